//! Every launch decision of a step, in one place: from shapes, the layer kind and the SM count only,
//! never from device data (a graph captured once replays on any lengths).
//!
//! A decode step is bound by bytes, so the rule for small T is "enough CTAs for every SM to stream";
//! a prefill is bound by arithmetic, so the rule for large T is "tiles fill the SMs in few waves".

use std::ops::RangeInclusive;

use crate::backend::cuda::model as m;
use crate::backend::cuda::tiles::{self, Projection};
use crate::config::{LayerKind, Taps, WeightKind};
use crate::plan::{
    AttentionEngine, AttentionPlan, DensePlan, ExpertPlan, Launches, PlanKey, RouterForm, RouterPlan, ShortRequests,
};
use crate::workspace::{CARRY_FLAGS, CONTROL_WORDS};

/// Up to this many tokens the dense projections take the skinny kernel (weights on M, tokens on N): at 128 it
/// runs a chain of the four in 63 us, the tiled kernel in 75.
pub const SKINNY_TOKENS: u32 = 128;
/// Up to this many tokens the router runs over its FP32 rows; above, as a product of FP16 halves.
pub const ROUTER_ROWS_TOKENS: u32 = 5;
/// Up to this many tokens the pooler goes beside the routing; with more there is little to gain.
const ROUTER_RELEASES_TOKENS: u32 = 1024;
/// From and to how many tokens the top 8, a CTA a token, are launched behind the pooler: it is there from 65 on, and to 128
/// the pooler's CTAs leave room for it (above, they fill an SM each, and the top 8 are 1% of a step slower behind them).
const TOPK_BEHIND_TOKENS: RangeInclusive<u32> = 65..=128;
/// Up to this many tokens that product is summed in clusters (the sizes are `router_tiled`'s).
pub const ROUTER_CLUSTER_TOKENS: u32 = 128;
/// What is left of 64 slices of K when 8 CTAs have added theirs (up to 64 tokens), or of 32 in fours.
const ROUTER_CLUSTER_SPLITS: u32 = 8;
/// Query lengths above this take the tiled attention kernel.
pub const SPLIT_ATTENTION_Q_LEN: u32 = 16;
/// Up to this many tokens the experts take the few-token kernel, which holds 8 of an expert at once: at 16 tokens, with
/// 41 routes on 10 experts, it takes 88 us and the other 83.
pub const FEW_TOKENS: u32 = 8;
/// On devices of up to so many multiprocessors the experts' CTAs get equal shares of the work, cut inside units.
const CARRY_SMS: u32 = CONTROL_WORDS as u32 - CARRY_FLAGS;
/// Up to this many tokens the unpooler computes this rank's slice of its columns only.
pub const SLICED_TOKENS: u32 = 8;
/// Up to this many tokens one pass covers every route there can be: a chunk of 8192 and the rows that decode beside it.
pub const SINGLE_PASS_TOKENS: u32 = 8704;
/// K splits of the router over FP32 rows: its kernel's.
pub const ROUTER_ROWS_SPLITS: u32 = 16;
/// The most K splits of the router's tiled form: four k tiles of 64 each.
pub const ROUTER_TILED_SPLITS: u32 = 32;
/// Tokens of a tile of the tiled router.
const ROUTER_TILE_TOKENS: u32 = 128;
/// The most KV splits a request is cut into: more bring nothing, at 8k or at 128k keys.
pub const MAX_KV_SPLITS: u32 = 128;
/// Keys a KV split should at least hold: below, the join costs more than the split saves.
const KEYS_PER_SPLIT: u64 = 64;
/// Partials of short requests behind long ones may take this much scratch.
const SHORT_PARTIAL_BYTES: u64 = 256 << 20;
/// Query tokens of a tile of the verify kernel.
const VERIFY_TOKENS: u32 = 8;
/// Keys, and query tokens, of a tile of the tiled attention kernel.
const KEY_TILE: u64 = 128;
const QUERY_TILE: u64 = 24;

