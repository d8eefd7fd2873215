//! The documentation against the tree: files and links that are named exist, operations are the code's, unsafe
//! code is where it is said to be, figures are the recorded ones.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every page, relative to the root.
fn pages() -> Vec<String> {
    let mut pages: Vec<String> = [
        "README.md",
        "KERNELS.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "third_party/README.md",
        "tests/golden/README.md",
    ]
    .map(String::from)
    .to_vec();
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") {
            pages.push(format!("docs/{name}"));
        }
    }
    assert!(pages.len() > 10, "{pages:?}");
    pages
}

/// Every file and folder of the tree, relative to the root, without build outputs.
fn tree() -> BTreeSet<String> {
    static TREE: std::sync::OnceLock<BTreeSet<String>> = std::sync::OnceLock::new();
    TREE.get_or_init(walked).clone()
}

fn walked() -> BTreeSet<String> {
    fn walk(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name == "target" || (name.starts_with('.') && name != ".ci") {
                continue;
            }
            found.insert(path.strip_prefix(root()).unwrap().to_string_lossy().into_owned());
            if path.is_dir() {
                walk(&path, found);
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(root(), &mut found);
    found
}

/// What stands in single backticks outside code blocks.
fn code_spans(text: &str) -> Vec<String> {
    let mut prose = String::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    prose.split('`').skip(1).step_by(2).map(String::from).collect()
}

/// `a/{b,c}.rs` is two paths.
fn braces(path: &str) -> Vec<String> {
    let Some((before, (inside, after))) =
        path.split_once('{').and_then(|(b, rest)| rest.split_once('}').map(|r| (b, r)))
    else {
        return vec![path.to_string()];
    };
    inside.split(',').map(|part| format!("{before}{part}{after}")).collect()
}

/// Whether a span reads as a file or folder of this repository.
fn is_path(span: &str) -> bool {
    const ENDINGS: [&str; 13] =
        [".rs", ".cu", ".cuh", ".h", ".cpp", ".py", ".md", ".sh", ".toml", ".txt", ".json", ".lock", "/"];
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./{},*".contains(c);
    !span.starts_with('/') && span.chars().all(plain) && ENDINGS.iter().any(|e| span.ends_with(e))
}

/// Files that are not this repository's: the judge and the specification, and what a checkpoint holds.
const ELSEWHERE: [&str; 4] = ["judge.py", "layer.py", "config.json", "model.safetensors.index.json"];

#[test]
fn files_that_are_named_exist() {
    let tree = tree();
    let mut seen = 0;
    for page in pages() {
        let beside = Path::new(&page).parent().unwrap().to_string_lossy().into_owned();
        for span in code_spans(&read(&page)) {
            if !is_path(&span) || ELSEWHERE.contains(&span.as_str()) {
                continue;
            }
            for path in braces(&span) {
                let path = path.trim_end_matches('/');
                let tail = format!("/{path}");
                let exists = |p: &String| match path.split_once('*') {
                    Some((start, end)) => {
                        let inside = ["csrc/", &format!("{beside}/")].into_iter().find_map(|f| p.strip_prefix(f));
                        [p.as_str(), inside.unwrap_or(p)].iter().any(|p| p.starts_with(start) && p.ends_with(end))
                    }
                    // A name without a folder may be anywhere; a path is from the root, csrc or the page's folder.
                    None if !path.contains('/') => p == path || p.ends_with(&tail),
                    None => p == path || *p == format!("csrc{tail}") || *p == format!("{beside}{tail}"),
                };
                assert!(tree.iter().any(exists), "{page}: `{span}`: there is no {path}");
                seen += 1;
            }
        }
    }
    assert!(seen > 60, "only {seen} names found: does the test still read the pages?");
}

#[test]
fn links_resolve() {
    let mut seen = 0;
    for page in pages() {
        let folder = root().join(&page).parent().unwrap().to_path_buf();
        let text = read(&page);
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap();
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target: PathBuf = if file.is_empty() { root().join(&page) } else { folder.join(file) };
            assert!(target.exists(), "{page}: {link}");
            if !anchor.is_empty() {
                let text = fs::read_to_string(&target).unwrap();
                let found = text.lines().filter(|l| l.starts_with('#')).any(|l| {
                    let heading = l.trim_start_matches('#').trim().to_lowercase();
                    let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
                    heading.chars().filter(kept).collect::<String>().replace(' ', "-") == anchor
                });
                assert!(found, "{page}: no heading for {link}");
            }
            seen += 1;
        }
    }
    assert!(seen > 10, "only {seen} links found");
}

/// The operations of the first column of KERNELS.md.
fn operations() -> BTreeSet<String> {
    let text = read("KERNELS.md");
    let rows = text.lines().filter(|l| l.starts_with("| `"));
    rows.flat_map(|l| code_spans(l.split('|').nth(1).unwrap())).collect()
}

#[test]
fn kernels_are_the_codes() {
    let header = ["ops", "fa3", "peer"].map(|name| read(&format!("csrc/include/{name}.h"))).concat();
    let entries: BTreeSet<String> = header
        .lines()
        .filter_map(|l| l.strip_prefix("int ").and_then(|l| l.split_once('(')))
        .map(|(name, _)| name.to_string())
        // A form of `router`, and what a device is opened with.
        .filter(|name| name != "router_tiled" && !name.starts_with("prepare_"))
        .collect();
    assert_eq!(operations(), entries, "KERNELS.md against the headers of csrc/include");
    let ops = ["ops.rs", "ops/fa3.rs"].map(|name| read(&format!("src/backend/cuda/{name}"))).concat();
    let tests = ["operations", "fa3", "peers"].map(|name| read(&format!("tests/gpu/{name}.rs"))).concat();
    let bridge = read("csrc/bridge/bridge.cpp");
    for operation in operations() {
        // Packing is the weights' business, and ranks speak through a collective.
        let step = !operation.starts_with("pack_") && !operation.starts_with("peer_");
        assert!(!step || ops.contains(&format!("pub fn {operation}(")), "{operation} is no method of a step");
        let range = [format!("MSL_OPERATION({operation},"), format!("range{{\"{operation}\"}}")];
        assert!(range.iter().any(|r| bridge.contains(r)), "{operation} has no range for a profiler");
    }
    for row in read("KERNELS.md").lines().filter(|l| l.starts_with("| `")) {
        for test in code_spans(row.split('|').nth(5).unwrap()) {
            assert!(
                tests.contains(&test) || is_path(&test),
                "the test {test} is in none of tests/gpu/{{operations,fa3,peers}}.rs"
            );
        }
    }
}

#[test]
fn unsafe_code_is_where_it_is_said_to_be() {
    let text = read("docs/architecture.md");
    let section = text.split("## Unsafe code").nth(1).unwrap().split("\n## ").next().unwrap();
    let said: BTreeSet<String> = code_spans(section).iter().filter(|s| is_path(s)).flat_map(|s| braces(s)).collect();
    let has = |path: &String| {
        let source = path.starts_with("src/") && path.ends_with(".rs");
        source && read(path).contains("allow(unsafe_code)]")
    };
    let found: BTreeSet<String> = tree().into_iter().filter(has).collect();
    assert_eq!(said, found);
}

/// A timed case as it is recorded: ours, SGLang's kernels by the same judge, the floor, in microseconds.
struct Recorded {
    case: String,
    us: f64,
    peer_us: f64,
    floor_us: f64,
}

fn record(name: &str) -> serde_json::Value {
    serde_json::from_str(&read(&format!("benches/results/h200-{name}.json"))).unwrap()
}

fn recorded() -> Vec<Recorded> {
    let (judge, peer) = (record("judge"), record("sglang"));
    let timed = |document: &serde_json::Value| document["timed"].as_array().unwrap().clone();
    let peer_us = |name: &str| timed(&peer).iter().find(|c| c["case"] == name).unwrap()["us"].as_f64().unwrap();
    let cases = timed(&judge).into_iter().map(|c| {
        let case = c["case"].as_str().unwrap().to_string();
        let (us, floor_us) = (c["us"].as_f64().unwrap(), c["sol_us"].as_f64().unwrap());
        Recorded { us, peer_us: peer_us(&case), floor_us, case }
    });
    cases.collect()
}

#[test]
fn figures_are_the_recorded_ones() {
    let text = read("docs/performance.md");
    let cases = recorded();
    assert_eq!(cases.len(), 40);
    for Recorded { case, us, peer_us, floor_us } in &cases {
        let row = text.lines().find(|l| l.starts_with(&format!("| {case} |"))).unwrap_or_else(|| panic!("no {case}"));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let wanted = [us, peer_us, floor_us].map(|us| format!("{us:.1}"));
        assert_eq!(cells[2..5], wanted, "{row}");
        assert_eq!(cells[5], format!("{:.2}", us / floor_us), "{row}");
    }
    let means = |of: fn(&Recorded) -> f64| {
        ["decode", "verify", "prefill"].map(|phase| {
            let logs: Vec<f64> = cases.iter().filter(|c| c.case.starts_with(phase)).map(|c| of(c).ln()).collect();
            (logs.iter().sum::<f64>() / logs.len() as f64).exp()
        })
    };
    let ([decode, verify, prefill], [d, v, p]) = (means(|c| c.us / c.floor_us), means(|c| c.peer_us / c.floor_us));
    let sentence = format!("means over the floor: decode {decode:.2}, verify {verify:.2}, prefill {prefill:.2}");
    assert!(text.contains(&sentence), "docs/performance.md does not say: {sentence}");
    let sentence = format!("{sentence} (SGLang: {d:.2}, {v:.2}, {p:.2})");
    assert!(read("README.md").contains(&sentence), "README.md does not say: {sentence}");
}

/// docs/performance.md: each operation of the recorded steps, alone, and its floor.
#[test]
fn operations_are_the_recorded_ones() {
    let text = read("docs/performance.md");
    let bench = record("bench");
    let cases = bench["cases"].as_array().unwrap();
    let shown = |v: &serde_json::Value| format!("{:.1}", v.as_f64().unwrap());
    let head: String = cases.iter().map(|c| format!(" {} | floor |", c["case"].as_str().unwrap())).collect();
    let table = text.split(&format!("| operation |{head}\n")).nth(1).unwrap_or_else(|| panic!("no table of{head}"));
    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(1)
        .take_while(|l| l.starts_with('|'))
        .map(|l| l.split('|').map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    let mut seen = 0;
    for (i, case) in cases.iter().enumerate() {
        let kernels = case["kernels"].as_array().unwrap();
        for row in &rows {
            let of = |k: &&serde_json::Value| k["operation"] == row[1];
            let found = if row[1] == "the step by one replay" { Some(case) } else { kernels.iter().find(of) };
            let wanted = found.map_or(Default::default(), |k| [shown(&k["us"]), shown(&k["floor_us"])]);
            assert_eq!([row[2 + 2 * i], row[3 + 2 * i]], wanted.each_ref().map(String::as_str), "{row:?}");
            seen += usize::from(found.is_some());
        }
        seen -= 1;
        assert!(kernels.iter().all(|k| rows.iter().any(|row| k["operation"] == row[1])), "an operation is missing");
    }
    assert_eq!(seen, cases.iter().map(|c| c["kernels"].as_array().unwrap().len()).sum::<usize>());
}

/// docs/engines.md: attention, kernel, schedule and layer by engine.
#[test]
fn engines_are_the_recorded_ones() {
    let text = read("docs/engines.md");
    let record = record("engines");
    let cases = record["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 40);
    let shown = |us: f64| if us < 100.0 { format!("{us:.1}") } else { format!("{us:.0}") };
    let (engines, schedule) = (["own", "fa3", "sglang"], [("fa3", "schedule")]);
    let of = |part| engines.map(|engine| (engine, part));
    let columns = [&of("attention")[..], &of("attention_kernel"), &schedule, &of("layer")].concat();
    for case in cases {
        let (name, kind) = case["case"].as_str().unwrap().rsplit_once('-').unwrap();
        let cells: Vec<String> = columns.iter().map(|(e, part)| shown(case[e][part].as_f64().unwrap())).collect();
        let row = format!("| {name}, {kind} | {} |", cells.join(" | "));
        assert!(text.lines().any(|line| line == row), "docs/engines.md does not have: {row}");
    }
}

/// README.md's table, in words: `decode, 8 requests, 8k, full`, `verify 8 tokens, 1 request, 8k`, `prefill 512 after 8k, full`.
#[test]
fn the_readme_shows_recorded_figures() {
    let words = |case: &str| -> Option<String> {
        let parts: Vec<&str> = case.split('-').collect();
        let [phase, size, context, kind] = parts[..] else { return None };
        let requests = size.strip_prefix('b').map(|n| format!("{n} request{}", if n == "1" { "" } else { "s" }));
        match phase {
            "decode" => Some(format!("decode, {}, {context}, {kind}", requests?)),
            "verify" => (kind == "full").then_some(format!("verify 8 tokens, {}, {context}", requests?)),
            _ => Some(format!("prefill {size} after {context}, {kind}")),
        }
    };
    let shown = |us: f64| if us < 999.5 { format!("{us:.0} us") } else { format!("{:.2} ms", us / 1e3) };
    let text = read("README.md");
    let cases = recorded();
    let mut seen = 0;
    for c in &cases {
        let Some(words) = words(&c.case) else { continue };
        let Some(row) = text.lines().find(|l| l.starts_with(&format!("| {words} |"))) else { continue };
        let (ours, peer) = (shown(c.us), shown(c.peer_us));
        let wanted = format!("| {words} | **{ours}** | {peer} | {:.2}x | {:.2} |", c.peer_us / c.us, c.us / c.floor_us);
        assert_eq!(row, wanted);
        seen += 1;
    }
    assert_eq!(seen, text.lines().filter(|l| l.contains("** | ")).count(), "a row that is no recorded case");
    assert!(seen > 8);
    let faster: Vec<f64> = cases.iter().map(|c| c.peer_us / c.us).collect();
    let (least, most) = faster.iter().fold((f64::MAX, 0f64), |(least, most), f| (least.min(*f), most.max(*f)));
    let sentence = format!("{least:.2} to {most:.2} times faster");
    assert!(text.contains(&sentence), "README.md does not say: {sentence}");
}

/// The judge's distances over its checked cases, update and attention input, to the nearest of the reference's queries.
#[test]
fn distances_are_the_recorded_ones() {
    let judge = record("judge");
    let all = ["checked", "timed"].into_iter().flat_map(|part| judge[part].as_array().unwrap().clone());
    let after = |text: &str, mark: &str| -> Vec<f64> {
        let rest = text.split(mark).nth(1).unwrap_or_else(|| panic!("no {mark} in {text}"));
        rest.split(' ').next().unwrap().split('/').map(|x| x.parse().unwrap()).collect()
    };
    let (mut updates, mut inputs, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for case in all {
        let message = case["message"].as_str().unwrap();
        let nearest = ["fp32-q ", "bf16-q ", "e4m3-q "].map(|mark| after(message, mark));
        let nearest = nearest.iter().min_by(|a, b| a[0].max(a[1]).total_cmp(&b[0].max(b[1]))).unwrap();
        updates.push(nearest[0]);
        inputs.push(nearest[1]);
        rows.push(after(message, " row ")[0]);
    }
    let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let sentence = format!(
        "{:.4} for the update and {:.4} for the input, {:.4} for the worst token",
        largest(&updates),
        largest(&inputs),
        largest(&rows)
    );
    let numerics = read("docs/numerics.md").replace('\n', " ");
    assert!(numerics.contains(&sentence), "docs/numerics.md does not say: {sentence}");
    let sentence = format!("at most {:.4} (", largest(&updates).max(largest(&inputs)));
    assert!(read("README.md").contains(&sentence), "README.md does not say: {sentence}");
}

/// docs/deployment.md: a step's layers from the recorded cases (16 full, 46 sliding), and with what collectives cost by the
/// table of two GPUs on the same page.
#[test]
fn times_per_step_follow_from_the_recorded_ones() {
    let text = read("docs/deployment.md");
    let cases = recorded();
    let us = |name: String| cases.iter().find(|c| c.case == name).unwrap().us;
    // | tokens | alone | NCCL | peers | collectives |
    let extra = |tokens: &str, column: usize| -> Option<f64> {
        let row = text.lines().find(|l| l.starts_with(&format!("| {tokens} |")) && l.split('|').count() == 7).unwrap();
        let cell = |i: usize| row.split('|').nth(i).unwrap().trim().trim_matches('*').parse::<f64>().ok();
        Some(cell(column)? - cell(2)?)
    };
    let shown = |ms: f64| if ms < 99.95 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") };
    for (words, case, tokens) in [
        ("decode, 1 request", "decode-b1-8k", "1"),
        ("decode, 8 requests", "decode-b8-8k", "8"),
        ("decode, 64 requests", "decode-b64-8k", "64"),
        ("decode, 256 requests", "decode-b256-8k", "256"),
        ("prefill, 2048 tokens", "prefill-2048-8k", "2048"),
    ] {
        let layers = (16.0 * us(format!("{case}-full")) + 46.0 * us(format!("{case}-sliding"))) / 1e3;
        let with = |column: usize| extra(tokens, column).map(|us| shown(layers + 62.0 * us / 1e3));
        let row = text.lines().find(|l| l.starts_with(&format!("| {words} |"))).unwrap();
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!([cells[2], cells[3]], [shown(layers), with(3).unwrap()].each_ref().map(String::as_str), "{row}");
        // Peers are for a few tokens; above them the table leaves the cell empty.
        assert!(cells[4].is_empty() || Some(cells[4]) == with(4).as_deref(), "{row}: wanted {:?}", with(4));
    }
}

#[test]
fn the_readme_is_short_and_pages_name_no_machine() {
    assert!(read("README.md").lines().count() < 250);
    for page in pages() {
        let text = read(&page);
        for place in ["work", "home", "root", "tmp"].map(|folder| format!("/{folder}/")) {
            assert!(!text.contains(&place), "{page} names {place}");
        }
    }
}

/// `docs/licences.md` lists the locked versions, and every direct dependency.
#[test]
fn licences_are_of_what_is_locked() {
    let lock = read("Cargo.lock");
    let page = read("docs/licences.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .skip_while(|l| *l != "## Crates")
        .filter(|l| l.starts_with("| ") && !l.starts_with("| crate"))
        .map(|l| l.split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 80, "{}", rows.len());
    for row in &rows {
        let locked = format!("name = \"{}\"\nversion = \"{}\"", row[1], row[2]);
        assert!(lock.contains(&locked), "{} {} is not locked: run third_party/licences.py", row[1], row[2]);
        assert!(!row[3].is_empty() && row[3] != "see the crate", "{} has no licence", row[1]);
    }
    let dependencies = read("Cargo.toml");
    let dependencies = dependencies.split("[dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
    let names = dependencies.lines().filter_map(|l| l.split_once(" = ")).map(|(name, _)| name);
    for name in names.filter(|n| !n.starts_with('#')) {
        assert!(rows.iter().any(|row| row[1] == name), "{name} is not on the page: run third_party/licences.py");
    }
}

/// The source of a test module: `gpu::exact` is tests/gpu/exact.rs, `checkpoint::golden` tests/checkpoint/golden.rs,
/// `cpu_layer` tests/cpu_layer.rs; `lib::device` is every file or folder of src/ of that name.
fn test_sources(module: &[&str]) -> Vec<String> {
    if module[0] != "lib" {
        return vec![format!("tests/{}.rs", module.join("/"))];
    }
    let name = module.last().unwrap();
    let of = |p: &String| {
        p.starts_with("src/") && (p.ends_with(&format!("/{name}.rs")) || p.ends_with(&format!("/{name}/mod.rs")))
    };
    tree().into_iter().filter(of).collect()
}

#[test]
fn faults_name_tests_that_exist() {
    let text = read("docs/faults.md");
    let public = ["sglang#22800", "flash-attention#2573", "surogate#111", "cuopt#1748", "llama.cpp", "vllm#48066"];
    assert!(public.iter().all(|report| text.contains(report)), "the table has lost a report");
    let mut seen = 0;
    for row in text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| report") && !l.starts_with("| what |"))
    {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let tests = code_spans(cells.last().unwrap());
        let named: Vec<&String> = tests.iter().filter(|t| t.contains("::")).collect();
        assert!(!named.is_empty() || tests.iter().any(|t| t == ".ci/run"), "no test stands for: {row}");
        for test in named {
            let parts: Vec<&str> = test.split("::").collect();
            let (name, module) = parts.split_last().unwrap();
            let found = test_sources(module).iter().any(|p| {
                root().join(p).exists()
                    && [format!("fn {name}("), format!("fn {name}<"), format!("pairwise!({name},")]
                        .iter()
                        .any(|f| read(p).contains(f))
            });
            assert!(found, "docs/faults.md names {test}, which does not exist");
            seen += 1;
        }
    }
    assert!(seen > 70, "only {seen} tests named");
}

/// Tests that pages name beside those of faults.md: `layer::whole`, `gpu::layer::whole`, `cpu_layer::x`, `layer::*`.
#[test]
fn tests_that_are_named_exist() {
    let mut seen = 0;
    for page in pages() {
        for span in code_spans(&read(&page)) {
            let parts: Vec<&str> = span.trim_start_matches("gpu::").split("::").collect();
            let file = ["tests/gpu", "tests", "tests/checkpoint"].map(|folder| format!("{folder}/{}.rs", parts[0]));
            let Some(file) = file.iter().find(|file| root().join(file).exists()) else { continue };
            let name = parts.last().unwrap().trim_end_matches('*');
            if parts.len() == 2 {
                let source = read(file);
                let found = name.is_empty() || source.contains(&format!("fn {name}"));
                assert!(found || source.contains(&format!("pairwise!({name},")), "{page}: {span} is not in {file}");
                seen += 1;
            }
        }
    }
    assert!(seen > 150, "only {seen} tests named");
}

/// A row that is wider than its table's head is cut when a page is shown.
#[test]
fn tables_are_rectangular() {
    for page in pages() {
        let text = read(&page);
        let mut head = None;
        for (i, line) in text.lines().enumerate() {
            if !line.starts_with('|') {
                head = None;
                continue;
            }
            let columns = line.matches('|').count() - line.matches("\\|").count();
            assert_eq!(*head.get_or_insert(columns), columns, "{page}, line {}: {line}", i + 1);
        }
    }
}
