//! Each operation against the CPU's, computed from the GPU's own previous result, so that a fault shows at
//! the operation that has it. Bounds are what the operation's own roundings amount to.

use crate::harness::{assert_rows, gpu, relative_l2, spec, step_key, DeviceStep, Gpu, Reference, Run};
use crate::memory::Scratch;
use half::bf16;
use muse_spark_layer::backend::cpu::{self, attn_boundary as cpu_attn_boundary, AttnBoundary, StepOutput, TapValues};
use muse_spark_layer::routing::{route_score, ExpertLists};
use muse_spark_layer::synthetic::{StepSpec, SyntheticStep};
use muse_spark_layer::{LayerKind, Plan, PlanKey, QueryPrecision, Stream};
use rstest::rstest;
use std::collections::HashSet;

fn taps(run: &Run) -> &TapValues {
    run.output.taps.as_ref().expect("taps")
}

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect()
}

fn set(slots: &[i64]) -> HashSet<i64> {
    slots.iter().copied().collect()
}

type Check = fn(&Reference, &Run, LayerKind);

/// A check of each operation on a run.
pub const CHECKS: [(&str, Check); 10] = [
    ("append", append),
    ("attention", attention),
    ("o", o),
    ("attn_boundary", attn_boundary),
    ("router", router),
    ("router_topk", router_topk),
    ("pooler", pooler),
    ("experts", experts),
    ("unpooler", unpooler),
    ("ffn_boundary", ffn_boundary),
];

macro_rules! tests {
    ($($name:ident,)*) => {
        mod steps {
            use super::{gpu, rstest, LayerKind};
            $(
                #[rstest]
                fn $name(
                    #[values(
                        "decode-1", "decode-1-empty", "decode-3", "decode-8", "decode-9", "decode-33", "decode-64",
                        "decode-130", "verify-1", "verify-3", "verify-17", "verify-20", "block-3", "prefill-65",
                        "prefill-200", "prefill-333", "prefill-1000", "ragged", "mixed", "behind"
                    )]
                    step: &str,
                    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
                ) {
                    let test = concat!("operations::", stringify!($name));
                    let Some(mut guard) = gpu(test) else { return };
                    let (run, reference) = (guard.run(step, kind), guard.reference.clone());
                    // The GPU is the next test's while the CPU computes.
                    drop(guard);
                    super::$name(&reference, &run, kind);
                }
            )*
        }
    };
}

tests! { append, attention, o, attn_boundary, router, router_topk, pooler, experts, unpooler, ffn_boundary, }

/// qkv_gate and qk_norm_rope_append by what they store: the step's rows hold the reference's entries but
/// for roundings of ties, and no other row changed.
pub fn append(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let before = &run.step.cache;
    for (name, got, want, old) in
        [("k_cache", &run.k_cache, &run.cpu_cache.k, &before.k), ("v_cache", &run.v_cache, &run.cpu_cache.v, &before.v)]
    {
        let row = gpu.config.kv_size();
        let (checked, stored) = (set(&run.step.input.cache_loc), set(&run.slots));
        let mut off = 0;
        for (r, ((g, w), o)) in got.chunks(row).zip(want.chunks(row)).zip(old.chunks(row)).enumerate() {
            if checked.contains(&(r as i64)) {
                // Neighbouring E4M3 values have neighbouring codes.
                off += g.iter().zip(w).filter(|(g, w)| g != w).count();
                assert!(
                    g.iter().zip(w).all(|(g, w)| g.abs_diff(*w) <= 1 || (g & 0x7f) + (w & 0x7f) <= 1),
                    "{name} row {r}"
                );
            } else if !stored.contains(&(r as i64)) {
                assert_eq!(g, o, "{name}: row {r} is not the step's");
            }
        }
        let entries = run.step.input.cache_loc.len() * row;
        assert!(off * 200 <= entries.max(400), "{name}: {off} of {entries} entries rounded the other way");
    }
}

/// attention, from the GPU's own cache entries.
pub fn attention(gpu: &Reference, run: &Run, kind: LayerKind) {
    let mut cache = run.cpu_cache.clone();
    cache.k.clone_from(&run.k_cache);
    cache.v.clone_from(&run.v_cache);
    let want = cpu::attention(&gpu.config, &run.queries.q, &run.step.input.view().batch, &cache.view(), kind);
    let got = &run.output.taps.as_ref().expect("taps").attn_core;
    assert_rows("attn_core", got, &want, gpu.config.head_dim, 4e-3);
    assert!(relative_l2(got, &want) < 1.2e-3, "attn_core is {:.2e} off", relative_l2(got, &want));
}