/// Keys, and (token, head) rows, of a tile of FlashAttention-3.
const FA3_KEY_TILE: u64 = 160;
const FA3_ROW_TILE: u32 = 192;
/// The most splits of FlashAttention-3 that there is a combine kernel for.
pub const FA3_MAX_SPLITS: u32 = 64;
/// Tokens times splits of FlashAttention-3: 4 KB of partials each.
const FA3_SPLIT_TOKENS: u32 = 1 << 14;

/// The launches of a step for `key` on a device of `sm_count` multiprocessors.
pub fn choose(key: &PlanKey, experts: WeightKind, sm_count: u32) -> Launches {
    let tokens = key.tokens;
    Launches {
        qkv_gate: qkv_gate(tokens, sm_count),
        attention: attention(&long_requests(key), sm_count),
        short_attention: key.short.map(|short| short_attention(key, &short, sm_count)),
        o: o(tokens, sm_count),
        router: router(key, sm_count),
        pooler: pooler(tokens, sm_count),
        experts: self::experts(tokens, key.route_bound, experts, sm_count),
        unpooler: unpooler(tokens, key.rank, sm_count),
    }
}

/// The narrowest token tile of the skinny kernel that holds all tokens.
fn skinny_tile(tokens: u32) -> u32 {
    match tokens {
        0..=8 => 8,
        9..=16 => 16,
        17..=32 => 32,
        33..=64 => 64,
        65..=96 => 96,
        _ => SKINNY_TOKENS,
    }
}

fn skinny(tokens: u32, rows: u32, k: u32, splits: u32, out_f32: bool) -> DensePlan {
    let tile_n = skinny_tile(tokens);
    DensePlan { row_begin: 0, rows, k, splits, tile_n, tile_rows: 0, out_f32: out_f32 || splits > 1 }
}

fn dense(tokens: u32, rows: u32, k: u32, out_f32: bool, sm_count: u32) -> DensePlan {
    let tile = tiles::choose(&Projection { rows, steps: k / 64, out_f32 }, tokens, sm_count);
    DensePlan { row_begin: 0, rows, k, splits: tile.splits, tile_n: tile.tokens, tile_rows: tile.rows, out_f32 }
}

/// K splits of a skinny projection: as many as keep two CTAs a SM, which is what streams best (a CTA owns
/// 64 rows of one split). Splits need not divide K's 64-wide tiles.
fn skinny_splits(rows: u32, sm_count: u32) -> u32 {
    (2 * sm_count / (rows / 64)).max(1)
}

/// 36 tiles of 64 rows: 7 splits.
fn qkv_gate(tokens: u32, sm_count: u32) -> DensePlan {
    if tokens > SKINNY_TOKENS {
        return dense(tokens, m::QKV_ROWS, m::HIDDEN, true, sm_count);
    }
    skinny(tokens, m::QKV_ROWS, m::HIDDEN, skinny_splits(m::QKV_ROWS, sm_count), true)
}

/// 128 tiles of 64 rows: one a SM without a split, so the output is the BF16 partial itself.
fn o(tokens: u32, sm_count: u32) -> DensePlan {
    if tokens > SKINNY_TOKENS {
        return dense(tokens, m::HIDDEN, m::Q_SIZE, false, sm_count);
    }
    skinny(tokens, m::HIDDEN, m::Q_SIZE, 1, false)
}

/// 64 tiles of 64 rows: 4 splits.
fn pooler(tokens: u32, sm_count: u32) -> DensePlan {
    if tokens > SKINNY_TOKENS {
        return dense(tokens, m::EXPERT_DIM, m::HIDDEN, true, sm_count);
    }
    skinny(tokens, m::EXPERT_DIM, m::HIDDEN, skinny_splits(m::EXPERT_DIM, sm_count), true)
}

/// Sliced (up to 8 tokens): 16 tiles of 64 rows, 8 splits: with 16 the reader loses what the kernel gains.
/// Else 128 tiles, 2 splits. FP32 out while it is small: it spares a rounding before the boundary's norm.
fn unpooler(tokens: u32, rank: u32, sm_count: u32) -> DensePlan {
    if tokens <= SLICED_TOKENS {
        let slice = skinny(tokens, m::UNPOOL_SLICE, m::EXPERT_DIM, 8, true);
        return DensePlan { row_begin: rank * m::UNPOOL_SLICE, ..slice };
    }
    if tokens > SKINNY_TOKENS {
        return dense(tokens, m::HIDDEN, m::EXPERT_DIM, false, sm_count);
    }
    skinny(tokens, m::HIDDEN, m::EXPERT_DIM, skinny_splits(m::HIDDEN, sm_count), true)
}

