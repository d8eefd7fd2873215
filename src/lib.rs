//! One Muse Spark Open decoder layer on one Hopper GPU of a TP8/EP8 deployment, and its reference on the CPU.
//!
//! | module | what |
//! |---|---|
//! | [`layer`] | [`DecoderLayer`]: `new`, `plan`, `forward`, and the layer in three segments |
//! | [`stack`] | [`DecoderStack`]: layers of both kinds in one call |
//! | [`config`] | dimensions, and the choices a step makes |
//! | [`plan`] | what a step launches: plain data, printable |
//! | [`step`] | a step's tensors in device memory, and their checks |
//! | [`collective`] | sums and gathers over the ranks, between the segments |
//! | [`scheduler`] | the scheduler metadata of the engine `fa3` |
//! | [`kv_cache`], [`workspace`], [`stream`] | views of the cache, scratch memory, the caller's stream |
//! | [`weights`] | from host arrays, device memory or safetensors; NVFP4 |
//! | [`routing`] | top 8 and the expert lists, on the CPU |
//! | [`synthetic`] | weights and steps made from integers, for examples, tests and measurements |
//! | [`backend`] | `cpu`: one function per operation, any dimensions; `cuda`: kernels behind a bridge |
//! | `capi` | the C ABI, which `csrc/include/muse_spark_layer.h` documents |
//! | `dlpack` | DLPack tensors as a step's tensors (feature `dlpack`) |
//! | [`tensor`], [`error`] | plain tensors, typed errors |
//!
//! What is hidden from these pages (the bridge, launch parameters and heuristics, scratch layouts, checks of a call,
//! number formats) is there for the crate's own tests and command line, and promises nothing.
//!
//! Without the feature `cuda` everything is here but the GPU itself: the CPU backend, plans, checks.

#![warn(missing_docs)]

pub mod backend;
#[doc(hidden)]
pub mod capi;
pub mod collective;
pub mod config;
#[cfg(feature = "dlpack")]
pub mod dlpack;
pub mod error;
pub mod kv_cache;
pub mod layer;
#[doc(hidden)]
pub mod numerics;
pub mod plan;
pub mod routing;
pub mod scheduler;
pub mod stack;
pub mod step;
pub mod stream;
pub mod synthetic;
pub mod tensor;
pub mod weights;
pub mod workspace;

pub use collective::{Collective, Identity, Queue};
pub use config::{LayerConfig, LayerKind, QueryPrecision, Taps, WeightKind};
pub use error::{Error, Result};
pub use kv_cache::PagedKvCache;
pub use layer::{Backend, DecoderLayer};
pub use plan::{AttentionEngine, Plan, PlanKey, ShortRequests};
pub use scheduler::SchedulerMetadata;
pub use stack::{DecoderStack, PerKind, StackInput, StackOutput, StackPlan};
pub use step::{DeviceInput, DeviceOutput, DeviceTaps, Tap};
pub use stream::Stream;
pub use tensor::{DType, DeviceTensor, HostTensor, NamedTensors};
pub use weights::LayerWeights;
pub use workspace::Workspace;

/// The README's example, compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
