//! The command line, end to end: what it prints, what it writes, and its exit codes (0 pass, 1 mismatch, 2 could
//! not run). Small dimensions, no GPU.

use rstest::rstest;
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::SafeTensors;

fn command(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_muse-spark-layer")).args(args).output().unwrap()
}

/// Runs it, asks for an exit code, and gives stdout.
#[track_caller]
fn run(args: &[&str], code: i32) -> String {
    let output = command(args);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    if code == 2 {
        assert!(err.contains("error: "), "{args:?} does not say why: {err}");
    }
    out
}

#[track_caller]
fn json(args: &[&str], code: i32) -> Value {
    let text = run(args, code);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}\n{text}"))
}

/// A folder of this test's own, emptied first.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// A small step on the CPU.
const STEP: [&str; 10] = ["--dims", "small", "--backend", "cpu", "--batch", "3", "--ctx", "40", "--q-len", "2"];

#[test]
fn run_reports_a_finite_step() {
    let mut args = vec!["run", "--json"];
    args.extend(STEP);
    let report = json(&args, 0);
    assert_eq!(report["backend"], "cpu");
    assert_eq!(report["tokens"], 6);
    assert_eq!(report["finite"], true);
    assert_eq!(report["routing"]["routes"], 6 * 4);
    assert!(report["routing"]["local_routes"].as_u64().unwrap() >= 6, "{report}");
    for rms in ["stream_rms", "hidden_rms", "update_rms"] {
        let rms = report[rms].as_f64().unwrap();
        assert!((0.1..10.0).contains(&rms), "{report}");
    }
    args.retain(|a| *a != "--json");
    assert!(run(&args, 0).contains("finite"));
}

#[test]
fn run_follows_its_arguments() {
    let rms = |more: &[&str]| {
        let mut args = vec!["run", "--json"];
        args.extend(STEP);
        args.extend(more);
        json(&args, 0)["stream_rms"].as_f64().unwrap()
    };
    let first = rms(&[]);
    assert_eq!(first, rms(&[]));
    for other in [["--seed", "2"], ["--kind", "sliding"], ["--query", "e4m3"]] {
        assert_ne!(first, rms(&other), "{other:?}");
    }
    // The page size moves the cache's rows, and with them what a row holds: only the shape of the step stays.
    assert!(rms(&["--page", "16"]).is_finite());
}

#[test]
fn plan_needs_no_gpu() {
    let plan = json(&["plan", "--json", "--batch", "64", "--ctx", "1024", "--kind", "sliding"], 0);
    assert_eq!(plan["plan"]["key"]["tokens"], 64);
    assert_eq!(plan["plan"]["key"]["requests"], 64);
    let (floor, predicted) = (plan["floor_us"].as_f64().unwrap(), plan["predicted_us"].as_f64().unwrap());
    assert!(floor > 50.0 && predicted > floor && predicted < 4.0 * floor, "{floor} {predicted}");
    let text = run(&["plan", "--batch", "64"], 0);
    for operation in ["qkv_gate", "attention", "router", "w13", "unpooler", "predicted us"] {
        assert!(text.contains(operation), "{operation} is not in\n{text}");
    }
    // Every operation's file is there, under the name that the plan gives.
    for args in [["--batch", "64"], ["--q-len", "8"], ["--q-len", "512"]] {
        let plan = json(&[&["plan", "--json"][..], &args[..]].concat(), 0);
        for operation in plan["operations"].as_array().unwrap() {
            let file = operation["file"].as_str().unwrap();
            let (folder, name) = file.rsplit_once('/').unwrap();
            let (start, end) = name.split_once('*').unwrap_or((name, ""));
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc").join(folder);
            let mut names = fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
            assert!(names.any(|n| n.starts_with(start) && n.ends_with(end)), "there is no {file}");
        }
    }
    // Fewer experts, fewer bytes.
    let few = json(&["plan", "--json", "--batch", "64", "--experts", "1", "--kind", "sliding", "--ctx", "1024"], 0);
    assert!(few["predicted_us"].as_f64().unwrap() < predicted);
}

#[test]
fn env_says_what_is_there() {
    let report = json(&["env", "--json"], 0);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    let cuda = report["features"].as_array().unwrap().iter().any(|f| f.as_str().unwrap().starts_with("cuda"));
    assert_eq!(cuda, cfg!(feature = "cuda"));
    assert!(report["gpus"].as_array().unwrap().is_empty() != report["problem"].is_null(), "{report}");
    let pinned = report["pinned"].as_array().unwrap();
    for name in ["nvidia-cuda-nvcc", "nvidia-cutlass", "cmake"] {
        let found = pinned.iter().find(|p| p[0] == name).unwrap_or_else(|| panic!("{name} is not in {pinned:?}"));
        assert!(found[1].as_str().unwrap().starts_with(|c: char| c.is_ascii_digit()), "{found}");
    }
    let text = run(&["env"], 0);
    assert!(text.contains(env!("CARGO_PKG_VERSION")));
    assert!(report["problem"].is_null() || text.contains("problem"), "{text}");
}

