// out_norm_gate: W warps own one head of one token (1 with up to 4 splits, 8 beyond 32: one request's
// 128 splits are then joined by 16 CTAs with every load in flight at once). Half a warp
// reads one split's 64 floats as float4; a thread walks the splits of its half warp in order, the
// halves and warps are added in a fixed tree. The first splits' `acc` is loaded before their weights are
// known; an empty split's is zero, and not used. Shared
// memory: W x 64 floats and the splits' weights.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../include/model.h"
#include "attention_split.cuh"
#include "qk_norm_rope_append.cuh"

namespace msl {

constexpr int kJoinThreads = 256;
constexpr int kJoinMaxSplits = 512;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// x0, x1: elements 2 lane, 2 lane + 1 of the head; one warp.
__device__ __forceinline__ void norm_gate_store(const OutNormGateParams& p, int64_t head_row, int lane, float x0, float x1,
                                                float2 g) {
  const int64_t at = head_row * kHeadDim + 2 * lane;
  if (p.attn_core) *reinterpret_cast<float2*>(p.attn_core + at) = make_float2(x0, x1);
  const float scale = rsqrtf(warp_sum(x0 * x0 + x1 * x1) * (1.0f / kHeadDim) + kRmsEps);
  const float y0 = x0 * scale / (1.0f + __expf(-g.x)), y1 = x1 * scale / (1.0f + __expf(-g.y));
  *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) = __floats2bfloat162_rn(y0, y1);
}

