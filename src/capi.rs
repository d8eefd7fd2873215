//! The C ABI of `csrc/include/muse_spark_layer.h`, which documents every function and field.
//!
//! Each function checks its pointers, turns raw addresses into checked views, and returns a status; the
//! text of an error stays with the thread. Panics are caught here and become `MSL_INTERNAL`.
#![allow(unsafe_code)]
#![allow(missing_docs)]

mod host;
mod types;

pub use types::*;

use crate::backend::cuda::model as m;
use crate::config::{LayerConfig, LayerKind, QueryPrecision, Taps, WeightKind};
use crate::error::{Error, Result};
use crate::kv_cache::PagedKvCache;
use crate::layer::{Backend, DecoderLayer};
use crate::plan::{AttentionEngine, Plan, PlanKey, ShortRequests};
use crate::scheduler::{Lengths, SchedulerMetadata};
use crate::step::{
    AttentionInput, DeviceInput, DeviceOutput, DeviceTaps, FfnInput, FinalInput, FinalOutput, MoeInput, MoeOutput, Tap,
};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor, NamedTensors};
use crate::weights::LayerWeights;
use crate::workspace::Workspace;
use std::ffi::{c_char, c_void, CString};
use types::{call, choice, destroy, give, handle, string, take, LAST_ERROR};

/// `MSL_ABI_VERSION`.
pub const ABI_VERSION: u32 = 1;

#[no_mangle]
pub extern "C" fn msl_abi_version() -> u32 {
    ABI_VERSION
}

#[no_mangle]
pub extern "C" fn msl_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[no_mangle]
pub extern "C" fn msl_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}

/// `MSL_CPU`.
const CPU: i32 = -1;

const DTYPES: [DType; 7] = [DType::F32, DType::Bf16, DType::F16, DType::E4m3, DType::U8, DType::I32, DType::I64];

/// Name, type and shape of a tensor.
///
/// # Safety
/// As the header says.
unsafe fn described(t: &MslTensor) -> Result<(String, DType, Vec<usize>)> {
    // SAFETY: the caller's promise.
    let name = unsafe { string("weights[].name", t.name)? };
    let dtype = choice(&format!("{name}: dtype"), t.dtype, &DTYPES)?;
    let bad = |got: String| Error::Value { what: name.clone(), wanted: "0 to 4 extents, none negative".into(), got };
    let extents = usize::try_from(t.rank).ok().and_then(|n| t.shape.get(..n)).ok_or_else(|| bad(t.rank.to_string()))?;
    let shape: Vec<usize> = extents.iter().filter_map(|&n| usize::try_from(n).ok()).collect();
    if shape.len() != extents.len() {
        return Err(bad(format!("{extents:?}")));
    }
    Ok((name, dtype, shape))
}

/// # Safety
/// As the header says: the tensors are host memory for a layer on the CPU, else device memory.
unsafe fn layer_weights<'a>(config: &LayerConfig, given: &[MslTensor], host: bool) -> Result<LayerWeights<'a>> {
    // SAFETY: the caller's promises.
    unsafe {
        let described = given.iter().map(|t| Ok((described(t)?, t.data))).collect::<Result<Vec<_>>>()?;
        if host {
            // Before anything is read by a shape.
            crate::weights::check(config, described.iter().map(|((name, ..), _)| name), |wanted| {
                let found = described.iter().rfind(|((name, ..), _)| name == wanted);
                found.map(|((_, dtype, shape), _)| (*dtype, shape.as_slice()))
            })?;
            let mut tensors = NamedTensors::new();
            for ((name, dtype, shape), data) in described {
                tensors.insert(&name, host::tensor(&name, data, dtype, &shape)?);
            }
            return LayerWeights::from_host(config, tensors);
        }
        let view = |((name, dtype, shape), data): ((String, DType, Vec<usize>), *const c_void)| {
            (name, DeviceTensor::contiguous(data as u64, dtype, &shape))
        };
        LayerWeights::from_device(config, described.into_iter().map(view))
    }
}

