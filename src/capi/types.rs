//! The structs of the C ABI, handles, and how errors become statuses.
#![allow(unsafe_code)]
#![allow(missing_docs)]

use crate::error::{Error, Result};
use crate::layer::DecoderLayer;
use crate::plan::Plan;
use crate::scheduler::SchedulerMetadata;
use crate::workspace::Workspace;
use std::cell::RefCell;
use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::offset_of;
use std::panic::{catch_unwind, AssertUnwindSafe};

thread_local! {
    pub(super) static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

/// Status of an error.
fn status(error: &Error) -> i32 {
    match error {
        Error::NanScale { .. } | Error::File { .. } | Error::Format { .. } | Error::Checkpoint { .. } => 2,
        Error::CudaDimensions { .. } | Error::Unsupported { .. } | Error::UnsupportedGpu { .. } => 3,
        Error::NoCuda | Error::NoDriver | Error::OldDriver { .. } | Error::NoDevice { .. } => 4,
        Error::Cuda { .. } | Error::OutOfMemory { .. } | Error::ContextLost { .. } => 5,
        Error::Nccl { .. } | Error::NcclLibrary { .. } | Error::RankLost { .. } => 5,
        Error::Internal { .. } => 6,
        _ => 1,
    }
}

fn remember(text: String) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with(|last| *last.borrow_mut() = text);
}

/// Runs a call: its error, or its panic, becomes a status and a text.
pub(super) fn call(body: impl FnOnce() -> Result<()>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".into());
        Err(Error::Internal { what: text })
    });
    match result {
        Ok(()) => 0,
        Err(error) => {
            remember(error.to_string());
            status(&error)
        }
    }
}

/// A struct of a caller whose header may be older or newer than this library.
pub(super) trait Sized32: Copy {
    const NAME: &'static str;
    /// Bytes of its first version, with which every caller's begins.
    const FIRST: usize = size_of::<Self>();
}

/// No version of a struct will ever be larger.
const LARGEST: usize = 1 << 16;

/// Copies what the caller knows of a struct; the rest is zero.
///
/// # Safety
/// `ptr` is null or points to as many bytes as its first field says.
pub(super) unsafe fn take<T: Sized32>(ptr: *const T) -> Result<T> {
    if ptr.is_null() {
        return Err(Error::Null { tensor: T::NAME.into() });
    }
    // SAFETY: every such struct begins with its size, and all-zero bytes are a value of it.
    unsafe {
        let given = ptr.cast::<u32>().read_unaligned() as usize;
        let known = size_of::<T>();
        // The first version of each struct is the smallest there is; a size past all reason was never set, and
        // nothing may be read by it.
        if !(T::FIRST..=LARGEST).contains(&given) {
            let (what, few) = (format!("{}.struct_size", T::NAME), given < T::FIRST);
            let wanted = if few { format!("at least {}", T::FIRST) } else { format!("at most {LARGEST}") };
            return Err(Error::Value { what, wanted, got: given.to_string() });
        }
        let bytes = std::slice::from_raw_parts(ptr.cast::<u8>(), given);
        let known = known.min(given);
        if bytes[known..].iter().any(|&b| b != 0) {
            let what = format!("{}: fields past byte {known}", T::NAME);
            return Err(Error::Value {
                what,
                wanted: "zero: this library does not know them".into(),
                got: "set".into(),
            });
        }
        let mut value = std::mem::zeroed::<T>();
        std::ptr::copy_nonoverlapping(ptr.cast::<u8>(), (&mut value as *mut T).cast::<u8>(), known);
        Ok(value)
    }
}

/// # Safety
/// `ptr` is null or a live handle of this library.
pub(super) unsafe fn handle<'a, T>(name: &str, ptr: *const T) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { ptr.as_ref() }.ok_or_else(|| Error::Null { tensor: name.into() })
}

/// # Safety
/// `ptr` is null or a zero-terminated string.
pub(super) unsafe fn string(what: &str, ptr: *const c_char) -> Result<String> {
    if ptr.is_null() {
        return Err(Error::Null { tensor: what.into() });
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { CStr::from_ptr(ptr) }.to_string_lossy().into_owned())
}

pub(super) fn choice<T: Copy>(what: &str, value: i32, choices: &[T]) -> Result<T> {
    usize::try_from(value).ok().and_then(|i| choices.get(i)).copied().ok_or_else(|| Error::Value {
        what: what.into(),
        wanted: format!("0 to {}", choices.len() - 1),
        got: value.to_string(),
    })
}

