//! The fuzz targets: each takes bytes and must return, whatever they are, without a panic and without asking for memory out
//! of proportion. `fuzz/run.sh` runs them for minutes, `cargo test --test fuzz_seeds` on what is kept in `fuzz/seeds`.
#![allow(dead_code)] // each target is a program of its own

use muse_spark_layer::backend::cpu::CpuLayer;
use muse_spark_layer::capi::*;
use muse_spark_layer::step::{check_step, AttentionInput};
use muse_spark_layer::weights::{names, Checkpoint, SafetensorsFile};
use muse_spark_layer::workspace::Layout;
use muse_spark_layer::{
    AttentionEngine, Backend, DType, DecoderLayer, DeviceInput, DeviceOutput, DeviceTaps, DeviceTensor, LayerConfig,
    LayerKind, NamedTensors, PagedKvCache, Plan, PlanKey, QueryPrecision, Taps, WeightKind,
};
use std::alloc::{GlobalAlloc, Layout as Request, System};
use std::ffi::{c_void, CStr, CString};
use std::path::PathBuf;
use std::sync::OnceLock;

/// The most that one allocation may ask for: far above what any of the seeds needs.
const MOST: usize = 256 << 20;

/// The system's memory, in pieces of bounded size. Asking for more ends the program, which the fuzzer keeps as a fault.
pub struct Limited;

// SAFETY: the system's allocator, or an end.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, request: Request) -> *mut u8 {
        if request.size() > MOST {
            eprintln!("one allocation of {} bytes", request.size());
            std::process::abort();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(request) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, request: Request) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, request) }
    }
}

/// Bytes as numbers; zeros when they are used up.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n.min(self.0.len()));
        self.0 = tail;
        head
    }

    fn u64(&mut self) -> u64 {
        self.take(8).iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }

    fn u32(&mut self) -> u32 {
        self.take(4).iter().rev().fold(0, |n, b| n << 8 | u32::from(*b))
    }

    fn u8(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// A small number mostly, any number sometimes: both sides of every limit.
    fn near(&mut self) -> u32 {
        match self.u8() {
            n @ 0..=127 => u32::from(n),
            128..=199 => self.u32() & 0xFFFF,
            200..=229 => 1 << (self.u8() & 31),
            _ => self.u32(),
        }
    }

    /// As many bytes as two of them say.
    fn part(&mut self) -> &'a [u8] {
        let n = self.take(2).iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
        self.take(n)
    }
}

/// A folder of this process's own.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("muse-spark-layer-fuzz-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

/// Dimensions of which a whole layer is a few kilobytes.
pub fn tiny() -> LayerConfig {
    LayerConfig {
        hidden: 4,
        head_dim: 2,
        q_heads: 2,
        kv_heads: 1,
        window: 4,
        expert_dim: 16,
        n_experts: 4,
        local_experts: 2,
        top_k: 2,
        unpool_slice: 2,
        ..LayerConfig::small()
    }
}

/// A safetensors file of a layer's weights.
pub fn weights(data: &[u8]) {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let path = FILE.get_or_init(|| folder("weights").join("layer.safetensors"));
    std::fs::write(path, data).expect("a temporary file");
    let Ok(file) = SafetensorsFile::open(path) else { return };
    let _ = file.tensors();
    for experts in [WeightKind::Nvfp4, WeightKind::Bf16] {
        let config = LayerConfig { experts, ..tiny() };
        let Ok(weights) = file.weights(&config) else { continue };
        let _ = DecoderLayer::new(config, weights, Backend::Cpu);
    }
}

/// A checkpoint's folder: configuration, index, one shard.
pub fn checkpoint(data: &[u8]) {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| folder("checkpoint"));
    let mut bytes = Bytes(data);
    let (config, index) = (bytes.part(), bytes.part());
    for (name, content) in
        [("config.json", config), ("model.safetensors.index.json", index), ("model.safetensors", bytes.0)]
    {
        let path = folder.join(name);
        if content.is_empty() {
            let _ = std::fs::remove_file(path);
        } else {
            std::fs::write(path, content).expect("a temporary file");
        }
    }
    let Ok(checkpoint) = Checkpoint::open(folder) else { return };
    for layer in [0, 1, usize::MAX] {
        let _ = checkpoint.input_norm(layer);
        for (rank, ranks) in [(0, 1), (1, 2), (7, 8), (0, 0), (3, 2), (usize::MAX, usize::MAX)] {
            let _ = checkpoint.parts(layer, rank, ranks);
            let _ = checkpoint.layer(layer, rank, ranks);
        }
    }
}

