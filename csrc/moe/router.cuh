// router: partial logits h @ router^T in FP32 FMA over FP32 weights (expert choice hangs on the last bits of
// close scores, so neither is rounded to 16 bits), for a few tokens.
//
// 128 CTAs of 8 warps; a CTA owns a block of 2 kSplits experts and one of kSplits slices of K, 64 KB of weights,
// which its threads load into 64 registers each before pdl_wait(): the whole 8.4 MB matrix is under way or
// there when the boundary ends. A warp owns kSplits / 4 experts; its lanes divide the slice among them.
// After the wait the tokens' slices of h = hi + mid + lo go through shared memory, 8 tokens at a time: the
// planes by cp.async (the next 8 come while these are multiplied), then added to FP32 by the threads that
// brought them. Lanes' sums meet by shuffles, up to 32 of them at once; the consumer (router_topk) adds the
// slices in order. A token's additions are the same whatever tokens stand beside it.
//
// Registers are kept to 128 a thread, so that the CTA fits beside those of its neighbours in the chain.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kRouterThreads = 256;
constexpr int kRouterTokens = 8;   // tokens a chunk

template <int kSplits>
struct RouterShape {
  static constexpr int kSlice = kHidden / kSplits;
  static constexpr int kRows = 2 * kSplits;
  static constexpr int kWarpRows = kRows / (kRouterThreads / 32);
  static constexpr int kQuads = kSlice / 128;                // float4s of a row a lane holds
  static constexpr int kGroup = 32 / kWarpRows;              // tokens multiplied together: 32 sums a lane
  static constexpr int kItems = kRouterTokens * kSlice / 8;  // 8-element pieces of a chunk of tokens
  static constexpr int kThreadItems = kItems / kRouterThreads;
  static constexpr size_t kSharedBytes = size_t(kItems) * (3 * 16 + 8 * 4);
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
__global__ void __launch_bounds__(kRouterThreads, 2) router_kernel(const RouterParams p) {
  using S = RouterShape<kSplits>;
  extern __shared__ __align__(16) uint8_t shared[];
  uint4* raw = reinterpret_cast<uint4*>(shared);  // [3][kItems], a thread's own
  float* chunk = reinterpret_cast<float*>(shared + 3 * 16 * S::kItems);  // [kRouterTokens][kSlice]
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
  if (p.ready != nullptr && blockIdx.x == 0 && threadIdx.x == 0) store_release(p.ready, 1);

  const __nv_bfloat16* planes = static_cast<const __nv_bfloat16*>(p.ffn_input) + k;
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < S::kThreadItems; i++) {
      const int item = i * kRouterThreads + threadIdx.x;
      const int64_t token = first + item / (S::kSlice / 8);
      if (token < p.tokens) {
        const __nv_bfloat16* src = planes + token * 3 * kHidden + item % (S::kSlice / 8) * 8;
#pragma unroll
        for (int plane = 0; plane < 3; plane++) cp_async16(raw + plane * S::kItems + item, src + plane * kHidden);
      }
    }
  };
  load(0);
  for (int first = 0; first < p.tokens; first += kRouterTokens) {
    const int n = min(kRouterTokens, p.tokens - first);
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (first > 0) __syncthreads();  // the chunk before has been multiplied
#pragma unroll
    for (int i = 0; i < S::kThreadItems; i++) {
      const int item = i * kRouterThreads + threadIdx.x;
      if (item / (S::kSlice / 8) >= n) continue;
      float h[8];
#pragma unroll
      for (int plane = 0; plane < 3; plane++) {
        const uint4 v = raw[plane * S::kItems + item];
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float even = __uint_as_float(word[j] << 16), odd = __uint_as_float(word[j] & 0xFFFF0000u);
          h[2 * j] = plane == 0 ? even : h[2 * j] + even;
          h[2 * j + 1] = plane == 0 ? odd : h[2 * j + 1] + odd;
        }
      }
      *reinterpret_cast<float4*>(chunk + item * 8) = make_float4(h[0], h[1], h[2], h[3]);
      *reinterpret_cast<float4*>(chunk + item * 8 + 4) = make_float4(h[4], h[5], h[6], h[7]);
    }
    __syncthreads();
    if (first + kRouterTokens < p.tokens) load(first + kRouterTokens);
    float* out = p.logits + (int64_t(split) * p.tokens + first) * kExperts + row;
    int t = 0;
    for (; t + S::kGroup <= n; t += S::kGroup)
      router_multiply<S::kWarpRows, S::kQuads, S::kGroup>(w, chunk + t * S::kSlice, S::kSlice, out + t * kExperts);
    for (; t + 2 <= n; t += 2)
      router_multiply<S::kWarpRows, S::kQuads, 2>(w, chunk + t * S::kSlice, S::kSlice, out + t * kExperts);
    if (t < n)
      router_multiply<S::kWarpRows, S::kQuads, 1>(w, chunk + t * S::kSlice, S::kSlice, out + t * kExperts);
  }
}

}  // namespace msl
