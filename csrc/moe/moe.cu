// Launchers of the routing and of the expert block's small kernels: which variant for how many tokens.
#include <algorithm>

#include "../include/ops.h"
#include "combine.cuh"
#include "combine_stream.cuh"
#include "pre_expert_norm.cuh"
#include "router.cuh"
#include "router_mma.cuh"
#include "router_topk.cuh"

namespace msl {
namespace {
// CTAs that share a token: many for latency while there are few tokens, one that walks over tokens once there
// are many. Thresholds measured on an H200 in a chain of dependent launches.
constexpr int kPreNorm8Tokens = 8, kPreNorm4Tokens = 32, kPreNorm2Tokens = 128;
constexpr int kCombine4Tokens = 32, kCombine2Tokens = 128;
constexpr int kCombineStreamTokens = 2048;  // BF16 rows
constexpr int kCtasPerSm = 3;               // of 512 threads, many tokens

template <int kCtas>
int pre_expert_norm_with(const PreExpertNormParams& p, const Launch& l) {
  const int ctas = kCtas == 1 ? std::min(p.tokens, kCtasPerSm * l.sm_count) : kCtas * p.tokens;
  return launch(pre_expert_norm_kernel<kCtas>, dim3(ctas), dim3(kPreNormThreads / kCtas), 0, l, p);
}
template <int kCtas, int kBatch>
int combine_with(const CombineParams& p, const Launch& l) {
  const int ctas = kCtas == 1 ? std::min(p.tokens, kCtasPerSm * l.sm_count) : kCtas * p.tokens;
  return launch(p.y_f32 ? combine_kernel<kCtas, kBatch, true> : combine_kernel<kCtas, kBatch, false>, dim3(ctas),
                dim3(kCombineThreads / kCtas), 0, l, p);
}
constexpr int kRouterFmaTokens = 5;  // FP32 FMA up to here, tensor cores beyond

template <int kSplits>
int router_with(const RouterParams& p, const Launch& l) {
  if (p.tokens > kRouterFmaTokens)
    return launch(router_mma_kernel<kSplits>, dim3(128), dim3(kRouterThreads),
                  RouterMmaShape<kSplits>::shared_bytes(p.tokens), l, p);
  return launch(router_kernel<kSplits>, dim3(128), dim3(kRouterThreads), RouterShape<kSplits>::kSharedBytes, l, p);
}
template <int kSplits>
int prepare_router() {
  if (int e = prepare_kernel(router_mma_kernel<kSplits>, RouterMmaShape<kSplits>::shared_bytes(kMmaTokens + 1))) return e;
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
  if (p.tokens == 0) return 0;
  if (p.tokens == 1) return launch(router_topk_cluster_kernel<1, 1>, dim3(1), dim3(kTopkThreads), 0, l, p);
  if (p.tokens <= kTopkCtas)
    return launch(router_topk_cluster_kernel<kTopkCtas, 1>, dim3(kTopkCtas), dim3(kTopkThreads), 0, l, p);
  if (p.tokens <= 2 * kTopkCtas)
    return launch(router_topk_cluster_kernel<kTopkCtas, 2>, dim3(kTopkCtas), dim3(2 * kTopkThreads), 0, l, p);
  if (int e = launch(router_topk_kernel, dim3(p.tokens), dim3(kListThreads), 0, l, p)) return e;
  if (p.tokens <= kListTokens) return 0;
  const dim3 blocks((p.tokens + kListThreads - 1) / kListThreads);
  if (int e = launch(expert_lists_count_kernel, blocks, dim3(kListThreads), 0, l, p)) return e;
  return launch(expert_lists_fill_kernel, blocks, dim3(kListThreads), 0, l, p);
}

int pre_expert_norm(const PreExpertNormParams& p, const Launch& l) {
  if (p.tokens <= kPreNorm8Tokens) return pre_expert_norm_with<8>(p, l);
  if (p.tokens <= kPreNorm4Tokens) return pre_expert_norm_with<4>(p, l);
  if (p.tokens <= kPreNorm2Tokens) return pre_expert_norm_with<2>(p, l);
  return pre_expert_norm_with<1>(p, l);
}

int combine(const CombineParams& p, const Launch& l) {
  if (p.tokens <= kCombine4Tokens) return combine_with<4, 4>(p, l);
  if (p.tokens <= kCombine2Tokens) return combine_with<2, 4>(p, l);
  if (p.tokens < kCombineStreamTokens || p.y_f32) return combine_with<1, 2>(p, l);
  return launch(combine_stream_kernel, dim3(std::min(p.tokens, kCombineStreamCtas * l.sm_count)), dim3(kCombineStreamThreads),
                kCombineSharedBytes, l, p);
}

int prepare_moe() {
  if (int e = prepare_router<16>()) return e;
  if (int e = prepare_router<32>()) return e;
  if (int e = prepare_kernel(router_topk_kernel, 0)) return e;
  if (int e = prepare_kernel(router_topk_cluster_kernel<1, 1>, 0)) return e;
  if (int e = prepare_kernel(router_topk_cluster_kernel<kTopkCtas, 1>, 0)) return e;
  if (int e = prepare_kernel(router_topk_cluster_kernel<kTopkCtas, 2>, 0)) return e;
  if (int e = prepare_kernel(expert_lists_count_kernel, 0)) return e;
  if (int e = prepare_kernel(expert_lists_fill_kernel, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<8>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<4>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<2>, 0)) return e;
  if (int e = prepare_kernel(pre_expert_norm_kernel<1>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<4, 4, true>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<4, 4, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<2, 4, true>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<2, 4, false>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, 2, true>, 0)) return e;
  if (int e = prepare_kernel(combine_kernel<1, 2, false>, 0)) return e;
  if (int e = prepare_kernel(combine_stream_kernel, kCombineSharedBytes)) return e;
  return 0;
}
}  // namespace msl