/// # Safety
/// `options` is as large as its first field says; `weights` points to `count` tensors; `layer` may be written.
#[no_mangle]
pub unsafe extern "C" fn msl_layer_create(
    options: *const MslLayerOptions,
    weights: *const MslTensor,
    count: usize,
    layer: *mut *mut MslLayer,
) -> i32 {
    call(|| {
        // SAFETY: the caller's promises, here and below.
        unsafe {
            give("layer", layer, || {
                let options = take(options)?;
                let experts = choice("experts", options.experts, &[WeightKind::Nvfp4, WeightKind::Bf16])?;
                let sizes = [LayerConfig::muse_spark_tp8(), LayerConfig::small()];
                let sizes = choice("dimensions", options.dimensions, &[&sizes[0], &sizes[1]])?;
                let config = LayerConfig { experts, ..sizes.clone() };
                if weights.is_null() && count > 0 {
                    return Err(Error::Null { tensor: "weights".into() });
                }
                let given = if count == 0 { &[][..] } else { std::slice::from_raw_parts(weights, count) };
                let host = options.device == CPU;
                let weights = layer_weights(&config, given, host)?;
                let backend = if host { Backend::Cpu } else { Backend::Cuda { device: options.device } };
                Ok(MslLayer(DecoderLayer::new(config, weights, backend)?))
            })
        }
    })
}

/// # Safety
/// `layer` is null or a handle that is not used again.
#[no_mangle]
pub unsafe extern "C" fn msl_layer_destroy(layer: *mut MslLayer) {
    // SAFETY: the caller's promise.
    unsafe { destroy(layer) }
}

/// # Safety
/// `layer` is null or a live handle.
#[no_mangle]
pub unsafe extern "C" fn msl_layer_weight_bytes(layer: *const MslLayer) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { layer.as_ref() }.map_or(0, |l| l.0.weight_bytes())
}

/// # Safety
/// `layer` is a live handle; `options` is as large as its first field says; `plan` may be written.
#[no_mangle]
pub unsafe extern "C" fn msl_plan_create(
    layer: *const MslLayer,
    options: *const MslPlanOptions,
    plan: *mut *mut MslPlan,
) -> i32 {
    call(|| {
        // SAFETY: the caller's promises.
        unsafe {
            give("plan", plan, || {
                let plan = handle("layer", layer)?.0.plan(key(&take(options)?)?)?;
                let text = CString::new(plan.to_string()).unwrap_or_default();
                Ok(MslPlan { plan, text })
            })
        }
    })
}

fn key(o: &MslPlanOptions) -> Result<PlanKey> {
    Ok(PlanKey {
        tokens: o.tokens,
        requests: o.requests,
        max_q_len: o.max_q_len,
        short: (o.short_requests > 0).then_some(ShortRequests {
            requests: o.short_requests,
            tokens: o.short_tokens,
            max_q_len: o.short_max_q_len,
        }),
        table_width: o.table_width,
        page_size: o.page_size,
        kind: choice("kind", o.kind, &[LayerKind::Full, LayerKind::Sliding])?,
        engine: choice("engine", o.engine, &[AttentionEngine::Own, AttentionEngine::Fa3])?,
        query: choice("query", o.query, &[QueryPrecision::Fp16, QueryPrecision::E4m3])?,
        rank: o.rank,
        taps: if o.taps != 0 { Taps::All } else { Taps::None },
        dependent_launch: o.plain_launch == 0,
        route_bound: (o.route_bound > 0).then_some(o.route_bound),
        skip_slot_zero: o.skip_slot_zero != 0,
        synchronize: o.synchronize != 0,
    })
}

/// # Safety
/// `plan` is null or a handle that is not used again.
#[no_mangle]
pub unsafe extern "C" fn msl_plan_destroy(plan: *mut MslPlan) {
    // SAFETY: the caller's promise.
    unsafe { destroy(plan) }
}

/// # Safety
/// `plan` is null or a live handle.
#[no_mangle]
pub unsafe extern "C" fn msl_plan_workspace_bytes(plan: *const MslPlan) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { plan.as_ref() }.map_or(0, |p| p.plan.workspace_bytes)
}

/// # Safety
/// `plan` is null or a live handle.
#[no_mangle]
pub unsafe extern "C" fn msl_plan_text(plan: *const MslPlan) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { plan.as_ref() }.map_or(c"".as_ptr(), |p| p.text.as_ptr())
}

/// # Safety
/// `plan` is null or a live handle.
#[no_mangle]
pub unsafe extern "C" fn msl_plan_metadata_words(plan: *const MslPlan) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { plan.as_ref() }.map_or(0, |p| SchedulerMetadata::words(&p.plan) as u64)
}

