//! The bridge to C++: one function per operation of `csrc/include/ops.h`, and the queries of the CUDA
//! runtime that the crate needs. Nothing here aborts where there is no driver or no GPU.
//!
//! On the C++ side everything returns a `cudaError_t`; here that is [`Error::Cuda`] (or [`Error::ContextLost`])
//! with the call, the code, its name and its text, and a C++ exception is [`Error::Internal`].
#![allow(unsafe_code)]

use crate::backend::cuda::params::*;
use crate::error::{Error, Result};

#[cxx::bridge(namespace = "msl::bridge")]
mod ffi {
    /// What the runtime says of one device.
    #[derive(Debug, Clone)]
    struct DeviceInfo {
        /// CUDA device ordinal.
        ordinal: i32,
        /// As the driver names it.
        name: String,
        /// Compute capability.
        major: i32,
        /// Its second part.
        minor: i32,
        /// Multiprocessors.
        sm_count: i32,
        /// Bytes of device memory.
        memory_bytes: u64,
        /// Bytes of L2 cache.
        l2_bytes: u64,
        /// Shared memory that a block may opt in to.
        shared_bytes_per_block: u64,
    }

    #[namespace = "msl"]
    unsafe extern "C++" {
        include!("bridge/bridge.h");

        type Launch = crate::backend::cuda::params::Launch;
        type DenseParams = crate::backend::cuda::params::DenseParams;
        type QkNormRopeAppendParams = crate::backend::cuda::params::QkNormRopeAppendParams;
        type AttentionParams = crate::backend::cuda::params::AttentionParams;
        type Fa3AttentionParams = crate::backend::cuda::params::Fa3AttentionParams;
        type OutNormGateParams = crate::backend::cuda::params::OutNormGateParams;
        type AttnBoundaryParams = crate::backend::cuda::params::AttnBoundaryParams;
        type RouterParams = crate::backend::cuda::params::RouterParams;
        type RouterTiledParams = crate::backend::cuda::params::RouterTiledParams;
        type RouterTopkParams = crate::backend::cuda::params::RouterTopkParams;
        type BoundaryRouterParams = crate::backend::cuda::params::BoundaryRouterParams;
        type PreExpertNormParams = crate::backend::cuda::params::PreExpertNormParams;
        type ExpertGemmParams = crate::backend::cuda::params::ExpertGemmParams;
        type CombineParams = crate::backend::cuda::params::CombineParams;
        type FfnBoundaryParams = crate::backend::cuda::params::FfnBoundaryParams;
        type SliceSumParams = crate::backend::cuda::params::SliceSumParams;
        type PeerParams = crate::backend::cuda::params::PeerParams;
        type PackDenseParams = crate::backend::cuda::params::PackDenseParams;
        type PackRouterParams = crate::backend::cuda::params::PackRouterParams;
        type PackExpertsParams = crate::backend::cuda::params::PackExpertsParams;
    }

    unsafe extern "C++" {
        unsafe fn qkv_gate(params: &DenseParams, launch: &Launch) -> Result<i32>;
        unsafe fn o(params: &DenseParams, launch: &Launch) -> Result<i32>;
        unsafe fn pooler(params: &DenseParams, launch: &Launch) -> Result<i32>;
        unsafe fn unpooler(params: &DenseParams, launch: &Launch) -> Result<i32>;
        unsafe fn qk_norm_rope_append(params: &QkNormRopeAppendParams, launch: &Launch) -> Result<i32>;
        unsafe fn attention(params: &AttentionParams, launch: &Launch) -> Result<i32>;
        unsafe fn append_attention(
            append: &QkNormRopeAppendParams,
            attention: &AttentionParams,
            launch: &Launch,
        ) -> Result<i32>;
        unsafe fn fa3_schedule(params: &Fa3AttentionParams, launch: &Launch) -> Result<i32>;
        unsafe fn fa3_attention(params: &Fa3AttentionParams, launch: &Launch) -> Result<i32>;
        unsafe fn out_norm_gate(params: &OutNormGateParams, launch: &Launch) -> Result<i32>;
        unsafe fn attn_boundary(params: &AttnBoundaryParams, launch: &Launch) -> Result<i32>;
        unsafe fn router(params: &RouterParams, launch: &Launch) -> Result<i32>;
        unsafe fn router_tiled(params: &RouterTiledParams, launch: &Launch) -> Result<i32>;
        unsafe fn router_topk(params: &RouterTopkParams, launch: &Launch) -> Result<i32>;
        unsafe fn boundary_router(params: &BoundaryRouterParams, launch: &Launch) -> Result<i32>;
        unsafe fn boundary_topk(
            topk: &RouterTopkParams,
            boundary: &BoundaryRouterParams,
            launch: &Launch,
        ) -> Result<i32>;
        unsafe fn pre_expert_norm(params: &PreExpertNormParams, launch: &Launch) -> Result<i32>;
        unsafe fn w13(params: &ExpertGemmParams, launch: &Launch) -> Result<i32>;
        unsafe fn w2(params: &ExpertGemmParams, launch: &Launch) -> Result<i32>;
        unsafe fn combine(params: &CombineParams, launch: &Launch) -> Result<i32>;
        unsafe fn ffn_boundary(params: &FfnBoundaryParams, launch: &Launch) -> Result<i32>;
        unsafe fn slice_sum(params: &SliceSumParams, launch: &Launch) -> Result<i32>;
        unsafe fn peer_sum(params: &PeerParams, launch: &Launch) -> Result<i32>;
        unsafe fn peer_gather(params: &PeerParams, launch: &Launch) -> Result<i32>;
        unsafe fn pack_dense(params: &PackDenseParams, launch: &Launch) -> Result<i32>;
        unsafe fn pack_router(params: &PackRouterParams, launch: &Launch) -> Result<i32>;
        unsafe fn pack_experts(params: &PackExpertsParams, launch: &Launch) -> Result<i32>;

        fn prepare_all() -> Result<i32>;

        fn device_count(count: &mut i32) -> Result<i32>;
        fn device_info(ordinal: i32, info: &mut DeviceInfo) -> Result<i32>;
        fn set_device(ordinal: i32) -> Result<i32>;
        fn current_device(ordinal: &mut i32) -> Result<i32>;
        fn driver_version(version: &mut i32) -> Result<i32>;
        fn runtime_version(version: &mut i32) -> Result<i32>;
        fn pointer_location(address: usize, kind: &mut i32, device: &mut i32) -> Result<i32>;
        fn peek_last_error() -> Result<i32>;
        fn clear_last_error() -> Result<i32>;
        fn error_name(code: i32) -> Result<String>;
        fn error_text(code: i32) -> Result<String>;

        fn layouts() -> Result<String>;
    }
}

