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
    use crate::bench::cases;

    /// (case, floor in microseconds, routes, experts) as the judge prints them, in its order.
    const JUDGED: [(&str, f64, f64, f64); 40] = [
        ("decode-b1-8k-full", 43.1, 3.1, 3.1),
        ("decode-b1-8k-sliding", 39.5, 2.4, 2.4),
        ("decode-b2-8k-full", 48.5, 5.1, 4.2),
        ("decode-b2-8k-sliding", 47.3, 5.2, 4.1),
        ("decode-b4-8k-full", 55.4, 10.6, 5.6),
        ("decode-b4-8k-sliding", 56.4, 10.4, 6.1),
        ("decode-b8-8k-full", 67.1, 19.2, 7.9),
        ("decode-b8-8k-sliding", 63.0, 19.4, 7.5),
        ("decode-b16-8k-full", 91.0, 41.0, 9.8),
        ("decode-b16-8k-sliding", 86.7, 39.0, 9.9),
        ("decode-b32-8k-full", 101.1, 78.9, 10.5),
        ("decode-b32-8k-sliding", 94.7, 83.2, 11.2),
        ("decode-b64-8k-full", 123.0, 162.0, 12.4),
        ("decode-b64-8k-sliding", 103.0, 164.6, 12.2),
        ("decode-b128-8k-full", 158.5, 326.1, 14.2),
        ("decode-b128-8k-sliding", 119.1, 323.5, 14.1),
        ("decode-b256-8k-full", 218.9, 646.4, 15.6),
        ("decode-b256-8k-sliding", 137.4, 649.5, 14.8),
        ("decode-b1-128k-full", 46.9, 2.5, 2.5),
        ("decode-b16-128k-full", 185.2, 39.1, 9.1),
        ("decode-b64-32k-full", 202.2, 160.8, 12.8),
        ("verify-b1-8k-full", 62.6, 15.5, 7.5),
        ("verify-b1-8k-sliding", 63.9, 17.0, 7.9),
        ("verify-b4-8k-full", 106.4, 58.9, 14.2),
        ("verify-b4-8k-sliding", 103.0, 57.0, 13.8),
        ("verify-b16-8k-full", 140.8, 238.8, 20.5),
        ("verify-b16-8k-sliding", 139.9, 240.1, 21.4),
        ("verify-b32-8k-full", 158.8, 477.0, 22.5),
        ("verify-b32-8k-sliding", 148.5, 478.2, 22.4),
        ("prefill-200-8k-full", 112.5, 511.1, 15.1),
        ("prefill-200-8k-sliding", 113.3, 511.0, 15.4),
        ("prefill-512-8k-full", 212.0, 1241.0, 16.3),
        ("prefill-512-8k-sliding", 202.5, 1287.7, 17.0),
        ("prefill-2048-8k-full", 893.0, 5554.7, 17.7),
        ("prefill-2048-8k-sliding", 833.8, 5461.0, 19.3),
        ("prefill-8192-8k-full", 3417.8, 20196.3, 19.0),
        ("prefill-8192-8k-sliding", 3401.9, 22718.7, 19.3),
        ("prefill-16384-8k-full", 7074.8, 43526.3, 20.7),
        ("prefill-16384-8k-sliding", 6820.7, 45658.7, 18.7),
        ("prefill-8192-0-full", 3254.4, 21697.3, 16.0),
    ];

    #[test]
    fn floors_and_names_are_the_judges() {
        let config = LayerConfig::muse_spark_tp8();
        let cases = cases::timed();
        assert_eq!(cases.len(), JUDGED.len());
        for (case, (name, floor, routes, experts)) in cases.iter().zip(JUDGED) {
            assert_eq!(case.name, name);
            assert!(name.starts_with(&case.phase.to_string()));
            let got = step(&config, case, Load { routes, experts });
            // Floors, routes and experts are printed with one digit: 0.05 experts are 0.22 us.
            assert!((got - floor).abs() <= 0.3, "{name}: {got} against {floor}");
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