/// # Safety
/// `plan` is a live handle; the device pointers are of the documented sizes, the stream is one of their
/// device's; `metadata` may be written.
#[no_mangle]
pub unsafe extern "C" fn msl_scheduler_metadata_prepare(
    plan: *const MslPlan,
    cu_seqlens_q: *const c_void,
    cache_seqlens: *const c_void,
    memory: *mut c_void,
    stream: *mut c_void,
    metadata: *mut *mut MslSchedulerMetadata,
) -> i32 {
    call(|| {
        // SAFETY: the caller's promises.
        unsafe {
            give("metadata", metadata, || {
                let plan = &handle("plan", plan)?.plan;
                let requests = plan.key.requests as usize;
                let words = |ptr: u64, count: usize| DeviceTensor::contiguous(ptr, DType::I32, &[count]);
                let lengths = Lengths {
                    cu_seqlens_q: words(cu_seqlens_q as u64, requests + 1),
                    cache_seqlens: words(cache_seqlens as u64, requests),
                    memory: words(memory as u64, SchedulerMetadata::words(plan)),
                };
                let made = SchedulerMetadata::prepare(plan, &lengths, Stream::from_raw(stream))?;
                Ok(MslSchedulerMetadata(made))
            })
        }
    })
}

/// # Safety
/// `metadata` is null or a handle that is not used again.
#[no_mangle]
pub unsafe extern "C" fn msl_scheduler_metadata_destroy(metadata: *mut MslSchedulerMetadata) {
    // SAFETY: the caller's promise.
    unsafe { destroy(metadata) }
}

/// # Safety
/// `layer` is a live handle; `workspace` may be written.
#[no_mangle]
pub unsafe extern "C" fn msl_workspace_create(
    layer: *const MslLayer,
    bytes: u64,
    workspace: *mut *mut MslWorkspace,
) -> i32 {
    call(|| {
        // SAFETY: the caller's promises.
        unsafe { give("workspace", workspace, || Ok(MslWorkspace(handle("layer", layer)?.0.workspace_of(bytes)?))) }
    })
}

/// # Safety
/// `layer` is a live handle; `memory` is `bytes` of its device's memory; `workspace` may be written.
#[no_mangle]
pub unsafe extern "C" fn msl_workspace_wrap(
    layer: *const MslLayer,
    memory: *mut c_void,
    bytes: u64,
    workspace: *mut *mut MslWorkspace,
) -> i32 {
    call(|| {
        // SAFETY: the caller's promises.
        unsafe {
            give("workspace", workspace, || {
                Ok(MslWorkspace(handle("layer", layer)?.0.workspace_from_raw(memory as u64, bytes)?))
            })
        }
    })
}

/// # Safety
/// `workspace` is null or a handle that is not used again.
#[no_mangle]
pub unsafe extern "C" fn msl_workspace_destroy(workspace: *mut MslWorkspace) {
    // SAFETY: the caller's promise.
    unsafe { destroy(workspace) }
}

/// # Safety
/// `workspace` is null or a live handle.
#[no_mangle]
pub unsafe extern "C" fn msl_workspace_bytes(workspace: *const MslWorkspace) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { workspace.as_ref() }.map_or(0, |w| w.0.bytes())
}

/// Views of a step's raw addresses, shaped as the plan says.
struct Views<'a> {
    step: MslStep,
    plan: &'a Plan,
}

