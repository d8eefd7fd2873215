//! The layer over ranks on one GPU: a rank that is alone and yet runs all that stands around collectives; two ranks of
//! TP8/EP8 whose sums go through the host; the segments.

use crate::harness::{gpu, relative_l2, spec, DeviceStep, Gpu};
use crate::layer::{carried, distances};
use cudarc::driver::sys;
use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::backend::cuda::graph::{Event, L2Flush, OwnedStream};
use muse_spark_layer::backend::cuda::Device;
use muse_spark_layer::collective::{self, ThreadRank};
use muse_spark_layer::step::{FfnInput, FinalInput, FinalOutput, MoeInput, MoeOutput};
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, Collective, DType, DecoderLayer, DeviceTensor, Error, LayerConfig, LayerKind, LayerWeights, PlanKey,
    QueryPrecision, Queue, Result, Stream, Taps, Workspace,
};
use rstest::rstest;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::time::Duration;

/// The deployment's ranks, of which the tests run the first two.
pub const RANKS: usize = 8;
pub const PAIR: usize = 2;

/// A rank alone that is not taken for the identity: the sum of the slice and the edges around collectives are there.
#[derive(Debug)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }
    fn ranks(&self) -> usize {
        1
    }
    fn all_reduce(&self, _: &'static str, _: &DeviceTensor, _: Queue) -> Result<()> {
        Ok(())
    }
    fn all_gather(&self, _: &'static str, part: &DeviceTensor, gathered: &DeviceTensor, _: Queue) -> Result<()> {
        assert_eq!(part.ptr(), gathered.ptr(), "the slice is made in its place");
        Ok(())
    }
}

/// The plan's key of a step.
pub fn key(step: &SyntheticStep, spec: &StepSpec, rank: usize) -> PlanKey {
    PlanKey {
        tokens: step.input.positions.len() as u32,
        max_q_len: spec.q_lens.iter().copied().max().unwrap_or(1) as u32,
        page_size: spec.page_size as u32,
        kind: spec.kind,
        rank: rank as u32,
        ..PlanKey::decode(spec.q_lens.len() as u32, step.input.table_width as u32)
    }
}

/// Runs a step eagerly, captured and replayed over `ranks`, and compares every bit with `forward`.
pub fn same_bits_as_forward(gpu: &Gpu, spec: &StepSpec, ranks: &dyn Collective) {
    let step = synthetic::step(&gpu.config, spec, 81).expect("a step");
    let on = DeviceStep::new(gpu, &step);
    on.overwrite(&step);
    let plan = gpu.cuda.plan(key(&step, spec, 0)).expect("a plan");
    let memory = gpu.device.allocate(plan.workspace_bytes).expect("allocate");
    // SAFETY: the memory outlives both; the captured work and the eager work use it in turn.
    let [mut captured, mut workspace] = [(); 2]
        .map(|()| unsafe { Workspace::from_raw(&gpu.device, memory.ptr(), memory.bytes()).expect("a workspace") });
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    // The first call of all is captured.
    let graph = own
        .capture(|stream| gpu.cuda.forward_with(&plan, &mut captured, &on.input, &on.output, stream, ranks))
        .expect("a capture");
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, own.stream()).expect("forward");
    own.synchronize().expect("forward");
    let want = on.results();
    let mut check = |what: &str, run: &mut dyn FnMut(&mut Workspace)| {
        on.overwrite(&step);
        workspace.poison(&gpu.device).expect("poison");
        run(&mut workspace);
        own.synchronize().expect("the step");
        assert!(on.results() == want, "{what} differs from the layer alone");
    };
    for _ in 0..2 {
        check("eager", &mut |workspace| {
            gpu.cuda.forward_with(&plan, workspace, &on.input, &on.output, own.stream(), ranks).expect("forward_with");
        });
        check("replay", &mut |_| own.replay(&graph).expect("replay"));
    }
}

#[rstest]
fn a_rank_alone_is_the_layer(
    #[values("decode-1", "decode-8", "decode-33", "decode-130", "verify-1", "prefill-333")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("collective::a_rank_alone_is_the_layer") else { return };
    same_bits_as_forward(&gpu, &spec(name, kind), &Alone);
}

