// qk_norm_rope_append: one warp owns one 64-wide head row of one token: 16 rows of q, 2 of k, 2 of v
// and 16 of the output gate, 36 warps a token in CTAs of 4 (so that one token already spreads over 9
// SMs). A lane holds elements 2 l and 2 l + 1, which is one RoPE pair: norm, rotation and
// quantisation need nothing but one warp reduction. No shared memory. The caller's step data
// (positions, slots, scales) is read before the wait, so that the sines are ready when the projection
// is. In decode the attention kernel does the same work in its prologue (attention_decode.cuh), by the
// functions below, and this kernel is not launched.
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
  for (int o = 16; o > 0; o >>= 1) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// Sine and cosine of an FP32 angle of any size: turns are reduced in FP64 (exact to far below an FP32
// ulp of the result up to angles of 2^30), the remainder by sincospif, which needs no slow path.
__device__ __forceinline__ void sincos_full_range(float angle, float& s, float& c) {
  const double turns = static_cast<double>(angle) * 0.15915494309189533577;
  sincospif(static_cast<float>(2.0 * (turns - rint(turns))), &s, &c);
}

constexpr int kFirstK = kQHeads, kFirstV = kFirstK + kKvHeads, kFirstGate = kFirstV + kKvHeads;  // head rows

// Elements 2 lane, 2 lane + 1 of N head rows of token t: the projection's splits added in order, all
// loads of 8 splits in flight together (one latency: few tokens have 7). Loads past the last split
// repeat it and are masked to 0: predicates instead make the compiler issue a few loads at a time.
template <int N>
__device__ __forceinline__ void add_splits(const QkNormRopeAppendParams& p, int64_t t, const int (&rows)[N], int lane,
                                           float2 (&x)[N]) {
  constexpr int kBatch = 8;
  const int64_t stride = static_cast<int64_t>(p.tokens) * kQkvRows;
  const float* src = p.qkv + t * kQkvRows + 2 * lane;
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < p.splits; first += kBatch) {
    float2 v[kBatch][N];
#pragma unroll
    for (int s = 0; s < kBatch; s++) {
#pragma unroll
      for (int i = 0; i < N; i++) v[s][i] = __ldcg(reinterpret_cast<const float2*>(src + rows[i] * kHeadDim));
      src += stride & ((first + s + 1 - p.splits) >> 31);
    }
#pragma unroll
    for (int s = 0; s < kBatch; s++)
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int keep = (first + s - p.splits) >> 31;  // all ones for a split that exists
        x[i].x += __int_as_float(__float_as_int(v[s][i].x) & keep);
        x[i].y += __int_as_float(__float_as_int(v[s][i].y) & keep);
      }
  }
}
// RMS norm of a q or k row, one warp, and rotation by (sn, cs) if `rope`.
__device__ __forceinline__ float2 norm_rope(float2 x, bool rope, float sn, float cs) {
  // Spelled out, so that every kernel that inlines it rounds alike.
  const float scale = rsqrtf(__fmaf_rn(warp_sum(__fmaf_rn(x.x, x.x, __fmul_rn(x.y, x.y))), 1.0f / kHeadDim, kRmsEps));
  x = make_float2(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale));
  if (!rope) return x;
  return make_float2(__fsub_rn(__fmul_rn(x.x, cs), __fmul_rn(x.y, sn)), __fadd_rn(__fmul_rn(x.x, sn), __fmul_rn(x.y, cs)));
}
__device__ __forceinline__ uint32_t query_half2(float2 x, bool e4m3) {
  if (e4m3) return e4m3_pair_to_half2(e4m3_pair(x.x, x.y));
  const __half2 h = __floats2half2_rn(x.x, x.y);
  return *reinterpret_cast<const uint32_t*>(&h);
}
// The cache row where token t's entry goes, or -1.
__device__ __forceinline__ int64_t append_slot(const QkNormRopeAppendParams& p, int64_t t) {
  const int64_t slot = __ldcg(reinterpret_cast<const long long*>(p.cache_loc) + t);
  return slot < 0 || slot >= p.cache_rows || (slot == 0 && p.skip_slot_zero) ? -1 : slot;
}
// Two bytes of a finished k or v row (head row `row`) as the cache holds them.
__device__ __forceinline__ float cache_scale(const QkNormRopeAppendParams& p, int row) {
  return __ldcg(row < kFirstV ? p.k_scale : p.v_scale);
}
__device__ __forceinline__ uint16_t cache_bytes(float2 x, float scale) {
  return e4m3_pair(__fdiv_rn(x.x, scale), __fdiv_rn(x.y, scale));
}
// ... and their place in the K or V cache, in units of two bytes.
__device__ __forceinline__ uint16_t* cache_place(const QkNormRopeAppendParams& p, int row, int64_t slot, int lane) {
  uint16_t* cache = static_cast<uint16_t*>(row < kFirstV ? p.k_cache : p.v_cache);
  return cache + (slot * kKvSize + ((row - kFirstK) & 1) * kHeadDim) / 2 + lane;
}
__device__ __forceinline__ void token_sincos(const QkNormRopeAppendParams& p, int64_t t, int lane, float& sn, float& cs) {
  const float position = static_cast<float>(__ldcg(reinterpret_cast<const long long*>(p.positions) + t));
  sincos_full_range(__fmul_rn(position, __ldcg(p.inv_freq + lane)), sn, cs);
}

__global__ void __launch_bounds__(kAppendWarps * 32, 8) qk_norm_rope_append_kernel(const __grid_constant__
                                                                                 QkNormRopeAppendParams p) {
  pdl_launch();
  const int lane = threadIdx.x & 31;
  const int row = blockIdx.x * kAppendWarps + (threadIdx.x >> 5);  // head row of the token
  const int64_t t = blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y;
  // The caller's data, which no kernel of the step writes, before the wait.
  const bool live = t < p.tokens, is_kv = row >= kFirstK && row < kFirstGate;
  float sn = 0.0f, cs = 1.0f, scale = 1.0f;
  int64_t slot = -1;
  if (live && p.inv_freq && row < kFirstV) token_sincos(p, t, lane, sn, cs);
  if (live && is_kv) {
    slot = append_slot(p, t);
    scale = cache_scale(p, row);
  }
  pdl_wait();
  if (!live) return;
  float2 sums[1];
  add_splits<1>(p, t, {row}, lane, sums);
  float2 x = sums[0];
  if (row >= kFirstGate) {
    *reinterpret_cast<float2*>(p.gate + t * kQSize + (row - kFirstGate) * kHeadDim + 2 * lane) = x;
    return;
  }
  if (row < kFirstV) x = norm_rope(x, p.inv_freq != nullptr, sn, cs);
  if (!is_kv) {
    reinterpret_cast<uint32_t*>(p.q)[(t * kQSize + row * kHeadDim) / 2 + lane] = query_half2(x, p.e4m3_query);
  } else if (slot >= 0) {
    *cache_place(p, row, slot, lane) = cache_bytes(x, scale);
  }
}

inline int launch_qk_norm_rope_append(const QkNormRopeAppendParams& p, const Launch& l) {
  if (p.tokens <= 0) return 0;
  static_assert(kHeadRows % kAppendWarps == 0);
  const unsigned y = p.tokens < 32768 ? p.tokens : 32768;
  const dim3 grid(kHeadRows / kAppendWarps, y, (p.tokens + y - 1) / y);
  return launch(qk_norm_rope_append_kernel, grid, dim3(kAppendWarps * 32), 0, l, p);
}

}  // namespace msl
