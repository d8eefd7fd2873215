//! Collectives over NCCL (feature `nccl`).
//!
//! NCCL's library is opened when the first of these is called: `MUSE_SPARK_LAYER_NCCL` names the file, else the
//! loader finds `libnccl.so.2`. Types are those of cudarc's bindings; results stay integers, since a newer library may
//! give codes that the bindings do not know.
//!
//! Communicators are non-blocking: a call that has to wait for other ranks gives up after the communicator's
//! time-out with [`Error::RankLost`], and [`Collective::wait`] does so for work that is queued. Either aborts the
//! communicator, which ends its kernels; every later call gives the same error.
#![allow(unsafe_code)]

use crate::backend::cuda::Device;
use crate::collective::{Collective, Queue};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};
use cudarc::driver::sys as cu;
use cudarc::nccl::sys;
use once_cell::sync::OnceCell;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::fmt;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The oldest version whose communicators take this file's configuration.
const WANTED: (&str, c_int) = ("2.18", 21800);
/// Names the library's file.
const LIBRARY_VARIABLE: &str = "MUSE_SPARK_LAYER_NCCL";
const SUCCESS: c_int = sys::ncclResult_t::ncclSuccess as c_int;
const REMOTE_ERROR: c_int = sys::ncclResult_t::ncclRemoteError as c_int;
const IN_PROGRESS: c_int = sys::ncclResult_t::ncclInProgress as c_int;
/// `NCCL_API_MAGIC` and `NCCL_CONFIG_UNDEF_INT` of nccl.h.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;

macro_rules! functions {
    ($($field:ident = $symbol:literal($($argument:ty),*) -> $result:ty;)*) => {
        /// The library's functions.
        struct Api {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: libloading::Library,
        }

        impl Api {
            /// # Safety
            /// The library is NCCL: its symbols are functions of these types.
            unsafe fn resolve(library: libloading::Library) -> std::result::Result<Api, libloading::Error> {
                // SAFETY: the caller's promise. The pointers live as long as the library, which is kept.
                Ok(Api {
                    $($field: *unsafe { library.get($symbol)? },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion"(*mut c_int) -> c_int;
    get_unique_id = "ncclGetUniqueId"(*mut sys::ncclUniqueId) -> c_int;
    comm_init = "ncclCommInitRankConfig"(*mut sys::ncclComm_t, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t) -> c_int;
    comm_async_error = "ncclCommGetAsyncError"(sys::ncclComm_t, *mut c_int) -> c_int;
    comm_finalize = "ncclCommFinalize"(sys::ncclComm_t) -> c_int;
    comm_destroy = "ncclCommDestroy"(sys::ncclComm_t) -> c_int;
    comm_abort = "ncclCommAbort"(sys::ncclComm_t) -> c_int;
    group_start = "ncclGroupStart"() -> c_int;
    group_end = "ncclGroupEnd"() -> c_int;
    all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, sys::ncclComm_t, *mut c_void) -> c_int;
    all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, sys::ncclComm_t, *mut c_void) -> c_int;
    error_string = "ncclGetErrorString"(c_int) -> *const c_char;
    last_error = "ncclGetLastError"(sys::ncclComm_t) -> *const c_char;
}

/// The library, opened once and kept: it has threads of its own.
fn api() -> Result<&'static Api> {
    static API: OnceCell<Api> = OnceCell::new();
    API.get_or_try_init(|| match std::env::var(LIBRARY_VARIABLE) {
        Ok(path) => open(&[&path]),
        Err(_) => open(&["libnccl.so.2", "libnccl.so"]),
    })
}

/// The first of `names` that the loader finds, if it is NCCL of a version that will do.
fn open(names: &[&str]) -> Result<Api> {
    let fault = |problem: String| Error::NcclLibrary { wanted: WANTED.0, problem };
    let mut problems = Vec::new();
    for name in names {
        // SAFETY: runs the library's initialisers; who names a file vouches for it.
        let library = match unsafe { libloading::Library::new(*name) } {
            Ok(library) => library,
            Err(error) => {
                problems.push(format!("{name}: {}", whole(&error)));
                continue;
            }
        };
        // The version first: an old library may lack the other functions.
        let mut version = 0;
        // SAFETY: NCCL's function of this name writes one integer.
        let found = unsafe {
            library
                .get::<unsafe extern "C" fn(*mut c_int) -> c_int>("ncclGetVersion")
                .map(|get_version| get_version(&mut version))
        };
        if let Err(error) = found {
            return Err(fault(format!("{name} is not NCCL: {}", whole(&error))));
        }
        if version < WANTED.1 {
            return Err(fault(format!("{name} is version {}", version_text(version))));
        }
        // SAFETY: it is NCCL.
        return unsafe { Api::resolve(library) }.map_err(|error| fault(format!("{name}: {}", whole(&error))));
    }
    Err(fault(format!("no library: {}", problems.join("; "))))
}

/// An error of the loader with its source, which says what was not found.
fn whole(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// 22305 is 2.23.5; before 2.9, 2804 was 2.8.4.
fn version_text(version: c_int) -> String {
    let unit = if version < 10000 { 1000 } else { 10000 };
    format!("{}.{}.{}", version / unit, version % unit / 100, version % 100)
}

/// The version of the library, as `2.27.5`.
pub fn version() -> Result<String> {
    let (api, mut version) = (api()?, 0);
    // SAFETY: writes one integer.
    check(api, "ncclGetVersion", unsafe { (api.get_version)(&mut version) })?;
    Ok(version_text(version))
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's strings end in a zero and live on (the last error: until the next one on this thread).
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_string()
}

fn check(api: &Api, call: &str, code: c_int) -> Result<()> {
    if code == SUCCESS {
        return Ok(());
    }
    // SAFETY: both take any value; a null communicator stands for "the last error of any".
    let (what, more) = unsafe { (text((api.error_string)(code)), text((api.last_error)(std::ptr::null_mut()))) };
    let text = if more.is_empty() { what } else { format!("{what} ({more})") };
    Err(Error::Nccl { call: call.into(), code, text })
}

/// What the ranks of one communicator agree on before they meet: one rank makes it, the runtime hands it to the others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; 128]);

impl NcclId {
    /// A new one. The process that makes it must live until the communicator is set up.
    pub fn new() -> Result<NcclId> {
        let api = api()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: writes the id.
        check(api, "ncclGetUniqueId", unsafe { (api.get_unique_id)(&mut id) })?;
        Ok(NcclId(id.internal.map(|c| c as u8)))
    }

    /// The bytes to hand over.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0
    }

    /// What was handed over.
    pub fn from_bytes(bytes: [u8; 128]) -> NcclId {
        NcclId(bytes)
    }
}

impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An address with a secret: not for logs.
        f.write_str("NcclId")
    }
}

/// A communicator, null once it has been given up.
struct Comm {
    handle: sys::ncclComm_t,
    lost: Option<String>,
}

// SAFETY: NCCL's communicators may be used from any thread, one at a time: they are behind a mutex.
unsafe impl Send for Comm {}

/// One rank of an NCCL communicator.
///
/// Every rank needs a thread (or a process) of its own while it makes calls, the set-up by [`Nccl::all`] excepted. Dropping
/// it waits for the other ranks to drop theirs, and aborts after an error. Graphs that hold its calls must be dropped
/// first, and work that is queued waited for.
pub struct Nccl {
    rank: usize,
    ranks: usize,
    device: Device,
    timeout: Duration,
    comm: Mutex<Comm>,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl(rank {} of {}, device {})", self.rank, self.ranks, self.device.ordinal())
    }
}

