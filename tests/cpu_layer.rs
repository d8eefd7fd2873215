//! What the whole CPU layer promises, whatever the numbers: batches, visibility, the cache, expert ranges.

mod cpu_common;

use cpu_common::pairwise::{self, pairwise};
use cpu_common::{close, exact, layer, nothing, part, run, spec, tokens, widen, with};
use half::bf16;
use muse_spark_layer::backend::cpu::{self, CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::numerics::{e4m3_to_f32, f32_to_e4m3};
use muse_spark_layer::synthetic::{self, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::tensor::{HostTensor, NamedTensors};
use muse_spark_layer::{LayerConfig, LayerKind, QueryPrecision, WeightKind};
use rstest::rstest;

/// Different blockings of the same FP32 sums.
const SAME: f64 = 2e-6;

/// A configuration whose unpooler is whole at any number of tokens, so that steps of other sizes compare.
fn unsliced() -> LayerConfig {
    LayerConfig { unpool_slice: 64, ..LayerConfig::small() }
}

// Every request alone, and every token of it alone and in turn, gives what the batch gave.
pairwise!(a_batch_is_its_requests_and_a_block_its_steps, |row| {
    let (config, options) = (unsliced(), exact(row.0));
    let layer = layer(&config, 7);
    let step = synthetic::step(&config, &pairwise::spec(row), 7).unwrap();
    let mut whole = step.clone();
    let batch = run(&layer, &mut whole, &options);
    let (mut stream, mut ids, mut one_by_one) = (Vec::new(), Vec::new(), Vec::new());
    let mut cache = step.cache.clone();
    for b in 0..step.input.cache_seqlens.len() {
        let mut alone = part(&step, b, tokens(&step, b));
        let out = run(&layer, &mut alone, &options);
        stream.extend(out.stream);
        ids.extend(out.topk_ids);
        for t in tokens(&step, b) {
            let mut single = part(&step, b, t..t + 1);
            single.cache = cache;
            one_by_one.extend(run(&layer, &mut single, &options).stream);
            cache = single.cache;
        }
    }
    close("requests alone", &stream, &batch.stream, SAME);
    assert_eq!(ids, batch.topk_ids);
    close("tokens alone", &one_by_one, &batch.stream, SAME);
    assert_eq!(cache, whole.cache);
});

/// A key like the query at the last visible position decides the output; one further back, or one
/// ahead, changes no bit.
#[rstest]
fn the_window_ends_where_it_should(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 3, 8)] q_len: usize,
    #[values(23, 24, 25, 60)] ctx: usize,
    #[values(1, 16)] page_size: usize,
) {
    let config = LayerConfig::small();
    let layer = layer(&config, 5);
    let mut step = synthetic::step(&config, &spec(2, q_len, ctx, kind, page_size), 5).unwrap();
    let (kv, dim) = (config.kv_size(), config.head_dim);
    // The step's own entries first; then attention alone, on changed caches.
    let qkv = cpu::qkv_gate(&config, layer.weights(), &widen(&step.input.attn_input));
    let SyntheticStep { input, cache } = &mut step;
    let batch = input.view().batch;
    let query = QueryPrecision::Fp32;
    let q = cpu::qk_norm_rope_append(&config, &qkv, &batch, &mut cache.view(), kind, query, false).q;
    let attend = |cache: &mut synthetic::SyntheticCache| cpu::attention(&config, &q, &batch, &cache.view(), kind);
    let before = attend(&mut cache.clone());
    let pages = cache.k.len() / kv / page_size;
    for b in 0..2 {
        for i in 0..q_len {
            let t = b * q_len + i;
            let position = ctx + i;
            let first = if kind == LayerKind::Sliding { (position + 1).saturating_sub(config.window) } else { 0 };
            let core = |x: &[f32]| x[t * config.q_size()..(t + 1) * config.q_size()].to_vec();
            let spiked = |at: usize| {
                let mut cache = cache.clone();
                let row = cpu_common::cache_row(&batch, b, at, page_size, pages).unwrap();
                for (h, chunk) in cache.k[row * kv..(row + 1) * kv].chunks_exact_mut(dim).enumerate() {
                    let like = &q[t * config.q_size() + h * config.group() * dim..][..dim];
                    chunk.iter_mut().zip(like).for_each(|(k, q)| *k = f32_to_e4m3(q / config.qk_scale_factor * 4.0));
                }
                let v: Vec<f32> = cache.v[row * kv..row * kv + dim].iter().map(|&b| e4m3_to_f32(b)).collect();
                (core(&attend(&mut cache)), v)
            };
            for visible in [first, position] {
                let (got, value) = spiked(visible);
                close("the spike's value", &got[..dim], &value, 0.05);
            }
            if first > 0 {
                assert_eq!(spiked(first - 1).0, core(&before), "one before the window");
            }
            if i + 1 < q_len {
                assert_eq!(spiked(position + 1).0, core(&before), "one ahead");
            }
        }
    }
}

