//! The steps that are timed, under the judge's names: decode, verify and prefill at each size a server meets.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use crate::cases::named;
use muse_spark_layer::synthetic::{Spread, StepSpec};
use muse_spark_layer::{Error, LayerKind, PlanKey, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// One new token a request.
    Decode,
    /// A block of draft tokens a request.
    Verify,
    /// A chunk of one prompt.
    Prefill,
}

impl Phase {
    pub const ALL: [Phase; 3] = [Phase::Decode, Phase::Verify, Phase::Prefill];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Decode => "decode",
            Phase::Verify => "verify",
            Phase::Prefill => "prefill",
        })
    }
}

/// A step to time: page size 1, unit scales.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub phase: Phase,
    pub batch: usize,
    /// Cached tokens of a request, in the middle.
    pub ctx: usize,
    pub q_len: usize,
    pub kind: LayerKind,
    pub spread: Spread,
}

impl Case {
    pub fn tokens(&self) -> usize {
        self.batch * self.q_len
    }

    /// How many inputs are timed: small steps touch other experts with each.
    pub fn inputs(&self) -> usize {
        if self.tokens() <= 256 {
            8
        } else {
            3
        }
    }

    pub fn spec(&self) -> StepSpec {
        StepSpec { spread: self.spread, ..StepSpec::new(self.batch, self.q_len, self.ctx, self.kind) }
    }

    /// Columns of the page table.
    pub fn table_width(&self) -> usize {
        (self.spec().longest() + self.q_len).max(1)
    }

    pub fn key(&self) -> PlanKey {
        let key = PlanKey::block(self.batch as u32, self.q_len as u32, self.table_width() as u32);
        PlanKey { kind: self.kind, ..key }
    }
}

/// Every case, in the judge's order.
pub fn timed() -> Vec<Case> {
    const BOTH: [LayerKind; 2] = [LayerKind::Full, LayerKind::Sliding];
    let mut cases = Vec::new();
    let mut add = |name: String, phase, batch, ctx, q_len, kinds: &[LayerKind]| {
        // Batches have requests of uneven lengths.
        let spread = if batch > 1 { Spread::Agentic } else { Spread::Fixed };
        for &kind in kinds {
            cases.push(Case { name: format!("{name}-{kind}"), phase, batch, ctx, q_len, kind, spread });
        }
    };
    for batch in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
        add(format!("decode-b{batch}-8k"), Phase::Decode, batch, 8192, 1, &BOTH);
    }
    for (batch, ctx) in [(1, 128), (16, 128), (64, 32)] {
        add(format!("decode-b{batch}-{ctx}k"), Phase::Decode, batch, ctx * 1024, 1, &BOTH[..1]);
    }
    for batch in [1, 4, 16, 32] {
        add(format!("verify-b{batch}-8k"), Phase::Verify, batch, 8192, 8, &BOTH);
    }
    for q_len in [200, 512, 2048, 8192, 16384] {
        add(format!("prefill-{q_len}-8k"), Phase::Prefill, 1, 8192, q_len, &BOTH);
    }
    add("prefill-8192-0".into(), Phase::Prefill, 1, 0, 8192, &BOTH[..1]);
    cases
}

/// The cases whose name contains one of the parts of `only`, which are separated by `|`.
pub fn select(only: &str) -> Result<Vec<Case>> {
    let cases: Vec<Case> = timed().into_iter().filter(|c| named(&c.name, only)).collect();
    if cases.is_empty() {
        let wanted = "parts of cases' names, separated by | (see --list)".into();
        return Err(Error::Value { what: "--only".into(), wanted, got: only.into() });
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use muse_spark_layer::Plan;

    #[test]
    fn selection_is_by_parts_of_names() {
        let names = |only: &str| select(only).unwrap().into_iter().map(|c| c.name).collect::<Vec<_>>();
        assert_eq!(
            names("decode-b1-8k|prefill-8192-0"),
            ["decode-b1-8k-full", "decode-b1-8k-sliding", "prefill-8192-0-full"]
        );
        assert_eq!(names("").len(), timed().len());
        assert!(select("decode-b3-8k").unwrap_err().to_string().starts_with("--only: wanted parts of cases' names"));
    }

    #[test]
    fn every_case_has_a_plan_and_enough_columns() {
        for case in timed() {
            let plan = Plan::new(case.key(), muse_spark_layer::WeightKind::Nvfp4, 132).unwrap();
            assert_eq!(plan.key.tokens as usize, case.tokens(), "{}", case.name);
            assert!(plan.key.dependent_launch);
            let longest = case.spec().lengths(1).into_iter().max().unwrap() + case.q_len;
            assert!(case.table_width() >= longest, "{}", case.name);
        }
    }
}
