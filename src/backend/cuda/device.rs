//! The driver: devices, contexts and allocations, and the code of each failed call as a typed error.
//!
//! Devices are used through their primary context, which the runtime API inside the kernels' library and
//! every other user of the device in the process share. It is made current for the length of a call and
//! the caller's context is restored, so calls may come from any thread.
#![allow(unsafe_code)]

use crate::backend::cuda::bridge;
use crate::backend::cuda::staging::Staging;
use crate::error::{Error, Result};
use cudarc::driver::sys;
use once_cell::sync::Lazy;
use std::ffi::{c_void, CStr};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// `CUDA_ERROR_*` as [`Error::Cuda`] or [`Error::ContextLost`].
pub(super) fn check(call: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded (it returned `result`); the string it hands out is static.
    let text = unsafe {
        if sys::cuGetErrorString(result, &mut text) == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            "unknown error".into()
        }
    };
    Err(Error::cuda(call, result as i32, text))
}

/// Devices there are. cudarc would panic without the driver's library, so it is looked for first.
fn devices() -> Result<i32> {
    static PRESENT: Lazy<bool> = Lazy::new(|| {
        // SAFETY: opens the library and closes it; that runs its initialisers, as any use of CUDA does.
        unsafe { sys::is_culib_present() }
    });
    if !*PRESENT {
        return Err(Error::NoDriver);
    }
    bridge::device_count()
}

/// Refuses what the kernels are not made for: they are code for sm_90a, which no other GPU runs.
fn supported(info: &bridge::DeviceInfo) -> Result<()> {
    let (major, minor) = (info.major, info.minor);
    if (major, minor) == (9, 0) {
        return Ok(());
    }
    let found = format!("{}, compute capability {major}.{minor}", info.name);
    Err(Error::UnsupportedGpu { device: info.ordinal, found })
}

struct Inner {
    ordinal: i32,
    context: sys::CUcontext,
    sm_count: u32,
    name: String,
    /// Addresses already seen to be this device's, so that a call asks the driver about new ones only.
    known: [AtomicU64; 256],
    staging: Mutex<Weak<Staging>>,
    /// Bytes of [`Buffer`]s that were allocated and not yet given back.
    held: AtomicU64,
}

// SAFETY: contexts may be made current on any thread; the rest is plain data.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// A Hopper GPU. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}: {}, {} SMs)", self.0.ordinal, self.0.name, self.0.sm_count)
    }
}

/// The device's context is current on this thread until this is dropped.
pub struct Current<'a> {
    pushed: bool,
    _device: PhantomData<(&'a Device, *const ())>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: this thread pushed it and guards are dropped in order.
            unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

impl Device {
    /// How many devices there are.
    pub fn count() -> Result<usize> {
        devices().map(|n| n as usize)
    }

    /// Device `ordinal`, if there is one and it is a Hopper GPU. Loads the crate's kernels on it.
    pub fn new(ordinal: i32) -> Result<Device> {
        static OPEN: Lazy<Mutex<Vec<Device>>> = Lazy::new(Default::default);
        let count = devices()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::NoDevice { reason: format!("there is no device {ordinal}, only {count} (0..{count})") });
        }
        let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(device) = open.iter().find(|d| d.ordinal() == ordinal) {
            return Ok(device.clone());
        }
        let device = Device::open(ordinal)?;
        open.push(device.clone());
        Ok(device)
    }

    fn open(ordinal: i32) -> Result<Device> {
        let info = bridge::device_info(ordinal)?;
        supported(&info)?;
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        // SAFETY: plain driver calls that write one value each. The context is retained for the life of the
        // process: kernels stay loaded.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGet", sys::cuDeviceGet(&mut handle, ordinal))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, handle))?;
        }
        let known = std::array::from_fn(|_| AtomicU64::new(0));
        let sm_count = info.sm_count.max(1) as u32;
        let (name, staging, held) = (info.name, Mutex::default(), AtomicU64::new(0));
        let device = Device(Arc::new(Inner { ordinal, context, sm_count, name, known, staging, held }));
        {
            let _current = device.make_current()?;
            bridge::prepare_all()?;
        }
        Ok(device)
    }

    /// The ordinal.
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// Multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.0.sm_count
    }

    /// The marketing name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Makes the device current on this thread for the guard's life.
    pub fn make_current(&self) -> Result<Current<'_>> {
        let mut current = std::ptr::null_mut();
        // SAFETY: plain driver calls; the context is retained for the life of the process.
        let pushed = unsafe {
            check("cuCtxGetCurrent", sys::cuCtxGetCurrent(&mut current))?;
            let other = current != self.0.context;
            if other {
                check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(self.0.context))?;
            }
            other
        };
        Ok(Current { pushed, _device: PhantomData })
    }

    /// The ring through which weights come from the host. It lives as long as someone holds it.
    pub(crate) fn staging(&self) -> Result<Arc<Staging>> {
        let mut held = self.0.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = held.upgrade() {
            return Ok(staging);
        }
        let staging = Arc::new(Staging::new(self)?);
        *held = Arc::downgrade(&staging);
        Ok(staging)
    }

    /// Bytes of device memory that are free, and that there are. Of the whole device: other processes take part in it.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _current = self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; writes two numbers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Bytes of device memory that this crate holds in this process: layers, workspaces, everything else of its own.
    pub fn held(&self) -> u64 {
        self.0.held.load(Ordering::Relaxed)
    }

    /// Allocates `bytes` of device memory (uninitialised).
    pub fn allocate(&self, bytes: u64) -> Result<Buffer> {
        let _current = self.make_current()?;
        let mut ptr = 0;
        // SAFETY: the context is current; writes one address.
        match unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes.max(1) as usize) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = self.memory()?;
                return Err(Error::OutOfMemory { device: self.ordinal(), wanted: bytes, free, total });
            }
            result => check("cuMemAlloc", result)?,
        }
        self.0.held.fetch_add(bytes, Ordering::Relaxed);
        Ok(Buffer { ptr, bytes, device: self.clone() })
    }

    /// A copy of `bytes` in device memory.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.allocate(bytes.len() as u64)?;
        buffer.write(bytes)?;
        Ok(buffer)
    }

    /// Lets this device read and write the memory of `peer`, for the life of the process.
    pub(super) fn map_peer(&self, peer: &Device) -> Result<()> {
        let _current = self.make_current()?;
        // SAFETY: a live context of another device.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.0.context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }

    /// Zeroes memory and waits for it.
    pub(crate) fn zero(&self, ptr: u64, bytes: u64) -> Result<()> {
        self.fill(ptr, 0, bytes)
    }

    /// Sets `bytes` bytes to `value` and waits for it.
    pub(crate) fn fill(&self, ptr: u64, value: u8, bytes: u64) -> Result<()> {
        let _current = self.make_current()?;
        // SAFETY: callers pass memory of this device of at least `bytes` bytes.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(ptr, value, bytes as usize) })?;
        self.synchronize()
    }

    /// Copies memory of this device to the host, after all work queued on the device.
    pub(crate) fn read(&self, ptr: u64, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        self.synchronize()?;
        let _current = self.make_current()?;
        // SAFETY: callers pass memory of this device of at least `out.len()` bytes.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast::<c_void>(), ptr, out.len()) })
    }

    /// Waits for all work of the device's primary context.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.make_current()?;
        // SAFETY: plain driver call.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Waits for the work queued on a stream.
    pub(crate) fn synchronize_stream(&self, stream: u64) -> Result<()> {
        let _current = self.make_current()?;
        // SAFETY: the caller vouched for the stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream as sys::CUstream) })
    }

    /// Checks that `ptr` is memory of this device; `tensor` names it in the error.
    pub(crate) fn check_pointer(&self, tensor: &str, ptr: u64) -> Result<()> {
        // Fibonacci hashing over 256 slots; a slot holds an address seen before.
        let slot = &self.0.known[(ptr.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize];
        if slot.load(Ordering::Relaxed) == ptr {
            return Ok(());
        }
        match bridge::pointer_location(ptr)? {
            bridge::Location::Managed => {}
            bridge::Location::Device(found) if found == self.ordinal() => {}
            bridge::Location::Device(found) => {
                return Err(Error::Device { tensor: tensor.into(), wanted: self.ordinal(), got: found });
            }
            _ => return Err(Error::Memory { tensor: tensor.into(), wanted: "device", got: "host" }),
        }
        slot.store(ptr, Ordering::Relaxed);
        Ok(())
    }
}

/// An allocation of device memory, freed when dropped.
pub struct Buffer {
    ptr: u64,
    bytes: u64,
    device: Device,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:#x}, {} bytes, device {})", self.ptr, self.bytes, self.device.ordinal())
    }
}

