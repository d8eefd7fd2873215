//! Plain tensors: named host arrays (weights, goldens, checkpoints) and views of raw device memory.
//!
//! Device memory is described by address, shape and strides; nothing here allocates or touches it.

#![allow(unsafe_code)] // byte views of plain element types, and unsafe constructors of device views

use crate::error::{Error, Result};
use half::{bf16, f16};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// Element types that the layer reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum DType {
    /// IEEE FP32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE FP16.
    F16,
    /// FP8 E4M3 without infinities, as bytes.
    E4m3,
    /// Bytes; NVFP4 codes are two to a byte, low nibble first.
    U8,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
}

impl DType {
    /// Bytes an element takes.
    pub const fn size(self) -> usize {
        match self {
            DType::E4m3 | DType::U8 => 1,
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::I64 => 8,
        }
    }

    /// The name, lower case.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::E4m3 => "e4m3",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Elements of a host tensor, owned or borrowed.
#[derive(Clone, Debug, PartialEq)]
pub enum HostData<'a> {
    /// FP32 elements.
    F32(Cow<'a, [f32]>),
    /// BF16 elements.
    Bf16(Cow<'a, [bf16]>),
    /// FP16 elements.
    F16(Cow<'a, [f16]>),
    /// E4M3 bit patterns.
    E4m3(Cow<'a, [u8]>),
    /// Bytes.
    U8(Cow<'a, [u8]>),
    /// 32-bit integers.
    I32(Cow<'a, [i32]>),
    /// 64-bit integers.
    I64(Cow<'a, [i64]>),
}

/// A contiguous row-major host tensor. It carries no name: [`NamedTensors`] does.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor<'a> {
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// `shape.iter().product()` elements.
    pub data: HostData<'a>,
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident, $get:ident, $variant:ident, $t:ty;)*) => {
        impl<'a> HostTensor<'a> {
            $($(#[$doc])*
            pub fn $name(shape: &[usize], data: impl Into<Cow<'a, [$t]>>) -> HostTensor<'a> {
                let data = data.into();
                assert_eq!(elements(shape), data.len(), "shape {shape:?} against {} elements", data.len());
                HostTensor { shape: shape.to_vec(), data: HostData::$variant(data) }
            }

            /// The elements, or an error that names the tensor when they are of another type.
            pub fn $get(&self, tensor: &str) -> Result<&[$t]> {
                match &self.data {
                    HostData::$variant(x) => Ok(x),
                    _ => Err(Error::DType { tensor: tensor.into(), wanted: DType::$variant, got: self.dtype() }),
                }
            })*
        }
    };
}

constructors! {
    /// An FP32 tensor. Panics when `shape` and the number of elements disagree, as all of these do.
    f32, as_f32, F32, f32;
    /// A BF16 tensor.
    bf16, as_bf16, Bf16, bf16;
    /// An FP16 tensor.
    f16, as_f16, F16, f16;
    /// An E4M3 tensor, as bytes.
    e4m3, as_e4m3, E4m3, u8;
    /// A tensor of bytes.
    u8, as_u8, U8, u8;
    /// An i32 tensor.
    i32, as_i32, I32, i32;
    /// An i64 tensor.
    i64, as_i64, I64, i64;
}

/// The product of extents; `usize::MAX` where it does not fit, which no memory has.
fn elements(shape: &[usize]) -> usize {
    shape.iter().fold(1, |n, &extent| n.saturating_mul(extent))
}

/// Types whose slices may be read as bytes and back.
trait Plain: Copy + 'static {}
impl Plain for f32 {}
impl Plain for bf16 {}
impl Plain for f16 {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for i64 {}

fn to_bytes<T: Plain>(x: &[T]) -> &[u8] {
    // SAFETY: `Plain` types have no padding and every byte of theirs is initialised.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), std::mem::size_of_val(x)) }
}

fn to_bytes_mut<T: Plain>(x: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `to_bytes`, and every bit pattern is a value of a `Plain` type.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), std::mem::size_of_val(x)) }
}

fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<&[T]> {
    // SAFETY: every bit pattern is a value of a `Plain` type; `align_to` keeps to aligned elements.
    let (head, middle, tail) = unsafe { bytes.align_to::<T>() };
    (head.is_empty() && tail.is_empty()).then_some(middle)
}

impl<'a> HostTensor<'a> {
    /// A view of little-endian bytes, as a memory-mapped file holds them. Checks length and alignment.
    pub fn from_bytes(tensor: &str, dtype: DType, shape: &[usize], bytes: &'a [u8]) -> Result<HostTensor<'a>> {
        let wanted = elements(shape).saturating_mul(dtype.size());
        if bytes.len() != wanted {
            return Err(Error::Value {
                what: format!("{tensor}: bytes of {dtype} {shape:?}"),
                wanted: wanted.to_string(),
                got: bytes.len().to_string(),
            });
        }
        fn cast<'a, T: Plain>(tensor: &str, bytes: &'a [u8]) -> Result<Cow<'a, [T]>> {
            from_bytes::<T>(bytes).map(Cow::Borrowed).ok_or_else(|| Error::Alignment {
                tensor: tensor.into(),
                wanted: std::mem::align_of::<T>(),
                got: bytes.as_ptr() as u64,
            })
        }
        let data = match dtype {
            DType::F32 => HostData::F32(cast(tensor, bytes)?),
            DType::Bf16 => HostData::Bf16(cast(tensor, bytes)?),
            DType::F16 => HostData::F16(cast(tensor, bytes)?),
            DType::E4m3 => HostData::E4m3(Cow::Borrowed(bytes)),
            DType::U8 => HostData::U8(Cow::Borrowed(bytes)),
            DType::I32 => HostData::I32(cast(tensor, bytes)?),
            DType::I64 => HostData::I64(cast(tensor, bytes)?),
        };
        Ok(HostTensor { shape: shape.to_vec(), data })
    }

    /// The elements as bytes, in this machine's order.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            HostData::F32(x) => to_bytes(x),
            HostData::Bf16(x) => to_bytes(x),
            HostData::F16(x) => to_bytes(x),
            HostData::E4m3(x) | HostData::U8(x) => x,
            HostData::I32(x) => to_bytes(x),
            HostData::I64(x) => to_bytes(x),
        }
    }

    /// Zeros.
    pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> HostTensor<'static> {
        let n = shape.iter().product();
        match dtype {
            DType::F32 => HostTensor::f32(shape, vec![0.0; n]),
            DType::Bf16 => HostTensor::bf16(shape, vec![bf16::ZERO; n]),
            DType::F16 => HostTensor::f16(shape, vec![f16::ZERO; n]),
            DType::E4m3 => HostTensor::e4m3(shape, vec![0; n]),
            DType::U8 => HostTensor::u8(shape, vec![0; n]),
            DType::I32 => HostTensor::i32(shape, vec![0; n]),
            DType::I64 => HostTensor::i64(shape, vec![0; n]),
        }
    }

