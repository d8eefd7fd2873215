//! Routing at its extremes: every route local, to 16384 tokens and in several passes; all on few experts; none local.

use crate::harness::{assert_bits, assert_rows, floats, gpu, halves, words, Gpu};
use crate::memory::{Banded, Scratch};
use half::bf16;
use muse_spark_layer::backend::cpu::{attn_boundary, CpuLayer};
use muse_spark_layer::step::{MoeInput, MoeOutput};
use muse_spark_layer::synthetic::StepSpec;
use muse_spark_layer::{
    Backend, DType, DecoderLayer, HostTensor, LayerKind, LayerWeights, NamedTensors, Plan, PlanKey, Stream,
};
use std::sync::{Mutex, OnceLock};

const HIDDEN: usize = 8192;
const DIM: usize = 4096;
/// Rows of the stream that differ; longer steps repeat them.
const DISTINCT: usize = 64;

/// The shared weights with a bias that makes ids 0 to 15 and 240 to 255 the most wanted, of them 0 to 7 if `few`.
fn biased(gpu: &Gpu, few: bool) -> (NamedTensors<'_>, Vec<i32>) {
    let wanted: Vec<i32> = if few { (0..8).collect() } else { (0..16).chain(240..256).collect() };
    let bias: Vec<f32> = (0..256).map(|e| if wanted.contains(&e) { 4.0 } else { 0.0 }).collect();
    let mut tensors = gpu.cpu.weights().tensors().view();
    tensors.insert("router_bias", HostTensor::f32(&[256], bias));
    (tensors, wanted)
}

/// The layer with that bias, made once.
fn layer(gpu: &Gpu, few: bool) -> &'static Mutex<DecoderLayer> {
    static LAYERS: [OnceLock<Mutex<DecoderLayer>>; 2] = [OnceLock::new(), OnceLock::new()];
    LAYERS[usize::from(few)].get_or_init(|| {
        let weights = LayerWeights::from_host(&gpu.config, biased(gpu, few).0).expect("weights");
        Mutex::new(DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 0 }).expect("a layer"))
    })
}

/// moe_mix and ids of `tokens` tokens.
fn moe(gpu: &Gpu, layer: &DecoderLayer, tokens: usize, start: i32, route_bound: Option<u32>) -> (Vec<f32>, Vec<i32>) {
    let step = gpu.step(&StepSpec::new(tokens.min(DISTINCT), 1, 1, LayerKind::Full), 101);
    let plan = PlanKey { tokens: tokens as u32, max_q_len: 1, route_bound, ..PlanKey::decode(tokens as u32, 1) };
    let plan = layer.plan(plan).expect("a plan");
    let (after, ids, mix) = moe_of(gpu, layer, &plan, &step.input.stream, &step.input.attn_input, start);
    assert!(after[..HIDDEN].iter().all(|v| v.is_finite()));
    (mix, ids)
}

/// stream_after_attn of the first token, ids and moe_mix of the plan's tokens, which repeat these rows.
fn moe_of(
    gpu: &Gpu,
    layer: &DecoderLayer,
    plan: &Plan,
    stream: &[f32],
    attn_out: &[bf16],
    start: i32,
) -> (Vec<f32>, Vec<i32>, Vec<f32>) {
    let tokens = plan.key.tokens as usize;
    let repeat = |bytes: Vec<u8>, row: usize| -> Banded {
        let memory = Banded::new(&gpu.device, (tokens * row) as u64);
        for at in (0..tokens).step_by(DISTINCT) {
            let rows = DISTINCT.min(tokens - at);
            memory.write_at((at * row) as u64, &bytes[..rows * row]);
        }
        memory
    };
    let stream = repeat(stream.iter().flat_map(|v| v.to_le_bytes()).collect(), 4 * HIDDEN);
    let attn_out = repeat(attn_out.iter().flat_map(|v| v.to_le_bytes()).collect(), 2 * HIDDEN);
    let local_start = Banded::of(&gpu.device, &start.to_le_bytes());
    let out = |row: usize| Banded::new(&gpu.device, (tokens * row) as u64);
    let (after, ids, mix) = (out(4 * HIDDEN), out(32), out(2 * DIM));
    let mut scratch = Scratch::new(gpu, plan);
    let input = MoeInput {
        stream: stream.view(DType::F32, &[tokens, HIDDEN]),
        attn_out: attn_out.view(DType::Bf16, &[tokens, HIDDEN]),
        local_start: local_start.view(DType::I32, &[1]),
        num_tokens_non_padded: None,
    };
    let output = MoeOutput {
        stream_after_attn: after.view(DType::F32, &[tokens, HIDDEN]),
        topk_ids: ids.view(DType::I32, &[tokens, 8]),
        moe_mix: mix.view(DType::Bf16, &[tokens, DIM]),
    };
    layer.moe_block(plan, scratch.workspace(), &input, &output, Stream::LEGACY).expect("the block");
    gpu.device.synchronize().expect("the block");
    scratch.intact();
    for (memory, name) in [(&after, "stream_after_attn"), (&ids, "topk_ids"), (&mix, "moe_mix")] {
        memory.intact(name, 0xFF);
    }
    let mix = halves(&mix.read()).iter().map(|v| v.to_f32()).collect();
    (floats(&after.read_at(0, 4 * HIDDEN as u64)), words(&ids.read()), mix)
}

