//! What the pictures show, from recorded documents or from a run.

use crate::bench::results::{self, CaseResult, Judge, Report};
use muse_spark_layer::Result;
use serde::Deserialize;
use std::path::Path;

/// One timed case.
#[derive(Clone, Debug)]
pub struct Timed {
    pub case: String,
    pub us: f64,
    pub floor_us: f64,
}

/// Distances of one case from the reference.
#[derive(Clone, Debug, Deserialize)]
pub struct Distances {
    pub case: String,
    pub update: f64,
    pub hidden: f64,
    pub taps: Vec<(String, f64)>,
}

#[derive(Clone, Debug, Default)]
pub struct Data {
    /// Where it was measured, for the captions.
    pub device: String,
    pub timed: Vec<Timed>,
    /// Another implementation's times, by case.
    pub peer: Vec<(String, f64)>,
    /// Cases with the times of their operations.
    pub kernels: Vec<CaseResult>,
    pub event_us: f64,
    pub distances: Vec<Distances>,
}

#[derive(Deserialize)]
struct Peer {
    timed: Vec<PeerTimed>,
}
#[derive(Deserialize)]
struct PeerTimed {
    case: String,
    us: f64,
}

/// What is read of `check --json`.
#[derive(Deserialize)]
struct Checked {
    cases: Vec<Distances>,
}

impl Data {
    /// The documents of `benches/results`: the judge's, `bench --record`'s, `check --json`'s and SGLang's times.
    pub fn recorded(folder: &Path) -> Result<Data> {
        let judge: Judge = results::load(&folder.join("h200-judge.json"))?;
        let peer: Peer = results::load(&folder.join("h200-sglang.json"))?;
        let bench: Report = results::load(&folder.join("h200-bench.json"))?;
        let checked: Checked = results::load(&folder.join("h200-check.json"))?;
        let timed = judge.timed.into_iter().map(|t| Timed { case: t.case, us: t.us, floor_us: t.floor_us }).collect();
        Ok(Data {
            device: judge.machine.name,
            timed,
            peer: peer.timed.into_iter().map(|t| (t.case, t.us)).collect(),
            event_us: bench.event_us,
            kernels: with_kernels(bench.cases),
            distances: checked.cases,
        })
    }

    /// A run of `bench`.
    pub fn measured(report: &Report) -> Data {
        Data {
            device: report.device.clone(),
            timed: report
                .cases
                .iter()
                .map(|c| Timed { case: c.case.clone(), us: c.us, floor_us: c.floor_us })
                .collect(),
            event_us: report.event_us,
            kernels: with_kernels(report.cases.clone()),
            ..Data::default()
        }
    }
}

fn with_kernels(cases: Vec<CaseResult>) -> Vec<CaseResult> {
    cases.into_iter().filter(|c| !c.kernels.is_empty()).collect()
}
