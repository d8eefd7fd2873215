//! `synth`: a synthetic checkpoint in the public format.

use crate::args::{Dims, SynthArgs};
use crate::report;
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::Result;
use std::path::PathBuf;
use std::time::Instant;

#[derive(serde::Serialize)]
struct SynthReport {
    out: PathBuf,
    layers: usize,
    /// Of tensor data, holes included.
    bytes: u64,
    written_bytes: u64,
    seconds: f64,
}

pub fn synth(args: &SynthArgs) -> Result<bool> {
    let spec = match args.dims {
        Dims::Small => SynthSpec::small(),
        Dims::Full => SynthSpec::full(3),
    };
    let layers = args.layers.unwrap_or(spec.layers);
    let of_rank = spec.n_experts / args.ranks.max(1);
    let only_experts = args.only_ranks.as_ref().map(|r| r.iter().map(|r| r * of_rank..(r + 1) * of_rank).collect());
    let only_layers = args.only_layers.clone();
    let spec = SynthSpec { layers, bf16_ends: !args.all_nvfp4, seed: args.seed, only_layers, only_experts, ..spec };
    let bar = report::bytes_bar(spec.written_bytes());
    let start = Instant::now();
    write(&args.out, &spec, &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let report = SynthReport {
        out: args.out.clone(),
        layers,
        bytes: spec.bytes(),
        written_bytes: spec.written_bytes(),
        seconds: start.elapsed().as_secs_f64(),
    };
    report::show(args.json, &report, table)?;
    Ok(true)
}

fn table(r: &SynthReport) -> String {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let facts = report::facts(&[
        ("written", r.out.display().to_string()),
        ("layers", r.layers.to_string()),
        ("size", format!("{:.3} GB, {:.3} GB of it written", gb(r.bytes), gb(r.written_bytes))),
        ("time", format!("{:.1} s, {:.2} GB/s", r.seconds, gb(r.written_bytes) / r.seconds)),
    ]);
    facts.to_string()
}
