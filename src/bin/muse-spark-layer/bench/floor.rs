//! The least time a step can take on an H200, by the reference's formula: the bytes that it cannot do
//! without at the memory's rate, or its arithmetic at the tensor cores' rate, whichever is more.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::cases::Case;
use muse_spark_layer::routing::ExpertLists;
use muse_spark_layer::synthetic::Spread;
use muse_spark_layer::{LayerConfig, LayerKind};

/// Bytes per microsecond: 4.8 TB/s.
pub const BYTES_PER_US: f64 = 4.8e6;
/// Operations per microsecond: 989 TFLOP/s, dense BF16.
pub const FLOPS_PER_US: f64 = 989e6;
/// Routing differs from input to input; the floor counts this share of the mean.
const ROUTING_SHARE: f64 = 0.75;
/// Bytes of a 4-bit weight with its part of a block's scale.
pub const EXPERT_BYTES: f64 = 0.5 + 1.0 / 16.0;

/// What of a step's routing stays on this rank, as a mean over inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub routes: f64,
    /// Distinct experts touched.
    pub experts: f64,
}

impl Load {
    /// The load of one input: `ids` are its routes.
    pub fn of(config: &LayerConfig, ids: &[i32], local_start: i32) -> Load {
        let lists = ExpertLists::new(config, ids, local_start, usize::MAX);
        Load { routes: lists.routes() as f64, experts: lists.touched() as f64 }
    }
}

/// Microseconds for bytes and operations.
pub fn microseconds(bytes: f64, flops: f64) -> f64 {
    (bytes / BYTES_PER_US).max(flops / FLOPS_PER_US)
}

/// Microseconds of one layer's step.
pub fn step(config: &LayerConfig, case: &Case, load: Load) -> f64 {
    let (hidden, dim) = (config.hidden as f64, config.expert_dim as f64);
    let tokens = case.tokens() as f64;
    let unpooled = if case.tokens() <= config.sliced_max_tokens { config.unpool_slice as f64 } else { hidden };
    let dense = hidden * (config.qkv_rows() + config.q_size()) as f64 + dim * (hidden + unpooled);
    let router = config.n_experts as f64 * hidden;
    // The busiest rank has at least the mean of the ranks, one route a token.
    let least = match case.tokens() {
        0..=15 => 1.0,
        16..=127 => 2.0,
        _ => 6.0,
    };
    let experts = (ROUTING_SHARE * load.experts).max(least);
    let routes = (ROUTING_SHARE * load.routes).max(tokens);
    let expert = 3.0 * dim * dim;
    let seen = match case.kind {
        LayerKind::Full => case.ctx,
        LayerKind::Sliding => case.ctx.min(config.window),
    };
    // Uneven lengths: the shortest there can be.
    let shortest = match case.spread {
        Spread::Fixed => 1.0,
        Spread::Agentic => 1.0 - 0.075,
        Spread::Mixed => 0.5,
    };
    let keys = (case.batch * seen) as f64 * shortest;
    let bytes = 2.0 * dense
        + 4.0 * router
        + experts * expert * EXPERT_BYTES
        + keys * 2.0 * config.kv_size() as f64
        + tokens * hidden * 12.0;
    let flops = 2.0 * tokens * (dense + router)
        + 2.0 * routes * expert
        + 4.0 * keys * case.q_len as f64 * config.q_size() as f64;
    microseconds(bytes, flops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{cases, results};

    #[test]
    fn floors_and_names_are_the_judges() {
        let config = LayerConfig::muse_spark_tp8();
        let (cases, judge) = (cases::timed(), results::judge());
        assert_eq!(cases.len(), judge.timed.len());
        for (case, judged) in cases.iter().zip(&judge.timed) {
            assert_eq!(case.name, judged.case);
            assert!(case.name.starts_with(&case.phase.to_string()));
            let got = step(&config, case, judged.load());
            let off = (got / judged.floor_us - 1.0).abs();
            assert!(off < 1e-12, "{}: {got} against {}", case.name, judged.floor_us);
        }
    }

    #[test]
    fn loads_count_routes_and_distinct_experts_of_a_range_that_wraps() {
        let config = LayerConfig::muse_spark_tp8();
        let ids = [0, 15, 16, 239, 240, 255, 255, 100];
        assert_eq!(Load::of(&config, &ids, 240), Load { routes: 5.0, experts: 4.0 });
        assert_eq!(Load::of(&config, &ids, 96), Load { routes: 1.0, experts: 1.0 });
    }
}
