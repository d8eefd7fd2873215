//! Every launch decision of a step, in one place: from shapes, the layer kind and the SM count only,
//! never from device data (a graph captured once replays on any lengths).
//!
//! A decode step is bound by bytes, so the rule for small T is "enough CTAs for every SM to stream";
//! a prefill is bound by arithmetic, so the rule for large T is "tiles fill the SMs in few waves".

use crate::backend::cuda::model as m;
use crate::config::{LayerKind, WeightKind};
use crate::plan::{AttentionPlan, DensePlan, ExpertPlan, Launches, PlanKey, RouterForm, RouterPlan};

/// Up to this many tokens the dense projections take the skinny kernel (weights on M, tokens on N).
pub const SKINNY_TOKENS: u32 = 64;
/// Up to this many tokens the router is an FP32 FMA kernel over the FP32 rows; above, three BF16 planes.
pub const ROUTER_ROWS_TOKENS: u32 = 64;
/// Query lengths above this take the tiled attention kernel.
pub const SPLIT_ATTENTION_Q_LEN: u32 = 16;
/// Up to this many tokens the experts take the few-token kernel.
pub const FEW_TOKENS: u32 = 32;
/// Up to this many tokens the unpooler computes this rank's slice of its columns only.
pub const SLICED_TOKENS: u32 = 8;
/// Up to this many tokens one pass covers every route there can be.
pub const SINGLE_PASS_TOKENS: u32 = 1024;
/// K splits of the router's FP32 form: fixed by its kernel (256 columns of h a CTA).
pub const ROUTER_ROWS_SPLITS: u32 = 32;
/// The most KV splits a request is cut into.
pub const MAX_KV_SPLITS: u32 = 64;
/// Keys a KV split should at least hold: below, the join costs more than the split saves.
const KEYS_PER_SPLIT: u64 = 64;
/// Tokens of a tile of the tiled dense kernel, and weight rows of it.
const TILED_TOKENS: u32 = 128;
const TILED_ROWS: u32 = 256;
/// The most K splits a tiled projection is cut into: its FP32 partials are written and read again.
const MAX_TILED_SPLITS: u32 = 8;
/// Keys of a tile of the tiled attention kernel.
const KEY_TILE: u64 = 128;

/// The launches of a step for `key` on a device of `sm_count` multiprocessors.
pub fn choose(key: &PlanKey, experts: WeightKind, sm_count: u32) -> Launches {
    let tokens = key.tokens;
    Launches {
        qkv_gate: qkv_gate(tokens, sm_count),
        attention: attention(key, sm_count),
        o: o(tokens, sm_count),
        router: router(tokens, sm_count),
        pooler: pooler(tokens, sm_count),
        experts: self::experts(tokens, key.route_bound, experts),
        unpooler: unpooler(tokens, key.rank, sm_count),
    }
}

/// The narrowest token tile of the skinny kernel that holds all tokens; 0 names the tiled kernel.
fn tile_n(tokens: u32) -> u32 {
    match tokens {
        0..=8 => 8,
        9..=16 => 16,
        17..=32 => 32,
        33..=SKINNY_TOKENS => 64,
        _ => 0,
    }
}

fn dense(tokens: u32, rows: u32, k: u32, splits: u32, out_f32: bool) -> DensePlan {
    debug_assert_eq!(k / 64 % splits, 0);
    DensePlan { row_begin: 0, rows, k, splits, tile_n: tile_n(tokens), out_f32: out_f32 || splits > 1 }
}

/// K splits of a tiled projection: doubled while all tiles still fit one wave, so that 65 tokens do not
/// run on nine SMs.
fn tiled_splits(tokens: u32, rows: u32, k: u32, sm_count: u32, most: u32) -> u32 {
    let tiles = tokens.div_ceil(TILED_TOKENS) * rows.div_ceil(TILED_ROWS);
    let mut splits = 1;
    while splits < most && tiles * splits * 2 <= sm_count && k / 64 % (splits * 2) == 0 {
        splits *= 2;
    }
    splits
}

/// 36 tiles of 64 rows, 128 steps of K: 8 splits are 288 CTAs of 131 KB each. From 17 tokens on the FP32
/// partials (9.4 KB a token and split) start to count, and 4 splits (144 CTAs) do.
fn qkv_gate(tokens: u32, sm_count: u32) -> DensePlan {
    let (rows, k) = (m::QKV_ROWS, m::HIDDEN);
    let splits = match tokens {
        0..=16 => 8,
        17..=SKINNY_TOKENS => 4,
        _ => tiled_splits(tokens, rows, k, sm_count, MAX_TILED_SPLITS),
    };
    dense(tokens, rows, k, splits, true)
}