#[rstest]
#[case::check("check")]
#[case::bench("bench")]
fn cases_are_listed(#[case] command: &str) {
    let all = run(&[command, "--list"], 0);
    assert!(all.lines().count() > 20, "{all}");
    let some = run(&[command, "--list", "--only", "verify|decode-b1"], 0);
    assert!(some.lines().any(|l| l.contains("decode-b1")), "{some}");
    assert!(
        some.lines().count() > 4 && some.lines().all(|l| l.contains("verify") || l.contains("decode-b1")),
        "{some}"
    );
    run(&[command, "--list", "--only", "no-such-case"], 2);
}

#[test]
fn a_checkpoint_is_written_and_inspected() {
    let out = folder("checkpoint").join("model");
    let out = out.to_str().unwrap();
    let written = json(&["synth", "--out", out, "--json"], 0);
    assert_eq!(written["layers"], 6);
    let one = json(&["inspect", out, "--layer", "1", "--ranks", "4", "--rank", "1", "--json"], 0);
    assert_eq!((&one["layer"], &one["rank"]), (&1.into(), &1.into()));
    let all = json(&["inspect", out, "--ranks", "4", "--json"], 0);
    assert_eq!(all["layers"].as_array().unwrap().len(), 6);
    run(&["inspect", out, "--layer", "6"], 2);
    run(&["synth", "--out", out], 2); // not empty
}

#[rstest]
#[case::bash("bash")]
#[case::zsh("zsh")]
#[case::fish("fish")]
fn completions_know_every_command(#[case] shell: &str) {
    let script = run(&["completions", shell], 0);
    for command in ["run", "check", "bench", "trace", "plan", "inspect", "synth", "env"] {
        assert!(script.contains(command), "{shell}: {command}");
    }
}

#[rstest]
#[case::none(&[])]
#[case::command(&["walk"])]
#[case::number(&["run", "--batch", "many"])]
#[case::kind(&["run", "--kind", "half"])]
#[case::query(&["run", "--query", "int8"])]
#[case::unknown(&["run", "--no-such-argument"])]
#[case::trace(&["trace"])]
#[case::out(&["trace", "dump"])]
#[case::shell(&["completions", "dos"])]
fn bad_arguments_are_refused_by_clap(#[case] args: &[&str]) {
    let output = command(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
}

#[rstest]
#[case::page(&["run", "--page", "3"], "page")]
#[case::page_of_a_plan(&["plan", "--page", "3"], "page")]
#[case::small_on_cuda(&["run", "--backend", "cuda", "--dims", "small"], "released")]
#[case::no_folder(&["trace", "dump", "--out", "no/such/folder/dump.safetensors"], "--out")]
#[case::no_dump(&["trace", "diff", "no-such-dump", "no-such-dump"], "no-such-dump")]
#[case::no_checkpoint(&["inspect", "no-such-checkpoint"], "no-such-checkpoint")]
#[case::no_layers(&["bench", "--layers", "0"], "--layers")]
#[case::no_record(&["bench", "--record", "no/such/folder/record.json"], "--record")]
#[case::no_results(&["bench", "--plot", "unused", "--recorded", "no-such-folder"], "no-such-folder")]
#[cfg_attr(not(feature = "png"), case::no_png(&["bench", "--plot", "unused", "--png"], "--features png"))]
#[cfg_attr(not(feature = "cuda"), case::no_cuda_to_check(&["check"], "--features cuda"))]
#[cfg_attr(not(feature = "cuda"), case::no_cuda_to_time(&["bench"], "--features cuda"))]
#[cfg_attr(not(feature = "cuda"), case::no_cuda_to_run(&["run", "--backend", "cuda", "--dims", "full"], "--features cuda"))]
fn what_cannot_run_says_why(#[case] args: &[&str], #[case] names: &str) {
    let mut args = args.to_vec();
    if args[0] == "run" && !args.contains(&"--dims") {
        args.extend(STEP);
    }
    run(&args, 2);
    let error = String::from_utf8(command(&args).stderr).unwrap();
    assert!(error.contains(names), "{args:?}: {error}");
}

/// The pictures of the documentation are those of the recorded results.
#[test]
fn pictures_are_of_the_recorded_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (out, results) = (folder("pictures"), root.join("benches/results"));
    run(&["bench", "--plot", out.to_str().unwrap(), "--recorded", results.to_str().unwrap()], 0);
    for name in ["latency", "roofline", "timeline", "errors"] {
        let [drawn, shown] =
            [&out, &root.join("docs/pictures")].map(|f| fs::read(f.join(format!("{name}.svg"))).unwrap());
        assert!(
            drawn == shown,
            "docs/pictures/{name}.svg is not of benches/results: `bench --plot docs/pictures --recorded ...`"
        );
    }
}

