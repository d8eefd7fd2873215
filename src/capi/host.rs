//! A step on the CPU backend: the pointers of `msl_step` are host memory.
#![allow(unsafe_code)]

use super::types::MslStep;
use crate::backend::cpu::{Batch, Cache, StepInput, StepOptions};
use crate::error::{Error, Result};
use crate::layer::DecoderLayer;
use crate::plan::Plan;
use crate::tensor::{DType, HostTensor};
use half::bf16;
use std::ffi::c_void;

/// The address of `n` elements that can be: not null, aligned, within the address space.
fn address<T>(tensor: &str, ptr: *const c_void, n: usize) -> Result<*const T> {
    let limit = (isize::MAX as usize / size_of::<T>()) as u64;
    if n as u64 > limit {
        return Err(Error::Limit { what: format!("elements of {tensor}"), limit, got: n as u64 });
    }
    if ptr.is_null() {
        return Err(Error::Null { tensor: tensor.into() });
    }
    let got = ptr as u64;
    if got % align_of::<T>() as u64 != 0 {
        return Err(Error::Alignment { tensor: tensor.into(), wanted: align_of::<T>(), got });
    }
    Ok(ptr.cast())
}

/// # Safety
/// `ptr` is null or points to `n` elements that live and do not change while the slice is used.
unsafe fn slice<'a, T>(tensor: &str, ptr: *const c_void, n: usize) -> Result<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(address::<T>(tensor, ptr, n)?, n) })
}

/// # Safety
/// As [`slice`], and nothing else uses the memory.
unsafe fn slice_mut<'a, T>(tensor: &str, ptr: *mut c_void, n: usize) -> Result<&'a mut [T]> {
    if n == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(address::<T>(tensor, ptr, n)?.cast_mut(), n) })
}

/// A copy of a named tensor in host memory, of a shape that was checked.
///
/// # Safety
/// `ptr` is null or points to a contiguous tensor of this type and shape.
pub(super) unsafe fn tensor(
    name: &str,
    ptr: *const c_void,
    dtype: DType,
    shape: &[usize],
) -> Result<HostTensor<'static>> {
    let n = shape.iter().product();
    // SAFETY: the caller's promise.
    unsafe {
        Ok(match dtype {
            DType::F32 => HostTensor::f32(shape, slice::<f32>(name, ptr, n)?.to_vec()),
            DType::Bf16 => HostTensor::bf16(shape, slice::<bf16>(name, ptr, n)?.to_vec()),
            DType::E4m3 => HostTensor::e4m3(shape, slice::<u8>(name, ptr, n)?.to_vec()),
            DType::U8 => HostTensor::u8(shape, slice::<u8>(name, ptr, n)?.to_vec()),
            other => return Err(Error::DType { tensor: name.into(), wanted: DType::F32, got: other }),
        })
    }
}

/// [`DecoderLayer::forward_host`].
///
/// # Safety
/// The pointers of `s` are host memory of the shapes that the header gives for the plan and the layer's dimensions.
pub(super) unsafe fn forward(layer: &DecoderLayer, plan: &Plan, s: &MslStep) -> Result<()> {
    let (c, key) = (layer.config(), &plan.key);
    let (t, b, width) = (key.tokens as usize, key.requests as usize, key.table_width as usize);
    let count = |what: &str, n: i64| {
        usize::try_from(n).map_err(|_| Error::Value {
            what: what.into(),
            wanted: "not negative".into(),
            got: n.to_string(),
        })
    };
    if s.tap_count > 0 {
        return Err(Error::Unsupported { backend: "CPU", what: "msl_step.taps".into() });
    }
    match (s.hidden.is_null(), layer.has_next_norm()) {
        (true, true) if t > 0 => return Err(Error::Null { tensor: "hidden".into() }),
        (false, false) => {
            let (wanted, got) = ("none: the layer has no next_pre_attn_norm".into(), "a tensor".into());
            return Err(Error::Value { what: "hidden".into(), wanted, got });
        }
        _ => {}
    }
    let stride = if b > 1 { count("table_stride", s.table_stride)? } else { width };
    let reached = if b == 0 { 0 } else { (b - 1).saturating_mul(stride).saturating_add(width) };
    let row = key.page_size as usize * c.kv_size();
    let pool = count("pages", s.pages)?.saturating_mul(row);
    if (s.k_cache as usize).abs_diff(s.v_cache as usize) < pool {
        return Err(Error::Alias { tensor: "k_cache".into(), other: "v_cache".into() });
    }
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let non_padded = if s.num_tokens_non_padded.is_null() {
            None
        } else {
            Some(slice::<i32>("num_tokens_non_padded", s.num_tokens_non_padded, 1)?[0].max(0) as usize)
        };
        let input = StepInput {
            stream: slice("stream", s.stream, t * c.hidden)?,
            attn_input: slice("attn_input", s.attn_input, t * c.hidden)?,
            batch: Batch {
                positions: slice("positions", s.positions, t)?,
                cache_loc: slice("cache_loc", s.cache_loc, t)?,
                cu_seqlens_q: slice("cu_seqlens_q", s.cu_seqlens_q, b + 1)?,
                cache_seqlens: slice("cache_seqlens", s.cache_seqlens, b)?,
                page_table: slice("page_table", s.page_table, reached)?,
                table_width: width,
                table_stride: stride,
            },
            local_start: slice::<i32>("local_start", s.local_start, 1)?[0],
            num_tokens_non_padded: non_padded,
        };
        let mut cache = Cache {
            k: slice_mut("k_cache", s.k_cache, pool)?,
            v: slice_mut("v_cache", s.v_cache, pool)?,
            page_size: key.page_size as usize,
            k_scale: slice::<f32>("k_scale", s.k_scale, 1)?[0],
            v_scale: slice::<f32>("v_scale", s.v_scale, 1)?[0],
        };
        let (stream, topk_ids) = (
            slice_mut::<f32>("stream (output)", s.stream_out, t * c.hidden)?,
            slice_mut::<i32>("topk_ids", s.topk_ids, t * c.top_k)?,
        );
        let options = StepOptions {
            rank: key.rank as usize,
            skip_slot_zero: key.skip_slot_zero,
            ..StepOptions::new(key.kind, key.query)
        };
        let out = layer.forward_host(&input, &mut cache, &options)?;
        slice_mut::<bf16>("hidden", s.hidden, out.hidden.len())?.copy_from_slice(&out.hidden);
        stream.copy_from_slice(&out.stream);
        topk_ids.copy_from_slice(&out.topk_ids);
    }
    Ok(())
}
