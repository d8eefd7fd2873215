//! What each operation of a step must move and compute: weights once, activations in and out once.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::floor::{Load, EXPERT_BYTES};
use muse_spark_layer::plan::{DensePlan, RouterForm};
use muse_spark_layer::{AttentionEngine, LayerConfig, LayerKind, Plan};

/// What the attention of one input sees.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Keys {
    /// Cache rows that some token of the step sees, the new ones included.
    pub rows: f64,
    /// Pairs of a token and a key that it sees.
    pub pairs: f64,
}

impl Keys {
    /// Of requests with (cached, new) tokens each.
    pub fn of(config: &LayerConfig, kind: LayerKind, requests: impl IntoIterator<Item = (usize, usize)>) -> Keys {
        let window = if kind == LayerKind::Sliding { config.window } else { usize::MAX };
        let mut keys = Keys::default();
        for (first, q_len) in requests {
            let end = first + q_len;
            keys.rows += (end - (first + 1).saturating_sub(window)) as f64;
            keys.pairs += (first..end).map(|position| (position + 1).min(window) as f64).sum::<f64>();
        }
        keys
    }
}

/// Bytes and operations of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub bytes: f64,
    pub flops: f64,
}

/// The cost of `operation` (as the library names it) in a step of `plan`.
pub fn cost(config: &LayerConfig, plan: &Plan, load: Load, keys: Keys, operation: &str) -> Cost {
    let (tokens, l) = (f64::from(plan.key.tokens), &plan.launches);
    let (hidden, dim, q) = (config.hidden as f64, config.expert_dim as f64, config.q_size() as f64);
    let (experts, top_k) = (config.n_experts as f64, config.top_k as f64);
    let out = |d: &DensePlan| tokens * f64::from(d.rows * d.splits) * if d.out_f32 { 4.0 } else { 2.0 };
    let dense = |d: &DensePlan| {
        let (rows, k) = (f64::from(d.rows), f64::from(d.k));
        Cost { bytes: 2.0 * rows * k + 2.0 * tokens * k + out(d), flops: 2.0 * tokens * rows * k }
    };
    let bytes = |bytes: f64| Cost { bytes, flops: 0.0 };
    let (planes, router) = if l.router.form == RouterForm::Rows { (6.0, 6.0) } else { (2.0, 4.0) };
    let logits = 4.0 * tokens * experts * f64::from(l.router.splits);
    // Per query head and split: 64 sums and 2 statistics. The tiled kernel reads the gate too and writes the gated heads
    // itself, in BF16. FlashAttention-3 hands on BF16; its partials come and go inside it.
    let partials = match (l.attention.engine, l.attention.tiled) {
        (AttentionEngine::Fa3, _) => 2.0 * tokens * q,
        (AttentionEngine::Own, true) => tokens * q * (2.0 + 4.0 * f64::from(l.qkv_gate.splits)),
        (AttentionEngine::Own, false) => {
            4.0 * tokens * f64::from(l.attention.splits) * config.q_heads as f64 * (config.head_dim + 2) as f64
        }
    };
    let weight = dim * dim * EXPERT_BYTES * load.experts;
    let y = load.routes * dim * if l.experts.w2_splits > 1 { 4.0 * f64::from(l.experts.w2_splits) } else { 2.0 };
    let route = 2.0 * load.routes * dim;
    // Queries as FP16, the gate and the cache rows out; without the queries where attention makes them itself, and
    // without the gate where attention reads it from the projection's output.
    let gate = if l.attention.tiled { -4.0 * f64::from(l.qkv_gate.splits) } else { 4.0 };
    let appended = out(&l.qkv_gate) + tokens * (gate * q + 2.0 * config.kv_size() as f64);
    let queries = 2.0 * tokens * q;
    let attention = keys.rows * 2.0 * config.kv_size() as f64 + partials;
    match operation {
        "qkv_gate" => dense(&l.qkv_gate),
        "qk_norm_rope_append" => bytes(appended + queries),
        "attention" | "fa3_attention" => Cost { bytes: attention + queries, flops: 4.0 * keys.pairs * q },
        "append_attention" => Cost { bytes: appended + attention, flops: 4.0 * keys.pairs * q },
        "out_norm_gate" => bytes(partials + tokens * (4.0 * q + 2.0 * q)),
        "o" => dense(&l.o),
        // Stream and branch in; stream and the planes out.
        "attn_boundary" => bytes(tokens * hidden * (4.0 + 2.0 + 4.0 + planes)),
        // Weights and tokens: planes of them, or the stream.
        "router" => Cost {
            bytes: 4.0 * experts * hidden + router * tokens * hidden + logits,
            flops: 2.0 * tokens * experts * hidden,
        },
        // Ids, weights and places of the routes out.
        "router_topk" => bytes(logits + tokens * top_k * 12.0),
        // Both rows of logits; the boundary's inputs are read by both.
        "boundary_router" => Cost {
            bytes: 4.0 * experts * hidden + tokens * hidden * (4.0 + 2.0) + 2.0 * logits,
            flops: 4.0 * tokens * experts * hidden,
        },
        "boundary_topk" => bytes(2.0 * logits + tokens * (hidden * (4.0 + 2.0 + 4.0 + 2.0) + top_k * 12.0)),
        "pooler" => dense(&l.pooler),
        "pre_expert_norm" => bytes(out(&l.pooler) + route),
        "w13" => Cost { bytes: 2.0 * weight + 2.0 * route, flops: 4.0 * load.routes * dim * dim },
        "w2" => Cost { bytes: weight + route + y, flops: 2.0 * load.routes * dim * dim },
        "combine" => bytes(y + 2.0 * tokens * dim),
        "unpooler" => dense(&l.unpooler),
        // Branch and stream in, stream and the next layer's input out.
        "ffn_boundary" => bytes(out(&l.unpooler) + tokens * hidden * (4.0 + 4.0 + 2.0)),
        _ => Cost::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{cases, floor};
    use muse_spark_layer::WeightKind;

    const OPERATIONS: [&str; 13] = [
        "qkv_gate",
        "append_attention",
        "out_norm_gate",
        "o",
        "boundary_router",
        "boundary_topk",
        "pooler",
        "pre_expert_norm",
        "w13",
        "w2",
        "combine",
        "unpooler",
        "ffn_boundary",
    ];

    /// The operations of a decode step move the floor's bytes and the little that goes from one to the next.
    #[test]
    fn operations_add_up_to_the_floor() {
        let config = LayerConfig::muse_spark_tp8();
        let case = &cases::select("decode-b1-8k-full").unwrap()[0];
        let plan = Plan::new(case.key(), WeightKind::Nvfp4, 132).unwrap();
        // 4 experts: 0.75 of them are what the floor counts.
        let keys = Keys { rows: 8192.0, pairs: 8192.0 };
        let moved: f64 = OPERATIONS
            .iter()
            .map(|name| cost(&config, &plan, Load { routes: 3.0, experts: 3.0 }, keys, name))
            .map(|c| floor::microseconds(c.bytes, 0.0))
            .sum();
        let least = floor::step(&config, case, Load { routes: 4.0, experts: 4.0 });
        assert!(moved > least && moved < 1.03 * least, "{moved} against {least}");
        assert_eq!(cost(&config, &plan, Load::default(), keys, "no such operation"), Cost::default());
    }

    #[test]
    fn windows_bound_what_is_seen() {
        let config = LayerConfig::muse_spark_tp8();
        let sees = |kind| Keys::of(&config, kind, [(4999, 1), (2047, 2)]);
        assert_eq!(sees(LayerKind::Full), Keys { rows: 7049.0, pairs: 5000.0 + 2048.0 + 2049.0 });
        assert_eq!(sees(LayerKind::Sliding), Keys { rows: 2048.0 + 2049.0, pairs: 3.0 * 2048.0 });
    }
}