/// A layer's configuration as JSON.
pub fn config(data: &[u8]) {
    let Ok(config) = serde_json::from_slice::<LayerConfig>(data) else { return };
    if config.validate().is_err() {
        return;
    }
    let _ = (config.qkv_rows(), config.ranks(), config.group(), config.sm_scale(), names::bytes(&config));
    let _ = config.unpool_rows(1, 0);
    if config.head_dim < 1 << 16 {
        let _ = config.inv_freq();
    }
    let none = NamedTensors::new();
    assert!(CpuLayer::new(config.clone(), none.view()).is_err(), "a layer of no weights");
    let text = serde_json::to_string(&config).expect("JSON");
    assert_eq!(serde_json::from_str::<LayerConfig>(&text).expect("what was written"), config);
}

fn key(bytes: &mut Bytes) -> PlanKey {
    let pick = bytes.u8();
    PlanKey {
        tokens: bytes.near(),
        requests: bytes.near(),
        max_q_len: bytes.near(),
        table_width: bytes.near(),
        page_size: if pick & 1 == 0 { 1 << (bytes.u8() & 15) } else { bytes.near() },
        kind: if pick & 2 == 0 { LayerKind::Full } else { LayerKind::Sliding },
        engine: if pick & 4 == 0 { AttentionEngine::Own } else { AttentionEngine::Fa3 },
        query: [QueryPrecision::Fp16, QueryPrecision::E4m3, QueryPrecision::Fp32, QueryPrecision::Bf16]
            [usize::from(pick >> 3 & 3)],
        rank: bytes.near() & if pick & 32 == 0 { 7 } else { u32::MAX },
        taps: if pick & 64 == 0 { Taps::None } else { Taps::All },
        dependent_launch: pick & 128 == 0,
        route_bound: match bytes.u8() {
            0..=99 => None,
            _ => Some(bytes.near()),
        },
        ..PlanKey::decode(1, 1)
    }
}

/// A plan's key and the device's size; then tensors of the planned shapes, of which some are spoilt.
pub fn plan(data: &[u8]) {
    let mut bytes = Bytes(data);
    let (key, sms) = (key(&mut bytes), bytes.near());
    let _ = PlanKey::block(bytes.near(), bytes.near(), bytes.near()).validate();
    let experts = if bytes.u8() & 1 == 0 { WeightKind::Nvfp4 } else { WeightKind::Bf16 };
    let Ok(plan) = Plan::new(key, experts, sms) else { return };
    let text = serde_json::to_string(&plan).expect("JSON");
    assert_eq!(serde_json::from_str::<Plan>(&text).expect("what was written"), plan);
    assert!(!plan.to_string().is_empty());
    assert!(Layout::measure(&plan) == plan.workspace_bytes && plan.workspace_bytes < 1 << 50, "{plan}");
    let end = Layout::regions(&plan, 0).iter().map(|r| r.begin + r.bytes).max().unwrap_or(0);
    assert!(end <= plan.workspace_bytes, "{plan}");

    let (t, b, page) = (plan.key.tokens as usize, plan.key.requests as usize, plan.key.page_size as usize);
    let mut slot = 0u64;
    let mut view = |dtype: DType, shape: &[usize]| {
        slot += 1;
        let address = (slot << 40) + u64::from(bytes.u8() & bytes.u8() & bytes.u8() & bytes.u8());
        let mut shape = shape.to_vec();
        if bytes.u8() == 255 {
            match shape.first_mut() {
                Some(extent) => *extent = bytes.u64() as usize,
                None => shape.push(bytes.u64() as usize),
            }
        }
        let address = if bytes.u8() == 254 { bytes.u64() } else { address };
        if bytes.u8() < 253 {
            // SAFETY: checks look at addresses and never follow them.
            return unsafe { DeviceTensor::contiguous(address, dtype, &shape) };
        }
        let strides: Vec<i64> = shape.iter().map(|_| bytes.u64() as i64).collect();
        // SAFETY: as above.
        unsafe { DeviceTensor::strided(address, dtype, &shape, &strides) }
    };
    let pool = [3, page, 2, 64];
    let Ok(cache) = PagedKvCache::new(view(DType::E4m3, &pool), view(DType::E4m3, &pool)) else { return };
    let input = DeviceInput {
        attention: AttentionInput {
            attn_input: view(DType::Bf16, &[t, 8192]),
            positions: view(DType::I64, &[t]),
            cache_loc: view(DType::I64, &[t]),
            cu_seqlens_q: view(DType::I32, &[b + 1]),
            cache_seqlens: view(DType::I32, &[b]),
            page_table: view(DType::I32, &[b, plan.key.table_width as usize]),
            k_scale: view(DType::F32, &[1]),
            v_scale: view(DType::F32, &[]),
            cache,
            scheduler_metadata: None,
        },
        stream: view(DType::F32, &[t, 8192]),
        local_start: view(DType::I32, &[1]),
        num_tokens_non_padded: None,
    };
    let output = DeviceOutput {
        hidden: Some(view(DType::Bf16, &[t, 8192])),
        stream: view(DType::F32, &[t, 8192]),
        topk_ids: view(DType::I32, &[t, 8]),
        taps: DeviceTaps::default(),
    };
    let _ = check_step(&plan, &input, &output, true).map(|_| ());
}

