//! What holds whatever the numbers: order of requests, names of pages, blocks and their steps, ranks that add up,
//! padding and unused memory that change no bit. Fixed seeds.

use crate::harness::{assert_bits, assert_rows, gpu, spec, step_key, DeviceStep, Gpu};
use crate::memory::Scratch;
use crate::steps::{only, rows, tokens, with_pages_renamed};
use half::bf16;
use muse_spark_layer::backend::cpu::{self, StepOutput};
use muse_spark_layer::routing::ExpertLists;
use muse_spark_layer::synthetic::{Spread, StepSpec, SyntheticStep};
use muse_spark_layer::{LayerKind, Plan, PlanKey, Stream, Taps};
use rstest::rstest;

const HIDDEN: usize = 8192;
const ROW: usize = 128;

fn run(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind) -> (StepOutput, [Vec<u8>; 2]) {
    let plan = gpu.plan(PlanKey { taps: Taps::All, ..step_key(step, kind) });
    let (on, output) = gpu.forward_once(step, &plan);
    let caches = on.caches();
    (output, caches)
}

/// Outputs of the tokens `of` in `got` are the first ones' in `want`, bit for bit.
#[track_caller]
fn same_bits(what: &str, got: &StepOutput, of: &[usize], want: &StepOutput, first: &[usize]) {
    assert_eq!(rows(&got.topk_ids, 8, of), rows(&want.topk_ids, 8, first), "{what}: topk_ids");
    assert_bits(what, &rows(&got.stream, HIDDEN, of), &rows(&want.stream, HIDDEN, first), HIDDEN);
    assert!(rows(&got.hidden, HIDDEN, of) == rows(&want.hidden, HIDDEN, first), "{what}: hidden");
}

/// Requests in another order give the same rows in that order, bit for bit: plans know no neighbours.
#[rstest]
fn permuting_requests_permutes_outputs(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(vec![1; 8], vec![1; 20], vec![8; 4], vec![2, 0, 5, 1, 8], vec![40, 1, 0, 17, 90])] q_lens: Vec<usize>,
    #[values(1, 16)] page_size: usize,
) {
    let Some(gpu) = gpu("properties::permuting_requests_permutes_outputs") else { return };
    let spec = StepSpec { q_lens, page_size, spread: Spread::Mixed, ..StepSpec::new(1, 1, 700, kind) };
    let step = gpu.step(&spec, 91);
    let batch = spec.q_lens.len();
    let order: Vec<usize> = (0..batch).rev().map(|b| (b + 2) % batch).collect();
    let (moved, tokens) = only(&step, &order);
    let (want, caches) = run(&gpu, &step, kind);
    let (got, moved_caches) = run(&gpu, &moved, kind);
    let all: Vec<usize> = (0..tokens.len()).collect();
    same_bits("in another order", &got, &all, &want, &tokens);
    assert!(caches == moved_caches, "the same entries are stored");
}

/// Other page ids with the pages moved along give the same bits.
#[rstest]
fn page_ids_do_not_matter(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values("decode-8", "verify-3", "prefill-65", "ragged")] name: &str,
) {
    let Some(gpu) = gpu("properties::page_ids_do_not_matter") else { return };
    let step = gpu.step(&spec(name, kind), 92);
    let pages = step.cache.k.len() / (step.cache.page_size * ROW);
    let moved = with_pages_renamed(&step, ROW, |id| pages - 1 - id);
    let all: Vec<usize> = (0..step.input.positions.len()).collect();
    same_bits("pages renamed", &run(&gpu, &moved, kind).0, &all, &run(&gpu, &step, kind).0, &all);
}

/// Each rank's range of experts, at every multiple of 32 and wrapping at 240, against the CPU from the GPU's own
/// routing; the eight ranks' mixtures are the whole.
#[test]
fn local_ranges_sum_to_the_whole() {
    let Some(gpu) = gpu("properties::local_ranges_sum_to_the_whole") else { return };
    let (config, weights) = (&gpu.config, gpu.cpu.weights());
    let kind = LayerKind::Full;
    let mut step = gpu.step(&spec("decode-3", kind), 93);
    let (mut sum, mut whole, mut routes) = (vec![0f32; 3 * 4096], vec![0f32; 3 * 4096], 0);
    for start in (0..256).step_by(32).chain([240]) {
        step.input.local_start = start;
        let (out, _) = run(&gpu, &step, kind);
        let t = out.taps.unwrap();
        let lists = ExpertLists::new(config, &out.topk_ids, start, usize::MAX);
        let x: Vec<f32> = t.expert_input.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
        let y = cpu::w2(config, weights, &cpu::w13(config, weights, &x, &lists), &lists);
        let want = cpu::combine(config, weights, &y, &t.topk_scores, &lists);
        assert_rows(&format!("the range from {start}"), &t.moe_mix, &want, 4096, 5e-3);
        if lists.routes() == 0 {
            assert!(t.moe_mix.iter().all(|v| *v == 0.0), "no local route, so zeros");
        }
        if start % 32 == 0 {
            sum.iter_mut().zip(&t.moe_mix).for_each(|(s, v)| *s += v);
            whole.iter_mut().zip(&want).for_each(|(s, v)| *s += v);
            routes += lists.routes();
        }
    }
    assert_eq!(routes, 3 * 8, "each route is one rank's");
    assert_rows("the ranks' sum", &sum, &whole, 4096, 5e-3);
}