impl Nccl {
    /// Rank `rank` of `ranks` on `device`, which no other rank of the communicator uses. All ranks call this with the
    /// same id, each in a process or thread of its own; it returns when all have, or gives
    /// [`Error::RankLost`] after `timeout`, which is that of all later calls, too.
    pub fn new(device: &Device, id: &NcclId, rank: usize, ranks: usize, timeout: Duration) -> Result<Nccl> {
        if ranks == 0 || rank >= ranks {
            let limit = ranks.max(1) as u64 - 1;
            return Err(Error::Limit { what: "rank".into(), limit, got: rank as u64 });
        }
        let (nccl, code) = Nccl::begin(api()?, device, id, rank, ranks, timeout)?;
        nccl.settle("ncclCommInitRankConfig", &mut nccl.comm(), code)?;
        Ok(nccl)
    }

    /// All ranks of a communicator within this process, one a device.
    pub fn all(devices: &[Device], timeout: Duration) -> Result<Vec<Nccl>> {
        let (api, id) = (api()?, NcclId::new()?);
        // SAFETY: the group is ended below, whatever happens in between.
        check(api, "ncclGroupStart", unsafe { (api.group_start)() })?;
        let begun: Result<Vec<_>> = (0..devices.len())
            .map(|rank| Nccl::begin(api, &devices[rank], &id, rank, devices.len(), timeout))
            .collect();
        // SAFETY: ends the group that was started above.
        let code = unsafe { (api.group_end)() };
        begun?
            .into_iter()
            .map(|(nccl, _)| {
                nccl.settle("ncclCommInitRankConfig", &mut nccl.comm(), code)?;
                Ok(nccl)
            })
            .collect()
    }

