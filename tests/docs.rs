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
    let header = read("csrc/include/ops.h") + &read("csrc/include/fa3.h");
    let entries: BTreeSet<String> = header
        .lines()
        .filter_map(|l| l.strip_prefix("int ").and_then(|l| l.split_once('(')))
        .map(|(name, _)| name.to_string())
        // How the router's product runs above some tokens, and what a device is opened with.
        .filter(|name| name != "router_planes" && !name.starts_with("prepare_"))
        .collect();
    assert_eq!(operations(), entries, "KERNELS.md against the headers of csrc/include");
    let (ops, tests) = (read("src/backend/cuda/ops.rs"), read("tests/gpu/operations.rs") + &read("tests/gpu/fa3.rs"));
    for operation in operations().iter().filter(|o| !o.starts_with("pack_")) {
        assert!(ops.contains(&format!("pub fn {operation}(")), "{operation} is no method in ops.rs");
    }
    for row in read("KERNELS.md").lines().filter(|l| l.starts_with("| `")) {
        for test in code_spans(row.split('|').nth(5).unwrap()) {
            assert!(tests.contains(&test), "the test {test} is in neither tests/gpu/operations.rs nor fa3.rs");
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

#[test]
fn figures_are_the_recorded_ones() {
    let record: serde_json::Value = serde_json::from_str(&read("benches/results/h200-judge.json")).unwrap();
    let timed = record["timed"].as_array().unwrap();
    let text = read("docs/performance.md");
    let mut rows = 0;
    for case in timed {
        let name = case["case"].as_str().unwrap();
        let row = text.lines().find(|l| l.starts_with(&format!("| {name} |"))).unwrap_or_else(|| panic!("no {name}"));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells[2], format!("{:.1}", case["us"].as_f64().unwrap()), "{row}");
        assert_eq!(cells[4], format!("{:.1}", case["sol_us"].as_f64().unwrap()), "{row}");
        assert_eq!(cells[5], format!("{:.2}", case["ratio"].as_f64().unwrap()), "{row}");
        rows += 1;
    }
    assert_eq!(rows, 40);
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