/// Page ids below 0 or past the pool, and positions past the table, are invisible keys: as if the
/// request did not have them.
#[rstest]
fn bad_pages_are_invisible(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(-1, i32::MIN, i32::MAX, 1000)] id: i32,
) {
    let config = LayerConfig::small();
    let layer = layer(&config, 6);
    let mut step = synthetic::step(&config, &spec(2, 1, 20, kind, 4), 6).unwrap();
    let w = step.input.table_width;
    step.input.page_table[w + 2] = id; // request 1, positions 8..12
    let got = run(&layer, &mut step, &exact(kind));
    let view = step.input.view();
    let mut cache = step.cache.clone();
    let qkv = cpu::qkv_gate(&config, layer.weights(), &widen(&step.input.attn_input));
    let query = QueryPrecision::Fp32;
    let q = cpu::qk_norm_rope_append(&config, &qkv, &view.batch, &mut cache.view(), kind, query, false).q;
    let want = cpu_common::naive::attention(&config, &q, &view.batch, &cache.view(), kind);
    close("attn_core", &got.taps.unwrap().attn_core, &want, SAME);

    // All of them: zeros for that request, the neighbour's bits unchanged.
    let neighbour = run(&layer, &mut step.clone(), &exact(kind)).taps.unwrap().attn_core;
    step.input.page_table[w..2 * w].fill(id);
    let core = run(&layer, &mut step, &exact(kind)).taps.unwrap().attn_core;
    assert!(core[config.q_size()..].iter().all(|&v| v == 0.0));
    assert_eq!(core[..config.q_size()], neighbour[..config.q_size()]);
    // A table too narrow for the length.
    step.input.page_table = vec![0, 0];
    step.input.table_width = 1;
    assert!(run(&layer, &mut step, &exact(kind)).stream.iter().all(|v| v.is_finite()));
}

/// Slots that no request lists, pages older than every window, table tails and slots ahead may hold
/// anything: NaN bytes there change no bit.
#[rstest]
fn dead_slots_are_never_read(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 3)] q_len: usize,
    #[values(1, 16)] page_size: usize,
    #[values(0x7f, 0xff)] garbage: u8,
) {
    let config = LayerConfig::small();
    let layer = layer(&config, 8);
    let step_spec = StepSpec { spread: Spread::Mixed, ..spec(3, q_len, 40, kind, page_size) };
    let mut step = synthetic::step(&config, &step_spec, 8).unwrap();
    let want = run(&layer, &mut step.clone(), &exact(kind));
    let kv = config.kv_size();
    let (i, pages) = (step.input.clone(), step.cache.k.len() / kv / page_size);
    let mut alive = vec![false; step.cache.k.len() / kv];
    for b in 0..3 {
        let seq = i.cache_seqlens[b] as usize;
        let first = seq.saturating_sub(q_len - 1 + config.window_of(kind));
        let first = if kind == LayerKind::Full { 0 } else { first };
        for p in first..seq {
            alive[cpu_common::cache_row(&i.view().batch, b, p, page_size, pages).unwrap()] = true;
        }
        // Stale ids in the tail.
        let used = seq.div_ceil(page_size);
        step.input.page_table[b * i.table_width + used..(b + 1) * i.table_width].fill(0);
        if kind == LayerKind::Sliding {
            step.input.page_table[b * i.table_width..][..first / page_size].fill(-1);
        }
    }
    for (row, alive) in alive.iter().enumerate().filter(|x| !x.1) {
        assert!(!alive);
        step.cache.k[row * kv..(row + 1) * kv].fill(garbage);
        step.cache.v[row * kv..(row + 1) * kv].fill(garbage);
    }
    assert_eq!(run(&layer, &mut step, &exact(kind)), want);
}