/// 128 tiles of 64 rows: one a SM without a split, so the output is the BF16 partial itself.
fn o(tokens: u32, _sm_count: u32) -> DensePlan {
    dense(tokens, m::HIDDEN, m::Q_SIZE, 1, false)
}

/// 64 tiles of 64 rows: 2 splits are 128 CTAs of 524 KB each.
fn pooler(tokens: u32, sm_count: u32) -> DensePlan {
    let (rows, k) = (m::EXPERT_DIM, m::HIDDEN);
    let splits = match tokens {
        0..=SKINNY_TOKENS => 2,
        _ => tiled_splits(tokens, rows, k, sm_count, MAX_TILED_SPLITS),
    };
    dense(tokens, rows, k, splits, true)
}

/// Sliced (up to 8 tokens): 16 tiles of 64 rows, 8 splits. Else 128 tiles. FP32 out while it is small:
/// it spares one rounding before the boundary's norm.
fn unpooler(tokens: u32, rank: u32, sm_count: u32) -> DensePlan {
    if tokens <= SLICED_TOKENS {
        let slice = dense(tokens, m::UNPOOL_SLICE, m::EXPERT_DIM, 8, true);
        return DensePlan { row_begin: rank * m::UNPOOL_SLICE, ..slice };
    }
    let (rows, k) = (m::HIDDEN, m::EXPERT_DIM);
    let splits = if tokens <= SKINNY_TOKENS { 1 } else { tiled_splits(tokens, rows, k, sm_count, MAX_TILED_SPLITS) };
    dense(tokens, rows, k, splits, tokens <= SKINNY_TOKENS)
}

fn router(tokens: u32, sm_count: u32) -> RouterPlan {
    if tokens <= ROUTER_ROWS_TOKENS {
        return RouterPlan { form: RouterForm::Rows, splits: ROUTER_ROWS_SPLITS };
    }
    // One tile of rows only: more splits than elsewhere, 1 KB of partial logits a token and split.
    let splits = tiled_splits(tokens, m::EXPERTS, m::HIDDEN, sm_count, 32);
    RouterPlan { form: RouterForm::Planes, splits }
}

fn attention(key: &PlanKey, sm_count: u32) -> AttentionPlan {
    let tiled = key.max_q_len > SPLIT_ATTENTION_Q_LEN;
    // Keys that a request may show: bounded by its table, and by the window on sliding layers.
    let mut keys = key.table_width as u64 * key.page_size as u64;
    let window = if key.kind == LayerKind::Sliding { m::SLIDING_WINDOW } else { 0 };
    if window > 0 {
        keys = keys.min(window as u64 + key.max_q_len as u64);
    }
    if tiled {
        return AttentionPlan { tiled, splits: 1, window, kv_scratch_bytes: tiled_scratch(key, keys) };
    }
    // Two CTAs a SM over all requests, but no split of fewer keys than are worth a CTA.
    let useful = keys.div_ceil(KEYS_PER_SPLIT).clamp(1, MAX_KV_SPLITS as u64) as u32;
    let splits = (2 * sm_count).div_ceil(key.requests.max(1)).clamp(1, useful);
    AttentionPlan { tiled, splits, window, kv_scratch_bytes: 0 }
}

/// A bound on what `csrc/attention/attention_tiled_plan.h` carves: FP16 tiles of every visible key (K and V
/// of two heads: 512 bytes a key), 32 bytes a tile, and the FP32 partials of up to 16 key splits, which
/// only short blocks use.
fn tiled_scratch(key: &PlanKey, keys: u64) -> u64 {
    let (tokens, requests) = (key.tokens as u64, key.requests as u64);
    let tiles = keys.div_ceil(KEY_TILE) + 1;
    let images = requests * tiles * (KEY_TILE * 4 * m::KV_SIZE as u64 + 32);
    let splits = if tokens <= 2048 { 16 } else { 4 };
    let partials = tokens * m::Q_HEADS as u64 * splits * (m::HEAD_DIM as u64 + 2) * 4;
    (images + partials + 1024).next_multiple_of(256)
}

