//! Capture and replay: the first call is captured, replays on changed inputs with poisoned scratch give the
//! bits of eager calls with dependent launch off.

use crate::harness::{gpu, key, spec, DeviceStep, Gpu};
use cudarc::driver::sys;
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::{LayerKind, PlanKey, Stream, Workspace};
use rstest::rstest;

/// A stream of the test's own.
struct OwnStream(sys::CUstream);

impl OwnStream {
    /// The device is current.
    fn new() -> OwnStream {
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        OwnStream(stream)
    }

    fn stream(&self) -> Stream {
        // SAFETY: a live stream of device 0.
        unsafe { Stream::from_raw(self.0.cast()) }
    }

    /// Captures what `work` queues, in the strictest mode.
    fn capture(&self, work: impl FnOnce(Stream)) -> Graph {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a live stream; handles are written once.
        unsafe {
            assert_eq!(sys::cuStreamBeginCapture_v2(self.0, mode), sys::CUresult::CUDA_SUCCESS);
            work(self.stream());
            assert_eq!(sys::cuStreamEndCapture(self.0, &mut graph), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), sys::CUresult::CUDA_SUCCESS);
            sys::cuGraphDestroy(graph);
        }
        Graph(exec)
    }

    fn replay(&self, graph: &Graph) {
        // SAFETY: both live.
        unsafe {
            assert_eq!(sys::cuGraphLaunch(graph.0, self.0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuStreamSynchronize(self.0), sys::CUresult::CUDA_SUCCESS);
        }
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

struct Graph(sys::CUgraphExec);

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture`, destroyed once.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// The same shape with other lengths: requests shortened to a third, everything else of another seed.
fn shorter(gpu: &Gpu, spec: &StepSpec, seed: u64) -> SyntheticStep {
    let mut step = synthetic::step(&gpu.config, spec, seed).expect("a step");
    let page = step.cache.page_size as i64;
    for b in 0..spec.q_lens.len() {
        let tokens = step.input.cu_seqlens_q[b] as usize..step.input.cu_seqlens_q[b + 1] as usize;
        let q_len = tokens.len() as i32;
        let seq = (step.input.cache_seqlens[b] - q_len) / 3;
        step.input.cache_seqlens[b] = seq + q_len;
        for (i, t) in tokens.enumerate() {
            let position = seq as i64 + i as i64;
            step.input.positions[t] = position;
            let id = step.input.page_table[b * step.input.table_width + (position / page) as usize];
            step.input.cache_loc[t] = id as i64 * page + position % page;
        }
    }
    step.input.local_start = (seed as i32 * 32) % 256;
    step.cache.k_scale *= 1.7;
    step.cache.v_scale *= 0.6;
    step
}

fn forward(gpu: &Gpu, key: &PlanKey, workspace: &mut Workspace, on: &DeviceStep, stream: Stream) {
    let plan = gpu.cuda.plan(key.clone()).expect("a plan");
    gpu.cuda.forward(&plan, workspace, &on.input, &on.output, stream).expect("forward");
}

#[rstest]
fn replays_give_eager_bits(
    #[values("decode-1", "decode-8", "decode-33", "decode-130", "verify-1", "verify-17", "prefill-333", "ragged")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("capture::replays_give_eager_bits") else { return };
    let _current = gpu.device.make_current().expect("a context");
    let spec = spec(name, kind);
    let captured_on = shorter(&gpu, &spec, 50);
    let on = DeviceStep::new(&gpu, &captured_on);
    let key = key(&captured_on, &spec);
    let plan = gpu.cuda.plan(key.clone()).expect("a plan");
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    let own = OwnStream::new();
    let graph = own.capture(|stream| forward(&gpu, &key, &mut workspace, &on, stream));
    let plain = PlanKey { dependent_launch: false, ..key.clone() };
    for seed in 51..54 {
        let step = if seed % 2 == 1 {
            synthetic::step(&gpu.config, &spec, seed).expect("a step")
        } else {
            shorter(&gpu, &spec, seed)
        };
        on.overwrite(&step);
        workspace.poison(&gpu.device).expect("poison");
        forward(&gpu, &plain, &mut workspace, &on, own.stream());
        gpu.device.synchronize().expect("eager");
        let want = on.results();
        for replay in 0..6 {
            on.overwrite(&step);
            if replay % 2 == 0 {
                workspace.poison(&gpu.device).expect("poison");
            }
            own.replay(&graph);
            assert!(on.results() == want, "replay {replay} of seed {seed} differs from eager");
            let control = workspace.control(&gpu.device).expect("the control block");
            assert!(control.iter().all(|w| *w == 0), "the control block is left zero");
        }
    }
}

/// A graph captured on a context of 1 replays at the table's full width.
#[rstest]
fn lengths_grow_after_capture(#[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind) {
    let Some(gpu) = gpu("capture::lengths_grow_after_capture") else { return };
    let _current = gpu.device.make_current().expect("a context");
    let spec = StepSpec::new(2, 1, 30_000, kind);
    let long = synthetic::step(&gpu.config, &spec, 61).expect("a step");
    let mut short = long.clone();
    for b in 0..2 {
        short.input.cache_seqlens[b] = 1;
        short.input.positions[b] = 0;
        short.input.cache_loc[b] = short.input.page_table[b * short.input.table_width] as i64;
    }
    let on = DeviceStep::new(&gpu, &short);
    let key = key(&short, &spec);
    let plan = gpu.cuda.plan(key.clone()).expect("a plan");
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    let own = OwnStream::new();
    let graph = own.capture(|stream| forward(&gpu, &key, &mut workspace, &on, stream));
    on.overwrite(&long);
    forward(&gpu, &PlanKey { dependent_launch: false, ..key.clone() }, &mut workspace, &on, own.stream());
    gpu.device.synchronize().expect("eager");
    let want = on.results();
    on.overwrite(&long);
    own.replay(&graph);
    assert!(on.results() == want);
}
