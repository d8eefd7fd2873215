//! The stack of layers on the GPU: the bits of its layers one by one, whole, in ranges and as one graph.

use crate::harness::{gpu, DeviceStep, Gpu};
use muse_spark_layer::backend::cuda::graph::OwnedStream;
use muse_spark_layer::backend::cuda::Buffer;
use muse_spark_layer::stack::{KindInput, LayerCache};
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DecoderStack, DeviceTensor, LayerKind, LayerWeights, PerKind, PlanKey, StackInput,
    StackOutput, StackPlan, Stream, Workspace,
};
use rstest::rstest;
use std::cell::RefCell;
use std::sync::OnceLock;

const LAYERS: usize = 4;

/// Two sets of weights in turn, layer 1 of 4 full.
fn stack(gpu: &Gpu) -> &'static DecoderStack {
    static STACK: OnceLock<DecoderStack> = OnceLock::new();
    STACK.get_or_init(|| {
        let sets = [13, 14].map(|seed| synthetic::weights(&gpu.config, seed).expect("weights"));
        let layer = |i: usize| {
            let weights = LayerWeights::from_host(&gpu.config, sets[i % 2].view()).expect("weights");
            DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 0 }).expect("a layer")
        };
        DecoderStack::new((0..LAYERS).map(|i| (LayerKind::of_layer(i), layer(i))).collect()).expect("a stack")
    })
}

/// A step as both kinds see it (other pages), a cache and outputs for each layer.
struct OnDevice {
    steps: PerKind<DeviceStep>,
    layers: Vec<DeviceStep>,
    topk_ids: Buffer,
    tokens: usize,
}

fn of(gpu: &Gpu, q_lens: &[usize], ctx: usize, kind: LayerKind, seed: u64) -> SyntheticStep {
    let spec = StepSpec { q_lens: q_lens.to_vec(), page_size: 16, ..StepSpec::new(1, 1, ctx, kind) };
    synthetic::step(&gpu.config, &spec, seed).expect("a step")
}

impl OnDevice {
    fn new(gpu: &Gpu, q_lens: &[usize], ctx: usize) -> OnDevice {
        let steps = PerKind {
            full: DeviceStep::new(gpu, &of(gpu, q_lens, ctx, LayerKind::Full, 110)),
            sliding: DeviceStep::new(gpu, &of(gpu, q_lens, ctx, LayerKind::Sliding, 111)),
        };
        let layers =
            (0..LAYERS).map(|i| DeviceStep::new(gpu, &of(gpu, q_lens, ctx, LayerKind::of_layer(i), 112))).collect();
        let tokens = q_lens.iter().sum();
        let topk_ids = gpu.device.allocate((LAYERS * tokens * 32) as u64).expect("allocate");
        OnDevice { steps, layers, topk_ids, tokens }
    }

    /// Inputs and caches of `seed`, poisoned outputs.
    fn overwrite(&self, gpu: &Gpu, q_lens: &[usize], ctx: usize, seed: u64) {
        self.steps.full.overwrite(&of(gpu, q_lens, ctx, LayerKind::Full, seed));
        self.steps.sliding.overwrite(&of(gpu, q_lens, ctx, LayerKind::Sliding, seed + 1));
        for (i, layer) in self.layers.iter().enumerate() {
            layer.overwrite(&of(gpu, q_lens, ctx, LayerKind::of_layer(i), seed + 2));
        }
        self.topk_ids.fill(0xFF).expect("fill");
    }

    fn input(&self) -> StackInput {
        let first = &self.steps.full.input;
        let kind = |step: &DeviceStep| KindInput {
            cache_loc: step.input.attention.cache_loc.clone(),
            cache_seqlens: step.input.attention.cache_seqlens.clone(),
            page_table: step.input.attention.page_table.clone(),
            scheduler_metadata: None,
        };
        let cache = |step: &DeviceStep| LayerCache {
            cache: step.input.attention.cache.clone(),
            k_scale: step.input.attention.k_scale.clone(),
            v_scale: step.input.attention.v_scale.clone(),
        };
        StackInput {
            attn_input: first.attention.attn_input.clone(),
            stream: first.stream.clone(),
            positions: first.attention.positions.clone(),
            cu_seqlens_q: first.attention.cu_seqlens_q.clone(),
            kinds: PerKind { full: kind(&self.steps.full), sliding: kind(&self.steps.sliding) },
            caches: self.layers.iter().map(cache).collect(),
            local_start: first.local_start.clone(),
            num_tokens_non_padded: None,
        }
    }