/// Two ranks' layers, on the GPU and on the CPU.
pub struct Pair {
    pub config: LayerConfig,
    pub cuda: Vec<DecoderLayer>,
    pub cpu: Vec<CpuLayer<'static>>,
}

impl Pair {
    /// Ranks 0 and 1 of eight, rank `r` on `devices[r]`.
    pub fn new(config: &LayerConfig, devices: [i32; PAIR], seed: u64) -> Pair {
        let parts = [0, 1].map(|r| synthetic::rank_weights(config, seed, r, RANKS).expect("weights"));
        let cuda = parts.iter().zip(devices).map(|(part, device)| {
            let weights = LayerWeights::from_host(config, part.view()).expect("weights");
            DecoderLayer::new(config.clone(), weights, Backend::Cuda { device }).expect("a layer")
        });
        let cuda = cuda.collect();
        let cpu = parts.into_iter().map(|part| CpuLayer::new(config.clone(), part).expect("a layer")).collect();
        Pair { config: config.clone(), cuda, cpu }
    }

    /// What each rank is given: one stream and one batch, a cache and experts of its own.
    pub fn steps(&self, spec: &StepSpec, seed: u64) -> Vec<SyntheticStep> {
        let step = |r: usize| {
            let mut step = synthetic::step(&self.config, spec, seed).expect("a step");
            step.cache.k = synthetic::step(&self.config, spec, seed + 100 * r as u64).expect("a step").cache.k;
            step.cache.v.rotate_left(self.config.kv_size() * r);
            step.input.local_start = (r * self.config.local_experts) as i32;
            step
        };
        (0..PAIR).map(step).collect()
    }

    /// The reference's outputs: both ranks, a thread each.
    pub fn reference(&self, steps: &[SyntheticStep], kind: LayerKind) -> Vec<StepOutput> {
        on_threads(Duration::from_secs(60), |rank, ranks| {
            let mut cache = steps[rank].cache.clone();
            let options = StepOptions { rank, ..StepOptions::new(kind, QueryPrecision::Fp16) };
            let input = steps[rank].input.view();
            self.cpu[rank].forward_with(&input, &mut cache.view(), &options, &ranks).expect("the reference")
        })
    }

    /// Each rank within 0.01 of its reference, and both ranks with the same bits.
    pub fn compare(&self, steps: &[SyntheticStep], got: &[StepOutput], want: &[StepOutput]) {
        let carried = carried(&self.config, self.cpu[0].weights().tensors());
        for r in 0..PAIR {
            let (update, hidden) = distances(&self.config, &carried, &steps[r].input.stream, &got[r], &want[r]);
            assert!(update < 0.01 && hidden < 0.01, "rank {r}: update {update:.4}, hidden {hidden:.4}");
        }
        let bits = |o: &StepOutput| o.stream.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(bits(&got[0]) == bits(&got[1]) && got[0].hidden == got[1].hidden, "the ranks differ");
        assert_eq!(got[0].topk_ids, got[1].topk_ids);
    }
}

/// Both ranks on the first GPU.
pub fn pair_on_one(gpu: &Gpu) -> &'static Pair {
    static PAIR_OF_LAYERS: OnceLock<Pair> = OnceLock::new();
    PAIR_OF_LAYERS.get_or_init(|| Pair::new(&gpu.config, [0, 0], 23))
}

/// `tokens` tokens: decode to 64, one chunk of a prefill beyond.
pub fn of_tokens(tokens: usize, kind: LayerKind) -> StepSpec {
    if tokens > 64 {
        StepSpec::new(1, tokens, 300, kind)
    } else {
        StepSpec { page_size: 16, ..StepSpec::new(tokens, 1, 400, kind) }
    }
}

