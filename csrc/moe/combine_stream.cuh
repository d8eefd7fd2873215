// combine for many tokens: the experts' rows as a stream.
//
// A persistent CTA, two an SM, owns every gridDim.x-th token. It looks up the routes of its next 64 tokens at once (one
// at a time, their latency is the kernel's). One warp brings the tokens' BF16 rows (8 KB each) by bulk copies into a
// ring of 12, so that up to 192 KB an SM are under way however the local routes fall; 8 warps, 16 columns a thread (with
// 8 of them instructions are the bound), take up to four rows at a time: one block reduction for their norms, then the
// weighted sum (two CTAs, because one would idle in the reduction). Rows stay in registers as BF16 and are widened twice.
// The arithmetic is combine.cuh's.
#pragma once
#include "combine.cuh"
#include "../common/ring.cuh"

namespace msl {

constexpr int kCombineStages = 12;
constexpr int kCombineStreamCtas = 2;  // an SM
constexpr int kCombineRowBytes = kExpertDim * 2;
constexpr size_t kCombineSharedBytes = kCombineStages * kCombineRowBytes;
constexpr int kCombineStreamRowThreads = 256;  // 8 columns in either half of the row
constexpr int kCombineStreamWarps = kCombineStreamRowThreads / 32;
constexpr int kCombineStreamThreads = kCombineStreamRowThreads + 32;

// The places of `tokens` tokens, every gridDim.x-th from `first` on, in this pass, or far above the bound.
constexpr int kRoutesAhead = 64;
__device__ __forceinline__ void look_up_routes(uint32_t (&place)[kRoutesAhead][kTopK], const int32_t* token_route,
                                               int64_t first, int tokens, int route_begin) {
  const int slot = threadIdx.x % kTopK;
  for (int i = threadIdx.x / kTopK; i < tokens; i += blockDim.x / kTopK) {
    const int32_t route = __ldcg(token_route + (first + int64_t(i) * gridDim.x) * kTopK + slot);
    place[i][slot] = route >= 0 ? uint32_t(route) - uint32_t(route_begin) : 0xFFFFFFFFu;
  }
}

struct CombineRing {
  float4 sums[2][kCombineStreamWarps];
  uint32_t place[kRoutesAhead][kTopK];
  float score[kRoutesAhead][kTopK];
  uint64_t full[kCombineStages];
  uint64_t empty[kCombineStages];
};

__global__ void __launch_bounds__(kCombineStreamThreads, kCombineStreamCtas) combine_stream_kernel(const CombineParams p) {
  extern __shared__ __align__(128) uint8_t rows[];  // [kCombineStages][8 KB]
  __shared__ __align__(16) CombineRing ring;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_launch();
  if (threadIdx.x == 0) ring_init<kCombineStages>(ring.full, ring.empty, kCombineStreamWarps);
  const int column = threadIdx.x * 8;  // and kHalf further
  constexpr int kHalf = kExpertDim / 2;
  Float8 w[2] = {};
  if (warp < kCombineStreamWarps) {
#pragma unroll
    for (int h = 0; h < 2; h++) w[h] = load8(p.norm_weight + column + h * kHalf);
  }
  __syncthreads();
  pdl_wait();
  const Pass pass = which_pass(p);
  if (pass.beyond) return;

  RingPlace<kCombineStages> at;
  int round = 0;
  for (int64_t first = blockIdx.x; first < p.tokens; first += int64_t(kRoutesAhead) * gridDim.x) {
    const int tokens = min(int64_t(kRoutesAhead), (p.tokens - first + gridDim.x - 1) / gridDim.x);
    look_up_routes(ring.place, p.token_route, first, tokens, p.route_begin);
    for (int i = threadIdx.x / kTopK; i < tokens; i += kCombineStreamThreads / kTopK)
      ring.score[i][threadIdx.x % kTopK] =
          __ldcg(p.topk_scores + (first + int64_t(i) * gridDim.x) * kTopK + threadIdx.x % kTopK);
    __syncthreads();
    for (int i = 0; i < tokens; i++) {
      uint32_t place = lane < kTopK ? ring.place[i][lane] : 0xFFFFFFFFu;
      float score = lane < kTopK ? ring.score[i][lane] : 0.0f;
      if (p.accumulate != nullptr) sort_routes(place, score);
      uint32_t slots = __ballot_sync(0xFFFFFFFFu, place < uint32_t(p.route_bound));
      if (warp == kCombineStreamWarps) {  // the copies
        for (; slots != 0; slots &= slots - 1) {
          const int64_t row = __shfl_sync(0xFFFFFFFFu, place, __ffs(slots) - 1);
          if (lane == 0) {
            mbar_wait(&ring.empty[at.stage], at.phase ^ 1);
            mbar_expect_tx(&ring.full[at.stage], kCombineRowBytes);
            bulk_load(rows + at.stage * kCombineRowBytes, static_cast<const __nv_bfloat16*>(p.y) + row * kExpertDim,
                      kCombineRowBytes, &ring.full[at.stage]);
          }
          at.advance();
        }
        continue;
      }
      if (slots == 0 && !pass.first && !pass.last) continue;
      const int64_t row = (first + int64_t(i) * gridDim.x) * kExpertDim + column;
      Float8 sum[2] = {};
      if (!pass.first) {
#pragma unroll
        for (int h = 0; h < 2; h++) sum[h] = load8(p.accumulate + row + h * kHalf);
      }
      while (slots != 0) {
        const int n = min(__popc(slots), 4);
        uint4 raw[4][2];
        float route_score[4], square[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (j >= n) continue;
          route_score[j] = __shfl_sync(0xFFFFFFFFu, score, __ffs(slots) - 1);
          slots &= slots - 1;
          mbar_wait(&ring.full[at.stage], at.phase);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            raw[j][h] = *reinterpret_cast<const uint4*>(rows + at.stage * kCombineRowBytes + (column + h * kHalf) * 2);
            const Float8 y = floats8(raw[j][h]);
#pragma unroll
            for (int e = 0; e < 8; e++) square[j] += (y.v[e] * w[h].v[e]) * (y.v[e] * w[h].v[e]);
          }
          __syncwarp();
          if (lane == 0) mbar_arrive(&ring.empty[at.stage]);
          at.advance();
        }
        const float part = warp_sum_transposed<4>(square);
        if ((lane & 7) == 0) reinterpret_cast<float*>(&ring.sums[round][warp])[lane >> 3] = part;
        named_barrier(1, kCombineStreamRowThreads);
        const float4 of_warp = lane < kCombineStreamWarps ? ring.sums[round][lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        round ^= 1;
        const float all[4] = {of_warp.x, of_warp.y, of_warp.z, of_warp.w};
        const float total = warp_sum_transposed<4>(all);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (j >= n) continue;
          const float factor =
              rsqrtf(__shfl_sync(0xFFFFFFFFu, total, 8 * j) * (1.0f / kExpertDim) + kPostNormEps) * route_score[j];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const Float8 y = floats8(raw[j][h]);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[h].v[e] += (y.v[e] * w[h].v[e]) * factor;
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (pass.last) {
          store_bf16x8(static_cast<__nv_bfloat16*>(p.moe_mix) + row + h * kHalf, sum[h]);
        } else {
          store8(p.accumulate + row + h * kHalf, sum[h]);
        }
      }
    }
    __syncthreads();  // every place has been read
  }
}

}  // namespace msl