/// A NaN value reaches the tokens that see it, and no other.
#[test]
fn a_nan_value_reaches_only_who_sees_it() {
    let config = LayerConfig::small();
    let layer = layer(&config, 8);
    let mut step = synthetic::step(&config, &spec(1, 4, 30, LayerKind::Full, 1), 8).unwrap();
    let want = run(&layer, &mut step.clone(), &exact(LayerKind::Full)).taps.unwrap().attn_core;
    step.input.cache_loc[2] = -1; // not stored: token 2's slot keeps what it held
    let slot = step.input.page_table[32] as usize * config.kv_size();
    step.cache.v[slot] = 0x7f;
    let core = run(&layer, &mut step, &exact(LayerKind::Full)).taps.unwrap().attn_core;
    let q = config.q_size();
    close("tokens before it", &core[..2 * q], &want[..2 * q], SAME);
    assert!(core[2 * q].is_nan() && core[3 * q].is_nan() && !core[2 * q + 1].is_nan());
}

/// Each stored slot is written once and nothing else is; below 0, past the pool and (by choice) slot 0
/// are not stored.
#[rstest]
fn only_the_steps_slots_are_written(#[values(false, true)] skip_slot_zero: bool, #[values(0, 5)] first: i64) {
    let config = LayerConfig::small();
    let layer = layer(&config, 9);
    let mut step = synthetic::step(&config, &spec(6, 1, 10, LayerKind::Sliding, 1), 9).unwrap();
    let rows = (step.cache.k.len() / config.kv_size()) as i64;
    step.input.cache_loc.copy_from_slice(&[first, -1, rows, i64::MIN, i64::MAX, 7]);
    let before = step.cache.clone();
    let options = StepOptions { skip_slot_zero, ..exact(LayerKind::Sliding) };
    run(&layer, &mut step, &options);
    let kv = config.kv_size();
    let changed = |a: &[u8], b: &[u8]| -> Vec<i64> {
        (0..rows).filter(|&r| a[r as usize * kv..][..kv] != b[r as usize * kv..][..kv]).collect()
    };
    let want = if first == 0 && skip_slot_zero { vec![7] } else { vec![first, 7] };
    assert_eq!(changed(&before.k, &step.cache.k), want);
    assert_eq!(changed(&before.v, &step.cache.v), want);
}

/// Zero-length requests anywhere, whatever their length and pages, change nobody's bits.
#[rstest]
fn zero_length_requests_are_nothing(#[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind) {
    let config = LayerConfig::small();
    let layer = layer(&config, 10);
    let step = synthetic::step(&config, &spec(2, 3, 30, kind, 4), 10).unwrap();
    let want = run(&layer, &mut step.clone(), &exact(kind));
    let (w, mut padded) = (step.input.table_width, step.clone());
    padded.input.cu_seqlens_q = vec![0, 0, 3, 3, 6, 6];
    padded.input.cache_seqlens = vec![0, 33, 17, 33, -5];
    let row = |b: usize| step.input.page_table[b * w..(b + 1) * w].to_vec();
    padded.input.page_table = [vec![-1; w], row(0), vec![3; w], row(1), vec![i32::MAX; w]].concat();
    assert_eq!(run(&layer, &mut padded, &exact(kind)), want);
}

