// Launchers of the routing and of the expert block's small kernels: which variant for how many tokens.
#include <algorithm>

#include "../gemm/tensor_map.h"
#include "../include/ops.h"
#include "boundary_router.cuh"
#include "combine.cuh"
#include "combine_stream.cuh"
#include "pack_router.cuh"
#include "pre_expert_norm.cuh"
#include "pre_expert_norm_stream.cuh"
#include "router.cuh"
#include "router_cluster.cuh"
#include "router_tiled.cuh"
#include "router_topk.cuh"
#include "router_topk_tokens.cuh"

namespace msl {
namespace {
// CTAs that share a token: many for latency while there are few tokens, one that walks over tokens once there
// are many. Thresholds measured on an H200 in a chain of dependent launches.
constexpr int kPreNorm8Tokens = 8, kPreNorm4Tokens = 32, kPreNorm2Tokens = 128;
constexpr int kCombine4Tokens = 32, kCombine2Tokens = 128;
constexpr int kStreamTokens = 2048;  // combine of BF16 rows, pre_expert_norm of one split
constexpr int kCtasPerSm = 3;               // of 512 threads, many tokens

template <int kCtas>
int pre_expert_norm_with(const PreExpertNormParams& p, const Launch& l) {
  const int ctas = kCtas == 1 ? std::min(p.tokens, kCtasPerSm * l.sm_count) : kCtas * p.tokens;
  return launch(pre_expert_norm_kernel<kCtas>, dim3(ctas), dim3(kPreNormThreads / kCtas), 0, l, p);
}
template <int kCtas, int kBatch, bool kFloat, bool kPasses = false>
int combine_with(const CombineParams& p, const Launch& l) {
  const int ctas = kCtas == 1 ? std::min(p.tokens, kCtasPerSm * l.sm_count) : kCtas * p.tokens;
  return launch(combine_kernel<kCtas, kBatch, kFloat, kPasses>, dim3(ctas), dim3(kCombineThreads / kCtas), 0, l, p);
}
constexpr int kRouterSplits = 16;  // over FP32 rows

// Clusters: tokens and k tiles of a CTA, CTAs.
template <int kTokens, int kSteps, int kCluster>
int router_cluster(const RouterTiledParams& p, const Launch& l) {
  constexpr int kSplits = kRouterTilesK / (kSteps * kCluster);
  if (p.splits != kSplits) return static_cast<int>(cudaErrorInvalidValue);
  const int tiles = (p.tokens + kTokens - 1) / kTokens;
  return launch(router_cluster_kernel<kTokens, kSteps, kCluster>, dim3(2 * tiles * kSplits * kCluster),
                dim3(kRouterClusterThreads), kRouterClusterBytes<kTokens, kSteps, kCluster>, l, p);
}
template <int kTokens, int kSteps, int kCluster>
int prepare_router_cluster() {
  return prepare_kernel(router_cluster_kernel<kTokens, kSteps, kCluster>, kRouterClusterBytes<kTokens, kSteps, kCluster>);
}
}  // namespace

int router(const RouterParams& p, const Launch& l) {
  if (p.tokens == 0) return 0;
  if (p.splits != kRouterSplits) return static_cast<int>(cudaErrorInvalidValue);
  return launch(router_kernel<kRouterSplits>, dim3(128), dim3(kRouterThreads), RouterShape<kRouterSplits>::kSharedBytes, l, p);
}

int router_tiled(const RouterTiledParams& p, const Launch& l) {
  if (p.tokens == 0) return 0;
  if (p.tokens <= 64) return router_cluster<64, 2, 8>(p, l);
  if (p.tokens <= 128) return router_cluster<128, 4, 4>(p, l);
  if (p.splits < 1 || p.splits > kRouterTilesK) return static_cast<int>(cudaErrorInvalidValue);
  const int tiles = (p.tokens + kRouterTileTokens - 1) / kRouterTileTokens;
  CUtensorMap tokens;
  if (int e = f32_rows_map(&tokens, p.stream, kHidden, p.tokens, kHidden, kRouterTileTokens / 2)) return e;
  return launch(router_tiled_kernel, dim3(2 * tiles * p.splits), dim3(kRouterTileThreads), kRouterTiledBytes, l, p, tokens);
}

int pack_router(const PackRouterParams& p, const Launch& l) {
  return launch(pack_router_kernel, dim3(kExperts), dim3(kPackRouterThreads), 0, l, p);
}

int router_topk(const RouterTopkParams& p, const Launch& l) {
  if (p.tokens == 0) return 0;
  if (p.tokens == 1) return launch(router_topk_cluster_kernel<1, 1>, dim3(1), dim3(kTopkThreads), 0, l, p);
  if (p.tokens <= kTopkCtas)
    return launch(router_topk_cluster_kernel<kTopkCtas, 1>, dim3(kTopkCtas), dim3(kTopkThreads), 0, l, p);
  if (p.tokens <= 2 * kTopkCtas)
    return launch(router_topk_cluster_kernel<kTopkCtas, 2>, dim3(kTopkCtas), dim3(2 * kTopkThreads), 0, l, p);
  if (p.tokens <= kTopkClusterTokens)
    return launch(router_topk_tokens_kernel, dim3(kTopkCtas), dim3((p.tokens + kTopkCtas - 1) / kTopkCtas * kTopkTokenThreads),
                  topk_tokens_bytes(p.tokens), l, p);
  if (p.tokens <= kTopkCtaTokens) return launch(router_topk_kernel, dim3(p.tokens), dim3(kTopkThreads), 0, l, p);
  // Whole words of the masks: the CTAs behind the last token write zeros.
  if (int e = launch(router_topk_warps_kernel, dim3((p.tokens + 31) / 32 * 4), dim3(kListThreads), 0, l, p)) return e;
  if (p.tokens <= kListTokens) return 0;
  return launch(expert_lists_kernel, dim3((p.tokens + kListThreads - 1) / kListThreads), dim3(kListThreads), 0, l, p);
}

int boundary_router(const BoundaryRouterParams& p, const Launch& l) {
  if (p.splits != kBoundarySplits) return static_cast<int>(cudaErrorInvalidValue);
  return launch(boundary_router_kernel<kBoundarySplits>, dim3(128), dim3(kRouterThreads), 0, l, p);
}

int boundary_topk(const RouterTopkParams& p, const BoundaryRouterParams& b, const Launch& l) {
  if (p.tokens != 1 || p.router_logits) return static_cast<int>(cudaErrorInvalidValue);
  return launch(boundary_topk_kernel, dim3(1 + kApplyCtas), dim3(kTopkThreads), 0, l, p, b);
}

int pre_expert_norm(const PreExpertNormParams& p, const Launch& l) {
  if (p.tokens <= kPreNorm8Tokens) return pre_expert_norm_with<8>(p, l);
  if (p.tokens <= kPreNorm4Tokens) return pre_expert_norm_with<4>(p, l);
  if (p.tokens <= kPreNorm2Tokens) return pre_expert_norm_with<2>(p, l);
  if (p.tokens < kStreamTokens || p.splits > 1) return pre_expert_norm_with<1>(p, l);
  return launch(pre_expert_norm_stream_kernel, dim3(std::min(p.tokens, kPreNormStreamCtas * l.sm_count)),
                dim3(kPreNormStreamThreads), kPreNormSharedBytes, l, p);
}

int combine(const CombineParams& p, const Launch& l) {
  // FP32 rows are of few tokens, or of a pass.
  if (p.accumulate != nullptr && p.y_f32) return combine_with<1, 2, true, true>(p, l);
  if (p.y_f32) return combine_with<4, 4, true>(p, l);
  if (p.tokens >= kStreamTokens)
    return launch(combine_stream_kernel, dim3(std::min(p.tokens, kCombineStreamCtas * l.sm_count)), dim3(kCombineStreamThreads),
                  kCombineSharedBytes, l, p);
  if (p.accumulate != nullptr) return combine_with<1, 2, false, true>(p, l);
  if (p.tokens <= kCombine4Tokens) return combine_with<4, 4, false>(p, l);
  if (p.tokens <= kCombine2Tokens) return combine_with<2, 4, false>(p, l);
  return combine_with<1, 2, false>(p, l);
}

int prepare_moe() {
  if (int e = prepare_kernel(router_kernel<kRouterSplits>, RouterShape<kRouterSplits>::kSharedBytes)) return e;
  if (int e = prepare_router_cluster<64, 2, 8>()) return e;
  if (int e = prepare_router_cluster<128, 4, 4>()) return e;
  if (int e = prepare_kernel(router_topk_tokens_kernel, topk_tokens_bytes(kTopkClusterTokens))) return e;
  if (int e = prepare_kernel(router_topk_kernel, 0)) return e;
  if (int e = prepare_kernel(router_topk_cluster_kernel<1, 1>, 0)) return e;
  if (int e = prepare_kernel(router_topk_cluster_kernel<kTopkCtas, 1>, 0)) return e;
  if (int e = prepare_kernel(router_topk_cluster_kernel<kTopkCtas, 2>, 0)) return e;
  if (int e = prepare_kernel(boundary_router_kernel<kBoundarySplits>, 0)) return e;
  if (int e = prepare_kernel(boundary_topk_kernel, 0)) return e;
  if (int e = prepare_kernel(router_topk_warps_kernel, 0)) return e;
  if (int e = prepare_kernel(expert_lists_kernel, 0)) return e;
  if (int e = prepare_kernel(router_tiled_kernel, kRouterTiledBytes)) return e;
  if (int e = prepare_kernel(pack_router_kernel, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<8>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<4>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<2>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<1>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_stream_kernel, kPreNormSharedBytes)) return e;
  if (int e = prepare_kernel(combine_kernel<4, 4, true, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<4, 4, false, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<2, 4, false, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, 2, false, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, 2, true, true>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, 2, false, true>, 0)) return e;
  if (int e = prepare_kernel(combine_stream_kernel, kCombineSharedBytes)) return e;
  return 0;
}
}  // namespace msl