/// Routes that land here: one a token is the mean, the busiest rank gets about twice that, and 8 a token
/// is the most there can be. Above 1024 tokens a pass holds 3 a token; the passes beyond the first find
/// nothing to do in almost every step and exit at once.
fn experts(tokens: u32, bound: Option<u32>, weight_kind: WeightKind) -> ExpertPlan {
    let all = tokens * m::TOP_K;
    let usual = if tokens <= SINGLE_PASS_TOKENS { all } else { (3 * tokens).next_multiple_of(256) };
    let route_bound = bound.unwrap_or(usual).min(all).max(1);
    let few = tokens <= FEW_TOKENS;
    ExpertPlan {
        weight_kind,
        few,
        // 64 tiles of 64 rows an expert: with one or two experts touched, 2 splits keep the SMs busy.
        w2_splits: if few { 2 } else { 1 },
        route_bound,
        passes: all.div_ceil(route_bound).max(1),
        max_routes_per_expert: tokens.min(route_bound),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMS: u32 = 132;

    fn every_token_count() -> impl Iterator<Item = u32> {
        (0..=1100).chain((1101..=16384).step_by(61)).chain([16384])
    }

    fn key(tokens: u32) -> PlanKey {
        PlanKey { tokens, requests: tokens.min(4), max_q_len: tokens, ..PlanKey::decode(1, 8192) }
    }

    #[test]
    fn dense_splits_cut_whole_k_tiles_and_tiles_hold_the_tokens() {
        for tokens in every_token_count() {
            let l = choose(&key(tokens), WeightKind::Nvfp4, SMS);
            for d in [&l.qkv_gate, &l.o, &l.pooler, &l.unpooler] {
                assert_eq!(d.k / 64 % d.splits, 0, "{tokens} tokens: {d:?}");
                assert_eq!(d.rows % 64, 0);
                assert!(d.splits == 1 || d.out_f32, "{tokens} tokens: {d:?}");
                if d.tile_n == 0 {
                    assert!(tokens > SKINNY_TOKENS && d.rows % TILED_ROWS == 0);
                } else {
                    assert!(tokens <= d.tile_n && [8, 16, 32, 64].contains(&d.tile_n));
                }
            }
            assert_eq!((l.o.splits, l.o.out_f32), (1, false), "attn_out is a BF16 segment border");
            assert_eq!(m::HIDDEN / 64 % l.router.splits, 0);
        }
    }

    #[test]
    fn unpooler_is_sliced_to_eight_tokens() {
        for rank in [0, 3, 7] {
            let l = choose(&PlanKey { rank, ..key(8) }, WeightKind::Nvfp4, SMS);
            assert_eq!((l.unpooler.row_begin, l.unpooler.rows), (1024 * rank, 1024));
            let l = choose(&PlanKey { rank, ..key(9) }, WeightKind::Nvfp4, SMS);
            assert_eq!((l.unpooler.row_begin, l.unpooler.rows), (0, 8192));
        }
    }

    #[test]
    fn passes_cover_every_route_there_can_be() {
        for tokens in every_token_count() {
            for bound in [None, Some(1), Some(300), Some(1 << 20)] {
                let e = choose(&PlanKey { route_bound: bound, ..key(tokens) }, WeightKind::Nvfp4, SMS).experts;
                assert!(e.route_bound as u64 * e.passes as u64 >= 8 * tokens as u64);
                assert!(e.route_bound <= (8 * tokens).max(1) && e.max_routes_per_expert <= e.route_bound);
                assert!(bound.is_some() || e.passes <= 3);
            }
        }
    }

    #[test]
    fn attention_fills_the_device_and_no_more() {
        for requests in 1..=512 {
            let l = choose(&PlanKey { tokens: requests, ..PlanKey::decode(requests, 131072) }, WeightKind::Nvfp4, SMS);
            assert!(!l.attention.tiled && (1..=MAX_KV_SPLITS).contains(&l.attention.splits));
            assert!(l.attention.splits * requests <= 2 * SMS + requests);
        }
        let short = choose(&PlanKey::decode(1, 8), WeightKind::Nvfp4, SMS);
        assert_eq!(short.attention.splits, 1, "eight keys are not worth two splits");
        let sliding =
            choose(&PlanKey { kind: LayerKind::Sliding, ..PlanKey::decode(1, 131072) }, WeightKind::Nvfp4, SMS);
        assert!(sliding.attention.splits <= 33, "a window of 2048 keys has no use for more");
        assert!(choose(&key(17), WeightKind::Nvfp4, SMS).attention.tiled);
    }
}
