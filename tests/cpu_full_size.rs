//! The released dimensions on the CPU: seconds and gigabytes, so only on request:
//! `cargo test --test cpu_full_size -- --ignored --nocapture`.

mod cpu_common;

use cpu_common::{layer, run, spec};
use muse_spark_layer::backend::cpu::StepOptions;
use muse_spark_layer::{routing, synthetic, LayerConfig, LayerKind, QueryPrecision};
use std::time::Instant;

/// The process's peak memory in GiB, where the system tells it.
fn peak_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<f64>().ok().map(|kib| kib / (1 << 20) as f64)
}

#[test]
#[ignore = "full size: 1.1 GiB of weights"]
fn one_token_takes_under_3_seconds_and_4_gib() {
    let config = LayerConfig::muse_spark_tp8();
    let start = Instant::now();
    let layer = layer(&config, 1);
    println!("weights {:.2?}", start.elapsed());
    for (batch, q_len, kind) in
        [(1, 1, LayerKind::Full), (1, 1, LayerKind::Sliding), (1, 8, LayerKind::Full), (64, 1, LayerKind::Sliding)]
    {
        let start = Instant::now();
        let mut step = synthetic::step(&config, &spec(batch, q_len, 8192, kind, 1), 2).unwrap();
        let made = start.elapsed();
        let options = StepOptions::new(kind, QueryPrecision::Fp16);
        let probe = run(&layer, &mut step, &options);
        step.input.local_start = routing::busiest_start(&config, &probe.topk_ids);
        let start = Instant::now();
        let out = run(&layer, &mut step, &options);
        let taken = start.elapsed();
        let ids = &out.topk_ids;
        let local =
            ids.iter().filter(|&&e| routing::local_expert(&config, e, step.input.local_start).is_some()).count();
        println!("{kind} {batch} x {q_len} at 8192: inputs {made:.2?}, step {taken:.2?}, {local} local routes");
        if batch * q_len == 1 {
            assert!(taken.as_secs_f64() < 3.0, "one token took {taken:?}");
        }
        assert!(out.stream.iter().all(|v| v.is_finite()));
    }
    if let Some(peak) = peak_memory() {
        println!("peak memory {peak:.2} GiB");
        assert!(peak < 4.0, "{peak} GiB");
    }
}