impl Views<'_> {
    fn view(&self, ptr: *const c_void, dtype: DType, shape: &[usize]) -> DeviceTensor {
        // SAFETY: `msl_forward`'s caller promised memory of the documented shapes.
        unsafe { DeviceTensor::contiguous(ptr as u64, dtype, shape) }
    }

    fn optional(&self, ptr: *const c_void, dtype: DType, shape: &[usize]) -> Option<DeviceTensor> {
        (!ptr.is_null()).then(|| self.view(ptr, dtype, shape))
    }

    fn tokens(&self) -> usize {
        self.plan.key.tokens as usize
    }

    fn wide(&self, ptr: *const c_void, dtype: DType) -> DeviceTensor {
        self.view(ptr, dtype, &[self.tokens(), m::HIDDEN as usize])
    }

    fn hidden(&self) -> Option<DeviceTensor> {
        self.optional(self.step.hidden, DType::Bf16, &[self.tokens(), m::HIDDEN as usize])
    }

    fn topk_ids(&self) -> DeviceTensor {
        self.view(self.step.topk_ids, DType::I32, &[self.tokens(), m::TOP_K as usize])
    }

    fn moe_mix(&self) -> DeviceTensor {
        self.view(self.step.moe_mix, DType::Bf16, &[self.tokens(), m::EXPERT_DIM as usize])
    }

    fn non_padded(&self) -> Option<DeviceTensor> {
        self.optional(self.step.num_tokens_non_padded, DType::I32, &[1])
    }

    fn attention(&self) -> Result<AttentionInput> {
        let (s, key) = (&self.step, &self.plan.key);
        let (t, b, width) = (self.tokens(), key.requests as usize, key.table_width as usize);
        let pages = usize::try_from(s.pages).map_err(|_| Error::Value {
            what: "pages".into(),
            wanted: "not negative".into(),
            got: s.pages.to_string(),
        })?;
        // SAFETY: `msl_forward`'s caller promised null or a live handle.
        let metadata = unsafe { s.scheduler_metadata.as_ref() }.map(|m| m.0.clone());
        // SAFETY: as in `view`.
        let (page_table, cache) = unsafe {
            let strides = [s.table_stride, 1];
            (
                DeviceTensor::strided(s.page_table as u64, DType::I32, &[b, width], &strides),
                PagedKvCache::from_raw(s.k_cache as u64, s.v_cache as u64, pages, key.page_size as usize)?,
            )
        };
        Ok(AttentionInput {
            attn_input: self.wide(s.attn_input, DType::Bf16),
            positions: self.view(s.positions, DType::I64, &[t]),
            cache_loc: self.view(s.cache_loc, DType::I64, &[t]),
            cu_seqlens_q: self.view(s.cu_seqlens_q, DType::I32, &[b + 1]),
            cache_seqlens: self.view(s.cache_seqlens, DType::I32, &[b]),
            page_table,
            k_scale: self.view(s.k_scale, DType::F32, &[1]),
            v_scale: self.view(s.v_scale, DType::F32, &[1]),
            cache,
            scheduler_metadata: metadata,
        })
    }

    fn taps(&self) -> Result<DeviceTaps> {
        let mut taps = DeviceTaps::default();
        for i in 0..self.step.tap_count as usize {
            if self.step.taps.is_null() {
                return Err(Error::Null { tensor: "taps".into() });
            }
            // SAFETY: the caller promised `tap_count` taps with zero-terminated names.
            let (tap, data) = unsafe {
                let t = &*self.step.taps.add(i);
                (string("taps[].name", t.name)?.parse::<Tap>()?, t.data)
            };
            taps.set(tap, self.view(data, tap.dtype(), &tap.shape(self.tokens())));
        }
        Ok(taps)
    }
}

/// What the six calls share: handles and step checked, then the call.
///
/// # Safety
/// The handles are live, `workspace` is used by no other call at the same time, `step` is as large as its first field says, its
/// pointers and the stream as the header says.
unsafe fn stepped(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    stream: *mut c_void,
    run: impl FnOnce(&DecoderLayer, &Plan, &mut Workspace, &Views, Stream) -> Result<()>,
) -> i32 {
    call(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let layer = &handle("layer", layer)?.0;
            let plan = &handle("plan", plan)?.plan;
            let workspace = workspace.as_mut().ok_or_else(|| Error::Null { tensor: "workspace".into() })?;
            let views = Views { step: take(step)?, plan };
            run(layer, plan, &mut workspace.0, &views, Stream::from_raw(stream))
        }
    })
}

/// Segments are the GPU's.
fn on_device(layer: &DecoderLayer) -> Result<()> {
    match layer.backend() {
        Backend::Cpu => Err(Error::Unsupported { backend: "CPU", what: "a segment (msl_forward is there)".into() }),
        Backend::Cuda { .. } => Ok(()),
    }
}