    /// The elements as bytes to be written, in this machine's order. Borrowed elements are copied first.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.data {
            HostData::F32(x) => to_bytes_mut(x.to_mut()),
            HostData::Bf16(x) => to_bytes_mut(x.to_mut()),
            HostData::F16(x) => to_bytes_mut(x.to_mut()),
            HostData::E4m3(x) | HostData::U8(x) => x.to_mut(),
            HostData::I32(x) => to_bytes_mut(x.to_mut()),
            HostData::I64(x) => to_bytes_mut(x.to_mut()),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self.data {
            HostData::F32(_) => DType::F32,
            HostData::Bf16(_) => DType::Bf16,
            HostData::F16(_) => DType::F16,
            HostData::E4m3(_) => DType::E4m3,
            HostData::U8(_) => DType::U8,
            HostData::I32(_) => DType::I32,
            HostData::I64(_) => DType::I64,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        elements(&self.shape)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Floating-point elements as FP32 (BF16 and FP16 widen exactly).
    pub fn to_f32(&self, tensor: &str) -> Result<Vec<f32>> {
        Ok(match &self.data {
            HostData::F32(x) => x.to_vec(),
            HostData::Bf16(x) => x.iter().map(|v| v.to_f32()).collect(),
            HostData::F16(x) => x.iter().map(|v| v.to_f32()).collect(),
            HostData::E4m3(x) => x.iter().map(|&v| crate::numerics::e4m3_to_f32(v)).collect(),
            _ => return Err(Error::DType { tensor: tensor.into(), wanted: DType::F32, got: self.dtype() }),
        })
    }

    /// Checks type and shape.
    pub fn expect(&self, tensor: &str, dtype: DType, shape: &[usize]) -> Result<()> {
        if self.dtype() != dtype {
            return Err(Error::DType { tensor: tensor.into(), wanted: dtype, got: self.dtype() });
        }
        if self.shape != shape {
            return Err(Error::Shape { tensor: tensor.into(), wanted: shape.to_vec(), got: self.shape.clone() });
        }
        Ok(())
    }

    /// The same tensor with its elements owned.
    pub fn into_owned(self) -> HostTensor<'static> {
        let data = match self.data {
            HostData::F32(x) => HostData::F32(Cow::Owned(x.into_owned())),
            HostData::Bf16(x) => HostData::Bf16(Cow::Owned(x.into_owned())),
            HostData::F16(x) => HostData::F16(Cow::Owned(x.into_owned())),
            HostData::E4m3(x) => HostData::E4m3(Cow::Owned(x.into_owned())),
            HostData::U8(x) => HostData::U8(Cow::Owned(x.into_owned())),
            HostData::I32(x) => HostData::I32(Cow::Owned(x.into_owned())),
            HostData::I64(x) => HostData::I64(Cow::Owned(x.into_owned())),
        };
        HostTensor { shape: self.shape, data }
    }

