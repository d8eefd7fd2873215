//! The API's contracts on a Hopper GPU: against the CPU reference, segments, capture and replay, dependent
//! launch, poisoned scratch, errors that leave the process usable. Says so and passes where there is no GPU.

use cudarc::driver::{result as driver, sys};
use muse_spark_layer::backend::cpu::{StepOptions, StepOutput};
use muse_spark_layer::backend::cuda::{Buffer, Device};
use muse_spark_layer::step::{AttentionInput, FinalInput, FinalOutput, MoeInput, MoeOutput};
use muse_spark_layer::synthetic::{self, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceInput, DeviceOutput, DeviceTaps, DeviceTensor, Error, LayerKind, LayerWeights,
    PagedKvCache, Plan, PlanKey, QueryPrecision, Stream, Taps, Workspace,
};
use rstest::rstest;

use crate::harness::{gpu, Gpu};

/// A step's tensors on the device.
struct OnDevice {
    input: DeviceInput,
    output: DeviceOutput,
    lengths: Buffer,
    positions: Buffer,
    hidden: Buffer,
    stream: Buffer,
    topk_ids: Buffer,
    _kept: Vec<Buffer>,
}

fn bytes<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| to(v)).collect()
}

fn view(buffer: &Buffer, dtype: DType, shape: &[usize]) -> DeviceTensor {
    // SAFETY: the buffer is as large and outlives the step, which every test waits for.
    unsafe { DeviceTensor::contiguous(buffer.ptr(), dtype, shape) }
}

impl OnDevice {
    fn new(device: &Device, step: &SyntheticStep) -> OnDevice {
        let (x, cache) = (&step.input, &step.cache);
        let (t, b) = (x.positions.len(), x.cache_seqlens.len());
        let mut kept = Vec::new();
        let mut put = |dtype, shape: &[usize], bytes: Vec<u8>| {
            let buffer = device.upload(&bytes).unwrap();
            let tensor = view(&buffer, dtype, shape);
            kept.push(buffer);
            tensor
        };
        let pages = cache.k.len() / cache.page_size / 128;
        let pool = [pages, cache.page_size, 2, 64];
        let attention = AttentionInput {
            attn_input: put(DType::Bf16, &[t, 8192], bytes(&x.attn_input, half::bf16::to_le_bytes)),
            positions: put(DType::I64, &[t], bytes(&x.positions, i64::to_le_bytes)),
            cache_loc: put(DType::I64, &[t], bytes(&x.cache_loc, i64::to_le_bytes)),
            cu_seqlens_q: put(DType::I32, &[b + 1], bytes(&x.cu_seqlens_q, i32::to_le_bytes)),
            cache_seqlens: put(DType::I32, &[b], bytes(&x.cache_seqlens, i32::to_le_bytes)),
            page_table: put(DType::I32, &[b, x.table_width], bytes(&x.page_table, i32::to_le_bytes)),
            k_scale: put(DType::F32, &[1], cache.k_scale.to_le_bytes().to_vec()),
            v_scale: put(DType::F32, &[1], cache.v_scale.to_le_bytes().to_vec()),
            cache: PagedKvCache::new(
                put(DType::E4m3, &pool, cache.k.clone()),
                put(DType::E4m3, &pool, cache.v.clone()),
            )
            .unwrap(),
        };
        let stream_in = put(DType::F32, &[t, 8192], bytes(&x.stream, f32::to_le_bytes));
        let local_start = put(DType::I32, &[1], x.local_start.to_le_bytes().to_vec());
        let out = |size: usize| {
            let buffer = device.allocate(size as u64).unwrap();
            buffer.fill(0xFF).unwrap();
            buffer
        };
        let (hidden, stream, topk_ids) = (out(t * 8192 * 2), out(t * 8192 * 4), out(t * 32));
        let own = |tensor: &mut DeviceTensor, dtype, shape: &[usize], bytes: Vec<u8>| {
            let buffer = device.upload(&bytes).unwrap();
            *tensor = view(&buffer, dtype, shape);
            buffer
        };
        let mut attention = attention;
        let lengths = own(&mut attention.cache_seqlens, DType::I32, &[b], bytes(&x.cache_seqlens, i32::to_le_bytes));
        let positions = own(&mut attention.positions, DType::I64, &[t], bytes(&x.positions, i64::to_le_bytes));
        OnDevice {
            output: DeviceOutput {
                hidden: Some(view(&hidden, DType::Bf16, &[t, 8192])),
                stream: view(&stream, DType::F32, &[t, 8192]),
                topk_ids: view(&topk_ids, DType::I32, &[t, 8]),
                taps: DeviceTaps::default(),
            },
            input: DeviceInput { attention, stream: stream_in, local_start, num_tokens_non_padded: None },
            lengths,
            positions,
            hidden,
            stream,
            topk_ids,
            _kept: kept,
        }
    }