    /// The last layer's outputs; the streams of `kept` in the other layers' own.
    fn output(&self, kept: &[usize]) -> StackOutput {
        let last = &self.layers[LAYERS - 1].output;
        let shape = [LAYERS, self.tokens, 8];
        // SAFETY: the buffer holds `shape` and lives as long as the step.
        let topk_ids = unsafe { DeviceTensor::contiguous(self.topk_ids.ptr(), DType::I32, &shape) };
        StackOutput {
            hidden: last.hidden.clone(),
            stream: last.stream.clone(),
            streams: kept.iter().map(|i| (*i, self.layers[*i].output.stream.clone())).collect(),
            topk_ids: Some(topk_ids),
        }
    }

    /// Every layer's outputs and caches, and the experts' ids.
    fn results(&self) -> Vec<Vec<u8>> {
        let mut ids = vec![0; self.topk_ids.bytes() as usize];
        self.topk_ids.read(&mut ids).expect("read");
        self.layers.iter().flat_map(|layer| layer.results()).chain([ids]).collect()
    }
}

fn keys(on: &OnDevice, q_lens: &[usize]) -> PerKind<PlanKey> {
    let table = on.steps.full.input.attention.page_table.shape();
    PerKind::both(PlanKey {
        tokens: on.tokens as u32,
        max_q_len: q_lens.iter().copied().max().unwrap_or(1) as u32,
        page_size: 16,
        ..PlanKey::decode(table[0] as u32, table[1] as u32)
    })
}

/// The layers by their own calls: each layer's outputs are the next one's inputs.
fn one_by_one(gpu: &Gpu, stack: &DecoderStack, plan: &StackPlan, workspace: &mut Workspace, on: &OnDevice) {
    let mut input = on.steps.full.input.clone();
    for (i, layer) in on.layers.iter().enumerate() {
        let (kind, own) = (LayerKind::of_layer(i), &layer.input.attention);
        let shared = &on.steps.get(kind).input.attention;
        input.attention.cache_loc = shared.cache_loc.clone();
        input.attention.cache_seqlens = shared.cache_seqlens.clone();
        input.attention.page_table = shared.page_table.clone();
        input.attention.cache = own.cache.clone();
        let mut output = layer.output.clone();
        // SAFETY: the part of the buffer that is this layer's.
        output.topk_ids = unsafe {
            DeviceTensor::contiguous(on.topk_ids.ptr() + (i * on.tokens * 32) as u64, DType::I32, &[on.tokens, 8])
        };
        stack.layers()[i].1.forward(plan.layer(i), workspace, &input, &output, Stream::LEGACY).expect("forward");
        input.attention.attn_input = output.hidden.clone().expect("hidden");
        input.stream = output.stream.clone();
    }
    gpu.device.synchronize().expect("the layers");
}

/// What a stack leaves of the results of its layers one by one: hidden of the last only.
fn of_stack(results: &[Vec<u8>], kept: &[usize]) -> Vec<Vec<u8>> {
    let mut out = results.to_vec();
    // Of each layer: hidden, stream, topk_ids, k, v.
    for i in 0..LAYERS {
        let last = i == LAYERS - 1;
        if !last {
            out[5 * i].clear();
        }
        if !last && !kept.contains(&i) {
            out[5 * i + 1].clear();
        }
        out[5 * i + 2].clear();
    }
    out
}

