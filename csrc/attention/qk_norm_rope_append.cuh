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
__device__ __forceinline__ float token_angle(const QkNormRopeAppendParams& p, int64_t t, int lane) {
  const float position = static_cast<float>(__ldcg(reinterpret_cast<const long long*>(p.positions) + t));
  return __fmul_rn(position, __ldcg(p.inv_freq + lane));
}
__device__ __forceinline__ void token_sincos(const QkNormRopeAppendParams& p, int64_t t, int lane, float& sn, float& cs) {
  sincos_full_range(token_angle(p, t, lane), sn, cs);
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
    if (p.gate == nullptr) return;
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

// The same for many tokens: a warp owns four head rows of a token, eight lanes and 2 x 16 bytes a lane each. Lane i
// of the eight holds pairs 2 i, 2 i + 1 and 16 more of each, and adds in the order of warp_sum: the bits are the
// same. A prefill step's gate stays where the projection left it (p.gate null): five warps a token then, else nine.
constexpr int kAppendRowsThreads = 256;
constexpr int kAppendRowsTokens = 128;  // more than this many

__global__ void __launch_bounds__(kAppendRowsThreads, 5) append_rows_kernel(const __grid_constant__ QkNormRopeAppendParams p) {
  pdl_launch();
  const int lane = threadIdx.x & 31, i = lane & 7;
  const uint32_t units = p.gate != nullptr ? kHeadRows / 4 : kFirstGate / 4;  // warps a token
  const uint32_t unit = blockIdx.x * (kAppendRowsThreads / 32) + (threadIdx.x >> 5);
  const int64_t t = unit / units;
  const int first = unit % units * 4, row = first + (lane >> 3);
  const bool live = t < p.tokens, is_kv = row >= kFirstK && row < kFirstGate;
  const bool rope = p.inv_freq != nullptr && first < kFirstGate;  // of the warp; value rows leave it out
  float angle = 0.0f, scale = 1.0f;
  int64_t slot = -1;
  if (live && rope) angle = token_angle(p, t, lane);
  if (live && is_kv) {
    slot = append_slot(p, t);
    scale = cache_scale(p, row);
  }
  pdl_wait();
  if (!live) return;
  const int64_t stride = static_cast<int64_t>(p.tokens) * kQkvRows;
  const float* src = p.qkv + t * kQkvRows + row * kHeadDim + 4 * i;
  float4 x[2];
#pragma unroll
  for (int h = 0; h < 2; h++) x[h] = __ldcg(reinterpret_cast<const float4*>(src + 32 * h));
  // While the loads are under way: most CTAs have no wait to compute before.
  float sn = 0.0f, cs = 1.0f;
  if (rope) sincos_full_range(angle, sn, cs);
#pragma unroll 2
  for (int s = 1; s < p.splits; s++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(src + s * stride + 32 * h));
      x[h] = make_float4(x[h].x + v.x, x[h].y + v.y, x[h].z + v.z, x[h].w + v.w);
    }
  }
  if (first >= kFirstGate) {
    float4* gate = reinterpret_cast<float4*>(p.gate + t * kQSize + (row - kFirstGate) * kHeadDim + 4 * i);
    gate[0] = x[0];
    gate[8] = x[1];
    return;
  }
  float square[2];  // of even pairs, of odd ones
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float part[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float a = e ? x[h].z : x[h].x, b = e ? x[h].w : x[h].y;
      part[h] = __fmaf_rn(a, a, __fmul_rn(b, b));
    }
    square[e] = __fadd_rn(part[0], part[1]);
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) square[e] = __fadd_rn(square[e], __shfl_xor_sync(~0u, square[e], d));
  }
  const float norm = rsqrtf(__fmaf_rn(__fadd_rn(square[0], square[1]), 1.0f / kHeadDim, kRmsEps));
  float2 out[2][2];  // [half][pair]
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float pair_sn = rope ? __shfl_sync(~0u, sn, 16 * h + 2 * i + e) : 0.0f;
      const float pair_cs = rope ? __shfl_sync(~0u, cs, 16 * h + 2 * i + e) : 1.0f;
      float2 v = e ? make_float2(x[h].z, x[h].w) : make_float2(x[h].x, x[h].y);
      if (row < kFirstV) {
        v = make_float2(__fmul_rn(v.x, norm), __fmul_rn(v.y, norm));
        if (rope)
          v = make_float2(__fsub_rn(__fmul_rn(v.x, pair_cs), __fmul_rn(v.y, pair_sn)),
                          __fadd_rn(__fmul_rn(v.x, pair_sn), __fmul_rn(v.y, pair_cs)));
      }
      out[h][e] = v;
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int word = 16 * h + 2 * i;  // pairs, in the row
    if (!is_kv) {
      *reinterpret_cast<uint2*>(reinterpret_cast<uint32_t*>(p.q) + (t * kQSize + row * kHeadDim) / 2 + word) =
          make_uint2(query_half2(out[h][0], p.e4m3_query), query_half2(out[h][1], p.e4m3_query));
    } else if (slot >= 0) {
      *reinterpret_cast<uint32_t*>(cache_place(p, row, slot, word)) =
          uint32_t(cache_bytes(out[h][0], scale)) | uint32_t(cache_bytes(out[h][1], scale)) << 16;
    }
  }
}

inline int launch_qk_norm_rope_append(const QkNormRopeAppendParams& p, const Launch& l) {
  if (p.tokens <= 0) return 0;
  static_assert(kHeadRows % kAppendWarps == 0);
  if (p.tokens > kAppendRowsTokens) {
    constexpr int kWarps = kAppendRowsThreads / 32;
    const int64_t units = static_cast<int64_t>(p.tokens) * ((p.gate ? kHeadRows : kFirstGate) / 4);
    return launch(append_rows_kernel, dim3(static_cast<unsigned>((units + kWarps - 1) / kWarps)), dim3(kAppendRowsThreads), 0,
                  l, p);
  }
  const unsigned y = p.tokens < 32768 ? p.tokens : 32768;
  const dim3 grid(kHeadRows / kAppendWarps, y, (p.tokens + y - 1) / y);
  return launch(qk_norm_rope_append_kernel, grid, dim3(kAppendWarps * 32), 0, l, p);
}

}  // namespace msl