/// Padding rows that have no length or one below zero (batch.rs has those of length 1), with stale pages or none, anywhere
/// in the batch: they see no key, and the others' bits are those of a batch with other rows there.
#[rstest]
fn rows_without_length_change_no_bit(
    #[values("decode-8", "decode-33", "verify-3", "ragged")] name: &str,
    #[values(0, -7, i32::MIN / 2)] length: i32,
) {
    let Some(gpu) = gpu("properties::rows_without_length_change_no_bit") else { return };
    let kind = LayerKind::Sliding;
    let step = gpu.step(&spec(name, kind), 94);
    let (batch, width) = (step.input.cache_seqlens.len(), step.input.table_width);
    let empty = if batch > 5 { vec![0, batch / 2, batch - 1] } else { vec![1, batch - 1] };
    let mut padded = step.clone();
    for &b in &empty {
        padded.input.cache_seqlens[b] = length;
        if b == empty[0] {
            padded.input.page_table[b * width..(b + 1) * width].fill(-1);
        }
        padded.input.cache_loc[tokens(&step, b)].fill(-1);
    }
    let real: Vec<usize> = (0..batch).filter(|b| !empty.contains(b)).flat_map(|b| tokens(&step, b)).collect();
    let ((want, _), (got, _)) = (run(&gpu, &step, kind), run(&gpu, &padded, kind));
    same_bits("rows without length", &got, &real, &want, &real);
    let core = got.taps.unwrap().attn_core;
    for t in empty.into_iter().flat_map(|b| tokens(&step, b)) {
        assert!(core[t * 1024..(t + 1) * 1024].iter().all(|v| *v == 0.0), "no visible key gives zeros");
    }
}

/// Page ids below 0 or past the pool among the visible ones are keys that are not there.
#[rstest]
fn bad_pages_are_invisible(
    #[values("decode-8", "verify-17", "prefill-65")] name: &str,
    #[values(-1, i32::MIN, i32::MAX, 1 << 20)] id: i32,
) {
    let Some(gpu) = gpu("properties::bad_pages_are_invisible") else { return };
    let kind = LayerKind::Full;
    let mut step = gpu.step(&spec(name, kind), 96);
    let columns = step.input.cache_seqlens[0] as usize / step.cache.page_size;
    step.input.page_table[columns / 2] = id; // request 0, in the middle
    let (out, [k, v]) = run(&gpu, &step, kind);
    let mut cache = step.cache.clone();
    let queries = gpu.cpu_queries(&step, &mut cache, kind, muse_spark_layer::QueryPrecision::Fp16);
    (cache.k, cache.v) = (k, v);
    let want = cpu::attention(&gpu.config, &queries.q, &step.input.view().batch, &cache.view(), kind);
    assert_rows("attn_core", &out.taps.unwrap().attn_core, &want, 64, 4e-3);
}

/// Which cache rows the step reads or writes.
fn alive(step: &SyntheticStep, kind: LayerKind) -> Vec<bool> {
    let (x, page) = (&step.input, step.cache.page_size);
    let mut alive = vec![false; step.cache.k.len() / ROW];
    for b in 0..x.cache_seqlens.len() {
        let (seq, q_len) = (x.cache_seqlens[b] as usize, (x.cu_seqlens_q[b + 1] - x.cu_seqlens_q[b]) as usize);
        let first = if kind == LayerKind::Full { 0 } else { (seq + 1).saturating_sub(q_len + 2048) };
        for p in first..seq {
            let id = x.page_table[b * x.table_width + p / page] as usize;
            alive[id * page + p % page] = true;
        }
    }
    alive
}

