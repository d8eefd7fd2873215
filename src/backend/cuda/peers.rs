//! Collectives of a few tokens between GPUs that write into each other's memory: ranks of one process, a thread
//! each. The kernels are in `csrc/collective/peer.cu`, which says how.
//!
//! Against NCCL these take a third of the time at a few tokens, and their kernels keep the rules of dependent launch, so
//! that the next operations load their weights while a rank waits for the others. Messages that are larger than the
//! inboxes go to another collective, NCCL for one.
#![allow(unsafe_code)]

use crate::backend::cuda::bridge;
use crate::backend::cuda::device::check;
use crate::backend::cuda::params::{Launch, PeerParams};
use crate::backend::cuda::{model as m, Buffer, Device};
use crate::collective::{Collective, Queue};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `kPeerCtas` of `csrc/include/peer.h`.
const CTAS: u64 = 64;
/// Bytes of a message that a packet of 16 bytes carries.
const PACKET: u64 = 8;

/// A word of host memory that kernels write.
struct HostWord(*mut AtomicU32);

// SAFETY: it is used as an atomic only.
unsafe impl Send for HostWord {}
// SAFETY: as above.
unsafe impl Sync for HostWord {}

impl HostWord {
    /// For all devices, which see it at its own address. A context is current.
    fn new() -> Result<HostWord> {
        let mut ptr = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut ptr, size_of::<AtomicU32>(), flags) })?;
        let word = HostWord(ptr.cast());
        word.get().store(0, Ordering::Relaxed);
        Ok(word)
    }

    fn get(&self) -> &AtomicU32 {
        // SAFETY: allocated by `new`, freed when dropped.
        unsafe { &*self.0 }
    }
}

impl Drop for HostWord {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once. An error has no one to go to.
        unsafe { sys::cuMemFreeHost(self.0.cast()) };
    }
}

/// One rank of a group. All ranks make the same calls, each from a thread of its own; graphs and queued work of any
/// rank must be done with before the last rank is dropped.
pub struct Peers {
    rank: usize,
    device: Device,
    timeout: Duration,
    /// Bytes of the largest message.
    bytes: u64,
    inboxes: Arc<Vec<Buffer>>,
    calls: Buffer,
    lost: HostWord,
    larger: Option<Box<dyn Collective>>,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peers(rank {} of {}, device {})", self.rank, self.inboxes.len(), self.device.ordinal())
    }
}

impl Peers {
    /// Ranks on `devices`, in order, for messages of up to `bytes` (8 tokens: 131072). The inboxes take
    /// `4 * ranks * bytes` on each device. A rank that waits on the device for longer than `timeout` gives the group up.
    pub fn all(devices: &[Device], bytes: u64, timeout: Duration) -> Result<Vec<Peers>> {
        let ranks = devices.len();
        if ranks > m::RANKS as usize {
            return Err(Error::Limit { what: "ranks".into(), limit: m::RANKS as u64, got: ranks as u64 });
        }
        let bytes = bytes.next_multiple_of(PACKET);
        for device in devices {
            for peer in devices.iter().filter(|p| p.ordinal() != device.ordinal()) {
                device.map_peer(peer)?;
            }
        }
        let inbox = |device: &Device| {
            let inbox = device.allocate(4 * ranks as u64 * bytes)?;
            inbox.fill(0)?;
            Ok(inbox)
        };
        let inboxes = Arc::new(devices.iter().map(inbox).collect::<Result<Vec<_>>>()?);
        let rank = |(rank, device): (usize, &Device)| {
            let _current = device.make_current()?;
            let calls = device.allocate(4 * CTAS)?;
            calls.fill(0)?;
            let (device, inboxes) = (device.clone(), inboxes.clone());
            Ok(Peers { rank, device, timeout, bytes, inboxes, calls, lost: HostWord::new()?, larger: None })
        };
        devices.iter().enumerate().map(rank).collect()
    }

