//! What can go wrong, one variant a kind, each with the fields a program needs to react to it and a
//! sentence that names the tensor, what was wanted and what was found.

use crate::tensor::DType;
use std::path::PathBuf;

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything the crate reports. No panic and no C++ exception crosses the API.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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

    /// There is no driver or no GPU.
    #[error("no CUDA device: {reason}")]
    NoDevice { reason: String },

    /// A CUDA call failed.
    #[error("{call} failed with CUDA error {code}: {text}")]
    Cuda { call: String, code: i32, text: String },

    /// An NCCL call failed.
    #[error("{call} failed with NCCL error {code}: {text}")]
    Nccl { call: String, code: i32, text: String },

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
