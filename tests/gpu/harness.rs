//! The layer on both backends, the steps the tests share, and distances.

use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::backend::cuda::{Buffer, Device};
use muse_spark_layer::synthetic::{self, Dist, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceInput, DeviceOutput, DeviceTaps, DeviceTensor, LayerConfig, LayerKind,
    LayerWeights, PagedKvCache, PlanKey, QueryPrecision, Taps,
};
use std::collections::HashMap;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock};

/// Both backends with the same weights, and the steps run so far.
pub struct Gpu {
    pub config: LayerConfig,
    pub device: Device,
    pub cpu: CpuLayer<'static>,
    pub cuda: DecoderLayer,
    runs: HashMap<(String, LayerKind), Run>,
}

/// One step on CUDA, with what it was given.
#[derive(Clone)]
pub struct Run {
    pub step: SyntheticStep,
    pub output: StepOutput,
    pub k_cache: Vec<u8>,
    pub v_cache: Vec<u8>,
}

fn open() -> Option<Mutex<Gpu>> {
    let device = match Device::new(0) {
        Ok(device) => device,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "GPU tests are SKIPPED: {error}");
            return None;
        }
    };
    let config = LayerConfig::muse_spark_tp8();
    let tensors = synthetic::weights(&config, 7).expect("weights");
    let weights = LayerWeights::from_host(&config, tensors.clone()).expect("weights");
    let cuda = DecoderLayer::new(config.clone(), weights, Backend::Cuda { device: 0 }).expect("the layer on the GPU");
    let cpu = CpuLayer::new(config.clone(), tensors).expect("the layer on the CPU");
    Some(Mutex::new(Gpu { config, device, cpu, cuda, runs: HashMap::new() }))
}

/// The GPU, one test at a time; `None` (and a line on stderr) where there is none.
pub fn gpu(test: &str) -> Option<MutexGuard<'static, Gpu>> {
    static GPU: OnceLock<Option<Mutex<Gpu>>> = OnceLock::new();
    match GPU.get_or_init(open) {
        Some(gpu) => Some(gpu.lock().unwrap_or_else(|e| e.into_inner())),
        None => {
            // Not by eprintln, which the test harness swallows.
            let _ = writeln!(std::io::stderr(), "  {test}: skipped, no GPU");
            None
        }
    }
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
        other => panic!("no step called {other}"),
    }
}

/// A plan's key for a step.
pub fn key(step: &SyntheticStep, spec: &StepSpec) -> PlanKey {
    PlanKey {
        tokens: step.input.positions.len() as u32,
        max_q_len: spec.q_lens.iter().copied().max().unwrap_or(1) as u32,
        page_size: spec.page_size as u32,
        kind: spec.kind,
        ..PlanKey::decode(spec.q_lens.len() as u32, step.input.table_width as u32)
    }
}

impl Gpu {
    /// The step `name` on CUDA with taps, poisoned scratch and outputs; run once, kept.
    pub fn run(&mut self, name: &str, kind: LayerKind) -> Run {
        let key = (name.to_string(), kind);
        if !self.runs.contains_key(&key) {
            let run = self.run_step(&spec(name, kind), QueryPrecision::Fp16, 11);
            self.runs.insert(key.clone(), run);
        }
        self.runs[&key].clone()
    }

    pub fn run_step(&self, spec: &StepSpec, query: QueryPrecision, seed: u64) -> Run {
        let step = synthetic::step(&self.config, spec, seed).expect("a step");
        let options = StepOptions { taps: Taps::All, ..StepOptions::new(spec.kind, query) };
        let mut cache = step.cache.clone();
        let output = self.cuda.forward_host(&step.input.view(), &mut cache.view(), &options).expect("forward");
        Run { step, output, k_cache: cache.k, v_cache: cache.v }
    }
}

/// `||got - want|| / ||want||`.
pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut difference, mut norm) = (0f64, 0f64);
    for (g, w) in got.iter().zip(want) {
        difference += (f64::from(*g) - f64::from(*w)).powi(2);
        norm += f64::from(*w).powi(2);
    }
    assert!(difference.is_finite(), "not finite");
    if difference == 0.0 {
        0.0
    } else {
        (difference / norm.max(1e-60)).sqrt()
    }
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

