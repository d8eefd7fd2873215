//! The layer on both backends, the steps the tests share, how a step is run, and distances.

use half::bf16;
use muse_spark_layer::backend::cpu::{self, CpuLayer, Queries, StepOutput, TapValues};
use muse_spark_layer::backend::cuda::Device;
use muse_spark_layer::step::AttentionInput;
use muse_spark_layer::synthetic::{self, Dist, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceInput, DeviceOutput, DeviceTaps, DeviceTensor, LayerConfig, LayerKind,
    LayerWeights, PagedKvCache, Plan, PlanKey, QueryPrecision, Stream, Tap, Taps, Workspace,
};
use std::collections::HashMap;
use std::io::Write;
use std::ops::Deref;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crate::memory::{Banded, Scratch, POISON};

/// The layer on the CPU: what a test goes on with when it has let the GPU go.
pub struct Reference {
    pub config: LayerConfig,
    pub cpu: CpuLayer<'static>,
}

/// Both backends with the same weights, and the steps run so far.
pub struct Gpu {
    pub reference: Arc<Reference>,
    pub device: Device,
    pub cuda: DecoderLayer,
    runs: HashMap<(String, LayerKind), Arc<Run>>,
}

impl Reference {
    /// Queries and gate by the CPU, which appends the step's keys and values to `cache`.
    pub fn cpu_queries(
        &self,
        step: &SyntheticStep,
        cache: &mut synthetic::SyntheticCache,
        kind: LayerKind,
        query: QueryPrecision,
    ) -> Queries {
        let x: Vec<f32> = step.input.attn_input.iter().map(|v| v.to_f32()).collect();
        let qkv = cpu::qkv_gate(&self.config, self.cpu.weights(), &x);
        cpu::qk_norm_rope_append(&self.config, &qkv, &step.input.view().batch, &mut cache.view(), kind, query, false)
    }
}

impl Deref for Gpu {
    type Target = Reference;
    fn deref(&self) -> &Reference {
        &self.reference
    }
}

/// One step on CUDA, with what it was given, and the CPU's queries for it.
#[derive(Clone)]
pub struct Run {
    pub step: SyntheticStep,
    pub output: StepOutput,
    pub k_cache: Vec<u8>,
    pub v_cache: Vec<u8>,
    pub queries: Queries,
    /// What the CPU appended, on its own copy of the cache.
    pub cpu_cache: synthetic::SyntheticCache,
    /// Where the step stores entries; `step` may be a sample of its tokens.
    pub slots: Vec<i64>,
}

fn open() -> Option<Mutex<Gpu>> {
    let device = match Device::new(0) {
        Ok(device) => device,
        Err(error) => {
            say(&format!("GPU tests are SKIPPED: {error}"));
            return None;
        }
    };
    let config = LayerConfig::muse_spark_tp8();
    let tensors = synthetic::weights(&config, 7).expect("weights");
    let weights = LayerWeights::from_host(&config, tensors.view()).expect("weights");
    let cuda = DecoderLayer::new(config.clone(), weights, Backend::Cuda { device: 0 }).expect("the layer on the GPU");
    let cpu = CpuLayer::new(config.clone(), tensors).expect("the layer on the CPU");
    let reference = Arc::new(Reference { config, cpu });
    Some(Mutex::new(Gpu { reference, device, cuda, runs: HashMap::new() }))
}

/// A line on stderr, not by eprintln, which the test harness swallows.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The GPU, one test at a time; `None` (and a line on stderr) where there is none.
pub fn gpu(test: &str) -> Option<MutexGuard<'static, Gpu>> {
    static GPU: OnceLock<Option<Mutex<Gpu>>> = OnceLock::new();
    match GPU.get_or_init(open) {
        Some(gpu) => Some(gpu.lock().unwrap_or_else(|e| e.into_inner())),
        None => {
            say(&format!("  {test}: skipped, no GPU"));
            None
        }
    }
}

