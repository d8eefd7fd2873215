//! Everything that needs a GPU, in one binary that carries its data (synthetic, from integers): the
//! operations and the layer against the CPU reference at full size, capture and replay. Built anywhere;
//! without a Hopper GPU each test says that it is skipped and passes.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

mod api;
mod batch;
mod capture;
mod checkpoint;
mod collective;
mod edges;
mod exact;
#[cfg(feature = "fa3")]
mod fa3;
mod faults;
mod harness;
mod interop;
mod layer;
mod matrix;
mod memory;
mod mixed;
#[cfg(feature = "nccl")]
mod nccl;
mod operations;
mod peers;
mod properties;
mod routes;
mod sanitized;
mod single;
mod soak;
mod speed;
mod stack;
#[path = "../cpu_common/steps.rs"]
mod steps;
