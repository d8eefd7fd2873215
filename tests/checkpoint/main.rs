//! Checkpoints in the public format: a synthetic one against transformers' layer (`tests/golden/checkpoint`,
//! made from the same files by the official reader), other layouts of the same files, and bad ones.

#[path = "../cpu_common/mod.rs"]
mod cpu_common;
mod files;
mod golden;
mod layouts;
mod load;
mod refused;

use files::folder;
use serde_json::Value;

/// The command line writes a checkpoint, reports on it, and fails with exit code 2 where there is none.
#[test]
fn command_line() {
    let Some(program) = option_env!("CARGO_BIN_EXE_muse-spark-layer") else { return };
    let dir = folder("command-line");
    let run = |args: &[&str]| std::process::Command::new(program).args(args).output().unwrap();
    let path = dir.to_str().unwrap();
    assert!(run(&["synth", "--out", path, "--layers", "3", "--all-nvfp4"]).status.success());
    let out = run(&["inspect", path, "--layer", "2", "--rank", "7", "--json"]);
    assert!(out.status.success());
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["local_start"], 28);
    assert_eq!(report["kind"], "full");
    assert_eq!(report["has_next_norm"], false);
    assert_eq!(report["parts"].as_array().unwrap().len(), 21);
    assert_eq!(report["scales"].as_array().unwrap().len(), 5);
    let out = run(&["inspect", path, "--json"]);
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let kinds: Vec<&str> = report["layers"].as_array().unwrap().iter().map(|l| l["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["sliding", "sliding", "full"]);
    assert_eq!(report["taken"], Value::Null);
    let out = run(&["inspect", path, "--json", "--backend", "cpu"]);
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let bytes: u64 = report["layers"].as_array().unwrap().iter().map(|l| l["bytes"].as_u64().unwrap()).sum();
    assert_eq!((&report["taken"]["bytes"], &report["taken"]["layers"]), (&bytes.into(), &3.into()));
    if cfg!(target_os = "linux") {
        // Copies of three layers; the map is not counted.
        let grown = report["taken"]["host_bytes"].as_u64().unwrap();
        assert!(grown < 64 << 20, "{grown}");
    }
    let table = String::from_utf8(run(&["inspect", path, "--layer", "1", "--backend", "cpu"]).stdout).unwrap();
    assert!(table.contains("1 layer") && table.contains("GB/s"), "{table}");
    assert!(String::from_utf8(run(&["inspect", path]).stdout).unwrap().contains("sliding"));
    let table = String::from_utf8(run(&["inspect", path, "--layer", "0"]).stdout).unwrap();
    assert!(table.contains("mlp.experts.gate_up_proj_weight_scale_2") && table.contains("w13_gs up"), "{table}");
    let holes = dir.join("holes");
    let some = ["--layers", "3", "--only-layers", "1,2", "--only-ranks", "0,7", "--json"];
    let out = run(&[&["synth", "--out", holes.to_str().unwrap()], &some[..]].concat());
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(report["written_bytes"].as_u64().unwrap() * 2 < report["bytes"].as_u64().unwrap(), "{report}");
    let failed = run(&["inspect", path, "--rank", "8"]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(String::from_utf8(failed.stderr).unwrap().contains("rank: wanted below 8"));
    assert_eq!(run(&["inspect", "/nowhere"]).status.code(), Some(2));
}
