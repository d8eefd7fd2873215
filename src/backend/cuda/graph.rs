//! Streams of the crate's own, events, captured graphs and an emptied L2 cache: what it takes to measure a
//! step, or to test its capture. A serving runtime brings its own.
#![allow(unsafe_code)]

use crate::backend::cuda::device::check;
use crate::backend::cuda::{Buffer, Device};
use crate::error::Result;
use crate::stream::Stream;
use cudarc::driver::sys;
use std::marker::PhantomData;

/// A stream that does not wait for the legacy default stream. Dropping it waits for its work.
#[derive(Debug)]
pub struct OwnedStream {
    handle: sys::CUstream,
    device: Device,
}

// SAFETY: a stream may be used from any thread, one at a time.
unsafe impl Send for OwnedStream {}

impl OwnedStream {
    /// A new stream of `device`.
    pub fn new(device: &Device) -> Result<OwnedStream> {
        let _current = device.make_current()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(OwnedStream { handle, device: device.clone() })
    }

    /// The stream as the layer takes it.
    pub fn stream(&self) -> Stream {
        // SAFETY: a live stream of this device. `Stream` keeps nothing alive, as it says.
        unsafe { Stream::from_raw(self.handle.cast()) }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits for the work queued so far.
    pub fn synchronize(&self) -> Result<()> {
        self.device.synchronize_stream(self.handle as u64)
    }

    /// Captures what `work` queues on the stream it is given, in the strictest mode, and instantiates it.
    /// The graph lives no longer than what `work` borrows: the memory that its kernels use.
    pub fn capture<'a>(&self, work: impl FnOnce(Stream) -> Result<()> + 'a) -> Result<Graph<'a>> {
        self.capture_in(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL, work)
    }

    /// The same in a mode that leaves other threads alone: for ranks that share a process.
    pub fn capture_on_thread<'a>(&self, work: impl FnOnce(Stream) -> Result<()> + 'a) -> Result<Graph<'a>> {
        self.capture_in(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, work)
    }

    fn capture_in<'a>(
        &self,
        mode: sys::CUstreamCaptureMode,
        work: impl FnOnce(Stream) -> Result<()> + 'a,
    ) -> Result<Graph<'a>> {
        let _current = self.device.make_current()?;
        // SAFETY: a live stream.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.handle, mode) })?;
        let worked = work(self.stream());
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: ends the capture that began above, also after an error in it; writes one handle.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.handle, &mut graph) });
        let instantiated = match worked.and(ended) {
            // SAFETY: the graph that the driver handed out; writes one handle.
            Ok(()) => check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }),
            error => error,
        };
        if !graph.is_null() {
            // SAFETY: destroyed once; the executable graph is a copy.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        instantiated?;
        Ok(Graph { exec, device: self.device.clone(), _memory: PhantomData })
    }

    /// Queues a graph.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        let _current = self.device.make_current()?;
        // SAFETY: both are live; what the graph uses is borrowed for its lifetime.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.exec, self.handle) })
    }

    /// Records `event` after the work queued so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        let _current = self.device.make_current()?;
        // SAFETY: both are live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, self.handle) })
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: created by `new`, destroyed once. Errors have no one to go to.
            unsafe {
                sys::cuStreamSynchronize(self.handle);
                sys::cuStreamDestroy_v2(self.handle);
            }
        }
    }
}

/// An event that keeps the time.
#[derive(Debug)]
pub struct Event {
    handle: sys::CUevent,
    device: Device,
}

impl Event {
    /// A new event of `device`.
    pub fn new(device: &Device) -> Result<Event> {
        let _current = device.make_current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; writes one handle. Flags 0: with timing.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, 0) })?;
        Ok(Event { handle, device: device.clone() })
    }

    /// Microseconds from `earlier` to this event, once both have happened: waits for this one.
    pub fn microseconds_since(&self, earlier: &Event) -> Result<f64> {
        let _current = self.device.make_current()?;
        let mut milliseconds = 0f32;
        // SAFETY: both are live; writes one number.
        unsafe {
            check("cuEventSynchronize", sys::cuEventSynchronize(self.handle))?;
            check("cuEventElapsedTime", sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.handle, self.handle))?;
        }
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: created by `new`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

/// A captured graph, instantiated. `'a` is the life of what it uses.
#[derive(Debug)]
pub struct Graph<'a> {
    exec: sys::CUgraphExec,
    device: Device,
    _memory: PhantomData<&'a ()>,
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: instantiated by `capture`, destroyed once. A replay under way keeps it until it is done.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// Bytes that are written to evict what the L2 cache (50 MB) holds.
const FLUSHED_BYTES: u64 = 512 << 20;
/// Bytes of one copy that reads: all copies write the same, which is all that stays dirty in the cache.
const COPY_BYTES: u64 = 4 << 20;

/// Empties the L2 cache: writes 512 MiB, then reads as much, so that no dirty line of that is left to be
/// written back on the time of what follows. One graph, which runs for longer than the host takes to queue a
/// step behind it: what is measured does not wait for the host.
#[derive(Debug)]
pub struct L2Flush {
    // Dropped before the memory that it writes.
    graph: Graph<'static>,
    _memory: [Buffer; 3],
}

impl L2Flush {
    /// Allocates and captures on `stream`.
    pub fn new(stream: &OwnedStream) -> Result<L2Flush> {
        let device = stream.device();
        let memory = [device.allocate(FLUSHED_BYTES)?, device.allocate(FLUSHED_BYTES)?, device.allocate(COPY_BYTES)?];
        memory[1].fill(1)?;
        let [dirty, clean, sink] = [0, 1, 2].map(|i: usize| memory[i].ptr());
        let graph = stream.capture(move |stream| {
            let stream = stream.as_ptr() as sys::CUstream;
            // SAFETY: the three allocations live as long as the graph; offsets stay within them.
            unsafe {
                check("cuMemsetD8Async", sys::cuMemsetD8Async(dirty, 0x5A, FLUSHED_BYTES as usize, stream))?;
                for offset in (0..FLUSHED_BYTES).step_by(COPY_BYTES as usize) {
                    let copied = sys::cuMemcpyDtoDAsync_v2(sink, clean + offset, COPY_BYTES as usize, stream);
                    check("cuMemcpyDtoDAsync", copied)?;
                }
            }
            Ok(())
        })?;
        Ok(L2Flush { graph, _memory: memory })
    }

    /// Queues the flush, and lets go of lines that a kernel asked the cache to keep.
    pub fn queue(&self, stream: &OwnedStream) -> Result<()> {
        let _current = stream.device.make_current()?;
        // SAFETY: plain driver call.
        check("cuCtxResetPersistingL2Cache", unsafe { sys::cuCtxResetPersistingL2Cache() })?;
        stream.replay(&self.graph)
    }
}
