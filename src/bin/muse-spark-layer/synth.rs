//! `synth`: a synthetic checkpoint in the public format.

use crate::args::{Dims, SynthArgs};
use crate::{report, run::report_error};
use indicatif::{ProgressBar, ProgressStyle};
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::Result;
use std::path::PathBuf;
use std::time::Instant;

#[derive(serde::Serialize)]
struct SynthReport {
    out: PathBuf,
    layers: usize,
    bytes: u64,
    seconds: f64,
}

pub fn synth(args: &SynthArgs) -> Result<bool> {
    let spec = match args.dims {
        Dims::Small => SynthSpec::small(),
        Dims::Full => SynthSpec::full(3),
    };
    let layers = args.layers.unwrap_or(spec.layers);
    let spec = SynthSpec { layers, bf16_ends: !args.all_nvfp4, seed: args.seed, ..spec };
    let bar = ProgressBar::new(spec.bytes());
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {elapsed}") {
        bar.set_style(style);
    }
    let start = Instant::now();
    write(&args.out, &spec, &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let report =
        SynthReport { out: args.out.clone(), layers, bytes: spec.bytes(), seconds: start.elapsed().as_secs_f64() };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(report_error)?);
        return Ok(true);
    }
    println!(
        "{}",
        report::facts(&[
            ("written", report.out.display().to_string()),
            ("layers", layers.to_string()),
            ("size", format!("{:.3} GB", report.bytes as f64 / 1e9)),
            ("time", format!("{:.1} s", report.seconds)),
        ])
    );
    Ok(true)
}
