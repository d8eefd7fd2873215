//! How weights get from host memory to the device: a ring of slots, each with pinned host memory, as much
//! device memory, and a stream of its own. Whoever holds a slot fills its host memory, queues the copy and the
//! kernels that repack it on the slot's stream, and gives it back at once; slots are taken oldest first, and
//! waited for. So any number of threads and layers share one ring, copies and packing of some slots run while
//! others are filled, and neither memory grows past [`SLOTS`] of [`SLOT_BYTES`].
#![allow(unsafe_code)]

use crate::backend::cuda::device::check;
use crate::backend::cuda::graph::OwnedStream;
use crate::backend::cuda::params::Launch;
use crate::backend::cuda::{Buffer, Device};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use memmap2::MmapMut;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of a slot: a quarter of an NVFP4 expert's gate and up rows with their scales, and whole rows of tiles
/// of every other matrix. Shorter ones cost the bus's rate: each takes eight calls of the driver.
pub const SLOT_BYTES: usize = 9 << 19;
/// Slots: half of them are copied while eight threads, which outrun the bus, fill the others. 72 MiB on either side.
pub const SLOTS: usize = 16;

/// Pinned host memory.
struct Pinned {
    map: MmapMut,
    device: Device,
}

impl Pinned {
    /// Memory of the system's, touched in parallel and then registered: an order of magnitude quicker than
    /// the driver's own allocation, which touches page by page.
    fn new(device: &Device, bytes: usize) -> Result<Pinned> {
        let fail = |e: std::io::Error| Error::Internal { what: format!("{bytes} bytes of host memory: {e}") };
        let mut map = MmapMut::map_anon(bytes).map_err(fail)?;
        // Advice only.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        // Not rayon's threads: they might take up a load that waits for this ring.
        std::thread::scope(|scope| {
            for part in map.chunks_mut(bytes / 8) {
                scope.spawn(|| part.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
            }
        });
        let _current = device.make_current()?;
        // SAFETY: the map is ours and stays where it is until it is unregistered.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(map.as_mut_ptr().cast(), bytes, 0) })?;
        Ok(Pinned { map, device: device.clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: registered by `new`; the streams that copied from it were dropped before and are idle.
            unsafe { sys::cuMemHostUnregister(self.map.as_mut_ptr().cast()) };
        }
    }
}

struct Slot {
    stream: OwnedStream,
    /// Which part of both memories.
    index: usize,
}

/// A device's ring of slots. Fields drop in order: streams wait for their work before the memory goes.
pub struct Staging {
    /// Oldest first.
    free: Mutex<VecDeque<Slot>>,
    given_back: Condvar,
    /// Of all slots, free or held.
    streams: Vec<u64>,
    on_device: Buffer,
    /// The slots' host memory, which each holder alone touches.
    host: *mut u8,
    _pinned: Pinned,
}

// SAFETY: `host` is the pinned map's; whoever holds a slot touches that slot's part alone.
unsafe impl Send for Staging {}
// SAFETY: as above.
unsafe impl Sync for Staging {}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staging(device {})", self.on_device.device().ordinal())
    }
}

impl Staging {
    pub(super) fn new(device: &Device) -> Result<Staging> {
        let mut pinned = Pinned::new(device, SLOTS * SLOT_BYTES)?;
        let slot = |index| Ok(Slot { stream: OwnedStream::new(device)?, index });
        let free: VecDeque<Slot> = (0..SLOTS).map(slot).collect::<Result<_>>()?;
        Ok(Staging {
            streams: free.iter().map(|slot| slot.stream.stream().as_ptr() as u64).collect(),
            free: Mutex::new(free),
            given_back: Condvar::new(),
            on_device: device.allocate((SLOTS * SLOT_BYTES) as u64)?,
            host: pinned.map.as_mut_ptr(),
            _pinned: pinned,
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Slot>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot that was given back first, once its stream is idle; waits for one while all are held.
    pub fn take(&self) -> Result<Held<'_>> {
        let mut free = self.lock();
        let slot = loop {
            match free.pop_front() {
                Some(slot) => break slot,
                None => free = self.given_back.wait(free).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(free);
        let held = Held { staging: self, slot: Some(slot) };
        held.slot().stream.synchronize()?;
        Ok(held)
    }

    /// Waits for everything that was queued on slots that were given back.
    pub fn wait(&self) -> Result<()> {
        self.streams.iter().try_for_each(|stream| self.on_device.device().synchronize_stream(*stream))
    }
}

/// A slot in one's hands; given back when dropped, with what was queued on its stream still under way.
pub struct Held<'a> {
    staging: &'a Staging,
    slot: Option<Slot>,
}

impl Held<'_> {
    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("held until dropped")
    }

    /// The host memory, [`SLOT_BYTES`] of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this slot's part of the map, which lives as long as the ring. The slot is ours, and the device
        // is done with it: its stream was idle when it was taken.
        unsafe { std::slice::from_raw_parts_mut(self.staging.host.add(self.slot().index * SLOT_BYTES), SLOT_BYTES) }
    }

    /// Queues the copy of the first `bytes` bytes to the same place of the slot's device memory.
    pub fn upload(&mut self, bytes: usize) -> Result<()> {
        self.copy_to(self.device_ptr(), bytes)
    }

    /// Queues the copy of the first `bytes` bytes to `ptr`, which is the caller's memory of as many.
    pub fn copy_to(&mut self, ptr: u64, bytes: usize) -> Result<()> {
        let _current = self.staging.on_device.device().make_current()?;
        let stream = self.slot().stream.stream().as_ptr() as sys::CUstream;
        let from = self.bytes()[..bytes].as_ptr();
        // SAFETY: `from` is pinned and not written before the stream is idle again; callers pass memory of
        // this device that outlives the stream's work.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(ptr, from.cast(), bytes, stream) })
    }

    /// The slot's device memory, [`SLOT_BYTES`] of it.
    pub fn device_ptr(&self) -> u64 {
        self.staging.on_device.ptr() + (self.slot().index * SLOT_BYTES) as u64
    }

    /// Launches on the slot's stream.
    pub fn launch(&self) -> Launch {
        let sm_count = self.staging.on_device.device().sm_count() as i32;
        Launch { stream: self.slot().stream.stream().as_ptr(), sm_count, dependent: 0 }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.staging.lock().extend(self.slot.take());
        self.staging.given_back.notify_one();
    }
}
