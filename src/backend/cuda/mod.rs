//! The CUDA backend: one Hopper GPU, the released TP8/EP8 dimensions.
//!
//! | file | what |
//! |---|---|
//! | `model.rs` | the dimensions, as `csrc/include/model.h` |
//! | `heuristics.rs` | every launch decision, from shapes and SM count |
//! | `tiles.rs` | the dense projections' part of them: tiles by a model of their clocks |
//! | `params.rs` | the operations' plain structs, as `csrc/include/params.h` |
//! | `bridge.rs` | the C++ entry points |
//! | `device.rs` | driver, devices, allocations |
//! | `staging.rs` | weights from the host: a ring of pinned memory |
//! | `ops.rs`, `ops/` | one method per operation: fills the struct, calls the entry point |
//! | `host.rs` | a step on host arrays: upload, run, download |
//! | `resident.rs` | a step whose tensors live on the device, for measurements |
//! | `peers.rs` | collectives of a few tokens between GPUs of one process |
//! | `nccl.rs` | collectives between GPUs, feature `nccl` |
//! | `graph.rs` | streams, events, captured graphs, an emptied L2 cache |
//!
//! The decisions need no toolkit: they are compiled, and tested, in every build. What a runtime uses is [`model`],
//! `Device`, `Buffer`, `graph`, `peers` and `nccl`; the rest is hidden from the documentation, and open to tests and
//! measurements.

#[doc(hidden)]
pub mod heuristics;
pub mod model;
#[doc(hidden)]
pub mod tiles;

#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod bridge;
#[cfg(feature = "cuda")]
pub mod device;
#[cfg(feature = "cuda")]
pub mod graph;
#[cfg(feature = "cuda")]
pub(crate) mod host;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub(crate) mod ops;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod params;
#[cfg(feature = "cuda")]
pub mod peers;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod resident;
#[cfg(feature = "cuda")]
pub(crate) mod staging;

#[cfg(feature = "cuda")]
pub use device::{Buffer, Device};