/// Tiled: two CTAs, of half the experts each, a tile of tokens and split. K is split until they fill the SMs once.
fn router(key: &PlanKey, sm_count: u32) -> RouterPlan {
    let tokens = key.tokens;
    let releases = tokens <= ROUTER_RELEASES_TOKENS;
    let topk_behind = TOPK_BEHIND_TOKENS.contains(&tokens);
    // A tap wants the planes.
    let boundary = tokens == 1 && key.taps == Taps::None;
    let (form, splits) = if tokens <= ROUTER_ROWS_TOKENS {
        (RouterForm::Rows, ROUTER_ROWS_SPLITS)
    } else if tokens <= ROUTER_CLUSTER_TOKENS {
        (RouterForm::Tiled, ROUTER_CLUSTER_SPLITS)
    } else {
        let splits = (sm_count / 2 / tokens.div_ceil(ROUTER_TILE_TOKENS)).clamp(1, ROUTER_TILED_SPLITS);
        (RouterForm::Tiled, splits)
    };
    RouterPlan { form, splits, releases, topk_behind, boundary }
}

/// The key less its short requests.
fn long_requests(key: &PlanKey) -> PlanKey {
    let (tokens, requests) = key.short.map_or((0, 0), |short| (short.tokens, short.requests));
    PlanKey { tokens: key.tokens - tokens, requests: key.requests - requests, short: None, ..key.clone() }
}

/// Partials are indexed by the step's rows, of which the short requests' are a part: splits as for a step of them
/// alone, as far as that fits.
fn short_attention(key: &PlanKey, short: &ShortRequests, sm_count: u32) -> AttentionPlan {
    let alone = PlanKey {
        tokens: short.tokens,
        requests: short.requests,
        max_q_len: short.max_q_len,
        short: None,
        ..key.clone()
    };
    let plan = attention(&alone, sm_count);
    let row = m::Q_HEADS as u64 * (m::HEAD_DIM as u64 + 2) * 4;
    let fitting = (SHORT_PARTIAL_BYTES / (row * key.tokens as u64)).max(1) as u32;
    AttentionPlan { splits: plan.splits.min(fitting), append: false, ..plan }
}

fn attention(key: &PlanKey, sm_count: u32) -> AttentionPlan {
    let tiled = key.max_q_len > SPLIT_ATTENTION_Q_LEN;
    // Keys that a request may show: bounded by its table, and by the window on sliding layers.
    let mut keys = key.table_width as u64 * key.page_size as u64;
    let window = if key.kind == LayerKind::Sliding { m::SLIDING_WINDOW } else { 0 };
    if window > 0 {
        keys = keys.min(window as u64 + key.max_q_len as u64);
    }
    if key.engine == AttentionEngine::Fa3 {
        let splits = fa3_splits(key, keys, sm_count);
        return AttentionPlan { engine: key.engine, tiled: false, append: false, splits, window, kv_scratch_bytes: 0 };
    }
    let engine = AttentionEngine::Own;
    if tiled {
        let kv_scratch_bytes = tiled_scratch(key, keys, window);
        return AttentionPlan { engine, tiled, append: false, splits: 1, window, kv_scratch_bytes };
    }
    // One wave over all requests: two CTAs a SM of the decode kernel, one of the verify kernel, which takes
    // tiles of 8 query tokens. No split of fewer keys than are worth a CTA.
    let tiles = key.requests.max(1) * key.max_q_len.div_ceil(VERIFY_TOKENS).max(1);
    let wave = if key.max_q_len <= 1 { 2 * sm_count } else { sm_count };
    let useful = keys.div_ceil(KEYS_PER_SPLIT).clamp(1, MAX_KV_SPLITS as u64) as u32;
    let splits = (wave / tiles).clamp(1, useful);
    AttentionPlan { engine, tiled, append: key.max_q_len <= 1, splits, window, kv_scratch_bytes: 0 }
}