pub use ffi::DeviceInfo;

/// A code of the CUDA runtime (or an exception) as the crate's result.
fn check(call: &str, code: std::result::Result<i32, cxx::Exception>) -> Result<()> {
    match code {
        Ok(0) => Ok(()),
        Ok(code) => Err(Error::cuda(call, code, describe(code))),
        Err(exception) => Err(Error::Internal { what: format!("{call}: {exception}") }),
    }
}

/// `cudaErrorInvalidValue: invalid argument`.
pub fn describe(code: i32) -> String {
    let name = ffi::error_name(code).unwrap_or_else(|_| "unknown".to_string());
    let text = ffi::error_text(code).unwrap_or_default();
    format!("{name}: {text}")
}

macro_rules! operations {
    ($($name:ident($params:ty),)*) => {$(
        #[doc = concat!("Launches `", stringify!($name), "` (csrc/include/ops.h) on `launch.stream`.")]
        ///
        /// # Safety
        /// Every pointer in `params` is null where params.h allows it, or points to device memory of the
        /// shape that params.h gives, alive until the launched work is done; `launch.stream` is a stream of
        /// the current device.
        pub unsafe fn $name(params: &$params, launch: &Launch) -> Result<()> {
            // SAFETY: the caller's promise is the C++ function's precondition.
            check(stringify!($name), unsafe { ffi::$name(params, launch) })
        }
    )*};
}

operations! {
    qkv_gate(DenseParams),
    o(DenseParams),
    pooler(DenseParams),
    unpooler(DenseParams),
    qk_norm_rope_append(QkNormRopeAppendParams),
    attention(AttentionParams),
    fa3_schedule(Fa3AttentionParams),
    fa3_attention(Fa3AttentionParams),
    out_norm_gate(OutNormGateParams),
    attn_boundary(AttnBoundaryParams),
    router(RouterParams),
    router_tiled(RouterTiledParams),
    router_topk(RouterTopkParams),
    boundary_router(BoundaryRouterParams),
    pre_expert_norm(PreExpertNormParams),
    w13(ExpertGemmParams),
    w2(ExpertGemmParams),
    combine(CombineParams),
    ffn_boundary(FfnBoundaryParams),
    slice_sum(SliceSumParams),
    peer_sum(PeerParams),
    peer_gather(PeerParams),
    pack_dense(PackDenseParams),
    pack_router(PackRouterParams),
    pack_experts(PackExpertsParams),
}

/// Launches `append_attention` (csrc/include/ops.h) on `launch.stream`.
///
/// # Safety
/// As of `qk_norm_rope_append` with `append` and of `attention` with `attention`, of the same step.
pub unsafe fn append_attention(
    append: &QkNormRopeAppendParams,
    attention: &AttentionParams,
    launch: &Launch,
) -> Result<()> {
    // SAFETY: the caller's promise is the C++ function's precondition.
    check("append_attention", unsafe { ffi::append_attention(append, attention, launch) })
}

