//! The API's contracts on a Hopper GPU: against the CPU reference, segments, capture and replay, dependent
//! launch, poisoned scratch, errors that leave the process usable. Says so and passes where there is no GPU.

use muse_spark_layer::backend::cpu::StepOptions;
use muse_spark_layer::backend::cuda::{Buffer, Device};
use muse_spark_layer::step::{FinalInput, FinalOutput, MoeInput, MoeOutput};
use muse_spark_layer::synthetic::{self, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceTensor, Error, LayerKind, LayerWeights, Plan, PlanKey, QueryPrecision, Stream,
    Taps,
};
use rstest::rstest;

use crate::harness::{floats, gpu, raw, relative_l2, step_key, DeviceStep, Gpu};
use crate::memory::{Scratch, POISON};

fn view(buffer: &Buffer, dtype: DType, shape: &[usize]) -> DeviceTensor {
    raw(buffer.ptr(), dtype, shape)
}

/// The outputs' bytes; the outputs are filled with NaN again.
fn take(on: &DeviceStep) -> Vec<Vec<u8>> {
    let out = on.outputs();
    on.intact();
    on.poison_outputs();
    out
}

fn plan_of(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind, change: impl Fn(&mut PlanKey)) -> Plan {
    let mut key = step_key(step, kind);
    change(&mut key);
    gpu.plan(key)
}

/// A step with local routes.
fn step(gpu: &Gpu, spec: &StepSpec) -> SyntheticStep {
    let config = gpu.cuda.config();
    let mut step = synthetic::step(config, spec, 5).unwrap();
    let options = StepOptions::new(spec.kind, QueryPrecision::Fp16);
    let mut cache = step.cache.clone();
    let probe = gpu.cuda.forward_host(&step.input.view(), &mut cache.view(), &options).unwrap();
    step.input.local_start = muse_spark_layer::routing::busiest_start(config, &probe.topk_ids);
    step
}

#[rstest]
#[case::decode(StepSpec { spread: Spread::Mixed, ..StepSpec::new(3, 1, 300, LayerKind::Full) })]
#[case::ragged(StepSpec { q_lens: vec![1, 0, 8, 3], page_size: 16, ..StepSpec::new(4, 1, 100, LayerKind::Sliding) })]
#[case::prefill(StepSpec { q_lens: vec![40, 1, 33], page_size: 64, ..StepSpec::new(3, 1, 60, LayerKind::Sliding) })]
fn a_step_is_the_reference_s(#[case] spec: StepSpec) {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let step = step(gpu, &spec);
    let options = StepOptions { taps: Taps::All, ..StepOptions::new(spec.kind, QueryPrecision::Fp16) };
    let (mut k, mut k_want) = (step.cache.clone(), step.cache.clone());
    let got = gpu.cuda.forward_host(&step.input.view(), &mut k.view(), &options).unwrap();
    let reference = gpu.reference.clone();
    drop(guard);
    let want = reference.cpu.forward(&step.input.view(), &mut k_want.view(), &options).unwrap();
    let (k, k_want) = (k.k, k_want.k);
    let tokens = step.input.positions.len();
    let differing = k.iter().zip(&k_want).filter(|(a, b)| a != b).count();
    assert!(differing * 1000 <= tokens * 128, "{differing} cache bytes differ");
    // A near tie may choose another expert: those tokens are compared up to their logits only.
    let same: Vec<bool> = got.topk_ids.chunks(8).zip(want.topk_ids.chunks(8)).map(|(g, w)| g == w).collect();
    let agree = same.iter().filter(|&&s| s).count();
    assert!((tokens - agree) * 10 <= tokens.max(10), "the experts of {} of {tokens} tokens differ", tokens - agree);
    let compare = |name: &str, got: &[f32], want: &[f32], after_routing: bool| {
        let width = want.len() / tokens;
        let pick = |x: &[f32]| -> Vec<f32> {
            x.chunks(width).zip(&same).filter(|(_, &s)| s || !after_routing).flat_map(|(row, _)| row.to_vec()).collect()
        };
        let error = relative_l2(&pick(got), &pick(want));
        println!("{name:18} {error:.1e}");
        assert!(error < 0.006, "{name}: {error}");
    };
    let (got_taps, want_taps) = (got.taps.unwrap(), want.taps.unwrap());
    for ((name, got), (_, want)) in got_taps.named().iter().zip(want_taps.named().iter()) {
        compare(name, got, want, ["topk_scores", "moe_mix", "ffn_out"].contains(name));
    }
    let wide = |x: &[half::bf16]| x.iter().map(|v| v.to_f32()).collect::<Vec<f32>>();
    compare("hidden", &wide(&got.hidden), &wide(&want.hidden), true);
    compare("stream", &got.stream, &want.stream, true);
}

