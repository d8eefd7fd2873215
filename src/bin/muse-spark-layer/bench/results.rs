//! What was measured: the JSON document, its tables, and the comparison with an earlier one.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::cases::Phase;
#[cfg(test)]
use super::floor::Load;
use crate::report;
use muse_spark_layer::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The document of `--json` and `--record`; `SCHEMA` says what its fields mean.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub schema: u32,
    pub version: String,
    pub device: String,
    pub sms: u32,
    pub cuda_driver: String,
    /// The attention engine.
    pub engine: String,
    pub layers: usize,
    pub reps: usize,
    pub seed: u64,
    /// Microseconds between two events with nothing between them.
    pub event_us: f64,
    pub cases: Vec<CaseResult>,
    pub geometric_means: Vec<Mean>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    pub case: String,
    pub phase: Phase,
    pub tokens: usize,
    pub us: f64,
    pub spread: f64,
    pub min_us: f64,
    pub max_us: f64,
    pub floor_us: f64,
    pub ratio: f64,
    pub routes: f64,
    pub experts: f64,
    pub host_us: f64,
    pub finite: bool,
    #[serde(default)]
    pub kernels: Vec<Kernel>,
}

/// One operation of a step, run alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kernel {
    pub operation: String,
    pub us: f64,
    pub bytes: f64,
    pub flops: f64,
    pub tb_per_s: f64,
    pub floor_us: f64,
    pub share: f64,
}

/// What is read of the judge's JSON (`judge.py --json`).
#[derive(Debug, Deserialize)]
pub struct Judge {
    pub machine: Machine,
    pub timed: Vec<Judged>,
}

#[derive(Debug, Deserialize)]
pub struct Machine {
    pub name: String,
}

/// A case that the judge timed.
#[derive(Debug, Deserialize)]
pub struct Judged {
    pub case: String,
    pub us: f64,
    #[serde(rename = "sol_us")]
    pub floor_us: f64,
    #[cfg(test)]
    pub routes: f64,
    #[cfg(test)]
    #[serde(rename = "distinct")]
    pub experts: f64,
}

