//! The plan's scratch for the tiled attention kernel is what the kernel's own arithmetic
//! (`csrc/attention/attention_tiled_plan.h`, compiled here by the host compiler) carves, or a little more.

use muse_spark_layer::{LayerKind, Plan, PlanKey, WeightKind};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = r#"
#include "attention/attention_tiled_plan.h"
#include <cstdio>
int main() {
  msl::AttentionParams p{};
  while (scanf("%d %d %d %d %d %d", &p.tokens, &p.requests, &p.max_q_len, &p.table_width, &p.page_log2, &p.window) == 6) {
    msl::tiled::Plan plan;
    printf("%lld\n", msl::tiled::make_plan(p, &plan) ? static_cast<long long>(plan.bytes) : -1LL);
  }
}
"#;

fn keys() -> Vec<PlanKey> {
    let mut keys = Vec::new();
    for tokens in [17u32, 100, 200, 513, 999, 2048, 3001, 8192, 16384, 32768] {
        for requests in [1, 2, 3, 7, 64] {
            for table_width in [20, 513, 8392, 24576, 131072] {
                for (page_size, kind) in [(1, LayerKind::Full), (1, LayerKind::Sliding), (64, LayerKind::Sliding)] {
                    let q_len = tokens.div_ceil(requests).max(17).min(tokens);
                    let one =
                        PlanKey { page_size, kind, max_q_len: q_len, tokens, ..PlanKey::decode(requests, table_width) };
                    keys.push(one);
                }
            }
        }
    }
    keys
}

#[test]
fn scratch_is_what_the_kernel_carves() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("api_scratch");
    std::fs::create_dir_all(&folder).unwrap();
    let (source, binary) = (folder.join("scratch.cpp"), folder.join("scratch"));
    std::fs::write(&source, PROGRAM).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc");
    let arguments = [Path::new("-std=c++17"), Path::new("-I"), &include, &source, Path::new("-o"), &binary];
    match Command::new(&compiler).args(arguments).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(e) => return eprintln!("skipped: no C++ compiler `{compiler}`: {e}"),
    }
    let plans: Vec<Plan> = keys()
        .into_iter()
        .filter_map(|key| Plan::new(key, WeightKind::Nvfp4, 132).ok())
        .filter(|plan| plan.launches.attention.tiled)
        .collect();
    assert!(plans.len() > 600);
    let mut child = Command::new(&binary).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let lines: String = plans
        .iter()
        .map(|Plan { key: k, launches: l, .. }| {
            let log2 = k.page_size.trailing_zeros();
            format!("{} {} {} {} {log2} {}\n", k.tokens, k.requests, k.max_q_len, k.table_width, l.attention.window)
        })
        .collect();
    let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()).unwrap());
    let printed = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    writer.join().unwrap();
    let wanted: Vec<i64> = printed.lines().map(|l| l.parse().unwrap()).collect();
    assert_eq!(wanted.len(), plans.len());
    for (plan, &wanted) in plans.iter().zip(&wanted) {
        let ours = plan.launches.attention.kv_scratch_bytes as i64;
        assert!(wanted > 0 && ours >= wanted, "{ours} < {wanted}\n{plan}");
        // A tile a request and a rounding more.
        assert!(ours - wanted < 70_000 * (plan.key.requests as i64 + 1), "{ours} against {wanted}\n{plan}");
    }
}