/// A bound: the metadata gives each request its own number, from the lengths, so that all requests together
/// fill the SMs. One request of short queries can use one CTA a SM; a request whose query tiles fill the SMs
/// uses none, and the kernel without splits is the quicker one.
fn fa3_splits(key: &PlanKey, keys: u64, sm_count: u32) -> u32 {
    let query_tiles = (key.max_q_len * (m::Q_HEADS / m::KV_HEADS)).div_ceil(FA3_ROW_TILE).max(1);
    let wave = sm_count / (query_tiles * m::KV_HEADS);
    let useful = keys.div_ceil(FA3_KEY_TILE).clamp(1, FA3_MAX_SPLITS as u64) as u32;
    let memory = FA3_SPLIT_TOKENS / key.tokens.max(1);
    wave.min(memory).clamp(1, useful)
}

/// What `csrc/attention/attention_tiled_plan.h` carves, rounded up: FP16 tiles of every visible key (K and V
/// of two heads: 512 bytes a key), 48 bytes a tile, and the FP32 partials of its key splits. The launcher
/// refuses scratch that is too small.
fn tiled_scratch(key: &PlanKey, keys: u64, window: u32) -> u64 {
    let (tokens, requests) = (key.tokens as u64, key.requests as u64);
    let tiles = keys.div_ceil(KEY_TILE);
    let images = requests * (tiles + 1) * (KEY_TILE * 4 * m::KV_SIZE as u64 + 48);
    let seen = if window > 0 { (window as u64).div_ceil(KEY_TILE) + 1 } else { tiles }.min(tiles);
    let query_tiles = (tokens / QUERY_TILE + requests).min(tokens);
    let likely = (2 * tokens + QUERY_TILE * requests.saturating_sub(1)).div_ceil(2 * QUERY_TILE).min(query_tiles);
    let (whole, splits) = tiled_splits(likely, seen);
    let rows = if splits > 1 { (query_tiles - whole) * QUERY_TILE * m::Q_HEADS as u64 * splits } else { 0 };
    (images + rows * (m::HEAD_DIM as u64 + 2) * 4 + 1024).next_multiple_of(256)
}

/// Query tiles of the tiled attention kernel whose keys are not split, and the splits of the others': its own choice
/// (`choose_splits` there), by the same arithmetic.
fn tiled_splits(query_tiles: u64, key_tiles: u64) -> (u64, u64) {
    const SMS: u64 = 132;
    let items = query_tiles * m::KV_HEADS as u64;
    let (mut best, mut best_cost) = ((0, 1), 1e30);
    for waves in [0, items / SMS] {
        let rest = items - waves * SMS;
        for s in (if waves > 0 { 2 } else { 1 }..=16).take_while(|&s| s == 1 || key_tiles >= 2 * s) {
            let join = 2.0 + (rest * QUERY_TILE / m::KV_HEADS as u64) as f64 * s as f64 * 0.0018;
            let cost = waves as f64 * (key_tiles as f64 + 3.0)
                + (rest * s).div_ceil(SMS) as f64 * (key_tiles as f64 / s as f64 + 3.0)
                + if s > 1 { join } else { 0.0 };
            if rest > 0 && cost < best_cost * 0.97 {
                (best, best_cost) = ((waves * SMS / m::KV_HEADS as u64, s), cost);
            }
        }
    }
    best
}

