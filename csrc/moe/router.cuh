// router: partial logits h @ router^T in FP32 FMA over FP32 weights (expert choice hangs on the last bits of
// close scores, so neither is rounded to 16 bits), for up to 64 tokens.
//
// 128 CTAs of 8 warps; a CTA owns a block of 2 kSplits experts and one of kSplits slices of K, 64 KB of weights,
// which its threads load into 64 registers each before pdl_wait(): the whole 8.4 MB matrix is under way or
// there when the boundary ends. A warp owns kSplits / 4 experts; its lanes divide the slice among them.
// After the wait the tokens' slices of h = hi + mid + lo go through shared memory as FP32, 16 tokens at a time
// (the next 16 are loaded while these are multiplied). Lanes' sums meet by shuffles, 16 of them at once; the
// consumer (router_topk) adds the slices in order. A token's additions are the same whatever tokens stand
// beside it.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kRouterThreads = 256;
constexpr int kRouterTokens = 16;  // tokens a chunk

template <int kSplits>
struct RouterShape {
  static constexpr int kSlice = kHidden / kSplits;
  static constexpr int kRows = 2 * kSplits;
  static constexpr int kWarpRows = kRows / (kRouterThreads / 32);
  static constexpr int kQuads = kSlice / 128;                // float4s of a row a lane holds
  static constexpr int kGroup = 16 / kWarpRows;              // tokens multiplied together: 16 sums a lane
  static constexpr int kItems = kRouterTokens * kSlice / 8;  // 8-element pieces of a chunk of tokens
  static constexpr int kThreadItems = kItems / kRouterThreads;
  static constexpr size_t kSharedBytes = size_t(kRouterTokens) * kSlice * 4;
  static_assert(kWarpRows * kQuads == 16);
};

// Not ld.global.nc and volatile: stays before pdl_wait(), whatever the compiler thinks of it.
__device__ __forceinline__ float4 load_weight(const float* p) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

template <int kWarpRows, int kQuads, int kGroup>
__device__ __forceinline__ void router_multiply(const float4 (&w)[kWarpRows][kQuads], const float* x, int x_stride,
                                                float* out) {
  float sum[kGroup * kWarpRows];
#pragma unroll
  for (int i = 0; i < kGroup * kWarpRows; i++) sum[i] = 0.0f;
#pragma unroll
  for (int q = 0; q < kQuads; q++) {
#pragma unroll
    for (int g = 0; g < kGroup; g++) {
      const float4 h = *reinterpret_cast<const float4*>(x + g * x_stride + q * 128 + (threadIdx.x & 31) * 4);
#pragma unroll
      for (int r = 0; r < kWarpRows; r++) {
        float& s = sum[g * kWarpRows + r];
        s = fmaf(w[r][q].x, h.x, s);
        s = fmaf(w[r][q].y, h.y, s);
        s = fmaf(w[r][q].z, h.z, s);
        s = fmaf(w[r][q].w, h.w, s);
      }
    }
  }
  constexpr int kLanes = 32 / (kGroup * kWarpRows);  // lanes that end with the same sum
  const float s = warp_sum_transposed<kGroup * kWarpRows>(sum);
  const int index = (threadIdx.x & 31) / kLanes;
  if ((threadIdx.x & 31) % kLanes == 0) out[(index / kWarpRows) * kExperts + index % kWarpRows] = s;
}

template <int kSplits>
__global__ void __launch_bounds__(kRouterThreads) router_kernel(const RouterParams p) {
  using S = RouterShape<kSplits>;
  extern __shared__ __align__(16) float chunk[];  // [kRouterTokens][kSlice]
  pdl_launch();
  const int split = blockIdx.x % kSplits;
  const int row = blockIdx.x / kSplits * S::kRows + (threadIdx.x >> 5) * S::kWarpRows;
  const int k = split * S::kSlice;
  float4 w[S::kWarpRows][S::kQuads];
#pragma unroll
  for (int r = 0; r < S::kWarpRows; r++)
#pragma unroll
    for (int q = 0; q < S::kQuads; q++)
      w[r][q] = load_weight(p.weight + int64_t(row + r) * kHidden + k + q * 128 + (threadIdx.x & 31) * 4);
  pdl_wait();

  const __nv_bfloat16* planes = static_cast<const __nv_bfloat16*>(p.ffn_input) + k;
  uint4 raw[S::kThreadItems][3];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < S::kThreadItems; i++) {
      const int item = i * kRouterThreads + threadIdx.x;
      const int token = first + item / (S::kSlice / 8), column = item % (S::kSlice / 8) * 8;
      if (token < p.tokens) {
#pragma unroll
        for (int plane = 0; plane < 3; plane++)
          raw[i][plane] = __ldcg(
              reinterpret_cast<const uint4*>(planes + (int64_t(token) * 3 + plane) * kHidden + column));
      }
    }
  };
  load(0);
  for (int first = 0; first < p.tokens; first += kRouterTokens) {
    const int n = min(kRouterTokens, p.tokens - first);
    if (first > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < S::kThreadItems; i++) {
      const int item = i * kRouterThreads + threadIdx.x;
      if (item / (S::kSlice / 8) < n) {
        float h[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const auto part = [&](int plane) {
            const uint4& v = raw[i][plane];
            const uint32_t word = j < 2 ? v.x : j < 4 ? v.y : j < 6 ? v.z : v.w;
            return __uint_as_float(j & 1 ? word & 0xFFFF0000u : word << 16);
          };
          h[j] = (part(0) + part(1)) + part(2);
        }
        *reinterpret_cast<float4*>(chunk + item * 8) = make_float4(h[0], h[1], h[2], h[3]);
        *reinterpret_cast<float4*>(chunk + item * 8 + 4) = make_float4(h[4], h[5], h[6], h[7]);
      }
    }
    __syncthreads();
    if (first + kRouterTokens < p.tokens) load(first + kRouterTokens);
    float* out = p.logits + (int64_t(split) * p.tokens + first) * kExperts + row;
    int t = 0;
    for (; t + S::kGroup <= n; t += S::kGroup)
      router_multiply<S::kWarpRows, S::kQuads, S::kGroup>(w, chunk + t * S::kSlice, S::kSlice, out + t * kExperts);
    for (; t < n; t++)
      router_multiply<S::kWarpRows, S::kQuads, 1>(w, chunk + t * S::kSlice, S::kSlice, out + t * kExperts);
  }
}

}  // namespace msl
