//! The C ABI on the CPU: a step through the header's structs gives the bits of the Rust API; what does not fit is a
//! status and a text; Python's example runs.
#![allow(unsafe_code)]

use muse_spark_layer::backend::cpu::StepOptions;
use muse_spark_layer::capi::*;
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, LayerConfig, LayerKind, LayerWeights, NamedTensors, QueryPrecision, WeightKind,
};
use rstest::rstest;
use std::ffi::{c_void, CStr, CString};
use std::mem::size_of;
use std::path::Path;
use std::process::Command;

const MSL_CPU: i32 = -1;
const MSL_SMALL: i32 = 1;

fn last_error() -> String {
    // SAFETY: a zero-terminated string of this thread.
    unsafe { CStr::from_ptr(msl_last_error()) }.to_string_lossy().into_owned()
}

/// Handles of a layer, a plan and a workspace.
struct Made {
    layer: *mut MslLayer,
    plan: *mut MslPlan,
    workspace: *mut MslWorkspace,
}

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: made by `make`, not used again.
        unsafe {
            msl_workspace_destroy(self.workspace);
            msl_plan_destroy(self.plan);
            msl_layer_destroy(self.layer);
        }
    }
}

fn create(config: &LayerConfig, tensors: &NamedTensors, layer: &mut *mut MslLayer) -> i32 {
    let names: Vec<CString> = tensors.0.keys().map(|name| CString::new(name.as_str()).unwrap()).collect();
    let given: Vec<MslTensor> = tensors
        .0
        .values()
        .zip(&names)
        .map(|(t, name)| {
            let mut shape = [0; 4];
            shape.iter_mut().zip(&t.shape).for_each(|(to, from)| *to = *from as i64);
            let dtype = match t.dtype() {
                DType::F32 => 0,
                DType::Bf16 => 1,
                DType::E4m3 => 3,
                _ => 4,
            };
            MslTensor { name: name.as_ptr(), data: t.bytes().as_ptr().cast(), dtype, rank: t.shape.len() as i32, shape }
        })
        .collect();
    let options = MslLayerOptions {
        struct_size: size_of::<MslLayerOptions>() as u32,
        device: MSL_CPU,
        experts: (config.experts == WeightKind::Bf16) as i32,
        dimensions: MSL_SMALL,
    };
    // SAFETY: live arguments.
    unsafe { msl_layer_create(&options, given.as_ptr(), given.len(), layer) }
}

