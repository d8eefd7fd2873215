//! The command line's arguments.

use crate::bench::SCHEMA;
use clap::{Args, Parser, Subcommand, ValueEnum};
use muse_spark_layer::synthetic::{Dist, Spread, StepSpec};
use muse_spark_layer::{AttentionEngine, LayerConfig, LayerKind, PlanKey, QueryPrecision};
use std::path::PathBuf;

/// Shown by `--help`.
const EXIT_CODES: &str = "\
Tables go to stdout, progress to stderr; --json prints one JSON object instead of a table.
Exit codes: 0 pass, 1 mismatch or slower than a baseline, 2 could not run.";

/// One Muse Spark Open decoder layer, on a Hopper GPU or on the CPU.
#[derive(Parser)]
#[command(version, about, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    /// Log what the library does, to stderr.
    #[arg(long, short, global = true, display_order = 100)]
    pub verbose: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run one step on synthetic weights and inputs and say what came out.
    Run(RunArgs),
    /// Compare the CUDA backend with the CPU reference, tap by tap, over the case matrix. Exit code 1: a case departs.
    Check(CheckArgs),
    /// Time the judge's cases by graph replay with a flushed L2 cache, against the floor.
    #[command(after_long_help = SCHEMA)]
    Bench(BenchArgs),
    /// Write a step's intermediate results to a file, or say where two such files part.
    Trace(TraceArgs),
    /// Print what a step launches, what each operation moves and computes, how long it should take. Needs no GPU.
    Plan(PlanArgs),
    /// Say what a checkpoint holds for one layer and rank: tensors, types, scales, memory.
    Inspect(InspectArgs),
    /// Write a synthetic checkpoint in the public format.
    Synth(SynthArgs),
    /// Say what this build and this machine offer.
    Env(EnvArgs),
    /// Print a shell's completion script.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// CUDA where there is a Hopper GPU, else the CPU.
    Auto,
    /// The reference.
    Cpu,
    /// The GPU that --device names.
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dims {
    /// The released model on one rank of TP8/EP8.
    Full,
    /// Small dimensions, CPU only.
    Small,
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Dims::Full { "full" } else { "small" })
    }
}

impl Dims {
    pub fn config(self) -> LayerConfig {
        match self {
            Dims::Full => LayerConfig::muse_spark_tp8(),
            Dims::Small => LayerConfig::small(),
        }
    }
}

/// The shape of a step.
#[derive(Args, Clone, Debug)]
pub struct StepArgs {
    /// Requests.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Cached tokens of each request before the step.
    #[arg(long, default_value_t = 8192)]
    pub ctx: usize,
    /// New tokens of each request: 1 decode, 8 a verify block, more a prefill chunk.
    #[arg(long, default_value_t = 1)]
    pub q_len: usize,
    /// full or sliding.
    #[arg(long, default_value = "full")]
    pub kind: LayerKind,
    /// Tokens a cache page holds: a power of two from 1 to 256.
    #[arg(long, default_value_t = 1)]
    pub page: usize,
    /// What queries are rounded to: fp16 or e4m3 (CPU: also fp32, bf16).
    #[arg(long, default_value = "fp16")]
    pub query: QueryPrecision,
    /// The attention engine on CUDA: own, or fa3 (needs --query e4m3 and a build with the feature).
    #[arg(long, default_value = "own")]
    pub engine: AttentionEngine,
}

impl StepArgs {
    pub fn spec(&self, local_start: i32) -> StepSpec {
        StepSpec {
            page_size: self.page,
            local_start,
            spread: Spread::Fixed,
            dist: Dist::Normal,
            ..StepSpec::new(self.batch, self.q_len, self.ctx, self.kind)
        }
    }

    pub fn key(&self) -> PlanKey {
        let width = (self.ctx + self.q_len).div_ceil(self.page.max(1));
        PlanKey {
            page_size: self.page as u32,
            kind: self.kind,
            query: self.query,
            engine: self.engine,
            ..PlanKey::block(self.batch as u32, self.q_len as u32, width as u32)
        }
    }
}

#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub step: StepArgs,
    /// Where the step runs.
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    pub device: i32,
    /// The layer's dimensions.
    #[arg(long, value_enum, default_value = "full")]
    pub dims: Dims,
    /// Seed of weights and inputs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// First expert of this rank; by default the 32 that the step's routes hit most.
    #[arg(long)]
    pub local_start: Option<i32>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Which cases, and where.