/// No token, with and without requests; tokens that belong to no request.
#[test]
fn empty_steps_and_padding_tokens() {
    let config = LayerConfig::small();
    let layer = layer(&config, 11);
    let mut step = synthetic::step(&config, &spec(3, 0, 30, LayerKind::Full, 4), 11).unwrap();
    let out = run(&layer, &mut step, &exact(LayerKind::Full));
    assert!(out.stream.is_empty() && out.hidden.is_empty() && out.topk_ids.is_empty());
    let mut cache = step.cache.clone();
    assert!(layer.forward(&nothing(), &mut cache.view(), &exact(LayerKind::Full)).unwrap().stream.is_empty());

    let mut step = synthetic::step(&config, &spec(4, 1, 30, LayerKind::Full, 4), 11).unwrap();
    let want = run(&layer, &mut step.clone(), &exact(LayerKind::Full));
    step.input.cu_seqlens_q = vec![0, 1, 2];
    step.input.cache_seqlens.truncate(2);
    step.input.page_table.truncate(2 * step.input.table_width);
    let SyntheticStep { input, cache } = &mut step;
    let mut view = input.view();
    view.num_tokens_non_padded = Some(2);
    let out = layer.forward(&view, &mut cache.view(), &exact(LayerKind::Full)).unwrap();
    assert_eq!(out.stream[..2 * config.hidden], want.stream[..2 * config.hidden]);
    let taps = out.taps.unwrap();
    assert!(taps.attn_core[2 * config.q_size()..].iter().all(|&v| v == 0.0));
    assert!(taps.moe_mix[2 * config.expert_dim..].iter().all(|&v| v == 0.0));
}

