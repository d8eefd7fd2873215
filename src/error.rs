//! What can go wrong, one variant a kind, each with the fields a program needs to react to it and a
//! sentence that names the tensor, what was wanted and what was found.

use crate::tensor::DType;
use std::path::PathBuf;

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything the crate reports. No panic and no C++ exception crosses the API.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
// Fields are what the messages name: `tensor`, `what` or `field` is at fault, `wanted` and `got` (or `found`) say how.
#[allow(missing_docs)]
pub enum Error {
    /// A tensor has another shape than the configuration asks for.
    #[error("{tensor}: wanted shape {wanted:?}, got {got:?}")]
    Shape { tensor: String, wanted: Vec<usize>, got: Vec<usize> },

    /// A tensor has another element type.
    #[error("{tensor}: wanted {wanted}, got {got}")]
    DType { tensor: String, wanted: DType, got: DType },

    /// A tensor's strides (in elements) are not the ones supported.
    #[error("{tensor}: wanted {wanted}, got strides {got:?}")]
    Stride { tensor: String, wanted: String, got: Vec<i64> },

    /// A pointer is not aligned to `wanted` bytes.
    #[error("{tensor}: wanted an address aligned to {wanted} bytes, got {got:#x}")]
    Alignment { tensor: String, wanted: usize, got: u64 },

    /// A null pointer where memory is needed.
    #[error("{tensor}: null pointer")]
    Null { tensor: String },

    /// A tensor lives on another device.
    #[error("{tensor}: wanted memory of device {wanted}, got device {got}")]
    Device { tensor: String, wanted: i32, got: i32 },

    /// A tensor's memory is not where it must be (host, device, managed).
    #[error("{tensor}: wanted {wanted} memory, got {got} memory")]
    Memory { tensor: String, wanted: &'static str, got: &'static str },

    /// An output overlaps an input or another output.
    #[error("{tensor} overlaps {other}: outputs must not alias inputs or each other")]
    Alias { tensor: String, other: String },

    /// A tensor that is needed was not given.
    #[error("{tensor}: missing")]
    Missing { tensor: String },

    /// A number is past a limit.
    #[error("{what}: {got} is past the limit of {limit}")]
    Limit { what: String, limit: u64, got: u64 },

    /// An argument has a value that is not allowed.
    #[error("{what}: wanted {wanted}, got {got}")]
    Value { what: String, wanted: String, got: String },