/// A thread for each of two ranks.
pub fn on_threads<T: Send>(timeout: Duration, work: impl Fn(usize, ThreadRank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = collective::threads(PAIR, timeout)
            .into_iter()
            .map(|ranks| scope.spawn(move || work(ranks.rank(), ranks)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

/// Ranks in threads of one process: device memory, but sums and gathers go through the host. Not for capture.
#[derive(Debug)]
struct ThroughHost(ThreadRank);

impl ThroughHost {
    /// The layer's device is current during its calls.
    fn read(tensor: &DeviceTensor, stream: Stream) -> Vec<f32> {
        let mut bytes = vec![0u8; tensor.len() * tensor.dtype().size()];
        // SAFETY: the tensor holds as many bytes; the stream is the layer's.
        unsafe {
            assert_eq!(sys::cuStreamSynchronize(stream.as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
            let copied = sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), tensor.ptr(), bytes.len());
            assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
        }
        match tensor.dtype() {
            DType::Bf16 => bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        }
    }

    fn write(tensor: &DeviceTensor, values: &[f32]) {
        let bytes: Vec<u8> = match tensor.dtype() {
            DType::Bf16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        // SAFETY: the tensor holds as many bytes.
        let copied = unsafe { sys::cuMemcpyHtoD_v2(tensor.ptr(), bytes.as_ptr().cast::<c_void>(), bytes.len()) };
        assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
    }
}

impl Collective for ThroughHost {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn ranks(&self) -> usize {
        self.0.ranks()
    }
    fn all_reduce(&self, call: &'static str, partial: &DeviceTensor, at: Queue) -> Result<()> {
        let mut values = Self::read(partial, at.stream);
        self.0.all_reduce_host(call, &mut values)?;
        Self::write(partial, &values);
        Ok(())
    }
    fn all_gather(&self, call: &'static str, part: &DeviceTensor, gathered: &DeviceTensor, at: Queue) -> Result<()> {
        Self::write(gathered, &self.0.all_gather_host(call, &Self::read(part, at.stream))?);
        Ok(())
    }
}

/// Everything of two ranks but the wire: heads, experts and slices of ranks 0 and 1 against the reference's two ranks.
#[rstest]
fn two_ranks_on_one_gpu(
    #[values(1, 8, 64, 512)] tokens: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("collective::two_ranks_on_one_gpu") else { return };
    let pair = pair_on_one(&gpu);
    let spec = of_tokens(tokens, kind);
    let steps = pair.steps(&spec, 91);
    let got = on_threads(Duration::from_secs(60), |rank, ranks| {
        let mut cache = steps[rank].cache.clone();
        let options = StepOptions { rank, ..StepOptions::new(kind, QueryPrecision::Fp16) };
        let (input, ranks) = (steps[rank].input.view(), ThroughHost(ranks));
        pair.cuda[rank].forward_host_with(&input, &mut cache.view(), &options, &ranks).expect("forward")
    });
    pair.compare(&steps, &got, &pair.reference(&steps, kind));
}

/// The caller's segments are the whole step's, in both forms of the third.
#[rstest]
fn segments_are_the_layer(#[values("decode-1", "decode-8", "decode-33")] name: &str) {
    let Some(gpu) = gpu("collective::segments_are_the_layer") else { return };
    let spec = spec(name, LayerKind::Full);
    let step = synthetic::step(&gpu.config, &spec, 83).expect("a step");
    let tokens = step.input.positions.len();
    let on = DeviceStep::new(&gpu, &step);
    let plan = gpu.cuda.plan(key(&step, &spec, 0)).expect("a plan");
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    on.overwrite(&step);
    gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).expect("forward");
    gpu.device.synchronize().expect("forward");
    let want = on.results();

    let border = |dtype: DType, shape: &[usize]| {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let buffer = gpu.device.allocate(bytes as u64).expect("allocate");
        buffer.fill(0xFF).expect("fill");
        // SAFETY: the buffer holds `shape` and is kept beside the view.
        (unsafe { DeviceTensor::contiguous(buffer.ptr(), dtype, shape) }, buffer)
    };
    let (attn_out, _a) = border(DType::Bf16, &[tokens, 8192]);
    let (stream_after_attn, _b) = border(DType::F32, &[tokens, 8192]);
    let (moe_mix, _c) = border(DType::Bf16, &[tokens, 4096]);
    let (slice, _d) = border(DType::F32, &[tokens, 1024]);
    let mut run = |sliced: bool| {
        on.overwrite(&step);
        workspace.poison(&gpu.device).expect("poison");
        let (w, s) = (&mut workspace, Stream::LEGACY);
        gpu.cuda.attention_block(&plan, w, &on.input.attention, &attn_out, s).expect("attention_block");
        let input = MoeInput {
            stream: on.input.stream.clone(),
            attn_out: attn_out.clone(),
            local_start: on.input.local_start.clone(),
            num_tokens_non_padded: None,
        };
        let output = MoeOutput {
            stream_after_attn: stream_after_attn.clone(),
            topk_ids: on.output.topk_ids.clone(),
            moe_mix: moe_mix.clone(),
        };
        gpu.cuda.moe_block(&plan, w, &input, &output, s).expect("moe_block");
        let output = FinalOutput { hidden: on.output.hidden.clone(), stream: on.output.stream.clone() };
        let after = stream_after_attn.clone();
        if sliced {
            gpu.cuda.unpool_block(&plan, w, &moe_mix, &slice, s).expect("unpool_block");
            // SAFETY: the same memory with one more extent: the slices of one rank.
            let slices = unsafe { DeviceTensor::contiguous(slice.ptr(), DType::F32, &[1, tokens, 1024]) };
            let input = FfnInput { stream_after_attn: after, slices };
            gpu.cuda.ffn_block(&plan, w, &input, &output, s).expect("ffn_block");
        } else {
            let input = FinalInput { stream_after_attn: after, moe_mix: moe_mix.clone() };
            gpu.cuda.final_block(&plan, w, &input, &output, s).expect("final_block");
        }
        gpu.device.synchronize().expect("the segments");
        on.results()
    };
    assert!(run(false) == want, "three segments differ from the layer");
    if plan.sliced() {
        assert!(run(true) == want, "with unpool_block and ffn_block they differ");
    } else {
        let error = gpu.cuda.unpool_block(&plan, &mut workspace, &moe_mix, &slice, Stream::LEGACY).unwrap_err();
        assert!(matches!(error, Error::Plan { field: "tokens", .. }), "{error}");
    }
}

/// Gathered slices, rank by rank and in them token by token, are columns of the branch.
#[rstest]
fn gathered_slices_are_the_branch(#[values(1, 3, 5, 8)] tokens: usize, #[values(1, 2, 7, 8)] ranks: usize) {
    let Some(gpu) = gpu("collective::gathered_slices_are_the_branch") else { return };
    let spec = of_tokens(tokens, LayerKind::Full);
    let step = synthetic::step(&gpu.config, &spec, 84).expect("a step");
    let on = DeviceStep::new(&gpu, &step);
    let plan = gpu.cuda.plan(key(&step, &spec, 0)).expect("a plan");
    let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
    let (hidden, width) = (gpu.config.hidden, gpu.config.unpool_slice);
    let random = synthetic::Random::new(84, "slices");
    let slices: Vec<f32> = (0..ranks * tokens * width).map(|i| random.normal(i as u64)).collect();
    let mut branch = vec![0f32; tokens * hidden];
    for (i, run) in slices.chunks(width).enumerate() {
        let (rank, token) = (i / tokens, i % tokens);
        branch[token * hidden + rank * width..][..width].copy_from_slice(run);
    }
    let want = gpu.cpu.ffn_block(&step.input.stream, &branch).expect("the reference");
    let bytes: Vec<u8> = slices.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffer = gpu.device.upload(&bytes).expect("upload");
    // SAFETY: the buffer holds the slices and lives to the end.
    let slices = unsafe { DeviceTensor::contiguous(buffer.ptr(), DType::F32, &[ranks, tokens, width]) };
    let input = FfnInput { stream_after_attn: on.input.stream.clone(), slices };
    let output = FinalOutput { hidden: on.output.hidden.clone(), stream: on.output.stream.clone() };
    on.overwrite(&step);
    gpu.cuda.ffn_block(&plan, &mut workspace, &input, &output, Stream::LEGACY).expect("ffn_block");
    gpu.device.synchronize().expect("ffn_block");
    let got: Vec<f32> = on.results()[1].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    for t in 0..tokens {
        let distance = relative_l2(&got[t * hidden..][..hidden], &want.stream[t * hidden..][..hidden]);
        assert!(distance < 1e-5, "token {t} is {distance:.2e} from the reference");
    }
}

/// Where the threads of a test's ranks wait for each other; one that panicked is not waited for for ever.
pub struct Meeting(Vec<ThreadRank>);

impl Meeting {
    pub fn new(ranks: usize) -> Meeting {
        Meeting(collective::threads(ranks, Duration::from_secs(30)))
    }

    pub fn wait(&self, rank: usize) {
        self.0[rank].all_reduce_host("a meeting", &mut []).expect("every rank");
    }
}

/// A thread for each of `ranks`, which hands its rank to `work`.
pub fn each_rank<C: Collective, T: Send>(ranks: Vec<C>, work: impl Fn(C) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

/// The outputs of a step in device memory.
pub fn output(on: &DeviceStep) -> StepOutput {
    let results = on.results();
    StepOutput {
        hidden: results[0].chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]])).collect(),
        stream: results[1].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        topk_ids: results[2].chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        topk_scores: Vec::new(),
        taps: None,
    }
}

/// Two ranks, eager, captured as the first call, and replayed: the reference's two ranks, and each other's bits.
pub fn over_two_ranks<C: Collective>(
    pair: &Pair,
    devices: &[Device],
    ranks: Vec<C>,
    spec: &StepSpec,
    dependent_launch: bool,
) {
    let steps = pair.steps(spec, 91);
    let meeting = Meeting::new(ranks.len());
    let runs = each_rank(ranks, |ranks| {
        let (rank, device) = (ranks.rank(), &devices[ranks.rank()]);
        let (layer, step) = (&pair.cuda[rank], &steps[rank]);
        let on = DeviceStep::on(&pair.config, device, step, Taps::None);
        let plan = layer.plan(PlanKey { dependent_launch, ..key(step, spec, rank) }).expect("a plan");
        let memory = device.allocate(plan.workspace_bytes).expect("allocate");
        // SAFETY: the memory outlives both; the captured work and the eager work use it in turn.
        let [mut captured, mut workspace] = [(); 2]
            .map(|()| unsafe { Workspace::from_raw(device, memory.ptr(), memory.bytes()).expect("a workspace") });
        let own = OwnedStream::new(device).expect("a stream");
        // On one GPU nobody may wait for the context while a rank captures.
        meeting.wait(rank);
        let graph = own
            .capture_on_thread(|stream| layer.forward_with(&plan, &mut captured, &on.input, &on.output, stream, &ranks))
            .expect("a capture");
        meeting.wait(rank);
        let mut results = Vec::new();
        for run in 0..6 {
            on.overwrite(step);
            workspace.poison(device).expect("poison");
            meeting.wait(rank);
            if run % 2 == 0 {
                layer
                    .forward_with(&plan, &mut workspace, &on.input, &on.output, own.stream(), &ranks)
                    .expect("forward_with");
            } else {
                own.replay(&graph).expect("replay");
            }
            ranks.wait(own.stream()).expect("the step");
            results.push(on.results());
        }
        assert!(results.iter().all(|r| *r == results[0]), "rank {rank}: eager and replayed bits differ");
        output(&on)
    });
    pair.compare(&steps, &runs, &pair.reference(&steps, spec.kind));
}

/// Medians, in microseconds, of replays of `graphs` in turn, each behind an emptied L2 cache.
#[cfg_attr(not(feature = "nccl"), allow(dead_code))]
pub fn medians(own: &OwnedStream, flush: &L2Flush, graphs: &[impl Fn()], reps: usize) -> Vec<f64> {
    let device = own.device();
    let (begin, end) = (Event::new(device).expect("an event"), Event::new(device).expect("an event"));
    let mut samples = vec![Vec::new(); graphs.len()];
    for _ in 0..reps {
        for (graph, samples) in graphs.iter().zip(&mut samples) {
            flush.queue(own).expect("flush");
            own.record(&begin).expect("record");
            graph();
            own.record(&end).expect("record");
            samples.push(end.microseconds_since(&begin).expect("a time"));
        }
    }
    let median = |s: &mut Vec<f64>| {
        s.sort_by(f64::total_cmp);
        s[s.len() / 2]
    };
    samples.iter_mut().map(median).collect()
}