/// # Safety
/// The handles are live, no other call uses `workspace` at the same time, and `step`, its pointers and the
/// stream are as the header says.
#[no_mangle]
pub unsafe extern "C" fn msl_forward(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        stepped(layer, plan, workspace, step, stream, |layer, plan, workspace, v, stream| {
            if layer.backend() == Backend::Cpu {
                return host::forward(layer, plan, &v.step);
            }
            let input = DeviceInput {
                attention: v.attention()?,
                stream: v.wide(v.step.stream, DType::F32),
                local_start: v.view(v.step.local_start, DType::I32, &[1]),
                num_tokens_non_padded: v.non_padded(),
            };
            let output = DeviceOutput {
                hidden: v.hidden(),
                stream: v.wide(v.step.stream_out, DType::F32),
                topk_ids: v.topk_ids(),
                taps: v.taps()?,
            };
            layer.forward(plan, workspace, &input, &output, stream)
        })
    }
}

/// # Safety
/// The handles are live, no other call uses `workspace` at the same time, and `step`, its pointers and the
/// stream are as the header says.
#[no_mangle]
pub unsafe extern "C" fn msl_attention_block(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        stepped(layer, plan, workspace, step, stream, |layer, plan, workspace, v, stream| {
            on_device(layer)?;
            let attn_out = v.wide(v.step.attn_out, DType::Bf16);
            layer.attention_block(plan, workspace, &v.attention()?, &attn_out, stream)
        })
    }
}

/// # Safety
/// The handles are live, no other call uses `workspace` at the same time, and `step`, its pointers and the
/// stream are as the header says.
#[no_mangle]
pub unsafe extern "C" fn msl_moe_block(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        stepped(layer, plan, workspace, step, stream, |layer, plan, workspace, v, stream| {
            on_device(layer)?;
            let input = MoeInput {
                stream: v.wide(v.step.stream, DType::F32),
                attn_out: v.wide(v.step.attn_out, DType::Bf16),
                local_start: v.view(v.step.local_start, DType::I32, &[1]),
                num_tokens_non_padded: v.non_padded(),
            };
            let output = MoeOutput {
                stream_after_attn: v.wide(v.step.stream_after_attn, DType::F32),
                topk_ids: v.topk_ids(),
                moe_mix: v.moe_mix(),
            };
            layer.moe_block(plan, workspace, &input, &output, stream)
        })
    }
}

/// # Safety
/// The handles are live, no other call uses `workspace` at the same time, and `step`, its pointers and the
/// stream are as the header says.
#[no_mangle]
pub unsafe extern "C" fn msl_final_block(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        stepped(layer, plan, workspace, step, stream, |layer, plan, workspace, v, stream| {
            on_device(layer)?;
            let input =
                FinalInput { stream_after_attn: v.wide(v.step.stream_after_attn, DType::F32), moe_mix: v.moe_mix() };
            let output = FinalOutput { hidden: v.hidden(), stream: v.wide(v.step.stream_out, DType::F32) };
            layer.final_block(plan, workspace, &input, &output, stream)
        })
    }
}

/// # Safety
/// As `msl_final_block`; `slice` is FP32 `[T, 1024]` of the layer's device.
#[no_mangle]
pub unsafe extern "C" fn msl_unpool_block(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    slice: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        stepped(layer, plan, workspace, step, stream, |layer, plan, workspace, v, stream| {
            let slice = v.view(slice, DType::F32, &[v.tokens(), m::UNPOOL_SLICE as usize]);
            layer.unpool_block(plan, workspace, &v.moe_mix(), &slice, stream)
        })
    }
}

/// # Safety
/// As `msl_final_block`; `slices` is FP32 `[ranks, T, 1024]` of the layer's device.
#[no_mangle]
pub unsafe extern "C" fn msl_ffn_block(
    layer: *const MslLayer,
    plan: *const MslPlan,
    workspace: *mut MslWorkspace,
    step: *const MslStep,
    slices: *const c_void,
    ranks: u32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        stepped(layer, plan, workspace, step, stream, |layer, plan, workspace, v, stream| {
            let input = FfnInput {
                stream_after_attn: v.wide(v.step.stream_after_attn, DType::F32),
                slices: v.view(slices, DType::F32, &[ranks as usize, v.tokens(), m::UNPOOL_SLICE as usize]),
            };
            let output = FinalOutput { hidden: v.hidden(), stream: v.wide(v.step.stream_out, DType::F32) };
            layer.ffn_block(plan, workspace, &input, &output, stream)
        })
    }
}
