//! A serving runtime's batches on the CPU: mixed requests, padding rows, strides, shared pages, rejected drafts, long
//! requests and large pools.

mod cpu_common;

use cpu_common::{close, exact, layer, only, pairwise, rows, run, spec};
use half::bf16;
use muse_spark_layer::backend::cpu::{Cache, CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::synthetic::{self, Spread, StepSpec, SyntheticCache, SyntheticStep};
use muse_spark_layer::{LayerConfig, LayerKind};
use rstest::rstest;

/// Different blockings of the same FP32 sums.
const SAME: f64 = 2e-6;

/// The unpooler is whole at any number of rows, so that steps of other sizes compare.
fn config() -> LayerConfig {
    LayerConfig { unpool_slice: 64, ..LayerConfig::small() }
}

fn step(q_lens: &[usize], ctx: usize, kind: LayerKind, page_size: usize, seed: u64) -> SyntheticStep {
    let spec = StepSpec { q_lens: q_lens.to_vec(), spread: Spread::Mixed, ..spec(1, 1, ctx, kind, page_size) };
    synthetic::step(&config(), &spec, seed).unwrap()
}

/// Prefill chunks, verify blocks, decode rows and idle requests in one call are what they are in calls by sort.
#[rstest]
fn a_mixed_batch_is_its_parts(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 16)] page_size: usize,
) {
    let (config, options) = (config(), exact(kind));
    let layer = layer(&config, 40);
    let step = step(&[1, 0, 8, 1, 37, 1, 8, 0, 20, 1], 40, kind, page_size, 40);
    let mut together = step.clone();
    let want = run(&layer, &mut together, &options);
    let mut cache = step.cache.clone();
    for part in [&[4usize, 8][..], &[2, 6], &[0, 3, 5, 9], &[1, 7]] {
        let (mut alone, tokens) = only(&step, part);
        alone.cache = cache;
        let got = run(&layer, &mut alone, &options);
        close("stream", &got.stream, &rows(&want.stream, config.hidden, &tokens), SAME);
        assert_eq!(got.topk_ids, rows(&want.topk_ids, config.top_k, &tokens));
        cache = alone.cache;
    }
    assert!(cache == together.cache, "every part stores what the whole stores");
}

/// The last `requests` requests as rows of graph padding.
fn padded(step: &SyntheticStep, requests: usize, cache_loc: i64, page: i32, activation: f32) -> SyntheticStep {
    let mut out = step.clone();
    let x = &mut out.input;
    let first = x.cache_seqlens.len() - requests;
    let start = x.cu_seqlens_q[first] as usize;
    x.cache_seqlens[first..].fill(1);
    x.page_table[first * x.table_width..].fill(page);
    x.cache_loc[start..].fill(cache_loc);
    x.positions[start..].fill(0);
    x.stream[start * config().hidden..].fill(activation);
    x.attn_input[start * config().hidden..].fill(bf16::from_f32(activation));
    out
}

/// Length 1, the sink or no slot, any page, any activations: nobody else's bits change, nothing but the sink is
/// written, and with the scalar padding takes no route.
#[rstest]
fn padding_rows_touch_nobody(
    #[values(&[1, 1, 1, 1, 1], &[4, 4, 4, 4])] q_lens: &[usize],
    #[values(-1, 0, 3, i32::MAX)] page: i32,
    #[values(f32::NAN, f32::INFINITY, 1.0)] activation: f32,
    #[values((0, false), (0, true), (-1, false))] slot: (i64, bool),
) {
    let (config, kind) = (config(), LayerKind::Sliding);
    let layer = layer(&config, 41);
    let mut step = step(q_lens, 30, kind, 1, 41);
    // A slot in front of the pool that is nobody's.
    step.input.page_table.iter_mut().filter(|id| **id >= 0).for_each(|id| *id += 1);
    step.input.cache_loc.iter_mut().for_each(|loc| *loc += 1);
    for pool in [&mut step.cache.k, &mut step.cache.v] {
        pool.splice(0..0, vec![0x7f; config.kv_size()]);
    }
    let mut usual = step.clone();
    let want = run(&layer, &mut usual, &exact(kind));
    let real = step.input.cu_seqlens_q[q_lens.len() - 2] as usize;
    let (cache_loc, skip_slot_zero) = slot;
    let mut with_padding = padded(&step, 2, cache_loc, page, activation);
    let options = StepOptions { skip_slot_zero, ..exact(kind) };
    let SyntheticStep { input, cache } = &mut with_padding;
    let mut view = input.view();
    view.num_tokens_non_padded = Some(real);
    let got = layer.forward(&view, &mut cache.view(), &options).unwrap();
    // An expert's rows are one product: fewer of them are summed in other blocks.
    close("stream", &got.stream[..real * config.hidden], &want.stream[..real * config.hidden], SAME);
    assert_eq!(got.topk_ids[..real * config.top_k], want.topk_ids[..real * config.top_k]);
    let (got, want) = (got.taps.unwrap(), want.taps.unwrap());
    assert_eq!(got.attn_core[..real * config.q_size()], want.attn_core[..real * config.q_size()]);
    assert!(got.moe_mix[real * config.expert_dim..].iter().all(|v| v.to_bits() == 0));
    let row = config.kv_size();
    for (pool, own, before) in [(&cache.k, &usual.cache.k, &step.cache.k), (&cache.v, &usual.cache.v, &step.cache.v)] {
        for (r, got) in pool.chunks(row).enumerate() {
            let stored = step.input.cache_loc[..real].contains(&(r as i64));
            let sink = r == 0 && cache_loc == 0 && !skip_slot_zero;
            let want = if stored { own } else { before };
            assert!(sink || got == &want[r * row..][..row], "row {r}");
        }
    }
}

