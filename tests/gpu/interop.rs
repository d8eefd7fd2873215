//! Callers: several threads, their own streams, cudarc's memory, other devices; and nothing is waited for behind
//! their back.

use crate::harness::{gpu, spec, DeviceStep, Gpu};
use cudarc::driver::{sys, CudaContext, CudaSlice, DeviceRepr};
use muse_spark_layer::backend::cpu::StepOptions;
use muse_spark_layer::backend::cuda::graph::{L2Flush, OwnedStream};
use muse_spark_layer::backend::cuda::Device;
use muse_spark_layer::synthetic::{self, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceTensor, LayerKind, LayerWeights, Plan, PlanKey, QueryPrecision, Stream,
};

const KIND: LayerKind = LayerKind::Sliding;

fn step(gpu: &Gpu, name: &str, seed: u64) -> SyntheticStep {
    synthetic::step(&gpu.config, &spec(name, KIND), seed).expect("a step")
}

fn plan(gpu: &Gpu, name: &str, step: &SyntheticStep) -> Plan {
    let spec = spec(name, KIND);
    let key = PlanKey {
        tokens: step.input.positions.len() as u32,
        max_q_len: spec.q_lens.iter().copied().max().unwrap_or(1) as u32,
        page_size: spec.page_size as u32,
        kind: KIND,
        ..PlanKey::decode(spec.q_lens.len() as u32, step.input.table_width as u32)
    };
    gpu.cuda.plan(key).expect("a plan")
}

/// What a step gives on the legacy stream, alone.
fn alone(gpu: &Gpu, name: &str, step: &SyntheticStep) -> Vec<Vec<u8>> {
    let (on, plan) = (DeviceStep::new(gpu, step), plan(gpu, name, step));
    on.overwrite(step);
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).expect("forward");
    gpu.device.synchronize().expect("the step");
    on.results()
}

/// Threads with a stream and a workspace each use one layer at the same time.
#[test]
fn threads_share_a_layer() {
    let Some(gpu) = gpu("interop::threads_share_a_layer") else { return };
    let gpu = &*gpu;
    std::thread::scope(|scope| {
        for (i, name) in ["decode-9", "verify-3", "decode-33", "prefill-65"].into_iter().enumerate() {
            scope.spawn(move || {
                let step = step(gpu, name, 150 + i as u64);
                let want = alone(gpu, name, &step);
                let (on, plan) = (DeviceStep::new(gpu, &step), plan(gpu, name, &step));
                let stream = OwnedStream::new(&gpu.device).expect("a stream");
                let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
                for _ in 0..20 {
                    on.overwrite(&step);
                    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, stream.stream()).expect("forward");
                    stream.synchronize().expect("the step");
                    assert!(on.results() == want, "{name} beside others");
                }
            });
        }
    });
}

/// A call returns while work queued before it on the stream is still under way, and touches no other stream: one
/// that is busy all the time does not hold the step up.
#[test]
fn a_call_waits_for_nothing() {
    let Some(gpu) = gpu("interop::a_call_waits_for_nothing") else { return };
    let name = "decode-9";
    let step = step(&gpu, name, 160);
    let want = alone(&gpu, name, &step);
    let (on, plan) = (DeviceStep::new(&gpu, &step), plan(&gpu, name, &step));
    let (stream, other) =
        (OwnedStream::new(&gpu.device).expect("a stream"), OwnedStream::new(&gpu.device).expect("a stream"));
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    let (flush, busy) = (L2Flush::new(&stream).expect("a flush"), L2Flush::new(&other).expect("a flush"));
    on.overwrite(&step);
    let _current = gpu.device.make_current().expect("a context");
    // SAFETY: a live stream.
    let pending = |s: &OwnedStream| unsafe { sys::cuStreamQuery(s.stream().as_ptr().cast()) } == sys::CUresult::CUDA_ERROR_NOT_READY;
    for _ in 0..40 {
        flush.queue(&stream).expect("work");
    }
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, stream.stream()).expect("forward");
    assert!(pending(&stream), "the call came back after the work before it");
    stream.synchronize().expect("the step");
    assert!(on.results() == want);

    on.overwrite(&step);
    for _ in 0..400 {
        busy.queue(&other).expect("work");
    }
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, stream.stream()).expect("forward");
    stream.synchronize().expect("the step");
    assert!(pending(&other), "the step waited for another stream");
    other.synchronize().expect("the other stream");
    assert!(on.results() == want);
}

