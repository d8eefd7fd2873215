// What src/backend/cuda/bridge.rs sees of C++. Compiled by the host compiler only; the kernels know
// nothing of cxx. Every function returns a cudaError_t; an exception becomes an error in Rust.
#pragma once
#include <cstddef>
#include <cstdint>

#include "include/fa3.h"
#include "include/params.h"
#include "include/peer.h"
#include "rust/cxx.h"

namespace msl::bridge {
struct DeviceInfo;

// One per operation, see include/ops.h.
int32_t qkv_gate(const DenseParams& params, const Launch& launch);
int32_t o(const DenseParams& params, const Launch& launch);
int32_t pooler(const DenseParams& params, const Launch& launch);
int32_t unpooler(const DenseParams& params, const Launch& launch);
int32_t qk_norm_rope_append(const QkNormRopeAppendParams& params, const Launch& launch);
int32_t attention(const AttentionParams& params, const Launch& launch);
int32_t boundary_router(const BoundaryRouterParams& params, const Launch& launch);
int32_t boundary_topk(const RouterTopkParams& topk, const BoundaryRouterParams& boundary, const Launch& launch);
int32_t append_attention(const QkNormRopeAppendParams& append, const AttentionParams& attention, const Launch& launch);
int32_t fa3_schedule(const Fa3AttentionParams& params, const Launch& launch);
int32_t fa3_attention(const Fa3AttentionParams& params, const Launch& launch);
int32_t out_norm_gate(const OutNormGateParams& params, const Launch& launch);
int32_t attn_boundary(const AttnBoundaryParams& params, const Launch& launch);
int32_t router(const RouterParams& params, const Launch& launch);
int32_t router_tiled(const RouterTiledParams& params, const Launch& launch);
int32_t router_topk(const RouterTopkParams& params, const Launch& launch);
int32_t pre_expert_norm(const PreExpertNormParams& params, const Launch& launch);
int32_t w13(const ExpertGemmParams& params, const Launch& launch);
int32_t w2(const ExpertGemmParams& params, const Launch& launch);
int32_t combine(const CombineParams& params, const Launch& launch);
int32_t ffn_boundary(const FfnBoundaryParams& params, const Launch& launch);
int32_t slice_sum(const SliceSumParams& params, const Launch& launch);
int32_t peer_sum(const PeerParams& params, const Launch& launch);
int32_t peer_gather(const PeerParams& params, const Launch& launch);
int32_t pack_dense(const PackDenseParams& params, const Launch& launch);
int32_t pack_router(const PackRouterParams& params, const Launch& launch);
int32_t pack_experts(const PackExpertsParams& params, const Launch& launch);

int32_t prepare_all();

int32_t device_count(int32_t& count);
int32_t device_info(int32_t ordinal, DeviceInfo& info);
int32_t set_device(int32_t ordinal);
int32_t current_device(int32_t& ordinal);
int32_t driver_version(int32_t& version);
int32_t runtime_version(int32_t& version);
// kind: cudaMemoryType.
int32_t pointer_location(size_t address, int32_t& kind, int32_t& device);
int32_t peek_last_error();
int32_t clear_last_error();
rust::String error_name(int32_t code);
rust::String error_text(int32_t code);

// The layout of every struct of params.h: `Struct size`, then `Struct.field offset size` lines.
rust::String layouts();
}  // namespace msl::bridge