    /// A view of this tensor.
    pub fn view(&self) -> HostTensor<'_> {
        let data = match &self.data {
            HostData::F32(x) => HostData::F32(Cow::Borrowed(x)),
            HostData::Bf16(x) => HostData::Bf16(Cow::Borrowed(x)),
            HostData::F16(x) => HostData::F16(Cow::Borrowed(x)),
            HostData::E4m3(x) => HostData::E4m3(Cow::Borrowed(x)),
            HostData::U8(x) => HostData::U8(Cow::Borrowed(x)),
            HostData::I32(x) => HostData::I32(Cow::Borrowed(x)),
            HostData::I64(x) => HostData::I64(Cow::Borrowed(x)),
        };
        HostTensor { shape: self.shape.clone(), data }
    }
}

/// Host tensors by name, as a layer's weights, a checkpoint or a golden file hold them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedTensors<'a>(pub BTreeMap<String, HostTensor<'a>>);

impl<'a> NamedTensors<'a> {
    /// No tensors yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: &str, tensor: HostTensor<'a>) {
        self.0.insert(name.to_string(), tensor);
    }

    /// The tensor, or [`Error::Missing`].
    pub fn get(&self, name: &str) -> Result<&HostTensor<'a>> {
        self.0.get(name).ok_or_else(|| Error::Missing { tensor: name.into() })
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Views of all tensors.
    pub fn view(&self) -> NamedTensors<'_> {
        NamedTensors(self.0.iter().map(|(k, v)| (k.clone(), v.view())).collect())
    }
}

/// A view of device memory: address, shape and strides. Copying it copies no data; it keeps nothing
/// alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    ptr: u64,
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<i64>,
}

