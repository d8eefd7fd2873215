//! The whole layer against the CPU reference, and what callers may do with it.

use crate::harness::{assert_rows, gpu, relative_l2, spec, Gpu};
use crate::steps::part;
use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::weights::derived::residual_coefficients;
use muse_spark_layer::{
    Backend, DecoderLayer, LayerConfig, LayerKind, LayerWeights, NamedTensors, QueryPrecision, Taps, WeightKind,
};
use rstest::rstest;
use std::sync::MutexGuard;

/// `alpha1 * alpha2` of the boundaries: what the layer carries of the stream.
pub fn carried(config: &LayerConfig, tensors: &NamedTensors) -> Vec<f32> {
    let alpha = |name: &str| residual_coefficients(config, &tensors.get(name).unwrap().to_f32(name).unwrap()).0;
    alpha("attn_residual_gate").iter().zip(alpha("ffn_residual_gate")).map(|(a, b)| a * b).collect()
}

/// Distances of update and next attention input over all tokens that chose the same experts.
pub fn distances(
    config: &LayerConfig,
    carried: &[f32],
    stream: &[f32],
    got: &StepOutput,
    want: &StepOutput,
) -> (f64, f64) {
    let (k, h) = (config.top_k, config.hidden);
    let tokens = stream.len() / h;
    let same = |t: usize| {
        let sorted = |ids: &[i32]| {
            let mut ids = ids[t * k..][..k].to_vec();
            ids.sort_unstable();
            ids
        };
        sorted(&got.topk_ids) == sorted(&want.topk_ids)
    };
    let kept: Vec<usize> = (0..tokens).filter(|t| same(*t)).collect();
    assert!(
        (tokens - kept.len()) * 20 <= tokens.max(20),
        "{} of {tokens} tokens chose other experts",
        tokens - kept.len()
    );
    let update = |out: &[f32]| -> Vec<f32> {
        kept.iter()
            .flat_map(|t| (0..h).map(move |i| (t * h + i, i)))
            .map(|(j, i)| out[j] - carried[i] * stream[j])
            .collect()
    };
    let hidden = |out: &[half::bf16]| -> Vec<f32> {
        // The last layer gives none.
        let kept = if out.is_empty() { &[][..] } else { &kept };
        kept.iter().flat_map(|t| out[t * h..][..h].iter().map(|v| v.to_f32())).collect()
    };
    (relative_l2(&update(&got.stream), &update(&want.stream)), relative_l2(&hidden(&got.hidden), &hidden(&want.hidden)))
}

/// A step on CUDA, and what it gave.
struct Done {
    step: SyntheticStep,
    options: StepOptions,
    output: StepOutput,
}

fn on_cuda(gpu: &Gpu, cuda: &DecoderLayer, spec: &StepSpec, query: QueryPrecision, rank: usize) -> Done {
    let step = gpu.step(spec, 21);
    let options = StepOptions { taps: Taps::None, rank, ..StepOptions::new(spec.kind, query) };
    let mut cache = step.cache.clone();
    let output = cuda.forward_host(&step.input.view(), &mut cache.view(), &options).expect("forward on CUDA");
    Done { step, options, output }
}

fn follow(cpu: &CpuLayer, done: &Done) {
    let (config, mut cache) = (cpu.config(), done.step.cache.clone());
    let input = &done.step.input;
    let want = cpu.forward(&input.view(), &mut cache.view(), &done.options).expect("forward on the CPU");
    let carried = carried(config, cpu.weights().tensors());
    let (update, hidden) = distances(config, &carried, &input.stream, &done.output, &want);
    assert!(update < 0.01 && hidden < 0.01, "update {update:.4}, hidden {hidden:.4}");
}

pub fn compare(gpu: &Gpu, cuda: &DecoderLayer, cpu: &CpuLayer, spec: &StepSpec, query: QueryPrecision, rank: usize) {
    follow(cpu, &on_cuda(gpu, cuda, spec, query, rank));
}

