// combine for many tokens: the experts' rows as a stream.
//
// A persistent CTA, two an SM, owns every gridDim.x-th token. One warp reads the tokens' routes ahead and brings
// their BF16 rows (8 KB each) by bulk copies into a ring of 12, so that up to 192 KB an SM are under way however
// the local routes fall; 16 warps, 8 columns a thread, take up to four rows at a time: one block reduction for
// their norms, then the weighted sum (two CTAs, because one would idle in the reduction). Rows stay in registers
// as BF16 and are widened twice, which keeps the threads small. The arithmetic and its order are combine.cuh's.
#pragma once
#include "combine.cuh"

namespace msl {

constexpr int kCombineStages = 12;
constexpr int kCombineStreamCtas = 2;  // an SM
constexpr int kCombineRowBytes = kExpertDim * 2;
constexpr size_t kCombineSharedBytes = kCombineStages * kCombineRowBytes;
constexpr int kCombineStreamThreads = kCombineThreads + 32;

struct CombineRing {
  float4 sums[2][kCombineThreads / 32];
  uint64_t full[kCombineStages];
  uint64_t empty[kCombineStages];
};

// Slot `lane` of a token: its place in this pass, or far above the bound.
__device__ __forceinline__ uint32_t route_place(const CombineParams& p, int64_t token) {
  const int lane = threadIdx.x & 31;
  if (lane >= kTopK || token >= p.tokens) return 0xFFFFFFFFu;
  const int32_t route = __ldcg(p.token_route + token * kTopK + lane);
  return route >= 0 ? uint32_t(route) - uint32_t(p.route_begin) : 0xFFFFFFFFu;
}

__global__ void __launch_bounds__(kCombineStreamThreads, kCombineStreamCtas) combine_stream_kernel(const CombineParams p) {
  extern __shared__ __align__(128) uint8_t rows[];  // [kCombineStages][8 KB]
  __shared__ __align__(16) CombineRing ring;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_launch();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < kCombineStages; s++) {
      mbar_init(&ring.full[s], 1);
      mbar_init(&ring.empty[s], kCombineThreads / 32);
    }
    mbar_init_fence();
  }
  const int column = threadIdx.x * 8;
  Float8 w = {};
  if (warp < kCombineThreads / 32) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 v = *reinterpret_cast<const float4*>(p.norm_weight + column + 4 * i);
      w.v[4 * i] = v.x, w.v[4 * i + 1] = v.y, w.v[4 * i + 2] = v.z, w.v[4 * i + 3] = v.w;
    }
  }
  __syncthreads();
  pdl_wait();

  int stage = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++stage == kCombineStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  uint32_t place_next = route_place(p, blockIdx.x);
  if (warp == kCombineThreads / 32) {  // the copies
    for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
      uint32_t place = place_next;
      place_next = route_place(p, token + gridDim.x);
      float no_score = 0.0f;
      if (p.accumulate != nullptr) sort_routes(place, no_score);
      uint32_t slots = __ballot_sync(0xFFFFFFFFu, place < uint32_t(p.route_bound));
      for (; slots != 0; slots &= slots - 1) {
        const int64_t row = __shfl_sync(0xFFFFFFFFu, place, __ffs(slots) - 1);
        if (lane == 0) {
          mbar_wait(&ring.empty[stage], parity ^ 1);
          mbar_expect_tx(&ring.full[stage], kCombineRowBytes);
          bulk_load(rows + stage * kCombineRowBytes, static_cast<const __nv_bfloat16*>(p.y) + row * kExpertDim,
                    kCombineRowBytes, &ring.full[stage]);
        }
        advance();
      }
    }
    return;
  }

  const auto scores = [&](int64_t token) {
    return lane < kTopK && token < p.tokens ? __ldcg(p.topk_scores + token * kTopK + lane) : 0.0f;
  };
  float score_next = scores(blockIdx.x);
  int round = 0;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    uint32_t place = place_next;
    float score = score_next;
    place_next = route_place(p, token + gridDim.x);
    score_next = scores(token + gridDim.x);
    if (p.accumulate != nullptr) sort_routes(place, score);
    uint32_t slots = __ballot_sync(0xFFFFFFFFu, place < uint32_t(p.route_bound));
    const int64_t row = token * kExpertDim + column;
    if (slots == 0 && !p.first_pass && !p.last_pass) continue;
    Float8 sum = {};
    if (!p.first_pass) sum = load8(p.accumulate + row);
    while (slots != 0) {
      const int n = min(__popc(slots), 4);
      uint4 raw[4];
      float route_score[4], square[4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i >= n) continue;
        route_score[i] = __shfl_sync(0xFFFFFFFFu, score, __ffs(slots) - 1);
        slots &= slots - 1;
        mbar_wait(&ring.full[stage], parity);
        raw[i] = *reinterpret_cast<const uint4*>(rows + stage * kCombineRowBytes + threadIdx.x * 16);
        const Float8 y = floats8(raw[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) square[i] += (y.v[j] * w.v[j]) * (y.v[j] * w.v[j]);
        __syncwarp();
        if (lane == 0) mbar_arrive(&ring.empty[stage]);
        advance();
      }
      const float part = warp_sum_transposed<4>(square);
      if ((lane & 7) == 0) reinterpret_cast<float*>(&ring.sums[round][warp])[lane >> 3] = part;
      named_barrier(1, kCombineThreads);
      const float4 of_warp =
          lane < kCombineThreads / 32 ? ring.sums[round][lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      round ^= 1;
      const float all[4] = {of_warp.x, of_warp.y, of_warp.z, of_warp.w};
      const float total = warp_sum_transposed<4>(all);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i >= n) continue;
        const float factor =
            rsqrtf(__shfl_sync(0xFFFFFFFFu, total, 8 * i) * (1.0f / kExpertDim) + kPostNormEps) * route_score[i];
        const Float8 y = floats8(raw[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.v[j] += (y.v[j] * w.v[j]) * factor;
      }
    }
    if (p.last_pass) {
      store_bf16x8(static_cast<__nv_bfloat16*>(p.moe_mix) + row, sum);
    } else {
      store8(p.accumulate + row, sum);
    }
  }
}

}  // namespace msl