impl DeviceTensor {
    /// A row-major contiguous view.
    ///
    /// # Safety
    /// `ptr` must be the address of `shape.iter().product()` elements of `dtype` in device memory that
    /// stay valid (and, for an output, unshared) until the work queued on the stream of every call that
    /// takes this view has finished.
    pub unsafe fn contiguous(ptr: u64, dtype: DType, shape: &[usize]) -> DeviceTensor {
        let mut strides = vec![1i64; shape.len()];
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i].saturating_mul(i64::try_from(shape[i]).unwrap_or(i64::MAX));
        }
        DeviceTensor { ptr, dtype, shape: shape.to_vec(), strides }
    }

    /// A view with strides in elements, outermost first.
    ///
    /// # Safety
    /// As [`DeviceTensor::contiguous`], for every element that shape and strides reach.
    pub unsafe fn strided(ptr: u64, dtype: DType, shape: &[usize], strides: &[i64]) -> DeviceTensor {
        DeviceTensor { ptr, dtype, shape: shape.to_vec(), strides: strides.to_vec() }
    }

    /// A row-major view of a whole cudarc slice. Made once and used for every step: neither this view nor a step
    /// records events, and no event is waited for but the slice's own, on its own stream, here.
    ///
    /// # Safety
    /// As [`DeviceTensor::contiguous`]: the slice outlives the work that takes the view, which cudarc does not see.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_slice<T>(
        tensor: &str,
        slice: &cudarc::driver::CudaSlice<T>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<DeviceTensor> {
        use cudarc::driver::DevicePtr;
        let (bytes, wanted) = (slice.num_bytes(), shape.iter().product::<usize>() * dtype.size());
        if bytes != wanted {
            let (wanted, got) = (shape.to_vec(), vec![bytes / dtype.size()]);
            return Err(Error::Shape { tensor: tensor.into(), wanted, got });
        }
        let (ptr, record) = slice.device_ptr(slice.stream());
        std::mem::forget(record);
        // SAFETY: the caller's promise.
        Ok(unsafe { DeviceTensor::contiguous(ptr, dtype, shape) })
    }

    /// The device address.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// The address past the last element reached; the last address there is for a view that goes beyond.
    pub(crate) fn end(&self) -> u64 {
        self.ptr.saturating_add(self.span_bytes())
    }

    /// Whether some byte may belong to both.
    pub(crate) fn overlaps(&self, other: &DeviceTensor) -> bool {
        self.ptr < other.end() && other.ptr < self.end()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides in elements, outermost first.
    pub fn strides(&self) -> &[i64] {
        &self.strides
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        elements(&self.shape)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The part of a view along its first extent: `self[i]`. Past the end it is empty.
    pub(crate) fn index(&self, i: usize) -> DeviceTensor {
        let (shape, strides) = (self.shape.get(1..).unwrap_or(&[]), self.strides.get(1..).unwrap_or(&[]));
        let inside = self.shape.first().is_some_and(|n| i < *n);
        let step = self.strides.first().copied().unwrap_or(0) * self.dtype.size() as i64;
        DeviceTensor {
            ptr: if inside { self.ptr.wrapping_add_signed(i as i64 * step) } else { 0 },
            dtype: self.dtype,
            shape: if inside { shape.to_vec() } else { vec![0; shape.len()] },
            strides: strides.to_vec(),
        }
    }

    /// The bytes from the first to just past the last element reached, strides included.
    pub fn span_bytes(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let last = self.shape.iter().zip(&self.strides).fold(0i64, |last, (&n, &s)| {
            last.saturating_add(i64::try_from(n - 1).unwrap_or(i64::MAX).saturating_mul(s))
        });
        (last.max(0) as u64 + 1).saturating_mul(self.dtype.size() as u64)
    }

    /// Whether elements lie row-major without gaps (extents of 1 may have any stride).
    pub fn is_contiguous(&self) -> bool {
        let mut wanted = 1i64;
        for (&n, &s) in self.shape.iter().zip(&self.strides).rev() {
            if n != 1 && s != wanted {
                return false;
            }
            wanted = wanted.saturating_mul(i64::try_from(n).unwrap_or(i64::MAX));
        }
        self.shape.len() == self.strides.len()
    }

    /// Checks type and shape, and that there is an address (unless empty) aligned to `align` bytes.
    pub fn expect(&self, tensor: &str, dtype: DType, shape: &[usize], align: usize) -> Result<()> {
        if self.dtype != dtype {
            return Err(Error::DType { tensor: tensor.into(), wanted: dtype, got: self.dtype });
        }
        if self.shape != shape {
            return Err(Error::Shape { tensor: tensor.into(), wanted: shape.to_vec(), got: self.shape.clone() });
        }
        if self.strides.len() != self.shape.len() {
            return Err(Error::Stride {
                tensor: tensor.into(),
                wanted: format!("{} strides", self.shape.len()),
                got: self.strides.clone(),
            });
        }
        if self.is_empty() {
            return Ok(());
        }
        if self.ptr == 0 {
            return Err(Error::Null { tensor: tensor.into() });
        }
        if self.ptr % align as u64 != 0 {
            return Err(Error::Alignment { tensor: tensor.into(), wanted: align, got: self.ptr });
        }
        Ok(())
    }

    /// [`DeviceTensor::expect`], and contiguous.
    pub fn expect_contiguous(&self, tensor: &str, dtype: DType, shape: &[usize], align: usize) -> Result<()> {
        self.expect(tensor, dtype, shape, align)?;
        if !self.is_empty() && !self.is_contiguous() {
            return Err(Error::Stride {
                tensor: tensor.into(),
                wanted: "a contiguous tensor".into(),
                got: self.strides.clone(),
            });
        }
        Ok(())
    }
}
