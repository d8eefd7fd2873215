// The operations and the runtime queries behind src/backend/cuda/bridge.rs.
#include "bridge/bridge.h"

#include <cuda_runtime_api.h>
#include <nvtx3/nvtx3.hpp>

#include "include/ops.h"
#include "muse-spark-layer/src/backend/cuda/bridge.rs.h"

#ifndef MUSE_SPARK_FA3
// Without the feature `fa3` no plan asks for these.
namespace msl {
int fa3_schedule(const Fa3AttentionParams&, const Launch&) { return cudaErrorNotSupported; }
int fa3_attention(const Fa3AttentionParams&, const Launch&) { return cudaErrorNotSupported; }
int prepare_fa3() { return cudaSuccess; }
}  // namespace msl
#endif

namespace msl::bridge {
namespace {
// The runtime remembers a failed call; a later, innocent one would report it. What the caller is told is
// forgotten here. (Errors that lose the context stay: the runtime repeats those by itself.)
int32_t told(int code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}
// The domain of the ranges, one an operation, that a profiler shows. Nothing is called where none listens.
struct NvtxDomain {
  static constexpr char const* name{"muse_spark_layer"};
};
}  // namespace

// A form of an operation has an entry of its own and the operation's range.
#define MSL_FORM(name, operation, Params)                            \
  int32_t name(const Params& params, const Launch& launch) {         \
    const nvtx3::scoped_range_in<NvtxDomain> range{operation};       \
    return told(msl::name(params, launch));                          \
  }
#define MSL_OPERATION(name, Params) MSL_FORM(name, #name, Params)
MSL_OPERATION(qkv_gate, DenseParams)
MSL_OPERATION(o, DenseParams)
MSL_OPERATION(pooler, DenseParams)
MSL_OPERATION(unpooler, DenseParams)
MSL_OPERATION(qk_norm_rope_append, QkNormRopeAppendParams)
MSL_OPERATION(attention, AttentionParams)
MSL_OPERATION(fa3_schedule, Fa3AttentionParams)
MSL_OPERATION(fa3_attention, Fa3AttentionParams)
MSL_OPERATION(out_norm_gate, OutNormGateParams)
MSL_OPERATION(attn_boundary, AttnBoundaryParams)
MSL_OPERATION(router, RouterParams)
MSL_FORM(router_tiled, "router", RouterTiledParams)
MSL_OPERATION(router_topk, RouterTopkParams)
MSL_OPERATION(boundary_router, BoundaryRouterParams)
MSL_OPERATION(pre_expert_norm, PreExpertNormParams)
MSL_OPERATION(w13, ExpertGemmParams)
MSL_OPERATION(w2, ExpertGemmParams)
MSL_OPERATION(combine, CombineParams)
MSL_OPERATION(ffn_boundary, FfnBoundaryParams)
MSL_OPERATION(slice_sum, SliceSumParams)
MSL_OPERATION(peer_sum, PeerParams)
MSL_OPERATION(peer_gather, PeerParams)
MSL_OPERATION(pack_dense, PackDenseParams)
MSL_OPERATION(pack_router, PackRouterParams)
MSL_OPERATION(pack_experts, PackExpertsParams)
#undef MSL_OPERATION
#undef MSL_FORM

int32_t boundary_topk(const RouterTopkParams& topk, const BoundaryRouterParams& boundary, const Launch& launch) {
  const nvtx3::scoped_range_in<NvtxDomain> range{"boundary_topk"};
  return told(msl::boundary_topk(topk, boundary, launch));
}

int32_t append_attention(const QkNormRopeAppendParams& append, const AttentionParams& attention, const Launch& launch) {
  const nvtx3::scoped_range_in<NvtxDomain> range{"append_attention"};
  return told(msl::append_attention(append, attention, launch));
}

int32_t prepare_all() {
  for (int (*prepare)() : {prepare_dense, prepare_attention, prepare_residual, prepare_moe, prepare_experts,
                            prepare_collective, prepare_peer, prepare_fa3}) {
    if (const int code = prepare()) return told(code);
  }
  return cudaSuccess;
}

int32_t device_count(int32_t& count) {
  int found = 0;
  const int code = cudaGetDeviceCount(&found);
  count = code == cudaSuccess ? found : 0;
  return told(code);
}

int32_t device_info(int32_t ordinal, DeviceInfo& info) {
  cudaDeviceProp properties;
  if (const int code = cudaGetDeviceProperties(&properties, ordinal)) return told(code);
  info.ordinal = ordinal;
  info.name = rust::String::lossy(properties.name);
  info.major = properties.major;
  info.minor = properties.minor;
  info.sm_count = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.l2_bytes = static_cast<uint64_t>(properties.l2CacheSize);
  info.shared_bytes_per_block = properties.sharedMemPerBlockOptin;
  return cudaSuccess;
}

int32_t set_device(int32_t ordinal) { return told(cudaSetDevice(ordinal)); }

int32_t current_device(int32_t& ordinal) { return told(cudaGetDevice(&ordinal)); }

int32_t driver_version(int32_t& version) { return told(cudaDriverGetVersion(&version)); }

int32_t runtime_version(int32_t& version) { return told(cudaRuntimeGetVersion(&version)); }

int32_t pointer_location(size_t address, int32_t& kind, int32_t& device) {
  cudaPointerAttributes attributes{};
  if (const int code = cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address)))
    return told(code);
  kind = attributes.type;
  device = attributes.device;
  return cudaSuccess;
}

int32_t peek_last_error() { return cudaPeekAtLastError(); }

int32_t clear_last_error() { return cudaGetLastError(); }

rust::String error_name(int32_t code) {
  return rust::String::lossy(cudaGetErrorName(static_cast<cudaError_t>(code)));
}

rust::String error_text(int32_t code) {
  return rust::String::lossy(cudaGetErrorString(static_cast<cudaError_t>(code)));
}
}  // namespace msl::bridge