/// Weights of the expert range `start..start + local` (wrapping) of a layer that has all experts.
fn rank_weights(all: &NamedTensors<'static>, start: usize, local: usize) -> NamedTensors<'static> {
    with(all, |w| {
        for name in ["w13", "w13_sf", "w13_gs", "w2", "w2_sf", "w2_gs"] {
            let t = all.get(name).unwrap();
            let each = t.bytes().len() / t.shape[0];
            let bytes: Vec<u8> =
                (start..start + local).flat_map(|e| t.bytes()[e % t.shape[0] * each..][..each].to_vec()).collect();
            let shape = [&[local], &t.shape[1..]].concat();
            let words: Vec<f32> = bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
            let part = match name {
                "w13_gs" | "w2_gs" => HostTensor::f32(&shape, words),
                "w13_sf" | "w2_sf" => HostTensor::e4m3(&shape, bytes),
                _ => HostTensor::u8(&shape, bytes),
            };
            w.insert(name, part);
        }
    })
}

/// The mixtures of all ranks add up to that of one layer with all experts, wherever the ranges begin.
#[rstest]
fn ranks_add_up(#[values(0, 8, 5, 28)] first: usize, #[values(1, 12)] tokens: usize) {
    let config = LayerConfig::small();
    let all_config = LayerConfig { local_experts: config.n_experts, ..config.clone() };
    let all = synthetic::weights(&all_config, 12).unwrap();
    let whole = CpuLayer::new(all_config, all.clone()).unwrap();
    let step = synthetic::step(&config, &spec(tokens, 1, 30, LayerKind::Full, 1), 12).unwrap();
    let want = run(&whole, &mut step.clone(), &exact(LayerKind::Full)).taps.unwrap().moe_mix;
    let mut sum = vec![0f32; want.len()];
    for rank in 0..config.ranks() {
        let start = (first + rank * config.local_experts) % config.n_experts;
        let layer = CpuLayer::new(config.clone(), rank_weights(&all, start, config.local_experts)).unwrap();
        let mut step = step.clone();
        step.input.local_start = start as i32;
        let mix = run(&layer, &mut step, &exact(LayerKind::Full)).taps.unwrap().moe_mix;
        sum.iter_mut().zip(&mix).for_each(|(s, m)| *s += m);
    }
    close("moe_mix", &sum, &want, SAME);
}

/// The three segments with sums over ranks between them are the layer of all heads and experts.
#[test]
fn segments_make_the_layer() {
    let config = LayerConfig::small();
    let layer = layer(&config, 13);
    let mut step = synthetic::step(&config, &spec(5, 2, 30, LayerKind::Sliding, 4), 13).unwrap();
    let options = exact(LayerKind::Sliding);
    let want = run(&layer, &mut step.clone(), &options);
    let SyntheticStep { input, cache } = &mut step;
    let view = input.view();
    let attention = layer.attention_block(view.attn_input, &view.batch, &mut cache.view(), &options).unwrap();
    let moe = layer.moe_block(view.stream, &attention.attn_out, view.local_start, None).unwrap();
    let mut ffn_out = layer.unpool_block(&moe.moe_mix, 0).unwrap();
    assert_eq!(layer.ffn_block(&moe.stream_after_attn, &ffn_out).unwrap().stream, want.stream);
    // Sliced, the ranks' columns are disjoint and add up to the whole.
    let few = &moe.moe_mix[..8 * config.expert_dim];
    let mut sum = vec![0f32; 8 * config.hidden];
    for rank in 0..config.hidden / config.unpool_slice {
        for (s, v) in sum.iter_mut().zip(layer.unpool_block(few, rank).unwrap()) {
            *s += v;
        }
    }
    ffn_out.truncate(sum.len());
    close("ffn_out", &sum, &ffn_out, SAME);
}

/// No local route gives exact zeros; all routes on one expert are that expert's output.
#[test]
fn idle_ranks_and_one_expert() {
    let config = LayerConfig { top_k: 1, ..LayerConfig::small() };
    let weights = synthetic::weights(&config, 14).unwrap();
    let mut bias = vec![0f32; config.n_experts];
    bias[17] = 10.0;
    let weights = with(&weights, |w| w.insert("router_bias", HostTensor::f32(&[config.n_experts], bias)));
    let layer = CpuLayer::new(config.clone(), weights).unwrap();
    let step = synthetic::step(&config, &spec(10, 1, 5, LayerKind::Full, 1), 14).unwrap();
    for (start, local) in [(0, false), (8, false), (16, true), (17, true), (10, true), (18, false), (24, false)] {
        let mut step = step.clone();
        step.input.local_start = start;
        let out = run(&layer, &mut step, &exact(LayerKind::Full));
        assert!(out.topk_ids.iter().all(|&e| e == 17));
        assert!(out.topk_scores.iter().all(|&s| (s - 1.0).abs() < 1e-6));
        let taps = out.taps.unwrap();
        assert_eq!(taps.moe_mix.iter().all(|&v| v == 0.0), !local, "range from {start}");
        assert!(out.stream.iter().all(|v| v.is_finite()));
    }
}

/// Twice the global scale is twice the sum, exactly; per-expert scales far from 1 stay with their expert.
#[test]
fn global_scales_multiply_once() {
    let config = LayerConfig::small();
    let weights = synthetic::weights(&config, 15).unwrap();
    let lists = routing_all(&config);
    let x: Vec<f32> = (0..config.expert_dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let scale = |name: &str, factors: &[f32]| {
        with(&weights, |w| {
            let t = w.get(name).unwrap().clone();
            let per = t.len() / config.local_experts;
            let gs = t.as_f32(name).unwrap().iter().enumerate().map(|(i, g)| g * factors[i / per]).collect::<Vec<_>>();
            w.insert(name, HostTensor::f32(&t.shape, gs));
        })
    };
    let of = |w: NamedTensors<'static>| CpuLayer::new(config.clone(), w).unwrap();
    let factors: Vec<f32> = (0..8).map(|e| 2f32.powi(3 * e - 12)).collect();
    let base = cpu::w2(&config, of(weights.clone()).weights(), &x.repeat(8), &lists);
    let scaled = cpu::w2(&config, of(scale("w2_gs", &factors)).weights(), &x.repeat(8), &lists);
    for (i, (s, b)) in scaled.iter().zip(&base).enumerate() {
        assert_eq!(*s, b * factors[i / config.expert_dim]);
    }
    // w13: the up scale is linear, the gate's is not; both apart.
    let base = cpu::w13(&config, of(weights.clone()).weights(), &x, &lists);
    let up = with(&weights, |w| {
        let gs = w.get("w13_gs").unwrap().as_f32("w13_gs").unwrap();
        let gs: Vec<f32> = gs.iter().enumerate().map(|(i, g)| if i % 2 == 1 { g * 4.0 } else { *g }).collect();
        w.insert("w13_gs", HostTensor::f32(&[8, 2], gs));
    });
    let scaled = cpu::w13(&config, of(up).weights(), &x, &lists);
    assert_eq!(scaled, base.iter().map(|b| b * 4.0).collect::<Vec<_>>());
}

/// One token routed to every local expert.
fn routing_all(config: &LayerConfig) -> muse_spark_layer::routing::ExpertLists {
    let config = LayerConfig { top_k: config.local_experts, ..config.clone() };
    let ids: Vec<i32> = (0..config.local_experts as i32).collect();
    muse_spark_layer::routing::ExpertLists::new(&config, &ids, 0, 1)
}

/// BF16 experts that hold an NVFP4 layer's values (exact in BF16 with power-of-two global scales) give its output.
#[test]
fn bf16_experts_are_nvfp4_experts_widened() {
    let config = LayerConfig::small();
    let weights = with(&synthetic::weights(&config, 16).unwrap(), |w| {
        w.insert("w13_gs", HostTensor::f32(&[8], vec![2f32.powi(-10); 8]));
        w.insert("w2_gs", HostTensor::f32(&[8], vec![2f32.powi(-9); 8]));
    });
    let dim = config.expert_dim;
    let wide = with(&weights, |w| {
        for (name, rows, gs) in [("w13", 2 * dim, 2f32.powi(-10)), ("w2", dim, 2f32.powi(-9))] {
            let scales = format!("{name}_sf");
            let values = muse_spark_layer::weights::nvfp4::dequantize(
                w.get(name).unwrap().as_u8(name).unwrap(),
                w.get(&scales).unwrap().as_e4m3(&scales).unwrap(),
                gs,
                dim,
            );
            let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
            w.insert(name, HostTensor::bf16(&[8, rows, dim], values));
            w.0.remove(&scales);
            w.0.remove(&format!("{name}_gs"));
        }
    });
    let bf16_config = LayerConfig { experts: WeightKind::Bf16, ..config.clone() };
    let (narrow, wide) = (CpuLayer::new(config.clone(), weights).unwrap(), CpuLayer::new(bf16_config, wide).unwrap());
    let step = synthetic::step(&config, &spec(12, 1, 9, LayerKind::Full, 1), 16).unwrap();
    let want = run(&narrow, &mut step.clone(), &exact(LayerKind::Full));
    let got = run(&wide, &mut step.clone(), &exact(LayerKind::Full));
    assert!(want.taps.as_ref().unwrap().moe_mix.iter().any(|&v| v != 0.0));
    close("stream", &got.stream, &want.stream, SAME);
}

/// NaN and infinite activations: distinct expert ids in range, no panic, other rows untouched.
#[rstest]
fn not_finite_activations(#[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] bad: f32) {
    let config = LayerConfig::small();
    let layer = layer(&config, 17);
    let mut step = synthetic::step(&config, &spec(3, 1, 20, LayerKind::Sliding, 1), 17).unwrap();
    let want = run(&layer, &mut step.clone(), &exact(LayerKind::Sliding));
    let h = config.hidden;
    step.input.stream[h + 3] = bad;
    step.input.attn_input[h..2 * h].fill(bf16::from_f32(bad));
    let out: StepOutput = run(&layer, &mut step, &exact(LayerKind::Sliding));
    for ids in out.topk_ids.chunks_exact(config.top_k) {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() == config.top_k && ids.iter().all(|e| (0..config.n_experts as i32).contains(e)));
    }
    assert_eq!(out.stream[..h], want.stream[..h]);
    assert_eq!(out.stream[2 * h..], want.stream[2 * h..]);
}

/// Query roundings move the output by their own size, in their order.
#[test]
fn query_precisions_are_ordered() {
    let config = LayerConfig::small();
    let layer = layer(&config, 18);
    let step = synthetic::step(&config, &spec(8, 1, 60, LayerKind::Full, 1), 18).unwrap();
    let core = |query| {
        let options = StepOptions { query, ..exact(LayerKind::Full) };
        run(&layer, &mut step.clone(), &options).taps.unwrap().attn_core
    };
    let exact = core(QueryPrecision::Fp32);
    let error = |query| cpu_common::relative_l2(&core(query), &exact);
    let (half, brain, eight) = (error(QueryPrecision::Fp16), error(QueryPrecision::Bf16), error(QueryPrecision::E4m3));
    assert!(half > 1e-6 && half < 2e-3, "{half}");
    assert!(brain > 2.0 * half && brain < 2e-2, "{brain}");
    assert!(eight > 4.0 * brain && eight < 0.3, "{eight}");
}

/// Keys and values are stored over their scales and read back times them.
#[rstest]
fn scales_cancel(#[values(0.5, 2.0, 4.0)] k_scale: f32, #[values(0.25, 2.0)] v_scale: f32) {
    let config = LayerConfig::small();
    let layer = layer(&config, 19);
    let mut step = synthetic::step(&config, &spec(4, 1, 30, LayerKind::Sliding, 1), 19).unwrap();
    let scale = |bytes: &mut [u8], s: f32| bytes.iter_mut().for_each(|b| *b = f32_to_e4m3(e4m3_to_f32(*b) / s));
    // Powers of two: exact both ways but for subnormal and saturated entries, which are cleared first.
    for bytes in [&mut step.cache.k, &mut step.cache.v] {
        bytes.iter_mut().filter(|b| !(0x20..0x60).contains(&(**b & 0x7f))).for_each(|b| *b = 0);
    }
    let want = run(&layer, &mut step.clone(), &exact(LayerKind::Sliding));
    scale(&mut step.cache.k, k_scale);
    scale(&mut step.cache.v, v_scale);
    (step.cache.k_scale, step.cache.v_scale) = (k_scale, v_scale);
    let got = run(&layer, &mut step, &exact(LayerKind::Sliding));
    // The new entries may be subnormal in one of the two.
    close("attn_core", &got.taps.unwrap().attn_core, &want.taps.unwrap().attn_core, 2e-3);
}

/// Norm weights and residual gates may be FP32: the values of BF16 ones give the same bits, and a value between
/// two of BF16 is taken as it is.
#[test]
fn vectors_may_be_fp32() {
    let config = LayerConfig::small();
    let weights = synthetic::weights(&config, 23).unwrap();
    let step = synthetic::step(&config, &spec(2, 3, 40, LayerKind::Sliding, 4), 23).unwrap();
    let run_with =
        |weights| run(&CpuLayer::new(config.clone(), weights).unwrap(), &mut step.clone(), &exact(LayerKind::Sliding));
    let want = run_with(weights.clone());
    for name in [
        "attn_residual_gate",
        "pre_ffn_norm",
        "pre_expert_norm",
        "post_expert_norm",
        "post_ffn_norm",
        "ffn_residual_gate",
        "next_pre_attn_norm",
    ] {
        let widened = |scale: f32| {
            with(&weights, |w| {
                let t = w.get(name).unwrap();
                let values: Vec<f32> = t.to_f32(name).unwrap().iter().map(|v| v * scale).collect();
                w.insert(name, HostTensor::f32(&t.shape.clone(), values));
            })
        };
        assert!(run_with(widened(1.0)) == want, "{name}");
        let close = run_with(widened(1.002));
        assert!(close.stream != want.stream || close.hidden != want.hidden, "{name}");
    }
}

/// Without the next layer's norm there is no `hidden`; the stream is the same.
#[test]
fn the_last_layer_has_no_hidden() {
    let config = LayerConfig::small();
    let weights = synthetic::weights(&config, 20).unwrap();
    let last = with(&weights, |w| drop(w.0.remove("next_pre_attn_norm")));
    let step = synthetic::step(&config, &spec(2, 1, 9, LayerKind::Full, 1), 20).unwrap();
    let options = exact(LayerKind::Full);
    let want = run(&CpuLayer::new(config.clone(), weights).unwrap(), &mut step.clone(), &options);
    let got = run(&CpuLayer::new(config, last).unwrap(), &mut step.clone(), &options);
    assert!(got.hidden.is_empty() && !want.hidden.is_empty());
    assert_eq!(got.stream, want.stream);
}