/// The step on both backends; the GPU is the next test's while the CPU computes.
fn both(gpu: MutexGuard<Gpu>, spec: &StepSpec, query: QueryPrecision, rank: usize) {
    let (done, reference) = (on_cuda(&gpu, &gpu.cuda, spec, query, rank), gpu.reference.clone());
    drop(gpu);
    follow(&reference.cpu, &done);
}

#[rstest]
fn whole(
    #[values(
        "decode-1",
        "decode-9",
        "decode-33",
        "verify-3",
        "prefill-65",
        "prefill-333",
        "ragged",
        "mixed",
        "behind"
    )]
    name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(QueryPrecision::Fp16, QueryPrecision::E4m3)] query: QueryPrecision,
) {
    let Some(gpu) = gpu("layer::whole") else { return };
    both(gpu, &spec(name, kind), query, 0);
}

/// Ranges of experts that begin anywhere and wrap at 256, and another rank's slice of the unpooler.
#[rstest]
fn range_and_rank(
    #[values(0, 32, 128, 224, 240, 255)] local_start: i32,
    #[values("decode-8", "decode-33")] name: &str,
) {
    let Some(gpu) = gpu("layer::range_and_rank") else { return };
    let spec = StepSpec { local_start, ..spec(name, LayerKind::Full) };
    both(gpu, &spec, QueryPrecision::Fp16, (local_start / 32) as usize);
}

/// Gates at the clamp, norm weights far from 1, branches as small as the epsilons, subnormal block scales.
#[test]
fn stressed() {
    let Some(gpu) = gpu("layer::stressed") else { return };
    let mut tensors = synthetic::weights(&gpu.config, 8).expect("weights");
    synthetic::stress(&gpu.config, &mut tensors).expect("stress");
    let weights = LayerWeights::from_host(&gpu.config, tensors.clone()).expect("weights");
    let cuda = DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 0 }).expect("a layer");
    let cpu = CpuLayer::new(gpu.config.clone(), tensors).expect("a layer");
    for name in ["decode-1", "decode-9", "verify-3", "prefill-200"] {
        let spec = StepSpec { k_scale: 1.0, v_scale: 2f32.powi(-8), ..spec(name, LayerKind::Sliding) };
        compare(&gpu, &cuda, &cpu, &spec, QueryPrecision::Fp16, 0);
    }
}

/// Layers 0 and 61: BF16 experts through the same kernels.
#[test]
fn bf16_experts() {
    let Some(gpu) = gpu("layer::bf16_experts") else { return };
    let config = LayerConfig { experts: WeightKind::Bf16, ..gpu.config.clone() };
    let tensors = synthetic::weights(&config, 9).expect("weights");
    let weights = LayerWeights::from_host(&config, tensors.clone()).expect("weights");
    let cuda = DecoderLayer::new(config.clone(), weights, Backend::Cuda { device: 0 }).expect("a layer");
    let cpu = CpuLayer::new(config, tensors).expect("a layer");
    for name in ["decode-1", "decode-3", "verify-17", "prefill-200"] {
        compare(&gpu, &cuda, &cpu, &spec(name, LayerKind::Full), QueryPrecision::Fp16, 0);
    }
}