/// A reader that closes the pipe early, as `head` does, is no fault.
#[test]
fn a_closed_pipe_is_no_fault() {
    for args in [&["plan"][..], &["bench", "--list"], &["env", "--json"], &["completions", "bash"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_muse-spark-layer"))
            .args(args)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(0) && !error.contains("panicked"), "{args:?}: {error}");
    }
}

/// A dump of the small step.
fn dump(path: &Path, more: &[&str]) -> Value {
    let mut args = vec!["trace", "dump", "--json", "--out", path.to_str().unwrap()];
    args.extend(STEP);
    args.extend(more);
    json(&args, 0)
}

fn diff(a: &Path, b: &Path, more: &[&str], code: i32) -> Value {
    let mut args = vec!["trace", "diff", a.to_str().unwrap(), b.to_str().unwrap(), "--json"];
    args.extend(more);
    json(&args, code)
}

/// Writes a dump again with one tensor's bytes changed.
fn tamper(from: &Path, to: &Path, tensor: &str, change: impl Fn(&mut [u8])) {
    let file = fs::read(from).unwrap();
    let parsed = SafeTensors::deserialize(&file).unwrap();
    let mut data: HashMap<String, Vec<u8>> = HashMap::new();
    for (name, view) in parsed.tensors() {
        data.insert(name, view.data().to_vec());
    }
    change(data.get_mut(tensor).unwrap());
    let views: Vec<_> = parsed
        .tensors()
        .into_iter()
        .map(|(name, v)| {
            let view = safetensors::tensor::TensorView::new(v.dtype(), v.shape().to_vec(), &data[&name]).unwrap();
            (name, view)
        })
        .collect();
    safetensors::serialize_to_file(views, None, to).unwrap();
}

const TAPS: [&str; 12] = [
    "attn_core",
    "attn_out",
    "stream_after_attn",
    "ffn_input",
    "router_logits",
    "topk_ids",
    "topk_scores",
    "expert_input",
    "moe_mix",
    "ffn_out",
    "stream",
    "hidden",
];

#[test]
fn a_dump_holds_taps_and_arguments() {
    let path = folder("dump").join("a.safetensors");
    let report = dump(&path, &[]);
    let names: Vec<&str> = report["taps"].as_array().unwrap().iter().map(|t| t["tap"].as_str().unwrap()).collect();
    assert_eq!(names, TAPS);
    let file = fs::read(&path).unwrap();
    let parsed = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(parsed.len(), TAPS.len());
    for (tap, width) in [("attn_core", 64), ("router_logits", 32), ("topk_ids", 4), ("moe_mix", 32), ("hidden", 64)] {
        assert_eq!(parsed.tensor(tap).unwrap().shape(), [6, width], "{tap}");
    }
    let (_, header) = SafeTensors::read_metadata(&file).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    for (name, value) in [("batch", "3"), ("ctx", "40"), ("q_len", "2"), ("kind", "full"), ("dims", "small")] {
        assert_eq!(metadata[name], value);
    }
    assert_eq!((metadata["backend"].as_str(), metadata["seed"].as_str()), ("cpu", "1"));
}

#[test]
fn dumps_of_one_step_agree() {
    let folder = folder("agree");
    let (a, b) = (folder.join("a"), folder.join("b"));
    dump(&a, &[]);
    dump(&b, &[]);
    let report = diff(&a, &b, &["--tolerance", "0"], 0);
    assert_eq!((&report["same"], &report["first"]), (&true.into(), &Value::Null));
    assert_eq!(report["taps"].as_array().unwrap().len(), TAPS.len());
    assert!(report["taps"].as_array().unwrap().iter().all(|t| t["distance"] == 0.0), "{report}");
}