#[cfg(test)]
impl Judged {
    /// Its load, as the judge counted it.
    pub fn load(&self) -> Load {
        Load { routes: self.routes, experts: self.experts }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mean {
    pub phase: Phase,
    pub ratio: f64,
    pub cases: usize,
}

/// Shown by `bench --help`.
pub const SCHEMA: &str = "\
JSON (--json, --record), times in microseconds:
  schema           1
  version, device, sms, cuda_driver, engine, layers, reps, seed   what was measured, and how
  event_us         two events with nothing between them: contained in every kernel's time
  cases[]          case, phase (decode, verify, prefill), tokens
    us             of one layer: the mean over inputs of each one's median
    spread         of a median input, 90th less 10th percentile over the median
    min_us max_us  over all samples
    floor_us ratio the floor for this case's routes (4.8 TB/s, 989 TFLOP/s), and us over it
    routes experts routes to this rank and experts touched, means over inputs
    host_us        median time that one call of the layer takes on the host, without a graph
    finite         whether the stream that came out is
    kernels[]      with --kernels: operation, us, bytes, flops, tb_per_s, floor_us, share (floor_us / us)
  geometric_means[]  phase, ratio, cases";

/// Median; 0 of nothing.
pub fn median(samples: &[f64]) -> f64 {
    percentile(samples, 0.5)
}

/// The sample at a part of the order, from 0 to 1; 0 of nothing.
pub fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

/// Geometric means of the ratios, by phase.
pub fn geometric_means(cases: &[CaseResult]) -> Vec<Mean> {
    let mean = |phase: Phase| {
        let logs: Vec<f64> = cases.iter().filter(|c| c.phase == phase).map(|c| c.ratio.ln()).collect();
        let ratio = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        (!logs.is_empty()).then_some(Mean { phase, ratio, cases: logs.len() })
    };
    Phase::ALL.into_iter().filter_map(mean).collect()
}

/// A recorded document.
pub fn load<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::File { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|e| Error::Format { path: path.into(), problem: e.to_string() })
}

/// The judge's recorded results, which tests compare with.
#[cfg(test)]
pub fn judge() -> Judge {
    load(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results/h200-judge.json"))).unwrap()
}

/// Writes the document.
pub fn record(path: &Path, document: &Report) -> Result<()> {
    let text = report::to_json(document)?;
    std::fs::write(path, text + "\n").map_err(|source| Error::File { path: path.into(), source })
}

/// A case against its record.
pub struct Change {
    pub case: String,
    pub before: f64,
    /// Percent; positive: slower.
    pub percent: f64,
    pub slower: bool,
}

/// Every case that both have. Slower: by more than `tolerance` percent.
pub fn compare(before: &Report, now: &Report, tolerance: f64) -> Result<Vec<Change>> {
    if before.layers != now.layers {
        let wanted = format!("a record of --layers {}", now.layers);
        return Err(Error::Value { what: "--baseline".into(), wanted, got: format!("--layers {}", before.layers) });
    }
    let changes: Vec<Change> = now
        .cases
        .iter()
        .filter_map(|c| {
            let old = before.cases.iter().find(|old| old.case == c.case)?;
            let percent = 100.0 * (c.us / old.us - 1.0);
            Some(Change { case: c.case.clone(), before: old.us, percent, slower: percent > tolerance })
        })
        .collect();
    if changes.is_empty() {
        let wanted = "a record with at least one of these cases".into();
        return Err(Error::Value { what: "--baseline".into(), wanted, got: "none of them".into() });
    }
    Ok(changes)
}

/// Everything as tables.
pub fn table(report: &Report, changes: &[Change]) -> String {
    let layers = if report.layers > 1 { format!(", {} layers, each", report.layers) } else { String::new() };
    let mut header = vec!["case", "us", "spread", "floor us", "x floor", "routes", "experts", "host us"];
    if !changes.is_empty() {
        header.extend(["before us", "change"]);
    }
    let mut table = report::table(&header);
    for c in &report.cases {
        let mut row = vec![
            c.case.clone(),
            format!("{:.1}", c.us),
            format!("{:.1}%", 100.0 * c.spread),
            format!("{:.1}", c.floor_us),
            format!("{:.2}{}", c.ratio, if c.finite { "" } else { " NOT FINITE" }),
            format!("{:.1}", c.routes),
            format!("{:.1}", c.experts),
            format!("{:.1}", c.host_us),
        ];
        if let Some(change) = changes.iter().find(|change| change.case == c.case) {
            row.push(format!("{:.1}", change.before));
            row.push(format!("{:+.1}%{}", change.percent, if change.slower { " SLOWER" } else { "" }));
        }
        table.add_row(row);
    }
    let mut lines = vec![format!("{}, {} SMs, CUDA {}{layers}", report.device, report.sms, report.cuda_driver)];
    lines.push(table.to_string());
    lines.extend(
        report
            .geometric_means
            .iter()
            .map(|m| format!("geometric mean over the floor, {} ({} cases): {:.3}", m.phase, m.cases, m.ratio)),
    );
    lines.extend(report.cases.iter().filter(|c| !c.kernels.is_empty()).map(|c| kernels(c, report.event_us)));
    lines.join("\n")
}

fn kernels(c: &CaseResult, event_us: f64) -> String {
    let mut table = report::table(&["operation", "us", "MB", "TB/s", "floor us", "share"]);
    let row = |name: &str, us: f64, bytes: f64, floor: f64| {
        let share = if us > 0.0 { 100.0 * floor / us } else { 0.0 };
        let rate = if us > 0.0 { bytes / us * 1e-6 } else { 0.0 };
        [
            name.to_string(),
            format!("{us:.2}"),
            format!("{:.2}", bytes * 1e-6),
            format!("{rate:.2}"),
            format!("{floor:.2}"),
            format!("{share:.0}%"),
        ]
    };
    for k in &c.kernels {
        table.add_row(row(&k.operation, k.us, k.bytes, k.floor_us));
    }
    let sum = |f: fn(&Kernel) -> f64| c.kernels.iter().map(f).sum::<f64>();
    table.add_row(row("sum", sum(|k| k.us), sum(|k| k.bytes), sum(|k| k.floor_us)));
    table.add_row(row("the step, in a graph", c.us, sum(|k| k.bytes), c.floor_us));
    format!("\n{}: each operation alone, {event_us:.2} us of events in each\n{table}", c.case)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cases: &[(&str, Phase, f64, f64)]) -> Report {
        let cases: Vec<CaseResult> = cases
            .iter()
            .map(|&(case, phase, us, floor_us)| CaseResult {
                case: case.into(),
                phase,
                tokens: 1,
                us,
                spread: 0.01,
                min_us: us,
                max_us: us,
                floor_us,
                ratio: us / floor_us,
                routes: 1.0,
                experts: 1.0,
                host_us: 30.0,
                finite: true,
                kernels: vec![],
            })
            .collect();
        Report {
            schema: 1,
            version: "0".into(),
            device: "a GPU".into(),
            sms: 132,
            cuda_driver: "13.0".into(),
            engine: "own".into(),
            layers: 1,
            reps: 30,
            seed: 1,
            event_us: 1.0,
            geometric_means: geometric_means(&cases),
            cases,
        }
    }

    #[test]
    fn means_are_geometric_and_by_phase() {
        let r =
            report(&[("a", Phase::Decode, 2.0, 1.0), ("b", Phase::Decode, 8.0, 1.0), ("c", Phase::Verify, 3.0, 1.0)]);
        let means: Vec<(Phase, usize)> = r.geometric_means.iter().map(|m| (m.phase, m.cases)).collect();
        assert_eq!(means, [(Phase::Decode, 2), (Phase::Verify, 1)]);
        assert!((r.geometric_means[0].ratio - 4.0).abs() < 1e-12);
    }

    #[test]
    fn percentiles() {
        let samples = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!([0.0, 0.5, 1.0].map(|part| percentile(&samples, part)), [1.0, 3.0, 5.0]);
        assert_eq!((median(&[7.0]), median(&[])), (7.0, 0.0));
    }

    #[test]
    fn comparison_names_what_became_slower() {
        let before = report(&[("a", Phase::Decode, 100.0, 50.0), ("b", Phase::Decode, 100.0, 50.0)]);
        let now = report(&[
            ("a", Phase::Decode, 102.9, 50.0),
            ("b", Phase::Decode, 103.1, 50.0),
            ("c", Phase::Decode, 9.0, 5.0),
        ]);
        let slower: Vec<(String, bool)> =
            compare(&before, &now, 3.0).unwrap().into_iter().map(|c| (c.case, c.slower)).collect();
        assert_eq!(slower, [("a".to_string(), false), ("b".to_string(), true)]);
        let chain = Report { layers: 8, ..now.clone() };
        assert!(compare(&before, &chain, 3.0).is_err());
        assert!(compare(&report(&[]), &now, 3.0).is_err());
    }

    #[test]
    fn documents_survive_being_written() {
        let path = std::env::temp_dir().join(format!("muse-spark-bench-{}.json", std::process::id()));
        record(&path, &report(&[("a", Phase::Prefill, 2.0, 1.0)])).unwrap();
        let read: Report = load(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((read.cases[0].case.as_str(), read.cases[0].ratio, read.layers), ("a", 2.0, 1));
        assert!(load::<Report>(&path).unwrap_err().to_string().contains("muse-spark-bench"));
    }
}