/// A layer on the CPU, of the small dimensions, made by the C call.
fn layer() -> *const MslLayer {
    static LAYER: OnceLock<usize> = OnceLock::new();
    *LAYER.get_or_init(|| {
        let tensors = muse_spark_layer::synthetic::weights(&LayerConfig::small(), 1).expect("weights");
        let names: Vec<CString> = tensors.0.keys().map(|name| CString::new(name.as_str()).expect("a name")).collect();
        let given: Vec<MslTensor> = tensors
            .0
            .values()
            .zip(&names)
            .map(|(t, name)| MslTensor {
                name: name.as_ptr(),
                data: t.bytes().as_ptr().cast(),
                dtype: match t.dtype() {
                    DType::F32 => 0,
                    DType::Bf16 => 1,
                    DType::E4m3 => 3,
                    _ => 4,
                },
                rank: t.shape.len() as i32,
                shape: std::array::from_fn(|i| t.shape.get(i).map_or(0, |n| *n as i64)),
            })
            .collect();
        let options =
            MslLayerOptions { struct_size: size_of::<MslLayerOptions>() as u32, device: -1, experts: 0, dimensions: 1 };
        let mut layer = std::ptr::null_mut();
        // SAFETY: live arguments.
        let status = unsafe { msl_layer_create(&options, given.as_ptr(), given.len(), &mut layer) };
        assert_eq!(status, 0, "{}", text());
        layer as usize
    }) as *const MslLayer
}

/// Asserts what every call of the C ABI promises: a status that the header lists, never a fault of the library, and a
/// text for all but success.
fn told(status: i32) -> bool {
    assert!((0..6).contains(&status), "status {status}: {:?}", text());
    assert!(status == 0 || !text().is_empty(), "status {status} without a text");
    status == 0
}

fn text() -> String {
    // SAFETY: a zero-terminated text of this thread.
    unsafe { CStr::from_ptr(msl_last_error()) }.to_string_lossy().into_owned()
}

/// A struct from bytes, its size field as they say, in memory that is larger than any size the library takes.
fn structure<T>(bytes: &mut Bytes) -> Vec<u64> {
    let mut memory = vec![0u8; 1 << 17];
    let given = bytes.take(size_of::<T>() + 16);
    memory[..given.len()].copy_from_slice(given);
    if bytes.u8() < 240 {
        memory[..4].copy_from_slice(&(size_of::<T>() as u32).to_le_bytes());
        memory[size_of::<T>()..].fill(0);
    }
    memory.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or([0; 8]))).collect()
}

/// Tensors of any shape at any address, which nothing follows: the layer is a device's.
fn weights_of_a_device(bytes: &mut Bytes) {
    let names = [c"qkv_gate", c"o", c"router", c"w13", c"w13_gs", c"", c"none of these"];
    let tensors: Vec<MslTensor> = (0..bytes.u8() & 31)
        .map(|_| MslTensor {
            name: match bytes.u8() {
                255 => std::ptr::null(),
                n => names[usize::from(n) % names.len()].as_ptr(),
            },
            data: bytes.u64() as *const c_void,
            dtype: (bytes.u8() % 9) as i32 - 1,
            rank: (bytes.u8() % 7) as i32 - 1,
            shape: std::array::from_fn(|_| if bytes.u8() & 1 == 0 { bytes.near() as i64 } else { bytes.u64() as i64 }),
        })
        .collect();
    let mut options = structure::<MslLayerOptions>(bytes);
    if options[0] >> 32 == 0xFFFF_FFFF {
        options[0] &= 0xFFFF_FFFF; // the CPU would read
    }
    let mut made = std::ptr::null_mut();
    // SAFETY: a struct in memory larger than any size that is taken, an array as long as said.
    unsafe {
        if told(msl_layer_create(options.as_ptr().cast(), tensors.as_ptr(), tensors.len(), &mut made)) {
            msl_layer_destroy(made);
        }
    }
}

