//! The caller's CUDA stream.
#![allow(unsafe_code)]

use std::ffi::c_void;

/// A CUDA stream, by handle. It keeps nothing alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// The legacy default stream (handle 0). It cannot be captured.
    pub const LEGACY: Stream = Stream(0);

    /// A stream of the runtime or the driver (`cudaStream_t` and `CUstream` are the same).
    ///
    /// # Safety
    /// The handle is a live stream of the device the layer runs on, or one of CUDA's special handles.
    pub unsafe fn from_raw(handle: *mut c_void) -> Stream {
        Stream(handle as u64)
    }

    /// The handle.
    pub fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

#[cfg(feature = "cuda")]
impl From<&cudarc::driver::CudaStream> for Stream {
    fn from(stream: &cudarc::driver::CudaStream) -> Stream {
        Stream(stream.cu_stream() as u64)
    }
}