/// Requests that list the pages of a common prefix are requests with copies of them.
#[rstest]
fn shared_prefix_pages(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 4)] page_size: usize,
) {
    let config = config();
    let layer = layer(&config, 42);
    let spec = StepSpec { q_lens: vec![1, 8, 1], ..spec(1, 1, 40, kind, page_size) };
    let mut copies = synthetic::step(&config, &spec, 42).unwrap();
    let (width, bytes) = (copies.input.table_width, page_size * config.kv_size());
    let mut sharing = copies.clone();
    for b in 1..3 {
        for p in 0..32 / page_size {
            let (from, to) = (copies.input.page_table[p] as usize, copies.input.page_table[b * width + p] as usize);
            for pool in [&mut copies.cache.k, &mut copies.cache.v] {
                pool.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
            }
            sharing.input.page_table[b * width + p] = from as i32;
        }
    }
    assert_eq!(run(&layer, &mut sharing, &exact(kind)), run(&layer, &mut copies, &exact(kind)));
}

/// A verify block of 4 tokens of each of two requests, from the `first` of 12 on.
fn block(all: &SyntheticStep, first: usize, cache: &SyntheticCache) -> SyntheticStep {
    let tokens: Vec<usize> = (0..2).flat_map(|b| b * 12 + first..b * 12 + first + 4).collect();
    let (mut out, hidden) = (all.clone(), config().hidden);
    out.input.stream = rows(&all.input.stream, hidden, &tokens);
    out.input.attn_input = rows(&all.input.attn_input, hidden, &tokens);
    out.input.positions = rows(&all.input.positions, 1, &tokens);
    out.input.cache_loc = rows(&all.input.cache_loc, 1, &tokens);
    out.input.cu_seqlens_q = vec![0, 4, 8];
    out.input.cache_seqlens = all.input.cache_seqlens.iter().map(|n| n - 12 + first as i32 + 4).collect();
    out.cache = cache.clone();
    out
}

/// What rejected drafts stored is overwritten by the next step: it has no effect, over page edges and the window's.
#[rstest]
fn rejected_drafts_leave_no_trace(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 8)] page_size: usize,
    #[values(20, 22, 29)] ctx: usize,
    #[values(0, 1, 3)] accepted: usize,
) {
    let config = config();
    let layer = layer(&config, 43);
    let all = synthetic::step(&config, &spec(2, 12, ctx, kind, page_size), 43).unwrap();
    let mut drafted = block(&all, 0, &all.cache);
    run(&layer, &mut drafted, &exact(kind));
    let mut erased = drafted.cache.clone();
    let row = config.kv_size();
    for b in 0..2 {
        for loc in &all.input.cache_loc[b * 12 + accepted + 1..b * 12 + 4] {
            erased.k[*loc as usize * row..][..row].fill(0x7f);
            erased.v[*loc as usize * row..][..row].fill(0xff);
        }
    }
    let mut next = block(&all, accepted + 1, &drafted.cache);
    let mut clean = block(&all, accepted + 1, &erased);
    let got = run(&layer, &mut next, &exact(kind));
    assert!(got.stream.iter().all(|v| v.is_finite()));
    assert_eq!(got, run(&layer, &mut clean, &exact(kind)));
    assert!(next.cache == clean.cache, "every slot of theirs is written again");
}