    /// A field of [`LayerConfig`](crate::LayerConfig) is not valid.
    #[error("configuration: {field} must be {wanted}, got {got}")]
    Config { field: &'static str, wanted: String, got: String },

    /// The CUDA backend runs the released TP8 dimensions only.
    #[error("CUDA backend: {field} = {got} is not supported, only the released {wanted}; other dimensions run on the CPU backend")]
    CudaDimensions { field: &'static str, wanted: String, got: String },

    /// Something the chosen backend does not do.
    #[error("{backend} backend: {what} is not supported")]
    Unsupported { backend: &'static str, what: String },

    /// A call does not fit the plan it was given.
    #[error("plan: {field} was planned as {planned}, the call has {got}")]
    Plan { field: &'static str, planned: String, got: String },

    /// A block scale of NVFP4 weights is NaN.
    #[error("{tensor}: block scale {index} is NaN (0x7f or 0xff)")]
    NanScale { tensor: String, index: usize },

    /// The GPU is not a Hopper one.
    #[error("device {device} is {found}; the CUDA backend needs compute capability 9.0 (H100, H200, GH200)")]
    UnsupportedGpu { device: i32, found: String },

    /// The crate was built without the `cuda` feature.
    #[error("this build has no CUDA backend: build with `--features cuda`, or use the CPU backend")]
    NoCuda,

    /// CUDA's driver is not on this machine.
    #[error("no CUDA device: no driver library (libcuda.so.1) on this machine: install NVIDIA's driver, or use the CPU backend")]
    NoDriver,

    /// The driver is older than the CUDA runtime that is linked in.
    #[error("no CUDA device: the driver supports CUDA up to {found}, this build needs {wanted}: update the driver, or build with an older toolkit")]
    OldDriver { found: String, wanted: String },

    /// There is a driver but no GPU, or not the one asked for.
    #[error("no CUDA device: {reason}")]
    NoDevice { reason: String },

    /// Device memory ran out. What was there before is as it was, and the next call works.
    #[error("device {device} is out of memory: {wanted} bytes wanted, {free} of {total} free: plan fewer tokens or a route bound, shrink the cache, or free what is not used")]
    OutOfMemory { device: i32, wanted: u64, free: u64, total: u64 },

    /// The process's CUDA context is lost: a kernel or a copy of this or of another library failed.
    #[error("{call}: the CUDA context is lost (error {code}, {text}): an operation before this call failed, maybe another library's, and every CUDA call of the process fails from now on. Start a new process; with MUSE_SPARK_LAYER_SYNC=1 it names the operation if it is one of this layer")]
    ContextLost { call: String, code: i32, text: String },

    /// A CUDA call failed.
    #[error("{call} failed with CUDA error {code}: {text}")]
    Cuda { call: String, code: i32, text: String },

    /// An NCCL call failed.
    #[error("{call} failed with NCCL error {code}: {text}")]
    Nccl { call: String, code: i32, text: String },

    /// NCCL's library is not there, or is too old.
    #[error("NCCL: {problem}; install NCCL {wanted} or newer (pip: nvidia-nccl-cu13), and name the file in MUSE_SPARK_LAYER_NCCL if it is not on the loader's path")]
    NcclLibrary { wanted: &'static str, problem: String },

    /// Another rank did not take part in a collective in time, or has left. The group is of no more use.
    #[error("rank {rank} of {ranks}: {call}: {reason}")]
    RankLost { rank: usize, ranks: usize, call: String, reason: String },

    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },

    /// A file was read but does not hold what it should.
    #[error("{}: {problem}", path.display())]
    Format { path: PathBuf, problem: String },

    /// A checkpoint's tensor (or setting, or file) is not what the layer needs: `what` names it, in `path`.
    #[error("{}: {what}: wanted {wanted}, got {got}", path.display())]
    Checkpoint { path: PathBuf, what: String, wanted: String, got: String },

    /// A fault of the crate itself (a caught panic or exception).
    #[error("internal error: {what}")]
    Internal { what: String },
}

impl Error {
    /// The same error about a part of something: `place` before the name of the tensor or value.
    pub(crate) fn within(mut self, place: &str) -> Error {
        match &mut self {
            Error::Shape { tensor, .. }
            | Error::DType { tensor, .. }
            | Error::Stride { tensor, .. }
            | Error::Alignment { tensor, .. }
            | Error::Null { tensor }
            | Error::Device { tensor, .. }
            | Error::Memory { tensor, .. }
            | Error::Alias { tensor, .. }
            | Error::Missing { tensor }
            | Error::RankLost { call: tensor, .. }
            | Error::Limit { what: tensor, .. }
            | Error::Value { what: tensor, .. } => *tensor = format!("{place}.{tensor}"),
            _ => {}
        }
        self
    }

    /// A failed call of the driver or the runtime (they share their codes), by what is left to do about it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn cuda(call: impl Into<String>, code: i32, text: String) -> Error {
        // Uncorrectable ECC and NVLink errors; illegal address; timeout; destroyed context; assertion; stack, instruction,
        // alignment, address space and counter faults; failed launch: none of them can be got over in the process.
        const LOST: [i32; 12] = [214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];
        let call = call.into();
        if LOST.contains(&code) {
            Error::ContextLost { call, code, text }
        } else {
            Error::Cuda { call, code, text }
        }
    }

    /// No devices, where the runtime gave `code` for their number: `driver` and `runtime` are CUDA versions as
    /// 1000 * major + 10 * minor, and `driver` is 0 without a driver.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn no_devices(code: i32, text: String, driver: i32, runtime: i32) -> Error {
        const INSUFFICIENT_DRIVER: i32 = 35;
        let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        match code {
            INSUFFICIENT_DRIVER if driver == 0 => Error::NoDriver,
            INSUFFICIENT_DRIVER => Error::OldDriver { found: version(driver), wanted: version(runtime) },
            _ => Error::NoDevice { reason: text },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_context_is_told_from_a_failed_call() {
        for (code, lost) in
            [(1, false), (2, false), (35, false), (700, true), (701, false), (709, true), (719, true), (900, false)]
        {
            let error = Error::cuda("attention", code, "why".into());
            assert_eq!(matches!(error, Error::ContextLost { .. }), lost, "{code}");
            assert!(error.to_string().starts_with("attention"), "{error}");
        }
        assert!(Error::cuda("x", 700, "why".into()).to_string().contains("Start a new process"));
    }

    #[test]
    fn a_missing_driver_is_told_from_an_old_one_and_from_no_gpu() {
        let text = |code, driver| Error::no_devices(code, "cudaErrorNoDevice: none".into(), driver, 13_000).to_string();
        assert!(text(35, 0).contains("install NVIDIA's driver"), "{}", text(35, 0));
        assert!(
            text(35, 12_080).contains("up to 12.8, this build needs 13.0: update the driver"),
            "{}",
            text(35, 12_080)
        );
        assert_eq!(text(100, 13_000), "no CUDA device: cudaErrorNoDevice: none");
        assert!([text(35, 0), text(35, 1), text(100, 0)].iter().all(|t| t.starts_with("no CUDA device: ")));
    }
}