/// Whether a test that is not part of the usual run was asked for; a line on stderr if not.
pub fn asked(test: &str, variable: &str) -> bool {
    let asked = std::env::var(variable).is_ok_and(|v| v == "1");
    if !asked {
        say(&format!("  {test}: skipped, {variable}=1 runs it"));
    }
    asked
}

/// Set in a child, so that its tests do nothing when they are run by hand.
const CHILD: &str = "MUSE_SPARK_LAYER_TEST_CHILD";

/// Runs the ignored test `name` in a process of its own, which must pass, and soon.
pub fn child(name: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads", "1"]);
    let mut child = command
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a child");
    let began = Instant::now();
    while child.try_wait().expect("the child").is_none() {
        if began.elapsed() > Duration::from_secs(60) {
            child.kill().expect("the child");
            panic!("{name} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("the child");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{name}: {text}");
    text
}

pub fn is_child() -> bool {
    std::env::var(CHILD).is_ok()
}

/// The step called `name`.
pub fn spec(name: &str, kind: LayerKind) -> StepSpec {
    let uniform = |batch: usize, q_len: usize, ctx: usize, page_size: usize| StepSpec {
        page_size,
        ..StepSpec::new(batch, q_len, ctx, kind)
    };
    let mixed = |spec: StepSpec| StepSpec { spread: Spread::Mixed, ..spec };
    let scaled = |spec: StepSpec| StepSpec { k_scale: 0.37, v_scale: 2.9, ..spec };
    match name {
        "decode-1" => uniform(1, 1, 777, 1),
        "decode-1-empty" => uniform(1, 1, 0, 1),
        "decode-3" => mixed(uniform(3, 1, 500, 16)),
        "decode-8" => uniform(8, 1, 2047, 64),
        "decode-9" => scaled(uniform(9, 1, 100, 256)),
        "decode-33" => mixed(uniform(33, 1, 300, 1)),
        "decode-64" => uniform(64, 1, 64, 1),
        "decode-130" => uniform(130, 1, 40, 1),
        "verify-1" => uniform(1, 8, 2100, 1),
        "verify-3" => scaled(mixed(uniform(3, 8, 300, 16))),
        "verify-17" => uniform(17, 8, 100, 64),
        // More keys a split than the few-key kernel takes.
        "verify-20" => uniform(20, 8, 2100, 64),
        "block-3" => StepSpec { dist: Dist::Soft, ..uniform(5, 3, 50, 1) },
        "prefill-65" => StepSpec { dist: Dist::Outliers, ..uniform(1, 65, 2040, 1) },
        "prefill-200" => uniform(1, 200, 0, 1),
        "prefill-333" => scaled(uniform(2, 333, 500, 16)),
        "prefill-1000" => uniform(1, 1000, 1100, 64),
        "ragged" => StepSpec { q_lens: vec![1, 8, 0, 40, 1], ..uniform(5, 1, 300, 1) },
        // Prefill chunks among decode rows, verify blocks and requests that have nothing to do.
        "mixed" => mixed(StepSpec { q_lens: vec![1, 0, 8, 1, 130, 1, 8, 0, 40, 1, 1], ..uniform(11, 1, 300, 16) }),
        // Short requests of all sorts behind long ones: they take their own form of the attention.
        "behind" => mixed(StepSpec { q_lens: vec![130, 40, 1, 8, 0, 1, 16, 3, 1], ..uniform(9, 1, 300, 16) }),
        // Enough query tiles that the tiled attention does not split keys.
        "padded-2600" => uniform(2, 1300, 40, 1),
        other => panic!("no step called {other}"),
    }
}

/// The key of a step: its own shape and nothing else of it.
pub fn step_key(step: &SyntheticStep, kind: LayerKind) -> PlanKey {
    let x = &step.input;
    let longest = x.cu_seqlens_q.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as u32;
    PlanKey {
        tokens: x.positions.len() as u32,
        max_q_len: longest,
        page_size: step.cache.page_size as u32,
        kind,
        ..PlanKey::decode(x.cache_seqlens.len() as u32, x.table_width as u32)
    }
}

impl Gpu {
    /// The step `name` on CUDA with taps; run once, kept.
    pub fn run(&mut self, name: &str, kind: LayerKind) -> Arc<Run> {
        let key = (name.to_string(), kind);
        if !self.runs.contains_key(&key) {
            let run = self.run_step(&spec(name, kind), QueryPrecision::Fp16, 11);
            self.runs.insert(key.clone(), Arc::new(run));
        }
        self.runs[&key].clone()
    }

    pub fn run_step(&self, spec: &StepSpec, query: QueryPrecision, seed: u64) -> Run {
        let step = self.step(spec, seed);
        let plan = self.plan(PlanKey { taps: Taps::All, query, ..step_key(&step, spec.kind) });
        let (on, output) = self.forward_once(&step, &plan);
        let [k_cache, v_cache] = on.caches();
        let mut cpu_cache = step.cache.clone();
        let queries = self.cpu_queries(&step, &mut cpu_cache, spec.kind, query);
        let slots = step.input.cache_loc.clone();
        Run { step, output, k_cache, v_cache, queries, cpu_cache, slots }
    }

    /// A step in device memory of its own, on poisoned scratch and outputs, with every tap; nothing but what it
    /// should write is written.
    pub fn forward_once(&self, step: &SyntheticStep, plan: &Plan) -> (DeviceStep, StepOutput) {
        let on = DeviceStep::with_taps(self, step, plan.key.taps);
        let mut scratch = Scratch::new(self, plan);
        self.forward(plan, scratch.workspace(), &on, Stream::LEGACY);
        self.device.synchronize().expect("the step");
        scratch.intact();
        on.intact();
        let output = on.output(self);
        (on, output)
    }

    pub fn step(&self, spec: &StepSpec, seed: u64) -> SyntheticStep {
        synthetic::step(&self.config, spec, seed).expect("a step")
    }

    pub fn plan(&self, key: PlanKey) -> Plan {
        self.cuda.plan(key).expect("a plan")
    }

    pub fn forward(&self, plan: &Plan, workspace: &mut Workspace, on: &DeviceStep, stream: Stream) {
        self.cuda.forward(plan, workspace, &on.input, &on.output, stream).expect("forward");
    }
}

/// `||got - want|| / ||want||`, which must be a number.
pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    let distance = muse_spark_layer::numerics::relative_l2(got, want);
    assert!(distance.is_finite(), "not finite");
    distance
}

/// Asserts that every row of `width` is within `bound`: a single wrong token does not hide among many.
#[track_caller]
pub fn assert_rows(what: &str, got: &[f32], want: &[f32], width: usize, bound: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (t, (g, w)) in got.chunks(width).zip(want.chunks(width)).enumerate() {
        let distance = relative_l2(g, w);
        assert!(distance <= bound, "{what}: row {t} is {distance:.3e} from the reference (bound {bound:.1e})");
    }
}

/// The same bits, NaN included; an unequal row of `width` elements is named.
#[track_caller]
pub fn assert_bits(what: &str, got: &[f32], want: &[f32], width: usize) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (t, (g, w)) in got.chunks(width).zip(want.chunks(width)).enumerate() {
        let same = g.iter().zip(w).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{what}: row {t} has other bits");
    }
}

