//! `muse-spark-layer`: runs a synthetic step, checks the CUDA backend against the CPU reference, times it, traces it,
//! prints plans and what the machine offers, looks into checkpoints. Tables go to stdout, progress to stderr; `--json`
//! prints one JSON object instead of a table. Exit codes: 0 pass, 1 mismatch or slower than a baseline, 2 could not run.

mod args;
mod bench;
mod cases;
mod check;
mod env;
mod inspect;
mod machine;
mod plan;
mod plot;
mod report;
mod run;
mod synth;
mod trace;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = if cli.verbose { tracing::Level::DEBUG } else { tracing::Level::WARN };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();
    let outcome = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::check(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Synth(args) => synth::synth(&args),
        Command::Env(args) => env::env(&args),
        Command::Completions { shell } => completions(shell),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn completions(shell: clap_complete::Shell) -> muse_spark_layer::Result<bool> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "muse-spark-layer", &mut script);
    report::print(String::from_utf8_lossy(&script).trim_end()).map(|()| true)
}