/// out_norm_gate and o.
pub fn o(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let gated = cpu::out_norm_gate(&gpu.config, &taps(run).attn_core, &run.queries.gate);
    let want = cpu::o(&gpu.config, gpu.cpu.weights(), &gated);
    assert_rows("attn_out", &taps(run).attn_out, &want, gpu.config.hidden, 3.2e-3);
}

/// attn_boundary: FP32 in and out.
pub fn attn_boundary(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let t = taps(run);
    let AttnBoundary { stream_after_attn, ffn_input } =
        cpu_attn_boundary(&gpu.config, gpu.cpu.weights(), &run.step.input.stream, &t.attn_out);
    assert_rows("stream_after_attn", &t.stream_after_attn, &stream_after_attn, gpu.config.hidden, 1e-6);
    assert_rows("ffn_input", &t.ffn_input, &ffn_input, gpu.config.hidden, 1e-6);
}

/// router: FP32-grade logits.
pub fn router(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let want = cpu::router(&gpu.config, gpu.cpu.weights(), &taps(run).ffn_input);
    let want: Vec<f32> = want.iter().map(|v| *v as f32).collect();
    assert_rows("router_logits", &taps(run).router_logits, &want, gpu.config.n_experts, 1e-5);
}

/// router_topk: from the GPU's own logits; another order or expert only between scores that are equal in
/// FP32 to a few units of the last place.
pub fn router_topk(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let (config, t) = (&gpu.config, taps(run));
    let logits: Vec<f64> = t.router_logits.iter().map(|v| f64::from(*v)).collect();
    let want = cpu::router_topk(config, gpu.cpu.weights(), &logits);
    let bias = gpu.cpu.weights().tensors().get("router_bias").and_then(|t| t.as_f32("router_bias")).expect("the bias");
    for (i, (got, want)) in t.topk_ids.iter().zip(&want.ids).enumerate() {
        let row = &logits[i / config.top_k * config.n_experts..];
        let biased = |id: i32| route_score(config, row[id as usize]) + bias[id as usize];
        assert!((biased(*got) - biased(*want)).abs() < 1e-6, "place {i}: expert {got} for {want}");
    }
    for (ids, scores) in t.topk_ids.chunks(config.top_k).zip(t.topk_scores.chunks(config.top_k)) {
        let mut distinct = ids.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), config.top_k, "{ids:?}");
        assert!((scores.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{scores:?}");
    }
    assert_rows("topk_scores", &t.topk_scores, &want.scores, config.top_k, 1e-5);
}

/// pooler and pre_expert_norm, from the BF16 plane that the pooler reads.
pub fn pooler(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let pooled = cpu::pooler(&gpu.config, gpu.cpu.weights(), &rounded(&taps(run).ffn_input));
    let want = cpu::pre_expert_norm(&gpu.config, gpu.cpu.weights(), &pooled);
    assert_rows("expert_input", &taps(run).expert_input, &want, gpu.config.expert_dim, 5e-5);
}

/// w13, w2 and combine, from the BF16 rows that w13 reads.
pub fn experts(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let (config, weights, t) = (&gpu.config, gpu.cpu.weights(), taps(run));
    let tokens = run.step.input.positions.len();
    let lists = ExpertLists::new(config, &t.topk_ids, run.step.input.local_start, tokens);
    let inter = cpu::w13(config, weights, &rounded(&t.expert_input), &lists);
    let y = cpu::w2(config, weights, &inter, &lists);
    let want = cpu::combine(config, weights, &y, &t.topk_scores, &lists);
    assert_rows("moe_mix", &t.moe_mix, &want, config.expert_dim, 5e-3);
    for (t, row) in t.moe_mix.chunks(config.expert_dim).enumerate() {
        let routed = lists.route_token.contains(&t);
        assert_eq!(row.iter().any(|v| *v != 0.0), routed, "token {t}: zeros exactly where no route is local");
    }
}

/// The few-token experts at the counts of tokens that no step has.
#[rstest]
fn experts_of_few_tokens(#[values(2, 4, 5, 6, 7, 10, 12, 16)] tokens: usize) {
    let Some(guard) = gpu("operations::experts_of_few_tokens") else { return };
    let spec = StepSpec::new(tokens, 1, 40, LayerKind::Sliding);
    experts(&guard, &guard.run_step(&spec, QueryPrecision::Fp16, 12), LayerKind::Sliding);
}

/// unpooler: the slice at up to 8 tokens, zeros beside it.
pub fn unpooler(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let want = cpu::unpooler(&gpu.config, gpu.cpu.weights(), &taps(run).moe_mix, 0);
    assert_rows("ffn_out", &taps(run).ffn_out, &want, gpu.config.hidden, 2.5e-3);
}