/// A branch that cancels all but a hundredth of the stream: so do the parts that the folded boundary's sum of squares is made of,
/// and each of its CTAs takes the sum itself. All 8 routes go to the 8 wanted experts; the sum shows in their scores.
#[test]
fn a_branch_cancels_the_stream() {
    let Some(gpu) = gpu("routes::a_branch_cancels_the_stream") else { return };
    let (tensors, _) = biased(&gpu, true);
    let layer = layer(&gpu, true).lock().unwrap_or_else(|e| e.into_inner());
    let cpu = CpuLayer::new(gpu.config.clone(), tensors).expect("the layer");
    let step = gpu.step(&StepSpec::new(1, 1, 1, LayerKind::Full), 103);
    let branch: Vec<f32> = step.input.attn_input.iter().map(|v| v.to_f32()).collect();
    let boundary = |stream: f32, branch: f32| {
        let rows = [stream, branch].map(|v| vec![v; HIDDEN]);
        attn_boundary(&gpu.config, gpu.cpu.weights(), &rows[0], &rows[1]).stream_after_attn
    };
    let (alpha, beta) = (boundary(1.0, 0.0), boundary(0.0, 1.0));
    let mean = branch.iter().map(|v| f64::from(v * v)).sum::<f64>() / HIDDEN as f64;
    let norm = 1.0 / (mean + f64::from(gpu.config.post_norm_eps)).sqrt();
    let stream: Vec<f32> = (0..HIDDEN)
        .map(|k| {
            let left = 1.0 + 0.02 * ((k * 37 % 64) as f64 - 31.5) / 32.0;
            (-f64::from(beta[k]) / f64::from(alpha[k]) * f64::from(branch[k]) * norm * left) as f32
        })
        .collect();
    let want = cpu.moe_block(&stream, &branch, 0, None).expect("the block");
    let folded = layer.plan(PlanKey::decode(1, 1)).expect("a plan");
    let mut launches = folded.launches.clone();
    assert!(std::mem::replace(&mut launches.router.boundary, false), "one token folds the boundary");
    let apart = Plan::with_launches(folded.key.clone(), launches, folded.sm_count);
    for (name, plan) in [("apart", &apart), ("folded", &folded)] {
        let (after, _, mix) = moe_of(&gpu, &layer, plan, &stream, &step.input.attn_input, 0);
        assert_rows(&format!("{name}: stream_after_attn"), &after, &want.stream_after_attn, HIDDEN, 1e-4);
        assert_rows(&format!("{name}: moe_mix"), &mix, &want.moe_mix, DIM, 8e-3);
    }
}

fn every_route_is_local(few: bool, sizes: &[usize]) {
    let Some(gpu) = gpu("routes::every_route_is_local") else { return };
    let (tensors, wanted) = biased(&gpu, few);
    let layer = layer(&gpu, few).lock().unwrap_or_else(|e| e.into_inner());
    let start = if few { 0 } else { 240 };
    // The CPU on a few rows.
    let cpu = CpuLayer::new(gpu.config.clone(), tensors).expect("the layer");
    let step = gpu.step(&StepSpec::new(4, 1, 1, LayerKind::Full), 101);
    let attn_out: Vec<f32> = step.input.attn_input.iter().map(|v| v.to_f32()).collect();
    let want = cpu.moe_block(&step.input.stream, &attn_out, start, None).expect("the block").moe_mix;
    for &tokens in sizes {
        let (mix, ids) = moe(&gpu, &layer, tokens, start, None);
        assert!(ids.iter().all(|id| wanted.contains(id)), "{tokens} tokens");
        let rows = tokens.min(4);
        assert_rows(&format!("{tokens} tokens"), &mix[..rows * DIM], &want[..rows * DIM], DIM, 8e-3);
        for at in (DISTINCT..tokens).step_by(DISTINCT) {
            let rows = DISTINCT.min(tokens - at) * DIM;
            assert_bits(&format!("tokens from {at} of {tokens}"), &mix[at * DIM..][..rows], &mix[..rows], DIM);
        }
    }
}

/// All of 32 experts, range wrapping at 256; index arithmetic at 131072 routes, in two passes.
#[test]
fn every_route_is_local_on_32_experts() {
    every_route_is_local(false, &[1, 9, 130, 1000, 16_384]);
}

/// As many routes on 8 experts: each has all tokens, the other 24 have none.
#[test]
fn every_route_is_local_on_8_experts() {
    every_route_is_local(true, &[1, 9, 130, 1000, 16_384]);
}

/// A bound on routes costs passes and changes no result beyond a rounding.
#[test]
fn passes_add_up() {
    let Some(gpu) = gpu("routes::passes_add_up") else { return };
    let layer = layer(&gpu, true).lock().unwrap_or_else(|e| e.into_inner());
    let (whole, _) = moe(&gpu, &layer, 300, 0, None);
    for bound in [256, 1000, 2399] {
        let (parts, _) = moe(&gpu, &layer, 300, 0, Some(bound));
        assert_rows(&format!("at most {bound} routes a pass"), &parts, &whole, DIM, 4e-3);
    }
}

/// No local route gives exact zeros at any size.
#[test]
fn no_local_route_gives_zeros() {
    let Some(gpu) = gpu("routes::no_local_route_gives_zeros") else { return };
    let layer = layer(&gpu, true).lock().unwrap_or_else(|e| e.into_inner());
    for tokens in [1, 8, 9, 65, 1000, 9000] {
        let (mix, _) = moe(&gpu, &layer, tokens, 8, None);
        assert!(mix.iter().all(|v| v.to_bits() & 0x7FFF_FFFF == 0), "{tokens} tokens");
    }
}