#[test]
fn coarser_queries_depart_at_the_attention() {
    let folder = folder("queries");
    let (a, b) = (folder.join("a"), folder.join("b"));
    dump(&a, &["--query", "fp32"]);
    dump(&b, &["--query", "e4m3"]);
    let report = diff(&a, &b, &["--tolerance", "0.001"], 1);
    assert_eq!(report["first"], "attn_core");
    assert_eq!(report["arguments"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!(report["arguments"][0], serde_json::json!(["query", "fp32", "e4m3"]));
    diff(&a, &b, &["--tolerance", "10"], 0);
    let text = run(&["trace", "diff", a.to_str().unwrap(), b.to_str().unwrap(), "--tolerance", "0.001"], 1);
    assert!(text.contains("attn_core is the first"), "{text}");
}

/// Each tap damaged in one element of its last row: that tap and that row are named, and no other departs.
#[rstest]
fn a_damaged_tap_is_named(
    #[values("attn_core", "attn_out", "router_logits", "topk_scores", "moe_mix", "stream", "hidden")] tap: &str,
) {
    let folder = folder(&format!("damaged-{tap}"));
    let (a, b) = (folder.join("a"), folder.join("b"));
    dump(&a, &[]);
    // The sign of the last element.
    tamper(&a, &b, tap, |bytes| *bytes.last_mut().unwrap() ^= 0x80);
    let report = diff(&a, &b, &["--tolerance", "1e-6"], 1);
    assert_eq!(report["first"], tap);
    for t in report["taps"].as_array().unwrap() {
        assert_eq!(t["departs"], t["tap"] == tap, "{t}");
        if t["tap"] == tap {
            assert_eq!(t["worst_row"], 5, "{t}");
        }
    }
}

#[test]
fn nan_departs() {
    let folder = folder("nan");
    let (a, b) = (folder.join("a"), folder.join("b"));
    dump(&a, &[]);
    tamper(&a, &b, "ffn_out", |bytes| bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    let report = diff(&a, &b, &["--tolerance", "1e30"], 1);
    assert_eq!((&report["first"], &report["taps"][9]["worst_row"]), (&"ffn_out".into(), &0.into()));
    diff(&b, &b, &[], 0);
}

#[test]
fn experts_count_and_their_order_does_not() {
    let folder = folder("experts");
    let (a, swapped, both, other) = (folder.join("a"), folder.join("b"), folder.join("c"), folder.join("d"));
    dump(&a, &[]);
    let swap = |bytes: &mut [u8]| bytes[..8].rotate_left(4);
    tamper(&a, &swapped, "topk_ids", swap);
    tamper(&swapped, &both, "topk_scores", swap);
    diff(&a, &both, &["--tolerance", "0"], 0);
    // The same experts with each other's weights.
    assert_eq!(diff(&a, &swapped, &["--tolerance", "1e-6"], 1)["first"], "topk_scores");
    // Another expert, at any tolerance.
    tamper(&a, &other, "topk_ids", |bytes| bytes[..4].copy_from_slice(&99i32.to_le_bytes()));
    assert_eq!(diff(&a, &other, &["--tolerance", "1e30"], 1)["first"], "topk_ids");
    // No expert at all.
    tamper(&a, &other, "topk_ids", |bytes| bytes[..4].copy_from_slice(&(-1i32).to_le_bytes()));
    run(&["trace", "diff", a.to_str().unwrap(), other.to_str().unwrap()], 2);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let folder = folder("refused");
    let (a, b, c) = (folder.join("a"), folder.join("b"), folder.join("c"));
    dump(&a, &[]);
    dump(&b, &[]);
    let text = |p: &Path| p.to_str().unwrap().to_string();
    let mut args = vec!["trace", "dump", "--dims", "small", "--backend", "cpu", "--ctx", "40", "--out"];
    let path = text(&c);
    args.push(&path);
    run(&args, 0); // one token instead of six
    run(&["trace", "diff", &text(&a), &text(&c)], 2);
    run(&["trace", "diff", &text(&a), &text(&b), "--tolerance=-1"], 2);
    run(&["trace", "diff", &text(&a), &text(&b), "--tolerance", "NaN"], 2);
    fs::write(&c, "not a dump").unwrap();
    run(&["trace", "diff", &text(&a), &text(&c)], 2);
    // A file of weights has no tap.
    let none: Vec<(&str, safetensors::tensor::TensorView)> = Vec::new();
    safetensors::serialize_to_file(none, None, &c).unwrap();
    run(&["trace", "diff", &text(&a), &text(&c)], 2);
}

#[test]
fn the_readme_lists_every_command() {
    let help = run(&["--help"], 0);
    let commands = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let mut seen = 0;
    // Descriptions are indented further than names.
    for line in commands.lines().filter(|l| l.starts_with("  ") && !l.starts_with("   ")) {
        let command = line.split_whitespace().next().unwrap();
        let listed = readme.lines().any(|l| l.starts_with("| `") && l.contains(&format!("`{command}`")));
        assert!(listed || command == "help", "{command} is not in the README");
        seen += 1;
    }
    assert!(seen > 8, "{help}");
}