/// ffn_boundary.
pub fn ffn_boundary(gpu: &Reference, run: &Run, _kind: LayerKind) {
    let t = taps(run);
    let want = gpu.cpu.ffn_block(&t.stream_after_attn, &t.ffn_out).expect("the boundary");
    assert_rows("stream", &run.output.stream, &want.stream, gpu.config.hidden, 1e-6);
    let hidden: Vec<f32> = run.output.hidden.iter().map(|v| v.to_f32()).collect();
    assert_rows("hidden", &hidden, &rounded(&want.hidden), gpu.config.hidden, 4e-4);
}

/// The pooler beside the routing: the bits of the pooler behind it.
#[rstest]
fn pooler_goes_beside_the_routing(
    #[values("decode-1", "decode-8", "decode-33", "decode-64", "prefill-65", "decode-130", "verify-20", "prefill-333")]
    name: &str,
    #[values(true, false)] dependent_launch: bool,
) {
    let Some(gpu) = gpu("operations::pooler_goes_beside_the_routing") else { return };
    let kind = LayerKind::Full;
    let step = gpu.step(&spec(name, kind), 37);
    let on = DeviceStep::new(&gpu, &step);
    let beside = gpu.plan(PlanKey { dependent_launch, ..step_key(&step, kind) });
    let mut launches = beside.launches.clone();
    assert!(std::mem::replace(&mut launches.router.releases, false), "the pooler goes beside the routing");
    launches.router.topk_behind = false;
    let behind = Plan::with_launches(beside.key.clone(), launches, beside.sm_count);
    let mut scratch = Scratch::new(&gpu, &beside);
    let mut run = |plan: &Plan| {
        on.overwrite(&step);
        gpu.forward(plan, scratch.workspace(), &on, Stream::LEGACY);
        gpu.device.synchronize().expect("the step");
        scratch.intact();
        on.results()
    };
    let want = run(&behind);
    for _ in 0..8 {
        assert!(run(&beside) == want, "beside the routing and behind it give different bits");
    }
}

/// The step by this plan, in scratch of its own that must stay intact.
fn run_by(gpu: &Gpu, plan: &Plan, on: &DeviceStep, step: &SyntheticStep) {
    on.overwrite(step);
    let mut scratch = Scratch::new(gpu, plan);
    gpu.forward(plan, scratch.workspace(), on, Stream::LEGACY);
    gpu.device.synchronize().expect("the step");
    scratch.intact();
}

/// boundary_router and boundary_topk: what the three launches give that they stand for, but for the order of sums.
#[rstest]
fn boundary_folds_into_router(
    #[values("decode-1", "decode-1-empty")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("operations::boundary_folds_into_router") else { return };
    let step = gpu.step(&spec(name, kind), 37);
    let on = DeviceStep::new(&gpu, &step);
    let folded = gpu.plan(step_key(&step, kind));
    let mut launches = folded.launches.clone();
    assert!(std::mem::replace(&mut launches.router.boundary, false), "one token folds the boundary");
    let apart = Plan::with_launches(folded.key.clone(), launches, folded.sm_count);
    let run = |plan: &Plan| {
        run_by(&gpu, plan, &on, &step);
        on.output(&gpu)
    };
    let (got, want) = (run(&folded), run(&apart));
    assert_eq!(got.topk_ids, want.topk_ids);
    assert!(relative_l2(&got.stream, &want.stream) < 1e-3, "{:.2e}", relative_l2(&got.stream, &want.stream));
    let hidden = |run: &StepOutput| run.hidden.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    let off = relative_l2(&hidden(&got), &hidden(&want));
    assert!(off < 2e-3, "{off:.2e}");
}

/// append_attention: the bits of the two launches that it stands for, in the caches too.
#[rstest]
fn append_folds_into_decode(
    #[values("decode-1", "decode-1-empty", "decode-3", "decode-8", "decode-9", "decode-33", "decode-130")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(QueryPrecision::Fp16, QueryPrecision::E4m3)] query: QueryPrecision,
) {
    let Some(gpu) = gpu("operations::append_folds_into_decode") else { return };
    let step = gpu.step(&spec(name, kind), 31);
    let on = DeviceStep::new(&gpu, &step);
    let folded = gpu.plan(PlanKey { query, ..step_key(&step, kind) });
    let mut launches = folded.launches.clone();
    assert!(std::mem::replace(&mut launches.attention.append, false), "decode folds the append");
    let apart = Plan::with_launches(folded.key.clone(), launches, folded.sm_count);
    let run = |plan: &Plan| {
        run_by(&gpu, plan, &on, &step);
        on.results()
    };
    assert!(run(&folded) == run(&apart), "one launch and two give different bits");
}