/// The first call is captured while the legacy stream, on which a captured launch would be an error, has work.
#[test]
fn capture_beside_a_busy_legacy_stream() {
    let Some(gpu) = gpu("interop::capture_beside_a_busy_legacy_stream") else { return };
    let name = "verify-3";
    let step = step(&gpu, name, 161);
    let want = alone(&gpu, name, &step);
    let (on, plan) = (DeviceStep::new(&gpu, &step), plan(&gpu, name, &step));
    let stream = OwnedStream::new(&gpu.device).expect("a stream");
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    let ballast = gpu.device.allocate(8 << 30).expect("allocate");
    on.overwrite(&step);
    {
        let _current = gpu.device.make_current().expect("a context");
        // SAFETY: memory that lives past the synchronisation below.
        let queued = unsafe { sys::cuMemsetD8Async(ballast.ptr(), 1, 8 << 30, std::ptr::null_mut()) };
        assert_eq!(queued, sys::CUresult::CUDA_SUCCESS);
    }
    // What the call is given goes with the closure; the memory itself stays.
    let (cuda, input, output, ws) = (&gpu.cuda, on.input.clone(), on.output.clone(), &mut workspace);
    let graph = stream.capture(move |s| cuda.forward(&plan, ws, &input, &output, s)).expect("a graph");
    stream.replay(&graph).expect("replay");
    gpu.device.synchronize().expect("all");
    assert!(on.results() == want);
}

/// cudarc's slices as inputs and outputs, on cudarc's stream, with its event tracking on: captured in the strictest
/// mode, which no event of another stream survives.
#[test]
fn cudarc_slices_are_tensors() {
    let Some(gpu) = gpu("interop::cudarc_slices_are_tensors") else { return };
    let name = "decode-9";
    let step = step(&gpu, name, 162);
    let want = alone(&gpu, name, &step);
    let (mut on, plan) = (DeviceStep::new(&gpu, &step), plan(&gpu, name, &step));
    on.overwrite(&step);
    let context = CudaContext::new(0).expect("cudarc's context");
    let stream = context.new_stream().expect("cudarc's stream");
    fn view<T: DeviceRepr>(slice: &CudaSlice<T>, dtype: DType, shape: &[usize]) -> DeviceTensor {
        // SAFETY: the test keeps the slices.
        unsafe { DeviceTensor::from_slice("a slice", slice, dtype, shape) }.expect("a view")
    }
    let (t, h) = (step.input.positions.len(), gpu.config.hidden);
    let positions = stream.clone_htod(&step.input.positions).expect("upload");
    let stream_in = stream.clone_htod(&step.input.stream).expect("upload");
    let stream_out: CudaSlice<f32> = stream.alloc_zeros(t * h).expect("allocate");
    on.input.attention.positions = view(&positions, DType::I64, &[t]);
    on.input.stream = view(&stream_in, DType::F32, &[t, h]);
    on.output.stream = view(&stream_out, DType::F32, &[t, h]);
    // SAFETY: refused before anything follows it.
    let wrong = unsafe { DeviceTensor::from_slice("positions", &positions, DType::I64, &[t + 1]) }.unwrap_err();
    assert_eq!(wrong.to_string(), format!("positions: wanted shape [{}], got [{t}]", t + 1));
    stream.synchronize().expect("uploads");
    gpu.device.synchronize().expect("uploads");
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("capture");
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::from(&*stream)).expect("forward");
    let graph = stream
        .end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
        .expect("a graph")
        .expect("a graph");
    graph.launch().expect("replay");
    let got = stream.clone_dtoh(&stream_out).expect("download");
    let bytes: Vec<u8> = got.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert!(bytes == want[1], "stream");
    assert!(on.results()[2..] == want[2..], "ids and caches");
}

/// Another device than 0, called from a thread on which device 0 is current: the same bits.
#[test]
fn a_layer_on_another_device() {
    let Some(gpu) = gpu("interop::a_layer_on_another_device") else { return };
    if Device::count().unwrap_or(0) < 2 {
        return eprintln!("interop::a_layer_on_another_device: skipped, one GPU");
    }
    let _first = gpu.device.make_current().expect("device 0");
    let weights = LayerWeights::from_host(&gpu.config, gpu.cpu.weights().tensors().view()).expect("weights");
    let other =
        DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 1 }).expect("a layer on device 1");
    for name in ["decode-9", "verify-3", "prefill-65"] {
        let step = step(&gpu, name, 163);
        let options = StepOptions::new(KIND, QueryPrecision::Fp16);
        let run = |layer: &DecoderLayer| {
            let mut cache = step.cache.clone();
            let out = layer.forward_host(&step.input.view(), &mut cache.view(), &options).expect("forward");
            (out, cache.k)
        };
        assert!(run(&other) == run(&gpu.cuda), "{name}");
        // Memory of the wrong device is named.
        let (on, plan) = (DeviceStep::new(&gpu, &step), plan(&gpu, name, &step));
        let mut workspace = other.workspace(&plan).expect("a workspace");
        let text = other.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).unwrap_err().to_string();
        assert!(text.ends_with("wanted memory of device 1, got device 0"), "{text}");
    }
}