/// Arguments of the C ABI: structs of any bytes, tensors of any shape; a step on the CPU whose memory is as large as its
/// plan wants and holds anything, and whose pointers are null or odd now and then.
pub fn capi(data: &[u8]) {
    let mut bytes = Bytes(data);
    weights_of_a_device(&mut bytes);
    let options = structure::<MslPlanOptions>(&mut bytes);
    let mut plan = std::ptr::null_mut();
    // SAFETY: as in `weights_of_a_device`.
    if !told(unsafe { msl_plan_create(layer(), options.as_ptr().cast(), &mut plan) }) {
        assert!(plan.is_null());
        return;
    }
    let field = |offset: usize| (options[offset / 8] >> (8 * (offset % 8))) as u32 as usize;
    let (tokens, requests) = (field(4), field(8));
    let width = field(16);
    // SAFETY: handles that are made here.
    unsafe { assert!(!CStr::from_ptr(msl_plan_text(plan)).is_empty() && msl_plan_workspace_bytes(plan) == 0) };
    if tokens <= 64 && requests <= 64 && width <= 1024 {
        step(&mut bytes, plan, width);
    }
    // SAFETY: as above.
    unsafe { msl_plan_destroy(plan) };
}

fn step(bytes: &mut Bytes, plan: *const MslPlan, width: usize) {
    // A piece of memory for each pointer, as large as the largest tensor of the plans above.
    const PIECE: usize = 1 << 19;
    let mut pieces: Vec<Vec<u64>> = (0..16).map(|_| vec![0u64; PIECE / 8]).collect();
    for piece in &mut pieces {
        let (of, pattern) = (usize::from(bytes.u8()) + 1, [bytes.u64(), bytes.u64()]);
        piece.iter_mut().step_by(of).enumerate().for_each(|(i, word)| *word = pattern[i % 2]);
    }
    let cu_seqlens: Vec<u8> = (0..65).flat_map(|i: i32| i.to_le_bytes()).collect();
    if bytes.u8() & 1 == 0 {
        let words = cu_seqlens.chunks(8).map(|c| c.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)));
        pieces[3].iter_mut().zip(words).for_each(|(to, word)| *to = word);
    }
    let mut next = pieces.iter_mut();
    let mut pointer = || {
        let piece = next.next().expect("a piece").as_mut_ptr().cast::<u8>();
        match bytes.u8() {
            250..=253 => std::ptr::null_mut(),
            254.. => piece.wrapping_add(1).cast::<c_void>(),
            _ => piece.cast::<c_void>(),
        }
    };
    // SAFETY: null pointers and zeros are a step.
    let mut step: MslStep = unsafe { std::mem::zeroed() };
    step.struct_size = size_of::<MslStep>() as u32;
    (step.attn_input, step.positions, step.cache_loc) = (pointer(), pointer(), pointer());
    (step.cu_seqlens_q, step.cache_seqlens, step.page_table) = (pointer(), pointer(), pointer());
    (step.k_scale, step.v_scale, step.k_cache, step.v_cache) = (pointer(), pointer(), pointer(), pointer());
    (step.stream, step.local_start, step.num_tokens_non_padded) = (pointer(), pointer(), pointer());
    (step.topk_ids, step.hidden, step.stream_out) = (pointer(), pointer(), pointer());
    // Within the pieces, below zero, or far past all memory.
    let mut amount = |most: u64| match bytes.u8() {
        n @ 0..=199 => (u64::from(n) % (most + 1)) as i64,
        200..=219 => -(bytes.u64() as i64 & i64::MAX >> 1) - 1,
        _ => i64::MAX - (bytes.u64() & 0xFFFF_FFFF) as i64,
    };
    let extra = amount(1024 - width as u64);
    step.table_stride = if (0..=1024).contains(&extra) { width as i64 + extra } else { extra };
    step.pages = amount(63);
    let mut workspace = std::ptr::null_mut();
    // SAFETY: handles that are made here or by the caller; memory as large as the plan wants, or an address that is
    // refused.
    unsafe {
        told(msl_workspace_create(layer(), bytes.u64(), &mut workspace));
        for call in [msl_forward, msl_attention_block, msl_moe_block, msl_final_block] {
            told(call(layer(), plan, workspace, &step, std::ptr::null_mut()));
        }
        told(msl_forward(layer(), plan, std::ptr::null_mut(), &step, std::ptr::null_mut()));
        msl_workspace_destroy(workspace);
    }
}

type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Target); 5] =
    [("weights", weights), ("checkpoint", checkpoint), ("config", config), ("plan", plan), ("capi", capi)];