#[derive(Args)]
pub struct CasesArgs {
    /// Only cases whose name contains one of these parts, separated by |.
    #[arg(long, value_name = "PARTS", default_value = "", hide_default_value = true)]
    pub only: String,
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    pub device: i32,
    /// Seed of weights and inputs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// List the cases and stop.
    #[arg(long)]
    pub list: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub cases: CasesArgs,
    /// Also the long prefill cases, whose reference takes minutes.
    #[arg(long)]
    pub long: bool,
}

#[derive(Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub cases: CasesArgs,
    /// Layers with different weights in one graph, each with a cache of its own; times are of one layer.
    #[arg(long, default_value_t = 1)]
    pub layers: usize,
    /// Samples of a case; at least 5 of each input.
    #[arg(long, default_value_t = 30)]
    pub reps: usize,
    /// Also time each operation of a step by itself.
    #[arg(long)]
    pub kernels: bool,
    /// The attention engine: own, or fa3 (with E4M3 queries; in a build with the feature).
    #[arg(long, default_value = "own")]
    pub engine: AttentionEngine,
    /// Compare with a recorded JSON; exit code 1 where a case is slower.
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Percent that a case may be slower than its record.
    #[arg(long, default_value_t = 3.0)]
    pub tolerance: f64,
    /// Write the JSON to a file.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Draw pictures of the results into a folder, as SVG.
    #[arg(long, value_name = "FOLDER")]
    pub plot: Option<PathBuf>,
    /// With --plot: draw the results recorded in this folder (benches/results) and measure nothing.
    #[arg(long, value_name = "FOLDER", requires = "plot")]
    pub recorded: Option<PathBuf>,
    /// With --plot: as PNG too (needs a build with `--features png`).
    #[arg(long, requires = "plot")]
    pub png: bool,
}

#[derive(Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    pub command: TraceCommand,
}

#[derive(Subcommand)]
pub enum TraceCommand {
    /// Run one step as `run` does and write its taps, outputs and arguments to a safetensors file.
    Dump(DumpArgs),
    /// Compare two dumps tap by tap. Exit code 1: one departs; 2: they cannot be compared.
    Diff(DiffArgs),
}

#[derive(Args)]
pub struct DumpArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Args)]
pub struct DiffArgs {
    /// The dump that is taken for right: distances are relative to it.
    pub a: PathBuf,
    /// The dump that is compared with it.
    pub b: PathBuf,
    /// Relative L2 distance that a row of a tap may have. A token with other experts departs at any tolerance.
    #[arg(long, default_value_t = 0.01)]
    pub tolerance: f64,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub step: StepArgs,
    /// Multiprocessors to plan for.
    #[arg(long, default_value_t = 132)]
    pub sms: u32,
    /// Routes to this rank's experts to reckon with; by default what the busiest rank gets from the synthetic router.
    #[arg(long)]
    pub routes: Option<f64>,
    /// Experts that they touch.
    #[arg(long)]
    pub experts: Option<f64>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct InspectArgs {
    /// Folder with config.json and model.safetensors.index.json (or model.safetensors).
    pub checkpoint: PathBuf,
    /// The layer to list; without it, every layer is loaded and gets a line.
    #[arg(long)]
    pub layer: Option<usize>,
    /// The rank whose part is looked at.
    #[arg(long, default_value_t = 0)]
    pub rank: usize,
    /// Ranks of tensor and expert parallelism.
    #[arg(long, default_value_t = 8)]
    pub ranks: usize,
    /// Also take what is listed to a backend, and say how fast: cpu, cuda, or auto for the one there is.
    #[arg(long, value_enum)]
    pub backend: Option<BackendChoice>,
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    pub device: i32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct SynthArgs {
    /// Folder to write; new or empty.
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// The model's dimensions; full takes 7.8 GB a layer, 26.3 GB one with BF16 experts.
    #[arg(long, value_enum, default_value = "small")]
    pub dims: Dims,
    /// Layers of the model: 6 by default, 3 at full size.
    #[arg(long)]
    pub layers: Option<usize>,
    /// NVFP4 experts in the first and the last layer too, which keep BF16 ones in the export.
    #[arg(long)]
    pub all_nvfp4: bool,
    /// Write these layers only; the others are holes in the files, which take no room and read as zeros.
    #[arg(long, value_name = "L,...", value_delimiter = ',')]
    pub only_layers: Option<Vec<usize>>,
    /// Write the experts of these ranks only (1.4 GB an NVFP4 layer with one rank of 8); the others are holes.
    #[arg(long, value_name = "R,...", value_delimiter = ',')]
    pub only_ranks: Option<Vec<usize>>,
    /// Ranks that the experts are shared out to.
    #[arg(long, default_value_t = 8)]
    pub ranks: usize,
    /// Seed of the tensors.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct EnvArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