/// The inputs of a step, in the order of [`DeviceStep::bytes`].
const INPUTS: [&str; 10] = [
    "attn_input",
    "stream",
    "positions",
    "cache_loc",
    "cu_seqlens_q",
    "cache_seqlens",
    "page_table",
    "k_scale",
    "v_scale",
    "local_start",
];

/// A step's tensors in device memory, each of exactly its size.
pub struct DeviceStep {
    pub input: DeviceInput,
    pub output: DeviceOutput,
    inputs: Vec<Banded>,
    /// hidden, stream, topk_ids, and the taps asked for.
    outputs: Vec<Banded>,
    cache: [Banded; 2],
}

macro_rules! le {
    ($v:expr) => {
        $v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()
    };
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn halves(bytes: &[u8]) -> Vec<bf16> {
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn words(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

impl DeviceStep {
    fn bytes(step: &SyntheticStep) -> Vec<(DType, Vec<usize>, Vec<u8>)> {
        let x = &step.input;
        let (tokens, requests) = (x.positions.len(), x.cache_seqlens.len());
        let hidden = x.stream.len().checked_div(tokens).unwrap_or(8192);
        vec![
            (DType::Bf16, vec![tokens, hidden], le!(x.attn_input)),
            (DType::F32, vec![tokens, hidden], le!(x.stream)),
            (DType::I64, vec![tokens], le!(x.positions)),
            (DType::I64, vec![tokens], le!(x.cache_loc)),
            (DType::I32, vec![requests + 1], le!(x.cu_seqlens_q)),
            (DType::I32, vec![requests], le!(x.cache_seqlens)),
            (DType::I32, vec![requests, x.table_width], le!(x.page_table)),
            (DType::F32, vec![1], le!([step.cache.k_scale])),
            (DType::F32, vec![1], le!([step.cache.v_scale])),
            (DType::I32, vec![1], le!([x.local_start])),
        ]
    }

    pub fn new(gpu: &Gpu, step: &SyntheticStep) -> DeviceStep {
        Self::with_taps(gpu, step, Taps::None)
    }

    pub fn with_taps(gpu: &Gpu, step: &SyntheticStep, wanted: Taps) -> DeviceStep {
        Self::on(&gpu.config, &gpu.device, step, wanted)
    }

    pub fn on(config: &LayerConfig, device: &Device, step: &SyntheticStep, wanted: Taps) -> DeviceStep {
        let tokens = step.input.positions.len();
        let (mut inputs, mut views) = (Vec::new(), Vec::new());
        for (dtype, shape, bytes) in Self::bytes(step) {
            let memory = Banded::of(device, &bytes);
            views.push(memory.view(dtype, &shape));
            inputs.push(memory);
        }
        let page = step.cache.page_size;
        let shape = [step.cache.k.len() / (page * config.kv_size()), page, config.kv_heads, config.head_dim];
        let cache = [&step.cache.k, &step.cache.v].map(|bytes| Banded::of(device, bytes));
        let [k, v] = [0, 1].map(|i: usize| cache[i].view(DType::E4m3, &shape));
        let mut outputs = Vec::new();
        let mut output = |dtype: DType, shape: &[usize]| {
            let memory = Banded::new(device, (shape.iter().product::<usize>() * dtype.size()) as u64);
            let view = memory.view(dtype, shape);
            outputs.push(memory);
            view
        };
        let (hidden, stream) =
            (output(DType::Bf16, &[tokens, config.hidden]), output(DType::F32, &[tokens, config.hidden]));
        let topk_ids = output(DType::I32, &[tokens, config.top_k]);
        let mut taps = DeviceTaps::default();
        for &tap in Tap::ALL.iter().filter(|_| wanted == Taps::All) {
            taps.set(tap, output(tap.dtype(), &tap.shape(tokens)));
        }
        let input = DeviceInput {
            attention: AttentionInput {
                attn_input: views[0].clone(),
                positions: views[2].clone(),
                cache_loc: views[3].clone(),
                cu_seqlens_q: views[4].clone(),
                cache_seqlens: views[5].clone(),
                page_table: views[6].clone(),
                k_scale: views[7].clone(),
                v_scale: views[8].clone(),
                cache: PagedKvCache::new(k, v).expect("a cache"),
                scheduler_metadata: None,
            },
            stream: views[1].clone(),
            local_start: views[9].clone(),
            num_tokens_non_padded: None,
        };
        DeviceStep {
            input,
            output: DeviceOutput { hidden: Some(hidden), stream, topk_ids, taps },
            inputs,
            outputs,
            cache,
        }
    }

    /// Overwrites inputs and caches with those of a step of the same shape, and poisons the outputs.
    pub fn overwrite(&self, step: &SyntheticStep) {
        for (memory, (_, _, bytes)) in self.inputs.iter().zip(Self::bytes(step)) {
            memory.write(&bytes);
        }
        self.cache[0].write(&step.cache.k);
        self.cache[1].write(&step.cache.v);
        self.poison_outputs();
    }

    pub fn poison_outputs(&self) {
        self.outputs.iter().for_each(|b| b.fill(POISON));
    }

    /// The memory of one input.
    pub fn memory(&self, input: &str) -> &Banded {
        &self.inputs[INPUTS.iter().position(|name| *name == input).unwrap_or_else(|| panic!("no input called {input}"))]
    }

    /// The memory of hidden, stream, topk_ids and the taps.
    pub fn output_memory(&self) -> &[Banded] {
        &self.outputs
    }

    /// The memory of keys (0) and values (1).
    pub fn cache(&self, half: usize) -> &Banded {
        &self.cache[half]
    }

    pub fn caches(&self) -> [Vec<u8>; 2] {
        [self.cache[0].read(), self.cache[1].read()]
    }

    /// Asserts that nothing beside the tensors was written.
    #[track_caller]
    pub fn intact(&self) {
        self.inputs.iter().zip(INPUTS).for_each(|(memory, name)| memory.intact(name, POISON));
        let taps = Tap::ALL.iter().map(|t| t.name());
        let names = ["hidden", "stream (output)", "topk_ids"].into_iter().chain(taps);
        self.outputs.iter().zip(names).for_each(|(memory, name)| memory.intact(name, POISON));
        self.cache.iter().zip(["k_cache", "v_cache"]).for_each(|(memory, name)| memory.intact(name, POISON));
    }

    /// Outputs (taps too) and caches, byte for byte.
    pub fn results(&self) -> Vec<Vec<u8>> {
        self.outputs.iter().chain(&self.cache).map(Banded::read).collect()
    }

    /// hidden, stream, topk_ids and taps, byte for byte.
    pub fn outputs(&self) -> Vec<Vec<u8>> {
        self.outputs.iter().map(Banded::read).collect()
    }

    /// The outputs as the CPU backend gives them.
    pub fn output(&self, gpu: &Gpu) -> StepOutput {
        let ids = words(&self.outputs[2].read());
        let tapped = |tap: Tap| -> Vec<f32> {
            let bytes = self.outputs[3 + tap as usize].read();
            match tap.dtype() {
                DType::Bf16 => halves(&bytes).iter().map(|v| v.to_f32()).collect(),
                _ => floats(&bytes),
            }
        };
        let taps = (self.outputs.len() > 3).then(|| {
            let (planes, width) = (tapped(Tap::FfnInput), gpu.config.hidden);
            let sum =
                |row: &[f32]| (0..width).map(|c| row[c] + row[width + c] + row[2 * width + c]).collect::<Vec<_>>();
            TapValues {
                attn_core: tapped(Tap::AttnCore),
                attn_out: tapped(Tap::AttnOut),
                stream_after_attn: tapped(Tap::StreamAfterAttn),
                ffn_input: planes.chunks_exact(3 * width).flat_map(sum).collect(),
                router_logits: tapped(Tap::RouterLogits),
                topk_ids: ids.clone(),
                topk_scores: tapped(Tap::TopkScores),
                expert_input: tapped(Tap::ExpertInput),
                moe_mix: tapped(Tap::MoeMix),
                ffn_out: tapped(Tap::FfnOut),
            }
        });
        StepOutput {
            hidden: halves(&self.outputs[0].read()),
            stream: floats(&self.outputs[1].read()),
            topk_scores: taps.as_ref().map_or(Vec::new(), |t| t.topk_scores.clone()),
            topk_ids: ids,
            taps,
        }
    }
}

/// A view of the same memory with another shape or type, for calls that must be refused.
pub fn raw(address: u64, dtype: DType, shape: &[usize]) -> DeviceTensor {
    // SAFETY: refused before anything follows it, or memory that the caller keeps.
    unsafe { DeviceTensor::contiguous(address, dtype, shape) }
}