#[rstest]
#[case(StepSpec::new(2, 1, 200, LayerKind::Full))]
#[case(StepSpec::new(3, 8, 100, LayerKind::Sliding))]
#[case(StepSpec::new(1, 150, 70, LayerKind::Full))]
fn launches_segments_and_scratch_do_not_change_a_bit(#[case] spec: StepSpec) {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let step = step(gpu, &spec);
    let on = DeviceStep::new(gpu, &step);
    let plan = plan_of(gpu, &step, spec.kind, |_| {});
    let mut scratch = Scratch::new(gpu, &plan);
    gpu.cuda.forward(&plan, scratch.workspace(), &on.input, &on.output, Stream::LEGACY).unwrap();
    let first = take(&on);
    assert!(first.iter().all(|x| x.iter().any(|&b| b != POISON)));
    scratch.intact();
    // The same workspace, used scratch; plain launches; a debugging plan.
    for change in
        [|_: &mut PlanKey| {}, |k: &mut PlanKey| k.dependent_launch = false, |k: &mut PlanKey| k.synchronize = true]
    {
        let plan = plan_of(gpu, &step, spec.kind, change);
        gpu.cuda.forward(&plan, scratch.workspace(), &on.input, &on.output, Stream::LEGACY).unwrap();
        assert_eq!(take(&on), first);
    }
    // In three segments, on scratch poisoned in between.
    let tokens = step.input.positions.len();
    let border = |dtype: DType, width: usize| gpu.device.allocate((tokens * width * dtype.size()) as u64).unwrap();
    let (a, s, mix) = (border(DType::Bf16, 8192), border(DType::F32, 8192), border(DType::Bf16, 4096));
    let attn_out = view(&a, DType::Bf16, &[tokens, 8192]);
    let stream_after_attn = view(&s, DType::F32, &[tokens, 8192]);
    let moe_mix = view(&mix, DType::Bf16, &[tokens, 4096]);
    gpu.cuda.attention_block(&plan, scratch.workspace(), &on.input.attention, &attn_out, Stream::LEGACY).unwrap();
    scratch.poison();
    let input = MoeInput {
        stream: on.input.stream.clone(),
        attn_out,
        local_start: on.input.local_start.clone(),
        num_tokens_non_padded: None,
    };
    let output = MoeOutput {
        stream_after_attn: stream_after_attn.clone(),
        topk_ids: on.output.topk_ids.clone(),
        moe_mix: moe_mix.clone(),
    };
    gpu.cuda.moe_block(&plan, scratch.workspace(), &input, &output, Stream::LEGACY).unwrap();
    scratch.poison();
    let output = FinalOutput { hidden: on.output.hidden.clone(), stream: on.output.stream.clone() };
    let input = FinalInput { stream_after_attn, moe_mix };
    gpu.cuda.final_block(&plan, scratch.workspace(), &input, &output, Stream::LEGACY).unwrap();
    assert_eq!(take(&on), first);
}

#[test]
fn routes_beyond_the_bound_cost_passes_only() {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let spec = StepSpec::new(40, 1, 50, LayerKind::Full);
    let step = step(gpu, &spec);
    let on = DeviceStep::new(gpu, &step);
    let run = |bound: Option<u32>| {
        let plan = plan_of(gpu, &step, spec.kind, |k| k.route_bound = bound);
        let mut scratch = Scratch::new(gpu, &plan);
        gpu.cuda.forward(&plan, scratch.workspace(), &on.input, &on.output, Stream::LEGACY).unwrap();
        let out = take(&on);
        (plan.launches.experts.passes, out)
    };
    let (one, whole) = run(None);
    let (many, parts) = run(Some(16));
    assert_eq!((one, many), (1, 20));
    assert!(relative_l2(&floats(&parts[1]), &floats(&whole[1])) < 1e-3);
    assert_eq!(parts[2], whole[2]);
}

#[test]
fn wrong_memory_is_named_and_the_process_stays_usable() {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let spec = StepSpec::new(1, 1, 30, LayerKind::Full);
    let step = step(gpu, &spec);
    let mut on = DeviceStep::new(gpu, &step);
    let plan = plan_of(gpu, &step, spec.kind, |_| {});
    let mut scratch = Scratch::new(gpu, &plan);
    let good = on.input.stream.clone();
    let host = vec![0f32; 8192 + 4];
    let address = (host.as_ptr() as u64).next_multiple_of(16);
    on.input.stream = raw(address, DType::F32, &[1, 8192]);
    let error = gpu.cuda.forward(&plan, scratch.workspace(), &on.input, &on.output, Stream::LEGACY).unwrap_err();
    assert_eq!(error.to_string(), "stream: wanted device memory, got host memory");
    on.input.stream = good;
    let mut small = gpu.cuda.workspace_of(1024).unwrap();
    let error = gpu.cuda.forward(&plan, &mut small, &on.input, &on.output, Stream::LEGACY).unwrap_err();
    assert!(error.to_string().starts_with("workspace: wanted at least"), "{error}");
    let error = Device::new(99).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }), "{error}");
    // From a fresh thread, which has no current context.
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                gpu.cuda.forward(&plan, scratch.workspace(), &on.input, &on.output, Stream::LEGACY).unwrap();
                gpu.device.synchronize().unwrap();
            })
            .join()
            .unwrap();
    });
    assert!(take(&on)[1].iter().any(|&b| b != POISON));
}

#[test]
fn nan_block_scales_are_found_on_the_device() {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let config = gpu.cuda.config();
    let mut kept = Vec::new();
    let tensors: Vec<(String, DeviceTensor)> = gpu
        .cpu
        .weights()
        .tensors()
        .0
        .iter()
        .map(|(name, t)| {
            let buffer = gpu.device.upload(t.bytes()).unwrap();
            if name == "w2_sf" {
                buffer.write_at(1_000_003, &[0x7f]).unwrap();
            }
            let tensor = view(&buffer, t.dtype(), &t.shape);
            kept.push(buffer);
            (name.clone(), tensor)
        })
        .collect();
    let weights = LayerWeights::from_device(config, tensors).unwrap();
    let error = DecoderLayer::new(config.clone(), weights, Backend::Cuda { device: 0 }).unwrap_err();
    assert_eq!(error.to_string(), "w2_sf: block scale 1000003 is NaN (0x7f or 0xff)");
}