fn make(config: &LayerConfig, tensors: &NamedTensors, step: &SyntheticStep, kind: LayerKind, skip: bool) -> Made {
    let mut made = Made { layer: std::ptr::null_mut(), plan: std::ptr::null_mut(), workspace: std::ptr::null_mut() };
    assert_eq!(create(config, tensors, &mut made.layer), 0, "{}", last_error());
    // SAFETY: all-zero options are valid, as the header says.
    let options = MslPlanOptions {
        struct_size: size_of::<MslPlanOptions>() as u32,
        tokens: step.input.positions.len() as u32,
        requests: step.input.cache_seqlens.len() as u32,
        max_q_len: step.input.positions.len() as u32,
        table_width: step.input.table_width as u32,
        page_size: step.cache.page_size as u32,
        kind: (kind == LayerKind::Sliding) as i32,
        skip_slot_zero: skip as i32,
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: live arguments.
    unsafe {
        assert_eq!(msl_plan_create(made.layer, &options, &mut made.plan), 0, "{}", last_error());
        let bytes = msl_plan_workspace_bytes(made.plan);
        assert_eq!((bytes, msl_workspace_create(made.layer, bytes, &mut made.workspace)), (0, 0), "{}", last_error());
    }
    made
}

/// Memory that a step writes.
struct Outputs {
    hidden: Vec<u16>,
    stream: Vec<f32>,
    topk_ids: Vec<i32>,
}

fn step_of(step: &mut SyntheticStep, out: &mut Outputs, scalars: &[f32; 2], ints: &[i32; 2]) -> MslStep {
    let row = LayerConfig::small().kv_size();
    let pages = step.cache.k.len() / row / step.cache.page_size;
    fn at<T>(x: &[T]) -> *const c_void {
        x.as_ptr().cast()
    }
    // SAFETY: null pointers and zeros.
    let zero: MslStep = unsafe { std::mem::zeroed() };
    MslStep {
        struct_size: size_of::<MslStep>() as u32,
        attn_input: at(&step.input.attn_input),
        positions: at(&step.input.positions),
        cache_loc: at(&step.input.cache_loc),
        cu_seqlens_q: at(&step.input.cu_seqlens_q),
        cache_seqlens: at(&step.input.cache_seqlens),
        page_table: at(&step.input.page_table),
        table_stride: step.input.table_width as i64,
        k_scale: at(&scalars[..1]),
        v_scale: at(&scalars[1..]),
        k_cache: step.cache.k.as_mut_ptr().cast(),
        v_cache: step.cache.v.as_mut_ptr().cast(),
        pages: pages as i64,
        stream: at(&step.input.stream),
        local_start: at(&ints[..1]),
        num_tokens_non_padded: at(&ints[1..]),
        topk_ids: out.topk_ids.as_mut_ptr().cast(),
        hidden: out.hidden.as_mut_ptr().cast(),
        stream_out: out.stream.as_mut_ptr().cast(),
        ..zero
    }
}

fn outputs(config: &LayerConfig, tokens: usize) -> Outputs {
    Outputs {
        hidden: vec![0xFFFF; tokens * config.hidden],
        stream: vec![f32::NAN; tokens * config.hidden],
        topk_ids: vec![-1; tokens * config.top_k],
    }
}

#[rstest]
fn a_step_is_the_rust_step(
    #[values(WeightKind::Nvfp4, WeightKind::Bf16)] experts: WeightKind,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(&[1, 1, 1], &[1, 0, 30, 8])] q_lens: &[usize],
    #[values(false, true)] skip_slot_zero: bool,
) {
    let config = LayerConfig { experts, ..LayerConfig::small() };
    let tensors = synthetic::weights(&config, 31).unwrap();
    let spec = StepSpec {
        q_lens: q_lens.to_vec(),
        page_size: 4,
        k_scale: 0.37,
        v_scale: 2.9,
        ..StepSpec::new(1, 1, 40, kind)
    };
    let mut step = synthetic::step(&config, &spec, 31).unwrap();
    step.input.cache_loc[0] = 0;
    let (tokens, local_start) = (step.input.positions.len(), 24);
    let layer =
        DecoderLayer::new(config.clone(), LayerWeights::from_host(&config, tensors.view()).unwrap(), Backend::Cpu);
    let options = StepOptions { skip_slot_zero, ..StepOptions::new(kind, QueryPrecision::Fp16) };
    let mut cache = step.cache.clone();
    let mut input = step.input.view();
    (input.local_start, input.num_tokens_non_padded) = (local_start, Some(tokens - 1));
    let want = layer.unwrap().forward_host(&input, &mut cache.view(), &options).unwrap();

    let made = make(&config, &tensors, &step, kind, skip_slot_zero);
    let mut out = outputs(&config, tokens);
    let given = step_of(&mut step, &mut out, &[0.37, 2.9], &[local_start, tokens as i32 - 1]);
    // SAFETY: live handles and memory of the shapes that the header gives.
    let status = unsafe { msl_forward(made.layer, made.plan, made.workspace, &given, std::ptr::null_mut()) };
    assert_eq!(status, 0, "{}", last_error());
    assert_eq!(out.stream, want.stream);
    assert_eq!(out.hidden, want.hidden.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
    assert_eq!(out.topk_ids, want.topk_ids);
    assert!(step.cache == cache, "caches");
}

#[test]
fn what_does_not_fit_is_a_status_and_a_text() {
    let (config, kind) = (LayerConfig::small(), LayerKind::Full);
    let tensors = synthetic::weights(&config, 32).unwrap();
    let mut step = synthetic::step(&config, &StepSpec::new(2, 1, 10, kind), 32).unwrap();
    let made = make(&config, &tensors, &step, kind, false);
    let mut out = outputs(&config, 2);
    let good = step_of(&mut step, &mut out, &[1.0, 1.0], &[0, 2]);
    type Call =
        unsafe extern "C" fn(*const MslLayer, *const MslPlan, *mut MslWorkspace, *const MslStep, *mut c_void) -> i32;
    let refused = |call: Call, step: MslStep| {
        // SAFETY: live handles; what is wrong is refused before it is used.
        let status = unsafe { call(made.layer, made.plan, made.workspace, &step, std::ptr::null_mut()) };
        (status, last_error())
    };
    let null = std::ptr::null();
    let text = |s: &str| s.to_string();
    assert_eq!(refused(msl_forward, MslStep { stream: null, ..good }), (1, text("stream: null pointer")));
    assert_eq!(refused(msl_forward, MslStep { hidden: null.cast_mut(), ..good }), (1, text("hidden: null pointer")));
    let odd = good.positions.wrapping_byte_add(4);
    let (status, error) = refused(msl_forward, MslStep { positions: odd, ..good });
    assert!(status == 1 && error.starts_with("positions: wanted an address aligned to 8 bytes"), "{error}");
    let bad = MslStep { pages: -1, ..good };
    assert_eq!(refused(msl_forward, bad), (1, text("pages: wanted not negative, got -1")));
    let bad = MslStep { table_stride: 3, ..good };
    let (status, error) = refused(msl_forward, bad);
    assert!(status == 1 && error.starts_with("page_table: wanted a row stride of at least 11"), "{error}");
    let bad = MslStep { tap_count: 1, ..good };
    assert_eq!(refused(msl_forward, bad), (3, text("CPU backend: msl_step.taps is not supported")));
    let borders = MslStep { attn_out: good.stream_out, ..good };
    let (status, error) = refused(msl_attention_block, borders);
    assert_eq!((status, &error[..]), (3, "CPU backend: a segment (msl_forward is there) is not supported"));
    // And the handles are as good as before.
    assert_eq!(refused(msl_forward, good).0, 0);
}

/// Weights are checked as everywhere, and a caller whose header knew no `dimensions` gets the released ones.
#[test]
fn weights_and_older_callers() {
    let config = LayerConfig::small();
    let mut tensors = synthetic::weights(&config, 33).unwrap();
    let mut layer = std::ptr::null_mut();
    tensors.0.remove("o");
    assert_eq!(create(&config, &tensors, &mut layer), 1);
    assert_eq!(last_error(), "o: missing");
    assert!(layer.is_null());
    let old = MslLayerOptions { struct_size: 12, device: MSL_CPU, experts: 0, dimensions: MSL_SMALL };
    let (name, small) = (c"qkv_gate", [0u16; 192 * 64]);
    let shape = [192, 64, 0, 0];
    let qkv_gate = MslTensor { name: name.as_ptr(), data: small.as_ptr().cast(), dtype: 1, rank: 2, shape };
    // SAFETY: live arguments.
    assert_eq!(unsafe { msl_layer_create(&old, &qkv_gate, 1, &mut layer) }, 1);
    assert_eq!(last_error(), "qkv_gate: wanted shape [2304, 8192], got [192, 64]", "the last field is not read");
}

#[test]
fn python_s_example_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Built with the tests, beside them.
    let library = std::env::current_exe().unwrap().with_file_name("libmuse_spark_layer.so");
    assert!(library.exists(), "no {}", library.display());
    let run = Command::new("python3")
        .arg(root.join("python/examples/cpu_step.py"))
        .env("MUSE_SPARK_LAYER_LIB", &library)
        .env("PYTHONPATH", root.join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output();
    let run = match run {
        Ok(run) => run,
        Err(error) => return eprintln!("skipped: no python3: {error}"),
    };
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{out}{err}");
    assert!(out.contains("token 0 goes to experts") && out.contains("refused: stream: null pointer"), "{out}");
}