/// A token's bits depend on its own request and the plan only: other neighbours, the same bits.
#[rstest]
fn neighbours_change_no_bit(#[values("decode-33", "verify-17")] name: &str) {
    let Some(gpu) = gpu("layer::neighbours_change_no_bit") else { return };
    let (base, hidden) = (spec(name, LayerKind::Full), gpu.config.hidden);
    let run = |seed: u64, first: Option<&synthetic::SyntheticStep>| {
        let mut step =
            synthetic::step(&gpu.config, &StepSpec { spread: synthetic::Spread::Fixed, ..base.clone() }, seed)
                .expect("a step");
        if let Some(first) = first {
            // Request 0 as it was; all others from another seed.
            let own = base.q_lens[0] * hidden;
            step.input.stream[..own].copy_from_slice(&first.input.stream[..own]);
            step.input.attn_input[..own].copy_from_slice(&first.input.attn_input[..own]);
            let row = gpu.config.kv_size();
            let page = step.cache.page_size * row;
            let pages = (base.ctx + base.q_lens[0]).div_ceil(step.cache.page_size);
            for p in 0..pages {
                let (to, from) = (step.input.page_table[p] as usize, first.input.page_table[p] as usize);
                step.cache.k[to * page..][..page].copy_from_slice(&first.cache.k[from * page..][..page]);
                step.cache.v[to * page..][..page].copy_from_slice(&first.cache.v[from * page..][..page]);
            }
        }
        let options = StepOptions::new(LayerKind::Full, QueryPrecision::Fp16);
        let mut cache = step.cache.clone();
        let out = gpu.cuda.forward_host(&step.input.view(), &mut cache.view(), &options).expect("forward");
        (step, out)
    };
    let (first, a) = run(31, None);
    let (_, b) = run(32, Some(&first));
    let own = base.q_lens[0] * hidden;
    assert_eq!(a.topk_ids[..8], b.topk_ids[..8]);
    assert!(a.stream[..own].iter().zip(&b.stream[..own]).all(|(x, y)| x.to_bits() == y.to_bits()), "stream");
    assert!(a.hidden[..own] == b.hidden[..own], "hidden");
    assert!(a.stream[own..] != b.stream[own..], "the others did change");
}

/// Tokens past `num_tokens_non_padded` take no route, in each form of the expert lists; the others are as without.
#[rstest]
fn padding_takes_no_route(#[values("decode-8", "decode-33", "prefill-333")] name: &str) {
    let Some(gpu) = gpu("layer::padding_takes_no_route") else { return };
    let (step, width) =
        (synthetic::step(&gpu.config, &spec(name, LayerKind::Full), 45).expect("a step"), gpu.config.expert_dim);
    let options = StepOptions { taps: Taps::All, ..StepOptions::new(LayerKind::Full, QueryPrecision::Fp16) };
    let tokens = step.input.positions.len();
    let run = |limit: Option<usize>| {
        let (mut cache, mut input) = (step.cache.clone(), step.input.view());
        input.num_tokens_non_padded = limit;
        let out = gpu.cuda.forward_host(&input, &mut cache.view(), &options).expect("forward");
        (out.topk_ids, out.taps.expect("taps").moe_mix)
    };
    let real = tokens - 3;
    let ((ids, whole), (padded_ids, padded)) = (run(None), run(Some(real)));
    assert_eq!(ids, padded_ids, "the choice itself is made for all");
    assert_rows("moe_mix", &padded[..real * width], &whole[..real * width], width, 1e-6);
    assert!(padded[real * width..].iter().all(|v| *v == 0.0), "padding has no routes");
}

/// Each token of a verify block is the decode step at its position, within rounding.
#[test]
fn a_verify_block_is_its_decode_steps() {
    let Some(gpu) = gpu("layer::a_verify_block_is_its_decode_steps") else { return };
    let block = spec("verify-1", LayerKind::Sliding);
    let step = synthetic::step(&gpu.config, &block, 41).expect("a step");
    let options = StepOptions::new(LayerKind::Sliding, QueryPrecision::Fp16);
    let mut cache = step.cache.clone();
    let whole = gpu.cuda.forward_host(&step.input.view(), &mut cache.view(), &options).expect("forward");
    let (h, mut cache) = (gpu.config.hidden, step.cache.clone());
    for t in 0..8 {
        let one = part(&step, 0, t..t + 1).input;
        let out = gpu.cuda.forward_host(&one.view(), &mut cache.view(), &options).expect("forward");
        assert_rows("stream", &out.stream, &whole.stream[t * h..][..h], h, 3e-3);
    }
}
