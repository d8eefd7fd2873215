//! Where a layer runs: the CPU reference, always there, and the CUDA backend (feature `cuda`).

pub mod cpu;
pub mod cuda;