/// Routes that land here: one a token is the mean, the busiest rank gets two to three times that, and 8 a
/// token is the most there can be. The kernels are persistent, so a wide bound costs scratch (24 KB a route)
/// and nothing else, while a second pass that finds routes costs the FP32 sum between passes: one pass to 8704 tokens
/// (1.7 GB), above that 4 routes a token in each of two passes, the second of which mostly finds none and does nothing.
fn experts(tokens: u32, bound: Option<u32>, weight_kind: WeightKind, sm_count: u32) -> ExpertPlan {
    let all = tokens * m::TOP_K;
    let usual = if tokens <= SINGLE_PASS_TOKENS { all } else { (4 * tokens).next_multiple_of(256) };
    let route_bound = bound.unwrap_or(usual).min(all).max(1);
    let few = tokens <= FEW_TOKENS;
    let max_routes_per_expert = tokens.min(route_bound);
    let carry = !few && weight_kind == WeightKind::Nvfp4 && sm_count <= CARRY_SMS;
    ExpertPlan {
        weight_kind,
        few,
        // 64 tiles of 64 rows an expert: with 2 splits an expert is one unit a SM, as in w13.
        w2_splits: if few { 2 } else { 1 },
        route_bound,
        passes: all.div_ceil(route_bound).max(1),
        max_routes_per_expert,
        // 256 weight rows x 32, 64 or 128 tokens a CTA, as the chunks of csrc/moe/experts_many.cu are.
        carry_words: match max_routes_per_expert {
            _ if !carry => 0,
            0..=32 => sm_count * 256 * 32,
            33..=128 => sm_count * 256 * 64,
            _ => sm_count * 256 * 128,
        },
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
    fn splits_are_of_whole_k_tiles_and_tiles_hold_the_tokens() {
        for tokens in every_token_count() {
            let l = choose(&key(tokens), WeightKind::Nvfp4, SMS);
            for d in [&l.qkv_gate, &l.o, &l.pooler, &l.unpooler] {
                assert!((1..=d.k / 64).contains(&d.splits), "{tokens} tokens: {d:?}");
                assert_eq!((d.rows % 64, d.k % 64), (0, 0));
                assert!(d.splits == 1 || d.out_f32, "{tokens} tokens: {d:?}");
                if tokens > SKINNY_TOKENS {
                    let wide = tiles::WIDE.contains(&(d.tile_rows, d.tile_n)) && d.rows % d.tile_rows == 0;
                    assert!(wide || (d.tile_rows, d.tile_n) == (0, 0), "{tokens} tokens: {d:?}");
                } else {
                    assert!(tokens <= d.tile_n && [8, 16, 32, 64, 96, 128].contains(&d.tile_n));
                }
            }
            assert_eq!((l.o.splits, l.o.out_f32), (1, false), "attn_out is a BF16 segment border");
            assert_eq!(l.router.releases, tokens <= 1024);
            assert_eq!(l.router.topk_behind, (65..=128).contains(&tokens));
            assert_eq!(l.router.boundary, tokens == 1);
            match l.router.form {
                RouterForm::Rows => assert!(tokens <= 5 && l.router.splits == 16),
                RouterForm::Tiled => assert!(tokens > 5 && (1..=32).contains(&l.router.splits)),
            }
        }
    }

    /// As measured on the H200.
    #[test]
    fn measured_choices() {
        let splits = |tokens| {
            let l = choose(&key(tokens), WeightKind::Nvfp4, SMS);
            [l.qkv_gate.splits, l.o.splits, l.pooler.splits, l.unpooler.splits, l.router.splits]
        };
        assert_eq!(splits(1), [7, 1, 4, 8, 16]);
        assert_eq!(splits(64), [7, 1, 4, 2, 8]);
        assert_eq!(splits(128), [7, 1, 4, 2, 8]);
        assert_eq!(splits(200), [7, 1, 4, 1, 32]);
        assert_eq!(splits(256), [3, 1, 2, 1, 32]);
        assert_eq!(splits(512), [4, 1, 2, 1, 16]);
        assert_eq!(splits(576), [2, 1, 2, 1, 13]);
        assert_eq!(splits(2048), [1, 1, 1, 1, 4]);
        assert_eq!(splits(8192), [1, 1, 1, 1, 1]);
        let kv = |key: PlanKey| choose(&key, WeightKind::Nvfp4, SMS).attention.splits;
        assert_eq!([1, 16, 64, 256].map(|b| kv(PlanKey::decode(b, 8192))), [128, 16, 4, 1]);
        assert_eq!([1, 4, 16, 32].map(|b| kv(PlanKey::block(b, 8, 8192))), [128, 33, 8, 4]);
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
                assert!(bound.is_some() || e.passes <= 2);
            }
        }
    }

    #[test]
    fn sums_are_carried_where_there_is_room_for_them() {
        let words = |tokens: u32, kind, sms| choose(&key(tokens), kind, sms).experts.carry_words;
        let nvfp4 = |tokens| words(tokens, WeightKind::Nvfp4, SMS);
        let chunks = [0, 32, 32, 64, 64, 128, 128];
        assert_eq!([8, 9, 32, 33, 128, 129, 16384].map(nvfp4), chunks.map(|tokens| SMS * 256 * tokens));
        assert_eq!(words(16, WeightKind::Bf16, SMS), 0);
        assert_eq!(words(16, WeightKind::Nvfp4, CARRY_SMS + 1), 0, "more multiprocessors than flags");
    }

    #[test]
    fn fa3_splits_are_bounded_by_tiles_keys_and_memory() {
        let splits = |key: PlanKey| {
            let a = attention(&PlanKey { engine: AttentionEngine::Fa3, ..key }, SMS);
            assert!(!a.tiled && a.kv_scratch_bytes == 0 && (1..=FA3_MAX_SPLITS).contains(&a.splits));
            a.splits
        };
        assert_eq!(splits(PlanKey::decode(1, 131_072)), 64);
        assert_eq!(splits(PlanKey::decode(1, 160 * 5)), 5, "a split holds a tile of keys at least");
        assert_eq!(splits(PlanKey { kind: LayerKind::Sliding, ..PlanKey::decode(1, 131_072) }), 13);
        assert_eq!(splits(PlanKey::decode(512, 131_072)), 32, "64 MiB of partials");
        assert_eq!(splits(PlanKey::block(1, 200, 8392)), 7);
        assert_eq!(splits(PlanKey::block(1, 8192, 16_384)), 1);
    }

    #[test]
    fn short_requests_behind_long_ones_take_their_own_kernel() {
        let of = |key: &PlanKey| choose(key, WeightKind::Nvfp4, SMS);
        for (chunk, requests, q_len) in [(512, 64, 1), (100, 16, 8), (2048, 40, 1)] {
            let block = PlanKey::block(requests, q_len, 9000);
            let short = ShortRequests { requests, tokens: block.tokens, max_q_len: q_len };
            let alone = PlanKey { tokens: chunk, max_q_len: chunk, ..PlanKey::decode(1, 9000) };
            let mixed =
                PlanKey { tokens: chunk + block.tokens, requests: 1 + requests, short: Some(short), ..alone.clone() };
            let (l, long, block) = (of(&mixed), of(&alone), of(&block));
            assert_eq!(l.attention, long.attention, "the chunk's, as if it were alone");
            let got = l.short_attention.expect("short requests");
            assert_eq!(got, AttentionPlan { append: false, ..block.attention });
            // Without the hint: everyone's keys are gathered for the tiled kernel.
            let one = of(&PlanKey { short: None, ..mixed });
            assert!(
                one.short_attention.is_none() && one.attention.kv_scratch_bytes > 3 * long.attention.kv_scratch_bytes
            );
        }
        // Partials of few requests behind very many rows stay within bounds.
        let short = ShortRequests { requests: 1, tokens: 1, max_q_len: 1 };
        let key =
            PlanKey { tokens: 16384, requests: 2, max_q_len: 16383, short: Some(short), ..PlanKey::decode(2, 131072) };
        assert!((1..=8).contains(&of(&key).short_attention.expect("short requests").splits));
    }

    #[test]
    fn attention_fills_the_device_and_no_more() {
        for requests in 1..=512 {
            let l = choose(&PlanKey { tokens: requests, ..PlanKey::decode(requests, 131072) }, WeightKind::Nvfp4, SMS);
            assert!(!l.attention.tiled && (1..=MAX_KV_SPLITS).contains(&l.attention.splits));
            assert!(l.attention.splits == 1 || l.attention.splits * requests <= 2 * SMS);
        }
        let short = choose(&PlanKey::decode(1, 8), WeightKind::Nvfp4, SMS);
        assert_eq!(short.attention.splits, 1, "eight keys are not worth two splits");
        let sliding =
            choose(&PlanKey { kind: LayerKind::Sliding, ..PlanKey::decode(1, 131072) }, WeightKind::Nvfp4, SMS);
        assert!(sliding.attention.splits <= 33, "a window of 2048 keys has no use for more");
        assert!(choose(&key(17), WeightKind::Nvfp4, SMS).attention.tiled);
    }
}