/// Launches `boundary_topk` (csrc/include/ops.h) on `launch.stream`.
///
/// # Safety
/// As of `router_topk` with `topk` and of `boundary_router` with `boundary`, of the same step.
pub unsafe fn boundary_topk(topk: &RouterTopkParams, boundary: &BoundaryRouterParams, launch: &Launch) -> Result<()> {
    // SAFETY: the caller's promise is the C++ function's precondition.
    check("boundary_topk", unsafe { ffi::boundary_topk(topk, boundary, launch) })
}

/// Loads every kernel and sets its attributes on the current device; before any capture.
pub fn prepare_all() -> Result<()> {
    check("prepare_all", ffi::prepare_all())
}

/// Devices that CUDA sees; [`Error::NoDriver`], [`Error::OldDriver`] or [`Error::NoDevice`] where there is none.
pub fn device_count() -> Result<i32> {
    let mut count = 0;
    match ffi::device_count(&mut count) {
        Ok(0) if count > 0 => Ok(count),
        Ok(code) => {
            let code = if code == 0 { NO_DEVICE } else { code };
            Err(Error::no_devices(code, describe(code), driver_version().unwrap_or(0), runtime_version()?))
        }
        Err(exception) => Err(Error::Internal { what: exception.to_string() }),
    }
}

/// `cudaErrorNoDevice`.
const NO_DEVICE: i32 = 100;

/// Name, compute capability and sizes of a device.
pub fn device_info(ordinal: i32) -> Result<DeviceInfo> {
    let mut info = DeviceInfo {
        ordinal,
        name: String::new(),
        major: 0,
        minor: 0,
        sm_count: 0,
        memory_bytes: 0,
        l2_bytes: 0,
        shared_bytes_per_block: 0,
    };
    check("device_info", ffi::device_info(ordinal, &mut info))?;
    Ok(info)
}

/// Makes a device current on this thread.
pub fn set_device(ordinal: i32) -> Result<()> {
    check("cudaSetDevice", ffi::set_device(ordinal))
}

/// The device that is current on this thread.
pub fn current_device() -> Result<i32> {
    number("cudaGetDevice", ffi::current_device)
}

/// The newest CUDA version the driver supports, 13000 for 13.0; 0 where there is no driver.
pub fn driver_version() -> Result<i32> {
    number("cudaDriverGetVersion", ffi::driver_version)
}

/// The CUDA runtime's version that is linked in, 13000 for 13.0.
pub fn runtime_version() -> Result<i32> {
    number("cudaRuntimeGetVersion", ffi::runtime_version)
}

fn number(call: &str, query: fn(&mut i32) -> std::result::Result<i32, cxx::Exception>) -> Result<i32> {
    let mut value = 0;
    check(call, query(&mut value))?;
    Ok(value)
}

/// Where an address lies, as the driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// Memory the driver does not know: the process's own.
    Unregistered,
    /// Pinned or registered host memory.
    Host,
    /// Memory of this device.
    Device(i32),
    /// Managed memory.
    Managed,
}

/// Looks an address up. Touches nothing that a stream capture would mind.
pub fn pointer_location(address: u64) -> Result<Location> {
    let (mut kind, mut device) = (0, 0);
    check("cudaPointerGetAttributes", ffi::pointer_location(address as usize, &mut kind, &mut device))?;
    // cudaMemoryType
    Ok(match kind {
        1 => Location::Host,
        2 => Location::Device(device),
        3 => Location::Managed,
        _ => Location::Unregistered,
    })
}

/// The last error of the runtime on this thread, left in place.
pub fn peek_last_error() -> Result<()> {
    check("cudaPeekAtLastError", ffi::peek_last_error())
}

/// The last error of the runtime on this thread, which is forgotten (unless the context is lost).
pub fn clear_last_error() -> Result<()> {
    check("cudaGetLastError", ffi::clear_last_error())
}

/// The layout of every struct of params.h as C++ has it, in the form of
/// [`params::layouts`](crate::backend::cuda::params::layouts).
pub fn layouts() -> String {
    ffi::layouts().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_an_error_with_a_reason() {
        match device_count() {
            Ok(count) => assert!(device_info(count - 1).unwrap().sm_count > 0),
            Err(Error::NoDevice { reason }) => assert!(reason.starts_with("cudaError"), "{reason}"),
            Err(Error::NoDriver | Error::OldDriver { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        driver_version().unwrap();
        assert!(runtime_version().unwrap() >= 13_000);
    }

    #[test]
    fn a_failed_call_names_itself_and_leaves_no_error_behind() {
        let error = set_device(1 << 20).unwrap_err();
        let Error::Cuda { call, code, text } = &error else { panic!("{error}") };
        assert_eq!(call, "cudaSetDevice");
        assert!(*code > 0 && text.starts_with("cudaError"), "{error}");
        if device_count().is_ok() {
            peek_last_error().unwrap();
        }
    }
}
