// qk_norm_rope_append: one warp owns one 64-wide head row of one token: 16 rows of q, 2 of k, 2 of v
// and 16 of the output gate, 36 warps a token in CTAs of 4 (so that one token already spreads over 9
// SMs). A lane holds elements 2 l and 2 l + 1, which is one RoPE pair: norm, rotation and
// quantisation need nothing but one warp reduction. No shared memory; everything but inv_freq comes
// from predecessors or the caller's step data, so all of it is read after the wait.
#pragma once
#include <cuda_fp8.h>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kAppendWarps = 4;
constexpr int kHeadRows = kQkvRows / kHeadDim;  // 36 a token

// Two floats to two saturated E4M3 bytes, round to nearest even (element 0 in the low byte).
__device__ __forceinline__ uint16_t e4m3_pair(float lo, float hi) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ uint32_t e4m3_pair_to_half2(uint16_t v) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(v));
  return r;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// Sine and cosine of an FP32 angle of any size: turns are reduced in FP64 (exact to far below an FP32
// ulp of the result up to angles of 2^30), the remainder by sincospif, which needs no slow path.
__device__ __forceinline__ void sincos_full_range(float angle, float& s, float& c) {
  const double turns = static_cast<double>(angle) * 0.15915494309189533577;
  sincospif(static_cast<float>(2.0 * (turns - rint(turns))), &s, &c);
}

__global__ void __launch_bounds__(kAppendWarps * 32) qk_norm_rope_append_kernel(const __grid_constant__
                                                                                 QkNormRopeAppendParams p) {
  pdl_launch();
  const int lane = threadIdx.x & 31;
  const int row = blockIdx.x * kAppendWarps + (threadIdx.x >> 5);  // head row of the token
  const int64_t t = blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y;
  const float inv_freq = p.inv_freq ? __ldg(p.inv_freq + lane) : 0.0f;
  pdl_wait();
  if (t >= p.tokens) return;

  const int64_t split_stride = static_cast<int64_t>(p.tokens) * kQkvRows;
  const float* src = p.qkv + t * kQkvRows + row * kHeadDim + 2 * lane;
  float x0 = 0.0f, x1 = 0.0f;
#pragma unroll 8
  for (int s = 0; s < p.splits; s++) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(src + s * split_stride));
    x0 += v.x;
    x1 += v.y;
  }

  constexpr int kFirstK = kQHeads, kFirstV = kFirstK + kKvHeads, kFirstGate = kFirstV + kKvHeads;
  if (row >= kFirstGate) {
    const int64_t at = t * kQSize + (row - kFirstGate) * kHeadDim + 2 * lane;
    *reinterpret_cast<float2*>(p.gate + at) = make_float2(x0, x1);
    return;
  }
  if (row < kFirstV) {
    const float scale = rsqrtf(warp_sum(x0 * x0 + x1 * x1) * (1.0f / kHeadDim) + kRmsEps);
    x0 *= scale;
    x1 *= scale;
    if (p.inv_freq) {
      float sn, cs;
      sincos_full_range(__fmul_rn(static_cast<float>(p.positions[t]), inv_freq), sn, cs);
      const float even = __fsub_rn(__fmul_rn(x0, cs), __fmul_rn(x1, sn));
      x1 = __fadd_rn(__fmul_rn(x0, sn), __fmul_rn(x1, cs));
      x0 = even;
    }
  }
  if (row < kFirstK) {
    uint32_t packed;
    if (p.e4m3_query) {
      packed = e4m3_pair_to_half2(e4m3_pair(x0, x1));
    } else {
      const __half2 h = __floats2half2_rn(x0, x1);
      packed = *reinterpret_cast<const uint32_t*>(&h);
    }
    reinterpret_cast<uint32_t*>(p.q)[(t * kQSize + row * kHeadDim) / 2 + lane] = packed;
    return;
  }
  const int64_t slot = p.cache_loc[t];
  if (slot < 0 || slot >= p.cache_rows || (slot == 0 && p.skip_slot_zero)) return;
  const bool is_k = row < kFirstV;
  const int head = row - (is_k ? kFirstK : kFirstV);
  const float scale = is_k ? *p.k_scale : *p.v_scale;
  uint16_t* cache = static_cast<uint16_t*>(is_k ? p.k_cache : p.v_cache);
  cache[(slot * kKvSize + head * kHeadDim) / 2 + lane] = e4m3_pair(__fdiv_rn(x0, scale), __fdiv_rn(x1, scale));
}

inline int launch_qk_norm_rope_append(const QkNormRopeAppendParams& p, const Launch& l) {
  if (p.tokens <= 0) return 0;
  static_assert(kHeadRows % kAppendWarps == 0);
  const unsigned y = p.tokens < 32768 ? p.tokens : 32768;
  const dim3 grid(kHeadRows / kAppendWarps, y, (p.tokens + y - 1) / y);
  return launch(qk_norm_rope_append_kernel, grid, dim3(kAppendWarps * 32), 0, l, p);
}

}  // namespace msl
