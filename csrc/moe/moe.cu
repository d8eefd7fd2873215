// Launchers of the routing and of the expert block's small kernels: which variant for how many tokens.
#include <algorithm>

#include "../include/ops.h"
#include "combine.cuh"
#include "pre_expert_norm.cuh"
#include "router.cuh"
#include "router_topk.cuh"

namespace msl {
namespace {
// Up to this many tokens a cluster of 4 CTAs takes one (latency); beyond it a CTA walks over tokens.
constexpr int kClusterTokens = 32;
constexpr int kCtasPerSm = 3;  // of 512 threads, many tokens

template <int kSplits>
int router_with(const RouterParams& p, const Launch& l) {
  return launch(router_kernel<kSplits>, dim3(128), dim3(kRouterThreads), RouterShape<kSplits>::kSharedBytes, l, p);
}
template <int kSplits>
int prepare_router() {
  return prepare_kernel(router_kernel<kSplits>, RouterShape<kSplits>::kSharedBytes);
}
}  // namespace

int router(const RouterParams& p, const Launch& l) {
  if (p.tokens == 0) return 0;
  switch (p.splits) {
    case 16: return router_with<16>(p, l);
    case 32: return router_with<32>(p, l);
    default: return static_cast<int>(cudaErrorInvalidValue);
  }
}

int router_topk(const RouterTopkParams& p, const Launch& l) {
  if (int e = launch(router_topk_kernel, dim3(p.tokens), dim3(kListThreads), 0, l, p)) return e;
  if (p.tokens <= kListTokens) return 0;
  const dim3 blocks((p.tokens + kListThreads - 1) / kListThreads);
  if (int e = launch(expert_lists_count_kernel, blocks, dim3(kListThreads), 0, l, p)) return e;
  return launch(expert_lists_fill_kernel, blocks, dim3(kListThreads), 0, l, p);
}

int pre_expert_norm(const PreExpertNormParams& p, const Launch& l) {
  if (p.tokens <= kClusterTokens)
    return launch(pre_expert_norm_kernel<4>, dim3(4 * p.tokens), dim3(kPreNormThreads / 4), 0, l, p);
  return launch(pre_expert_norm_kernel<1>, dim3(std::min(p.tokens, kCtasPerSm * l.sm_count)), dim3(kPreNormThreads), 0,
                l, p);
}

int combine(const CombineParams& p, const Launch& l) {
  if (p.tokens <= kClusterTokens) {
    const dim3 grid(4 * p.tokens), block(kCombineThreads / 4);
    return p.y_f32 ? launch(combine_kernel<4, true>, grid, block, 0, l, p)
                   : launch(combine_kernel<4, false>, grid, block, 0, l, p);
  }
  const dim3 grid(std::min(p.tokens, kCtasPerSm * l.sm_count)), block(kCombineThreads);
  return p.y_f32 ? launch(combine_kernel<1, true>, grid, block, 0, l, p)
                 : launch(combine_kernel<1, false>, grid, block, 0, l, p);
}

int prepare_moe() {
  if (int e = prepare_router<16>()) return e;
  if (int e = prepare_router<32>()) return e;
  if (int e = prepare_kernel(router_topk_kernel, 0)) return e;
  if (int e = prepare_kernel(expert_lists_count_kernel, 0)) return e;
  if (int e = prepare_kernel(expert_lists_fill_kernel, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<4>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<1>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<4, true>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<4, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, true>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, false>, 0)) return e;
  return 0;
}
}  // namespace msl