impl Buffer {
    /// The device address.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device it lives on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `bytes` to the front and waits for it.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        self.write_at(0, bytes)
    }

    /// Copies `bytes` to `offset` and waits for it.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset.saturating_add(bytes.len() as u64);
        if end > self.bytes {
            return Err(Error::Limit { what: "bytes written to a buffer".into(), limit: self.bytes, got: end });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.device.make_current()?;
        // SAFETY: both ranges hold `bytes.len()` bytes.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.ptr + offset, bytes.as_ptr().cast::<c_void>(), bytes.len())
        })?;
        // The call returns while a copy of up to 64 KB is still under way, and streams of their own do not wait for it.
        // SAFETY: the legacy stream of the current context.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) })
    }

    /// Copies the first `out.len()` bytes to the host, after all work queued on the device.
    pub fn read(&self, out: &mut [u8]) -> Result<()> {
        self.read_at(0, out)
    }

    /// Copies the `out.len()` bytes from `offset` on to the host, after all work queued on the device.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(out.len() as u64);
        if end > self.bytes {
            return Err(Error::Limit { what: "bytes read from a buffer".into(), limit: self.bytes, got: end });
        }
        self.device.read(self.ptr + offset, out)
    }

    /// Sets every byte and waits for it.
    pub fn fill(&self, value: u8) -> Result<()> {
        self.device.fill(self.ptr, value, self.bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: allocated by `allocate` and freed once. Errors (a dead context) have no one to go to.
            if unsafe { sys::cuMemFree_v2(self.ptr) } == sys::CUresult::CUDA_SUCCESS {
                self.device.0.held.fetch_sub(self.bytes, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_are_not_hopper_are_refused_by_name() {
        let info = |name: &str, major, minor| bridge::DeviceInfo {
            ordinal: 3,
            name: name.into(),
            major,
            minor,
            sm_count: 1,
            memory_bytes: 0,
            l2_bytes: 0,
            shared_bytes_per_block: 0,
        };
        supported(&info("NVIDIA H200", 9, 0)).unwrap();
        for (name, major, minor) in [("NVIDIA A100", 8, 0), ("NVIDIA L40S", 8, 9), ("NVIDIA B200", 10, 0)] {
            let text = supported(&info(name, major, minor)).unwrap_err().to_string();
            let wanted = format!("device 3 is {name}, compute capability {major}.{minor}; the CUDA backend needs");
            assert!(text.starts_with(&wanted), "{text}");
        }
    }
}