    /// The outputs' bytes; the outputs are filled with NaN again.
    fn take(&self) -> Vec<Vec<u8>> {
        [&self.hidden, &self.stream, &self.topk_ids]
            .map(|buffer| {
                let mut out = vec![0; buffer.bytes() as usize];
                buffer.read(&mut out).unwrap();
                buffer.fill(0xFF).unwrap();
                out
            })
            .to_vec()
    }
}

fn plan_of(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind, change: impl Fn(&mut PlanKey)) -> Plan {
    let x = &step.input;
    let longest = x.cu_seqlens_q.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as u32;
    let mut key = PlanKey {
        tokens: x.positions.len() as u32,
        max_q_len: longest,
        page_size: step.cache.page_size as u32,
        kind,
        ..PlanKey::decode(x.cache_seqlens.len() as u32, x.table_width as u32)
    };
    change(&mut key);
    gpu.cuda.plan(key).unwrap()
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

fn poisoned(gpu: &Gpu, plan: &Plan) -> Workspace {
    let mut workspace = gpu.cuda.workspace(plan).unwrap();
    workspace.poison(&gpu.device).unwrap();
    workspace
}

fn relative(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(g as f64 - w as f64)).sum();
    let norm: f64 = want.iter().map(|&w| square(w as f64)).sum();
    (error / norm.max(1e-60)).sqrt()
}

#[rstest]
#[case::decode(StepSpec { spread: Spread::Mixed, ..StepSpec::new(3, 1, 300, LayerKind::Full) })]
#[case::ragged(StepSpec { q_lens: vec![1, 0, 8, 3], page_size: 16, ..StepSpec::new(4, 1, 100, LayerKind::Sliding) })]
#[case::prefill(StepSpec { q_lens: vec![40, 1, 33], page_size: 64, ..StepSpec::new(3, 1, 60, LayerKind::Sliding) })]
fn a_step_is_the_reference_s(#[case] spec: StepSpec) {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let config = gpu.cuda.config().clone();
    let weights = LayerWeights::from_host(&config, gpu.cpu.weights().tensors().view()).unwrap();
    let reference = DecoderLayer::new(config, weights, Backend::Cpu).unwrap();
    let step = step(gpu, &spec);
    let options = StepOptions { taps: Taps::All, ..StepOptions::new(spec.kind, QueryPrecision::Fp16) };
    let run = |layer: &DecoderLayer| -> (StepOutput, Vec<u8>) {
        let mut cache = step.cache.clone();
        let out = layer.forward_host(&step.input.view(), &mut cache.view(), &options).unwrap();
        (out, cache.k)
    };
    let ((got, k), (want, k_want)) = (run(&gpu.cuda), run(&reference));
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
        let error = relative(&pick(got), &pick(want));
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
    let on = OnDevice::new(&gpu.device, &step);
    let plan = plan_of(gpu, &step, spec.kind, |_| {});
    let mut workspace = poisoned(gpu, &plan);
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap();
    let first = on.take();
    assert!(first.iter().all(|x| x.iter().any(|&b| b != 0xFF)));
    assert_eq!(workspace.control(&gpu.device).unwrap(), [0; 64], "counters are left zero");
    // The same workspace, used scratch; plain launches; a debugging plan.
    for change in
        [|_: &mut PlanKey| {}, |k: &mut PlanKey| k.dependent_launch = false, |k: &mut PlanKey| k.synchronize = true]
    {
        let plan = plan_of(gpu, &step, spec.kind, change);
        gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap();
        assert_eq!(on.take(), first);
    }
    // In three segments, on scratch poisoned in between.
    let tokens = step.input.positions.len();
    let border = |dtype: DType, width: usize| gpu.device.allocate((tokens * width * dtype.size()) as u64).unwrap();
    let (a, s, mix) = (border(DType::Bf16, 8192), border(DType::F32, 8192), border(DType::Bf16, 4096));
    let attn_out = view(&a, DType::Bf16, &[tokens, 8192]);
    let stream_after_attn = view(&s, DType::F32, &[tokens, 8192]);
    let moe_mix = view(&mix, DType::Bf16, &[tokens, 4096]);
    gpu.cuda.attention_block(&plan, &mut workspace, &on.input.attention, &attn_out, Stream::LEGACY).unwrap();
    workspace.poison(&gpu.device).unwrap();
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
    gpu.cuda.moe_block(&plan, &mut workspace, &input, &output, Stream::LEGACY).unwrap();
    workspace.poison(&gpu.device).unwrap();
    let output = FinalOutput { hidden: on.output.hidden.clone(), stream: on.output.stream.clone() };
    let input = FinalInput { stream_after_attn, moe_mix };
    gpu.cuda.final_block(&plan, &mut workspace, &input, &output, Stream::LEGACY).unwrap();
    assert_eq!(on.take(), first);
}