/// A step's tensors in device memory.
pub struct DeviceStep {
    pub input: DeviceInput,
    pub output: DeviceOutput,
    /// In the order of [`DeviceStep::bytes`].
    buffers: Vec<Buffer>,
    outputs: Vec<Buffer>,
    cache: [Buffer; 2],
}

impl DeviceStep {
    fn bytes(step: &SyntheticStep) -> Vec<(DType, Vec<usize>, Vec<u8>)> {
        let x = &step.input;
        let (tokens, requests) = (x.positions.len(), x.cache_seqlens.len());
        let hidden = x.stream.len() / tokens;
        macro_rules! le {
            ($v:expr) => {
                $v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()
            };
        }
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
        let (config, device) = (&gpu.config, &gpu.device);
        let tokens = step.input.positions.len();
        let (mut buffers, mut views) = (Vec::new(), Vec::new());
        for (dtype, shape, bytes) in Self::bytes(step) {
            let buffer = device.upload(&bytes).expect("upload");
            // SAFETY: the buffer holds `shape` elements and lives as long as the step.
            views.push(unsafe { DeviceTensor::contiguous(buffer.ptr(), dtype, &shape) });
            buffers.push(buffer);
        }
        let page = step.cache.page_size;
        let shape = [step.cache.k.len() / (page * config.kv_size()), page, config.kv_heads, config.head_dim];
        let cache = [device.upload(&step.cache.k).expect("upload"), device.upload(&step.cache.v).expect("upload")];
        // SAFETY: as above.
        let [k, v] = [0, 1].map(|i| unsafe { DeviceTensor::contiguous(cache[i].ptr(), DType::E4m3, &shape) });
        let mut outputs = Vec::new();
        let mut output = |dtype: DType, width: usize| {
            let buffer = device.allocate((tokens * width * dtype.size()) as u64).expect("allocate");
            // SAFETY: as above.
            let view = unsafe { DeviceTensor::contiguous(buffer.ptr(), dtype, &[tokens, width]) };
            outputs.push(buffer);
            view
        };
        let output = DeviceOutput {
            hidden: Some(output(DType::Bf16, config.hidden)),
            stream: output(DType::F32, config.hidden),
            topk_ids: output(DType::I32, config.top_k),
            taps: DeviceTaps::default(),
        };
        let input = DeviceInput {
            attention: muse_spark_layer::step::AttentionInput {
                attn_input: views[0].clone(),
                positions: views[2].clone(),
                cache_loc: views[3].clone(),
                cu_seqlens_q: views[4].clone(),
                cache_seqlens: views[5].clone(),
                page_table: views[6].clone(),
                k_scale: views[7].clone(),
                v_scale: views[8].clone(),
                cache: PagedKvCache::new(k, v).expect("a cache"),
            },
            stream: views[1].clone(),
            local_start: views[9].clone(),
            num_tokens_non_padded: None,
        };
        DeviceStep { input, output, buffers, outputs, cache }
    }

    /// Overwrites inputs and caches with those of a step of the same shape, and poisons the outputs.
    pub fn overwrite(&self, step: &SyntheticStep) {
        for (buffer, (_, _, bytes)) in self.buffers.iter().zip(Self::bytes(step)) {
            assert_eq!(buffer.bytes(), bytes.len() as u64, "steps of one shape");
            buffer.write(&bytes).expect("write");
        }
        self.cache[0].write(&step.cache.k).expect("write");
        self.cache[1].write(&step.cache.v).expect("write");
        self.outputs.iter().for_each(|b| b.fill(0xFF).expect("fill"));
    }

    /// Outputs and caches, byte for byte.
    pub fn results(&self) -> Vec<Vec<u8>> {
        let read = |buffer: &Buffer| {
            let mut bytes = vec![0; buffer.bytes() as usize];
            buffer.read(&mut bytes).expect("read");
            bytes
        };
        self.outputs.iter().chain(&self.cache).map(read).collect()
    }
}