    /// The same with another collective, of the same rank, for larger messages.
    pub fn with_larger(self, larger: Box<dyn Collective>) -> Result<Peers> {
        if (larger.rank(), larger.ranks()) != (self.rank, self.ranks()) {
            return Err(Error::Value {
                what: "larger".into(),
                wanted: format!("rank {} of {}", self.rank, self.ranks()),
                got: format!("rank {} of {}", larger.rank(), larger.ranks()),
            });
        }
        Ok(Peers { larger: Some(larger), ..self })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a rank was lost so far.
    pub fn check(&self, call: &str) -> Result<()> {
        match self.lost.get().load(Ordering::Acquire) {
            0 => Ok(()),
            word => Err(Error::RankLost {
                rank: self.rank,
                ranks: self.ranks(),
                call: call.into(),
                reason: format!("waited {:?} for rank {}", self.timeout, word - 1),
            }),
        }
    }

    /// What a message's kernel is given, or `None` for those of the other collective.
    fn params(&self, call: &str, data: &DeviceTensor, elements: usize, dtype: DType) -> Result<Option<PeerParams>> {
        self.check(call)?;
        if data.dtype() != dtype {
            return Err(Error::DType { tensor: call.into(), wanted: dtype, got: data.dtype() });
        }
        let bytes = (elements * dtype.size()) as u64;
        if bytes > self.bytes {
            return match &self.larger {
                Some(_) => Ok(None),
                None => Err(Error::Limit { what: format!("{call}: bytes"), limit: self.bytes, got: bytes }),
            };
        }
        if bytes % PACKET != 0 {
            let wanted = format!("a multiple of {PACKET} bytes");
            return Err(Error::Value { what: call.into(), wanted, got: bytes.to_string() });
        }
        let inbox = |rank: usize| self.inboxes.get(rank).map_or(0, Buffer::ptr) as *mut u32;
        Ok(Some(PeerParams {
            data: data.ptr() as *mut c_void,
            inboxes: std::array::from_fn(inbox),
            calls: self.calls.ptr() as *mut u32,
            lost: self.lost.0.cast(),
            timeout_ns: self.timeout.as_nanos().min(u64::MAX as u128) as u64,
            elements: elements as i32,
            capacity: (self.bytes / PACKET) as i32,
            rank: self.rank as i32,
            ranks: self.ranks() as i32,
        }))
    }

    fn launch(&self, at: Queue) -> Launch {
        Launch {
            stream: at.stream.as_ptr(),
            sm_count: self.device.sm_count() as i32,
            dependent: i32::from(at.dependent),
        }
    }
}

impl Collective for Peers {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.inboxes.len()
    }

    fn dependent(&self, bytes: usize) -> bool {
        bytes as u64 <= self.bytes || self.larger.as_ref().is_some_and(|larger| larger.dependent(bytes))
    }

    fn all_reduce(&self, call: &'static str, partial: &DeviceTensor, at: Queue) -> Result<()> {
        match (self.params(call, partial, partial.len(), DType::Bf16)?, &self.larger) {
            (Some(params), _) => {
                let _current = self.device.make_current()?;
                // SAFETY: the partial's own elements; inboxes that live as long as the group; words of this rank.
                unsafe { bridge::peer_sum(&params, &self.launch(at)) }
            }
            (None, Some(larger)) => larger.all_reduce(call, partial, at),
            (None, None) => Ok(()),
        }
    }

    fn all_gather(&self, call: &'static str, part: &DeviceTensor, gathered: &DeviceTensor, at: Queue) -> Result<()> {
        let place = gathered.ptr() + (self.rank * part.len() * part.dtype().size()) as u64;
        if gathered.len() != self.ranks() * part.len() {
            let wanted = [&[self.ranks()], part.shape()].concat();
            return Err(Error::Shape { tensor: call.into(), wanted, got: gathered.shape().to_vec() });
        }
        if part.ptr() != place {
            let what = format!("{call} from elsewhere than its place");
            return Err(Error::Unsupported { backend: "CUDA", what });
        }
        match (self.params(call, gathered, part.len(), DType::F32)?, &self.larger) {
            (Some(params), _) => {
                let _current = self.device.make_current()?;
                // SAFETY: as in `all_reduce`; `gathered` holds every rank's part.
                unsafe { bridge::peer_gather(&params, &self.launch(at)) }
            }
            (None, Some(larger)) => larger.all_gather(call, part, gathered, at),
            (None, None) => Ok(()),
        }
    }

    /// The kernels end by themselves; this is for larger messages, too.
    fn wait(&self, stream: Stream) -> Result<()> {
        if let Some(larger) = &self.larger {
            larger.wait(stream)?;
            return self.check("wait");
        }
        let began = Instant::now();
        loop {
            let done = {
                let _current = self.device.make_current()?;
                // SAFETY: the caller vouched for the stream.
                unsafe { sys::cuStreamQuery(stream.as_ptr() as sys::CUstream) }
            };
            match done {
                sys::CUresult::CUDA_ERROR_NOT_READY if began.elapsed() < Duration::from_millis(2) => {
                    std::thread::yield_now();
                }
                sys::CUresult::CUDA_ERROR_NOT_READY => std::thread::sleep(Duration::from_micros(200)),
                done => {
                    check("cuStreamQuery", done)?;
                    return self.check("wait");
                }
            }
        }
    }
}