/// Rows of the page table further apart than its width, with anything between them.
#[rstest]
fn table_rows_may_be_apart(#[values(0, 1, 37)] gap: usize) {
    let (config, kind) = (config(), LayerKind::Full);
    let layer = layer(&config, 44);
    let mut step = step(&[1, 8, 0, 1], 30, kind, 4, 44);
    let want = run(&layer, &mut step.clone(), &exact(kind));
    let width = step.input.table_width;
    let apart = step.input.page_table.chunks(width).flat_map(|row| row.iter().copied().chain(vec![1; gap]));
    step.input.page_table = apart.collect();
    let SyntheticStep { input, cache } = &mut step;
    let mut view = input.view();
    view.batch.table_stride = width + gap;
    assert_eq!(layer.forward(&view, &mut cache.view(), &exact(kind)).unwrap(), want);
}

fn one_token(layer: &CpuLayer, step: &SyntheticStep, cache: &mut Cache, kind: LayerKind) -> StepOutput {
    layer.forward(&step.input.view(), cache, &exact(kind)).unwrap()
}

/// A request of a million tokens at positions up to 1,048,575: on a sliding layer it is a short request with the same
/// last keys.
#[test]
fn a_million_tokens() {
    let (config, kind) = (config(), LayerKind::Sliding);
    let layer = layer(&config, 45);
    let length = 1 << 20;
    let mut long = synthetic::step(&config, &spec(1, 1, length - 1, kind, 1), 45).unwrap();
    assert_eq!(long.input.positions, [1_048_575]);
    let mut short = long.clone();
    short.input.page_table.drain(..length - config.window);
    short.input.table_width = config.window;
    short.input.cache_seqlens = vec![config.window as i32];
    let want = run(&layer, &mut short, &exact(kind));
    assert_eq!(run(&layer, &mut long, &exact(kind)), want);
    // And on a full layer every key counts: it differs from its own last keys.
    let full = exact(LayerKind::Full);
    let (long, short) = (run(&layer, &mut long, &full), run(&layer, &mut short, &full));
    assert!(long.stream != short.stream && long.stream.iter().all(|v| v.is_finite()));
}

/// Pages past 2^31 bytes of a pool. (Memory that nothing touches costs nothing.)
#[rstest]
fn pools_past_two_gib(#[values(1, 64)] page_size: usize) {
    let (config, kind) = (config(), LayerKind::Full);
    let layer = layer(&config, 46);
    let step = synthetic::step(&config, &spec(1, 1, 100, kind, page_size), 46).unwrap();
    let own = step.cache.k.len();
    let first = ((1usize << 31) + (1 << 20)) / (page_size * config.kv_size());
    let offset = first * page_size * config.kv_size();
    let (mut k, mut v) = (vec![0u8; offset + own], vec![0u8; offset + own]);
    k[offset..].copy_from_slice(&step.cache.k);
    v[offset..].copy_from_slice(&step.cache.v);
    let mut moved = step.clone();
    moved.input.page_table.iter_mut().filter(|id| **id >= 0).for_each(|id| *id += first as i32);
    moved.input.cache_loc.iter_mut().for_each(|loc| *loc += (first * page_size) as i64);
    let mut large = Cache { k: &mut k, v: &mut v, page_size, k_scale: 1.0, v_scale: 1.0 };
    let got = one_token(&layer, &moved, &mut large, kind);
    let mut small = step.cache.clone();
    assert_eq!(got, one_token(&layer, &step, &mut small.view(), kind));
    assert!(k[offset..] == small.k && v[offset..] == small.v, "the new entry is where it belongs");
}

/// The same call twice gives the same bits.
#[rstest]
fn runs_repeat(#[values(0, 5, 9, 14)] row: usize) {
    let row = &pairwise::ROWS[row];
    let config = LayerConfig::small();
    let layer = layer(&config, 21);
    let step = synthetic::step(&config, &pairwise::spec(row), 21).unwrap();
    let once = run(&layer, &mut step.clone(), &exact(row.0));
    assert_eq!(run(&layer, &mut step.clone(), &exact(row.0)), once);
}