/// Scratch, unused cache slots, table tails, what is beside every tensor: NaN bytes or zeros there, the same bits.
#[rstest]
fn unused_memory_changes_no_bit(
    #[values("decode-1", "decode-9", "verify-1", "verify-3", "prefill-65", "prefill-333", "ragged")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("properties::unused_memory_changes_no_bit") else { return };
    let step = gpu.step(&spec(name, kind), 97);
    let plan = gpu.plan(step_key(&step, kind));
    let with = |byte: u8, tail: i32| {
        let mut step = step.clone();
        for (row, _) in alive(&step, kind).iter().enumerate().filter(|x| !x.1) {
            step.cache.k[row * ROW..(row + 1) * ROW].fill(byte);
            step.cache.v[row * ROW..(row + 1) * ROW].fill(byte);
        }
        let (x, page) = (&mut step.input, step.cache.page_size);
        for b in 0..x.cache_seqlens.len() {
            let used = (x.cache_seqlens[b] as usize).div_ceil(page);
            x.page_table[b * x.table_width + used..(b + 1) * x.table_width].fill(tail);
            let q_len = (x.cu_seqlens_q[b + 1] - x.cu_seqlens_q[b]) as usize;
            if kind == LayerKind::Sliding {
                let first = (x.cache_seqlens[b] as usize + 1).saturating_sub(q_len + 2048);
                x.page_table[b * x.table_width..][..first / page].fill(tail);
            }
        }
        outputs(&gpu, &step, &plan, byte)
    };
    let want = with(0xFF, -1);
    for (byte, tail) in [(0x7F, 0), (0x00, i32::MAX), (0x5A, -2)] {
        assert!(with(byte, tail) == want, "with {byte:#04x} in unused memory and {tail} in unused entries");
    }
}

fn outputs(gpu: &Gpu, step: &SyntheticStep, plan: &Plan, scratch_byte: u8) -> Vec<Vec<u8>> {
    let on = DeviceStep::new(gpu, step);
    let mut scratch = Scratch::new(gpu, plan);
    scratch.fill(scratch_byte);
    gpu.forward(plan, scratch.workspace(), &on, Stream::LEGACY);
    let outputs = on.outputs();
    scratch.intact();
    on.intact();
    outputs
}

/// A plan for 128k keys on requests of a few: most splits are empty.
#[rstest]
fn more_splits_than_keys(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 8)] q_len: usize,
    #[values(0, 1, 63, 200)] ctx: usize,
) {
    let Some(gpu) = gpu("properties::more_splits_than_keys") else { return };
    let narrow = gpu.step(&StepSpec::new(2, q_len, ctx, kind), 98);
    let mut wide = narrow.clone();
    wide.input.table_width = 131_072;
    wide.input.page_table = vec![-1; 2 * 131_072];
    let width = narrow.input.table_width;
    for b in 0..2 {
        wide.input.page_table[b * 131_072..][..width].copy_from_slice(&narrow.input.page_table[b * width..][..width]);
    }
    let ((got, _), (want, _)) = (run(&gpu, &wide, kind), run(&gpu, &narrow, kind));
    assert_rows("attn_core", &got.taps.unwrap().attn_core, &want.taps.unwrap().attn_core, 64, 1e-3);
    assert_rows("stream", &got.stream, &want.stream, HIDDEN, 3e-3);
}

/// Each stored slot is written once and nothing else is: below 0, past the pool and, by choice, slot 0 are not stored.
#[rstest]
fn only_the_steps_slots_are_written(#[values(false, true)] skip_slot_zero: bool, #[values(0, 5)] first: i64) {
    let Some(gpu) = gpu("properties::only_the_steps_slots_are_written") else { return };
    let kind = LayerKind::Sliding;
    let mut step = gpu.step(&StepSpec::new(6, 1, 10, kind), 99);
    let slots = (step.cache.k.len() / ROW) as i64;
    step.input.cache_loc = vec![first, -1, slots, i64::MIN, i64::MAX, 7];
    let plan = gpu.plan(PlanKey { skip_slot_zero, ..step_key(&step, kind) });
    let (on, _) = gpu.forward_once(&step, &plan);
    let changed = |old: &[u8], new: &[u8]| -> Vec<i64> {
        (0..slots).filter(|&r| old[r as usize * ROW..][..ROW] != new[r as usize * ROW..][..ROW]).collect()
    };
    let want = if first == 0 && skip_slot_zero { vec![7] } else { vec![first, 7] };
    let [k, v] = on.caches();
    assert_eq!(changed(&step.cache.k, &k), want);
    assert_eq!(changed(&step.cache.v, &v), want);
}