    /// Starts the set-up of a rank, and gives NCCL's code for it.
    fn begin(
        api: &Api,
        device: &Device,
        id: &NcclId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<(Nccl, c_int)> {
        let _current = device.make_current()?;
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: MAGIC,
            version: WANTED.1 as u32,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        let (mut handle, id) = (std::ptr::null_mut(), sys::ncclUniqueId { internal: id.0.map(|b| b as c_char) });
        // SAFETY: writes the handle; the configuration is copied; the device is current.
        let code = unsafe { (api.comm_init)(&mut handle, ranks as c_int, id, rank as c_int, &mut config) };
        if code != IN_PROGRESS {
            check(api, "ncclCommInitRankConfig", code)?;
        }
        let comm = Mutex::new(Comm { handle, lost: None });
        Ok((Nccl { rank, ranks, device: device.clone(), timeout, comm }, code))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A panic between two statements of this file leaves the communicator whole.
    fn comm(&self) -> MutexGuard<'_, Comm> {
        self.comm.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What NCCL found out since the last call: an error of this or another rank.
    pub fn check(&self) -> Result<()> {
        let mut comm = self.comm();
        self.alive("ncclCommGetAsyncError", &comm)?;
        let code = self.state(&comm)?;
        self.told("ncclCommGetAsyncError", &mut comm, if code == IN_PROGRESS { SUCCESS } else { code })
    }

    fn lost(&self, call: &str, reason: &str) -> Error {
        Error::RankLost { rank: self.rank, ranks: self.ranks, call: call.into(), reason: reason.into() }
    }

    fn alive(&self, call: &str, comm: &Comm) -> Result<()> {
        comm.lost.as_ref().map_or(Ok(()), |reason| Err(self.lost(call, reason)))
    }

    /// Gives the communicator up: its kernels end, no further call is made.
    fn lose(&self, call: &str, comm: &mut Comm, reason: String) -> Error {
        let error = self.lost(call, &reason);
        comm.lost.get_or_insert(reason);
        abort(&self.device, comm);
        error
    }

    /// The communicator's state: success, in progress, or what went wrong.
    fn state(&self, comm: &Comm) -> Result<c_int> {
        let (api, mut state) = (api()?, SUCCESS);
        // SAFETY: a live communicator; writes one integer.
        check(api, "ncclCommGetAsyncError", unsafe { (api.comm_async_error)(comm.handle, &mut state) })?;
        Ok(state)
    }

    /// A final code as a result. An error gives the communicator up.
    fn told(&self, call: &str, comm: &mut Comm, code: c_int) -> Result<()> {
        match check(api()?, call, code) {
            Ok(()) => Ok(()),
            Err(Error::Nccl { text, .. }) if code == REMOTE_ERROR => Err(self.lose(call, comm, text)),
            Err(error) => {
                self.lose(call, comm, error.to_string());
                Err(error)
            }
        }
    }

    /// Waits until what `code` says is in progress is settled.
    fn settle(&self, call: &str, comm: &mut Comm, mut code: c_int) -> Result<()> {
        let patience = Patience::new(self.timeout);
        while code == IN_PROGRESS {
            if !patience.pause() {
                let reason = format!("waited {:?} for the other ranks", self.timeout);
                return Err(self.lose(call, comm, reason));
            }
            code = self.state(comm)?;
        }
        self.told(call, comm, code)
    }

    /// Queues a collective.
    fn queue(&self, call: &str, work: impl FnOnce(&Api, sys::ncclComm_t) -> c_int) -> Result<()> {
        let _current = self.device.make_current()?;
        let mut comm = self.comm();
        self.alive(call, &comm)?;
        let code = work(api()?, comm.handle);
        self.settle(call, &mut comm, code)
    }
}

fn data_type(call: &str, dtype: DType) -> Result<c_int> {
    match dtype {
        DType::Bf16 => Ok(sys::ncclDataType_t::ncclBfloat16 as c_int),
        DType::F32 => Ok(sys::ncclDataType_t::ncclFloat32 as c_int),
        got => Err(Error::DType { tensor: call.into(), wanted: DType::Bf16, got }),
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_reduce(&self, call: &'static str, partial: &DeviceTensor, at: Queue) -> Result<()> {
        let (dtype, data) = (data_type(call, partial.dtype())?, partial.ptr() as *mut c_void);
        let sum = sys::ncclRedOp_t::ncclSum as c_int;
        // SAFETY: the tensor's elements, in place; the stream is of this device, as the caller vouched for.
        self.queue(call, |api, comm| unsafe {
            (api.all_reduce)(data, data, partial.len(), dtype, sum, comm, at.stream.as_ptr())
        })
    }

    fn all_gather(&self, call: &'static str, part: &DeviceTensor, gathered: &DeviceTensor, at: Queue) -> Result<()> {
        let dtype = data_type(call, part.dtype())?;
        if gathered.dtype() != part.dtype() {
            return Err(Error::DType { tensor: call.into(), wanted: part.dtype(), got: gathered.dtype() });
        }
        if gathered.len() != self.ranks * part.len() {
            let wanted = [&[self.ranks], part.shape()].concat();
            return Err(Error::Shape { tensor: call.into(), wanted, got: gathered.shape().to_vec() });
        }
        let (from, to) = (part.ptr() as *const c_void, gathered.ptr() as *mut c_void);
        // SAFETY: as in `all_reduce`; `gathered` holds `ranks` parts.
        self.queue(call, |api, comm| unsafe { (api.all_gather)(from, to, part.len(), dtype, comm, at.stream.as_ptr()) })
    }

    /// Gives [`Error::RankLost`] if the work is not done after the time-out.
    fn wait(&self, stream: Stream) -> Result<()> {
        let patience = Patience::new(self.timeout);
        loop {
            let queried = {
                let _current = self.device.make_current()?;
                // SAFETY: the caller vouched for the stream.
                unsafe { cu::cuStreamQuery(stream.as_ptr() as cu::CUstream) }
            };
            self.check()?;
            match queried {
                cu::CUresult::CUDA_ERROR_NOT_READY => {}
                done => return super::device::check("cuStreamQuery", done),
            }
            if !patience.pause() {
                let reason =
                    format!("work that was queued did not end in {:?}: another rank takes no part", self.timeout);
                return Err(self.lose("wait", &mut self.comm(), reason));
            }
        }
    }
}

/// Frees a communicator without the other ranks.
fn abort(device: &Device, comm: &mut Comm) {
    let handle = std::mem::replace(&mut comm.handle, std::ptr::null_mut());
    if handle.is_null() {
        return;
    }
    if let (Ok(api), Ok(_current)) = (api(), device.make_current()) {
        // SAFETY: a live communicator, taken out of use above. An error has no one to go to.
        unsafe { (api.comm_abort)(handle) };
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let mut comm = self.comm();
        if comm.handle.is_null() {
            return;
        }
        let finalized = api().and_then(|api| {
            let _current = self.device.make_current()?;
            // SAFETY: a live communicator.
            let code = unsafe { (api.comm_finalize)(comm.handle) };
            self.settle("ncclCommFinalize", &mut comm, code)?;
            // SAFETY: finalized, and destroyed once.
            unsafe { (api.comm_destroy)(comm.handle) };
            Ok(())
        });
        if finalized.is_err() {
            abort(&self.device, &mut comm);
        }
    }
}

/// A time-out, and the pauses until then: none at first, since most waits are for microseconds.
struct Patience {
    began: Instant,
    timeout: Duration,
}

impl Patience {
    fn new(timeout: Duration) -> Patience {
        Patience { began: Instant::now(), timeout }
    }

    /// Whether there is time left, after a while.
    fn pause(&self) -> bool {
        let waited = self.began.elapsed();
        if waited < Duration::from_millis(2) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(200));
        }
        waited < self.timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_what_to_do() {
        let error = open(&["/nowhere/libnccl.so.2", "libnccl-of-no-one.so"]).err().unwrap();
        let text = error.to_string();
        assert!(matches!(error, Error::NcclLibrary { wanted: "2.18", .. }), "{text}");
        for part in ["/nowhere/libnccl.so.2", "libnccl-of-no-one.so", "2.18", "nvidia-nccl", LIBRARY_VARIABLE] {
            assert!(text.contains(part), "{text} does not name {part}");
        }
    }

    #[test]
    fn another_library_is_not_nccl() {
        let text = open(&["libc.so.6"]).err().unwrap().to_string();
        assert!(text.starts_with("NCCL: libc.so.6 is not NCCL: "), "{text}");
    }

    /// A library of one function, which says that it is `version`.
    fn pretended(version: i32) -> String {
        let folder = std::env::temp_dir().join(format!("muse-spark-layer-nccl-{}-{version}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, library) = (folder.join("nccl.c"), folder.join("libnccl.so.2"));
        std::fs::write(&source, format!("int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}\n")).unwrap();
        let made =
            std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(made.unwrap().success());
        library.to_str().unwrap().to_string()
    }

    #[test]
    fn an_old_library_is_named_with_its_version() {
        for (version, text) in [(21705, "2.17.5"), (2804, "2.8.4")] {
            let error = open(&[&pretended(version)]).err().unwrap().to_string();
            assert!(error.contains(&format!("is version {text}; install NCCL 2.18 or newer")), "{error}");
        }
        // New enough, and yet it lacks functions.
        let error = open(&[&pretended(22305)]).err().unwrap().to_string();
        assert!(error.contains("ncclGetUniqueId"), "{error}");
    }
}