/// Hands a new object to the caller.
///
/// # Safety
/// `out` is null or may be written.
pub(super) unsafe fn give<T>(name: &str, out: *mut *mut T, make: impl FnOnce() -> Result<T>) -> Result<()> {
    if out.is_null() {
        return Err(Error::Null { tensor: name.into() });
    }
    // SAFETY: the caller's promise.
    unsafe { *out = std::ptr::null_mut() };
    let object = Box::new(make()?);
    // SAFETY: as above.
    unsafe { *out = Box::into_raw(object) };
    Ok(())
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MslTensor {
    pub name: *const c_char,
    pub data: *const c_void,
    pub dtype: i32,
    pub rank: i32,
    pub shape: [i64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MslLayerOptions {
    pub struct_size: u32,
    pub device: i32,
    pub experts: i32,
    pub dimensions: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MslPlanOptions {
    pub struct_size: u32,
    pub tokens: u32,
    pub requests: u32,
    pub max_q_len: u32,
    pub table_width: u32,
    pub page_size: u32,
    pub kind: i32,
    pub engine: i32,
    pub query: i32,
    pub rank: u32,
    pub taps: i32,
    pub plain_launch: i32,
    pub route_bound: u32,
    pub skip_slot_zero: i32,
    pub synchronize: i32,
    pub short_requests: u32,
    pub short_tokens: u32,
    pub short_max_q_len: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MslTap {
    pub name: *const c_char,
    pub data: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MslStep {
    pub struct_size: u32,
    pub tap_count: u32,
    pub attn_input: *const c_void,
    pub positions: *const c_void,
    pub cache_loc: *const c_void,
    pub cu_seqlens_q: *const c_void,
    pub cache_seqlens: *const c_void,
    pub page_table: *const c_void,
    pub table_stride: i64,
    pub k_scale: *const c_void,
    pub v_scale: *const c_void,
    pub k_cache: *mut c_void,
    pub v_cache: *mut c_void,
    pub pages: i64,
    pub stream: *const c_void,
    pub local_start: *const c_void,
    pub num_tokens_non_padded: *const c_void,
    pub topk_ids: *mut c_void,
    pub hidden: *mut c_void,
    pub stream_out: *mut c_void,
    pub attn_out: *mut c_void,
    pub stream_after_attn: *mut c_void,
    pub moe_mix: *mut c_void,
    pub taps: *const MslTap,
    pub scheduler_metadata: *const MslSchedulerMetadata,
}

impl Sized32 for MslLayerOptions {
    const NAME: &'static str = "msl_layer_options";
    const FIRST: usize = offset_of!(MslLayerOptions, dimensions);
}
impl Sized32 for MslPlanOptions {
    const NAME: &'static str = "msl_plan_options";
    const FIRST: usize = offset_of!(MslPlanOptions, short_requests);
}
impl Sized32 for MslStep {
    const NAME: &'static str = "msl_step";
    const FIRST: usize = offset_of!(MslStep, scheduler_metadata);
}

/// `msl_layer`.
pub struct MslLayer(pub(super) DecoderLayer);
/// `msl_workspace`.
pub struct MslWorkspace(pub(super) Workspace);
/// `msl_scheduler_metadata`.
pub struct MslSchedulerMetadata(pub(super) SchedulerMetadata);
/// `msl_plan`, with its text.
pub struct MslPlan {
    pub(super) plan: Plan,
    pub(super) text: CString,
}

/// # Safety
/// `ptr` is null or came from `give` and is not used again.
pub(super) unsafe fn destroy<T>(ptr: *mut T) {
    if !ptr.is_null() {
        // SAFETY: the caller's promise. A panic in a destructor ends here.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(ptr) })));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `msl_step` grew by its last field: a caller of the header before that goes on, a shorter one is refused.
    #[test]
    fn an_older_step_is_taken() {
        // SAFETY: an all-zero step is a value of it.
        let mut step: MslStep = unsafe { std::mem::zeroed() };
        step.pages = 7;
        step.scheduler_metadata = std::ptr::dangling();
        step.struct_size = MslStep::FIRST as u32;
        // SAFETY: the step is longer than its first field says.
        let older = unsafe { take(&step) }.unwrap();
        assert_eq!((older.pages, older.scheduler_metadata), (7, std::ptr::null()));
        step.struct_size -= 8;
        // SAFETY: as above.
        let text = unsafe { take(&step) }.map(|_| ()).unwrap_err().to_string();
        assert_eq!(text, format!("msl_step.struct_size: wanted at least {}, got {}", MslStep::FIRST, step.struct_size));
        step.struct_size = size_of::<MslStep>() as u32;
        // SAFETY: as above.
        assert_eq!(unsafe { take(&step) }.unwrap().scheduler_metadata, step.scheduler_metadata);
    }
}