__device__ __forceinline__ float2 bf16_pair(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// The output of FlashAttention-3: BF16, joined and scaled.
__global__ void __launch_bounds__(kJoinThreads) out_norm_gate_joined_kernel(const __grid_constant__ OutNormGateParams p) {
  pdl_launch();
  pdl_wait();
  const int lane = threadIdx.x & 31;
  const int64_t head_row = static_cast<int64_t>(blockIdx.x) * (kJoinThreads / 32) + (threadIdx.x >> 5);
  if (head_row >= static_cast<int64_t>(p.tokens) * kQHeads) return;
  const int64_t at = head_row * kHeadDim + 2 * lane;
  const float2 x = bf16_pair(__ldcg(static_cast<const uint32_t*>(p.joined) + at / 2));
  const float2 g = __ldcg(reinterpret_cast<const float2*>(p.gate + at));
  norm_gate_store(p, head_row, lane, x.x, x.y, g);
}

template <int W, int kMaxSplits>
__global__ void __launch_bounds__(kJoinThreads) out_norm_gate_kernel(const __grid_constant__ OutNormGateParams p) {
  constexpr int kItems = kJoinThreads / 32 / W;  // heads a CTA
  __shared__ float weight[kItems][kMaxSplits < 32 ? 32 : kMaxSplits];
  __shared__ float partial[kItems][W][kHeadDim];
  pdl_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int item = warp / W, part = warp % W;
  const int64_t head_row = static_cast<int64_t>(blockIdx.x) * kItems + item;
  const bool live = head_row < static_cast<int64_t>(p.tokens) * kQHeads;
  const float v_scale = __ldcg(p.v_scale);
  pdl_wait();
  const float* lse = p.lse + head_row * p.splits * 2;
  const int64_t at = head_row * kHeadDim + 2 * lane;
  float2 g = make_float2(0.0f, 0.0f);
  if (live && part == 0) g = __ldcg(reinterpret_cast<const float2*>(p.gate + at));

  const int half = lane >> 4, quad = lane & 15;
  const float* acc = p.acc + head_row * p.splits * kHeadDim + quad * 4;
  constexpr int kAll = (kMaxSplits + 2 * W - 1) / (2 * W), kEarly = kAll < 8 ? kAll : 8;  // of a half warp's splits
  float4 early[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; i++) {
    const int s = 2 * part + half + i * 2 * W;
    early[i] = live && s < p.splits ? __ldcg(reinterpret_cast<const float4*>(acc + static_cast<int64_t>(s) * kHeadDim))
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // Only to keep the loads above here: they are sunk below the weights otherwise, a latency more.
  __syncthreads();

  constexpr int kLse = (kMaxSplits + 31) / 32;
  float2 mine[kLse];
#pragma unroll
  for (int i = 0; i < kLse; i++) {
    const int s = i * 32 + lane;
    mine[i] = live && s < p.splits ? __ldcg(reinterpret_cast<const float2*>(lse) + s) : make_float2(-INFINITY, 0.0f);
  }
  // Every warp of the item computes the maximum over all splits; warp i mod W of it writes the weights
  // of splits 32 i .. 32 i + 31.
  float m = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLse; i++) {
    if (mine[i].y == 0.0f) mine[i].x = -INFINITY;
    m = fmaxf(m, mine[i].x);
  }
  m = warp_max(m);
  float l = 0.0f;
#pragma unroll
  for (int i = 0; i < kLse; i++) {
    const float w = mine[i].y == 0.0f ? 0.0f : exp2_approx(mine[i].x - m);
    l += w * mine[i].y;
    if (part == i % W) weight[item][i * 32 + lane] = w;
  }
  l = warp_sum(l);
  if constexpr (W == 1) __syncwarp(); else __syncthreads();

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const auto add = [&](float w, float4 v) {
    if (w == 0.0f) return;
    sum.x += w * v.x;
    sum.y += w * v.y;
    sum.z += w * v.z;
    sum.w += w * v.w;
  };
#pragma unroll
  for (int i = 0; i < kEarly; i++) {
    const int s = 2 * part + half + i * 2 * W;
    if (s < p.splits) add(weight[item][s], early[i]);
  }
  if (kEarly < kAll && live) {
#pragma unroll 4
    for (int s = 2 * part + half + kEarly * 2 * W; s < p.splits; s += 2 * W) {
      const float w = weight[item][s];
      if (w != 0.0f) add(w, __ldcg(reinterpret_cast<const float4*>(acc + static_cast<int64_t>(s) * kHeadDim)));
    }
  }
  sum.x += __shfl_xor_sync(~0u, sum.x, 16);
  sum.y += __shfl_xor_sync(~0u, sum.y, 16);
  sum.z += __shfl_xor_sync(~0u, sum.z, 16);
  sum.w += __shfl_xor_sync(~0u, sum.w, 16);
  if (half == 0) *reinterpret_cast<float4*>(&partial[item][part][quad * 4]) = sum;
  if constexpr (W == 1) __syncwarp(); else __syncthreads();
  if (part != 0 || !live) return;
  float x0 = 0.0f, x1 = 0.0f;
#pragma unroll
  for (int w = 0; w < W; w++) {
    x0 += partial[item][w][2 * lane];
    x1 += partial[item][w][2 * lane + 1];
  }
  const float scale = l == 0.0f ? 0.0f : v_scale / l;
  norm_gate_store(p, head_row, lane, x0 * scale, x1 * scale, g);
}

inline int launch_out_norm_gate(const OutNormGateParams& p, const Launch& l) {
  const int64_t rows = static_cast<int64_t>(p.tokens) * kQHeads;
  if (rows <= 0) return 0;
  const auto grid = [&](int items) { return dim3(static_cast<unsigned>((rows + items - 1) / items)); };
  const dim3 block(kJoinThreads);
  if (!p.acc) return launch(out_norm_gate_joined_kernel, grid(8), block, 0, l, p);
  if (p.splits < 1 || p.splits > kJoinMaxSplits) return static_cast<int>(cudaErrorInvalidValue);
  if (p.splits <= 4) return launch(out_norm_gate_kernel<1, 4>, grid(8), block, 0, l, p);
  if (p.splits <= 32) return launch(out_norm_gate_kernel<2, 32>, grid(4), block, 0, l, p);
  if (p.splits <= 128) return launch(out_norm_gate_kernel<8, 128>, grid(1), block, 0, l, p);
  return launch(out_norm_gate_kernel<8, kJoinMaxSplits>, grid(1), block, 0, l, p);
}

inline int prepare_out_norm_gate() {
  int e = prepare_kernel(out_norm_gate_joined_kernel, 0);
  if (!e) e = prepare_kernel(out_norm_gate_kernel<1, 4>, 0);
  if (!e) e = prepare_kernel(out_norm_gate_kernel<2, 32>, 0);
  if (!e) e = prepare_kernel(out_norm_gate_kernel<8, 128>, 0);
  if (!e) e = prepare_kernel(out_norm_gate_kernel<8, kJoinMaxSplits>, 0);
  return e;
}

}  // namespace msl
