//! DLPack tensors (PyTorch, CuPy, JAX, ...) as a step's tensors, through the crate `dlpark` (feature `dlpack`).
//!
//! A producer's managed tensor is taken over with [`dlpark::Managed::from_raw`] (legacy or versioned), which calls
//! its deleter when dropped; [`view`] checks what DLPack says about it and gives the view that a step takes.
//! Shapes and strides are checked by the step itself, as for every other tensor.
//!
//! Streams: DLPack hands over memory, not order. What the producer queued to fill a tensor must come before the
//! step on the step's stream (`__dlpack__(stream=...)` in Python does that).
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceTensor};
pub use dlpark;
use dlpark::ffi::{DLDataType, DLDeviceType};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};

/// What a step does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// An input.
    Read,
    /// An output, or a cache.
    Write,
}

/// Element types by their DLPack descriptors.
const DTYPES: [(DLDataType, DType); 8] = [
    (DLDataType::F32, DType::F32),
    (DLDataType::BF16, DType::Bf16),
    (DLDataType::F16, DType::F16),
    (DLDataType::F8E4M3FN, DType::E4m3),
    (DLDataType::F8E4M3, DType::E4m3),
    (DLDataType::U8, DType::U8),
    (DLDataType::I32, DType::I32),
    (DLDataType::I64, DType::I64),
];

/// A view of `managed` for a step on device `device`; `tensor` names it in errors.
///
/// Refused by name: a descriptor that is not valid, element types that no step takes ([`Error::Value`]), memory of
/// the host ([`Error::Memory`]) or of another GPU ([`Error::Device`]), negative strides ([`Error::Stride`]), and
/// a read-only tensor where a step writes ([`Error::Value`]).
///
/// # Safety
/// As [`DeviceTensor::strided`]: `managed`, or whoever owns the memory, lives until the work of every step that
/// takes the view has finished, graphs included.
pub unsafe fn view<M: ManagedTensorBase>(
    tensor: &str,
    managed: &Managed<M>,
    device: i32,
    access: Access,
) -> Result<DeviceTensor> {
    let invalid = |what: &str, wanted: &str, got: String| Error::Value {
        what: if what.is_empty() { tensor.into() } else { format!("{tensor}: {what}") },
        wanted: wanted.into(),
        got,
    };
    let valid = managed.validate().map_err(|e| invalid("", "a valid DLPack tensor", e.to_string()))?;
    // SAFETY: `Managed::from_raw`'s caller promised a readable descriptor that does not change.
    let raw = unsafe { managed.tensor() };
    match raw.device.device_type {
        DLDeviceType::CUDA if raw.device.device_id != device => {
            return Err(Error::Device { tensor: tensor.into(), wanted: device, got: raw.device.device_id });
        }
        DLDeviceType::CUDA | DLDeviceType::CUDAMANAGED => {}
        other => {
            let got = match other {
                DLDeviceType::CPU => "host",
                DLDeviceType::CUDAHOST => "pinned host",
                _ => "another kind of",
            };
            return Err(Error::Memory { tensor: tensor.into(), wanted: "device", got });
        }
    }
    let dtype = DTYPES.iter().find(|(descriptor, _)| descriptor.matches(raw.dtype)).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| {
        let DLDataType { code, bits, lanes } = raw.dtype;
        invalid("dtype", "f32, bf16, f16, e4m3, u8, i32 or i64", format!("code {}, {bits} bits, {lanes} lanes", code.0))
    })?;
    if access == Access::Write && managed.flags().contains(DlpackFlags::READ_ONLY) {
        return Err(invalid("", "a tensor that may be written", "a read-only one".into()));
    }
    let shape: Vec<usize> = valid.shape().iter().map(|&n| n as usize).collect();
    let address = (raw.data as u64).wrapping_add(raw.byte_offset);
    let Some(strides) = valid.strides() else {
        // SAFETY: the caller's promise.
        return Ok(unsafe { DeviceTensor::contiguous(address, dtype, &shape) });
    };
    if strides.iter().zip(&shape).any(|(&s, &n)| s < 0 && n > 1) {
        let (wanted, got) = ("strides that are not negative".into(), strides.to_vec());
        return Err(Error::Stride { tensor: tensor.into(), wanted, got });
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { DeviceTensor::strided(address, dtype, &shape, strides) })
}