#[test]
fn routes_beyond_the_bound_cost_passes_only() {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let spec = StepSpec::new(40, 1, 50, LayerKind::Full);
    let step = step(gpu, &spec);
    let on = OnDevice::new(&gpu.device, &step);
    let run = |bound: Option<u32>| {
        let plan = plan_of(gpu, &step, spec.kind, |k| k.route_bound = bound);
        let mut workspace = poisoned(gpu, &plan);
        gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap();
        let out = on.take();
        (plan.launches.experts.passes, out)
    };
    let (one, whole) = run(None);
    let (many, parts) = run(Some(16));
    assert_eq!((one, many), (1, 20));
    let floats = |x: &[u8]| x.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>();
    assert!(relative(&floats(&parts[1]), &floats(&whole[1])) < 1e-3);
    assert_eq!(parts[2], whole[2]);
}

#[rstest]
#[case(StepSpec::new(2, 1, 400, LayerKind::Full))]
#[case(StepSpec::new(1, 8, 400, LayerKind::Sliding))]
#[case(StepSpec::new(1, 130, 400, LayerKind::Full))]
fn a_captured_first_call_replays_on_other_lengths(#[case] spec: StepSpec) {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let step = step(gpu, &spec);
    let on = OnDevice::new(&gpu.device, &step);
    let plan = plan_of(gpu, &step, spec.kind, |_| {});
    let mut workspace = poisoned(gpu, &plan);
    let _current = gpu.device.make_current().unwrap();
    // SAFETY: plain driver calls on this test's own stream and graph.
    unsafe {
        let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking).unwrap();
        driver::stream::begin_capture(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::from_raw(stream.cast())).unwrap();
        let graph = driver::stream::end_capture(stream).unwrap();
        let exec = driver::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).unwrap();
        for shorter in [0, 7, 150] {
            // The step moves back in time: its tokens see fewer keys. Same cache rows.
            let lengths: Vec<i32> = step.input.cache_seqlens.iter().map(|l| l - shorter).collect();
            let positions: Vec<i64> = step.input.positions.iter().map(|p| p - shorter as i64).collect();
            on.lengths.write(&bytes(&lengths, i32::to_le_bytes)).unwrap();
            on.positions.write(&bytes(&positions, i64::to_le_bytes)).unwrap();
            workspace.poison(&gpu.device).unwrap();
            driver::graph::launch(exec, stream).unwrap();
            driver::stream::synchronize(stream).unwrap();
            let replayed = on.take();
            gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap();
            assert_eq!(replayed, on.take(), "{shorter} tokens shorter");
        }
        driver::graph::exec_destroy(exec).unwrap();
        driver::graph::destroy(graph).unwrap();
        driver::stream::destroy(stream).unwrap();
    }
}

#[test]
fn wrong_memory_is_named_and_the_process_stays_usable() {
    let Some(guard) = gpu("api") else { return };
    let gpu = &*guard;
    let spec = StepSpec::new(1, 1, 30, LayerKind::Full);
    let step = step(gpu, &spec);
    let mut on = OnDevice::new(&gpu.device, &step);
    let plan = plan_of(gpu, &step, spec.kind, |_| {});
    let mut workspace = poisoned(gpu, &plan);
    let good = on.input.stream.clone();
    let host = vec![0f32; 8192 + 4];
    let address = (host.as_ptr() as u64).next_multiple_of(16);
    // SAFETY: refused before anything follows it.
    on.input.stream = unsafe { DeviceTensor::contiguous(address, DType::F32, &[1, 8192]) };
    let error = gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap_err();
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
                gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap();
                gpu.device.synchronize().unwrap();
            })
            .join()
            .unwrap();
    });
    assert!(on.take()[1].iter().any(|&b| b != 0xFF));
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
