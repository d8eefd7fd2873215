//! `muse-spark-layer`: runs a synthetic step, checks the CUDA backend against the CPU reference, times it,
//! prints plans and what the machine offers. Tables go to stdout, progress to stderr; `--json` prints one JSON
//! object instead of a table. Exit codes: 0 pass, 1 mismatch or slower than a baseline, 2 could not run.

mod args;
mod bench;
mod cases;
mod check;
mod env;
mod inspect;
mod machine;
mod report;
mod run;
mod synth;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = if cli.verbose { tracing::Level::DEBUG } else { tracing::Level::WARN };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();
    let outcome = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::check(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Plan(args) => run::plan(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Synth(args) => synth::synth(&args),
        Command::Env(args) => env::env(&args),
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
