// The C++ entry points, one per operation, named as everywhere else in the project. Each returns a
// cudaError_t as int (0: launched). None allocates, synchronises or sets a function attribute:
// `prepare_all` does that once per device (opt-in shared memory, module load), before any capture.
#pragma once
#include "params.h"

namespace msl {
int qkv_gate(const DenseParams&, const Launch&);
int o(const DenseParams&, const Launch&);
int pooler(const DenseParams&, const Launch&);
int unpooler(const DenseParams&, const Launch&);
int qk_norm_rope_append(const QkNormRopeAppendParams&, const Launch&);
int attention(const AttentionParams&, const Launch&);
int append_attention(const QkNormRopeAppendParams&, const AttentionParams&, const Launch&);  // the two above in one, decode
int out_norm_gate(const OutNormGateParams&, const Launch&);
int attn_boundary(const AttnBoundaryParams&, const Launch&);
int router(const RouterParams&, const Launch&);
int router_tiled(const RouterTiledParams&, const Launch&);
int router_topk(const RouterTopkParams&, const Launch&);
int boundary_router(const BoundaryRouterParams&, const Launch&);  // attn_boundary and the two above in two, one token
int boundary_topk(const RouterTopkParams&, const BoundaryRouterParams&, const Launch&);
int pre_expert_norm(const PreExpertNormParams&, const Launch&);
int w13(const ExpertGemmParams&, const Launch&);
int w2(const ExpertGemmParams&, const Launch&);
int combine(const CombineParams&, const Launch&);
int ffn_boundary(const FfnBoundaryParams&, const Launch&);
int slice_sum(const SliceSumParams&, const Launch&);
int pack_dense(const PackDenseParams&, const Launch&);
int pack_router(const PackRouterParams&, const Launch&);
int pack_experts(const PackExpertsParams&, const Launch&);

// Per family: opt-in shared memory and one touch of every kernel, on the current device.
int prepare_dense();
int prepare_attention();
int prepare_residual();
int prepare_moe();      // router, router_tiled, router_topk, pre_expert_norm, combine, pack_router
int prepare_experts();  // w13, w2, pack_experts
int prepare_collective();  // slice_sum
}  // namespace msl