#[rstest]
fn a_stack_is_its_layers_one_by_one(#[values(&[1; 9], &[8, 8, 8], &[1, 0, 8, 130, 1])] q_lens: &[usize]) {
    let Some(gpu) = gpu("stack::a_stack_is_its_layers_one_by_one") else { return };
    let stack = stack(&gpu);
    let ctx = 300;
    let on = OnDevice::new(&gpu, q_lens, ctx);
    let plan = stack.plan(&keys(&on, q_lens)).expect("a plan");
    let workspace = RefCell::new(stack.workspace(&plan).expect("a workspace"));
    let kept = [0, 2];
    let (input, output) = (on.input(), on.output(&kept));
    let stream = OwnedStream::new(&gpu.device).expect("a stream");
    // The first call of all is captured.
    let graph = stream
        .capture(|stream| stack.forward(&plan, &mut workspace.borrow_mut(), &input, &output, stream))
        .expect("a graph");
    for seed in [120, 130] {
        on.overwrite(&gpu, q_lens, ctx, seed);
        workspace.borrow_mut().poison(&gpu.device).expect("poison");
        one_by_one(&gpu, stack, &plan, &mut workspace.borrow_mut(), &on);
        let want = of_stack(&on.results(), &kept);
        assert!(want[1] != want[11], "layers differ");
        let check = |what: &str, run: &dyn Fn()| {
            on.overwrite(&gpu, q_lens, ctx, seed);
            workspace.borrow_mut().poison(&gpu.device).expect("poison");
            run();
            gpu.device.synchronize().expect("the stack");
            let got = of_stack(&on.results(), &kept);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(got == want, "{what}, seed {seed}: result {} of layer {}", i % 5, i / 5);
            }
        };
        check("eager", &|| {
            stack.forward(&plan, &mut workspace.borrow_mut(), &input, &output, Stream::LEGACY).expect("forward");
        });
        check("graph", &|| stream.replay(&graph).expect("replay"));
        check("in two ranges", &|| {
            // Layers 0 to 2, then 3: layer 2's stream and hidden are the border.
            let border = &on.layers[2].output;
            let mut first = StackOutput { streams: vec![output.streams[0].clone()], topk_ids: None, ..output.clone() };
            (first.hidden, first.stream) = (border.hidden.clone(), border.stream.clone());
            let ids = |from: usize, n: usize| {
                let at = on.topk_ids.ptr() + (from * on.tokens * 32) as u64;
                // SAFETY: the part of the buffer that belongs to these layers.
                Some(unsafe { DeviceTensor::contiguous(at, DType::I32, &[n, on.tokens, 8]) })
            };
            first.topk_ids = ids(0, 3);
            let ws = &mut *workspace.borrow_mut();
            stack.forward_range(&plan, ws, 0..3, &input, &first, Stream::LEGACY).expect("forward");
            let mut rest = input.clone();
            (rest.attn_input, rest.stream) = (border.hidden.clone().expect("hidden"), border.stream.clone());
            let end = StackOutput { streams: Vec::new(), topk_ids: ids(3, 1), ..output.clone() };
            stack.forward_range(&plan, ws, 3..4, &rest, &end, Stream::LEGACY).expect("forward");
        });
        let control = workspace.borrow().control(&gpu.device).expect("the control block");
        assert!(control.iter().all(|w| *w == 0), "counters are left zero");
    }
}

/// What does not fit is refused by the name of the layer, before anything is launched.
#[test]
fn faults_are_named_before_any_launch() {
    let Some(gpu) = gpu("stack::faults_are_named_before_any_launch") else { return };
    let stack = stack(&gpu);
    let q_lens = [1, 1];
    let on = OnDevice::new(&gpu, &q_lens, 30);
    let plan = stack.plan(&keys(&on, &q_lens)).expect("a plan");
    let mut workspace = stack.workspace(&plan).expect("a workspace");
    on.overwrite(&gpu, &q_lens, 30, 140);
    let before = on.results();
    let (input, output) = (on.input(), on.output(&[]));
    let mut refused = |input: &StackInput, output: &StackOutput| {
        stack.forward(&plan, &mut workspace, input, output, Stream::LEGACY).unwrap_err().to_string()
    };
    let mut bad = input.clone();
    bad.caches[3].k_scale = on.steps.full.input.local_start.clone();
    assert_eq!(refused(&bad, &output), "layers[3].k_scale: wanted f32, got i32");
    let mut bad = input.clone();
    let host = [0f32; 8];
    // SAFETY: refused before anything follows it.
    bad.caches[2].v_scale = unsafe { DeviceTensor::contiguous(host.as_ptr() as u64, DType::F32, &[1]) };
    assert_eq!(refused(&bad, &output), "layers[2].v_scale: wanted device memory, got host memory");
    bad.caches.truncate(3);
    assert_eq!(refused(&bad, &output), "caches: wanted one for each of 4 layers, got 3");
    let twice = StackOutput { streams: vec![(3, output.stream.clone())], ..output.clone() };
    assert_eq!(refused(&input, &twice), "streams: wanted layers of 0..3, got layer 3");
    let mut small = stack.layers()[0].1.workspace_of(plan.plans[0].workspace_bytes).expect("a workspace");
    let text = stack.forward(&plan, &mut small, &input, &output, Stream::LEGACY).unwrap_err().to_string();
    assert!(text.starts_with("workspace: wanted at least"), "{text}");
    gpu.device.synchronize().expect("nothing");
    assert!(on.results() == before, "nothing was launched");
}
