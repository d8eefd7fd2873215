// What a warp of the split kernel does with one chunk of keys, on registers: scores, mask, softmax,
// O^T. decode_scores / verify_scores leave `prob`, the FP16 probabilities as B fragments (keys on K, 8
// query columns on N); add_values multiplies V^T by them.
//
// A column's scores are kept relative to its reference point: p = 2^(score + minus_ref). The point
// moves only when a lane's probabilities of a chunk add up to more than kMoveAbove (one vote a chunk;
// no maximum is taken otherwise) and is then put 3 below the maximum: FP16 probabilities cannot
// overflow, and lose only what lies 2^-27 below the maximum. It starts at -inf, so that the first
// chunk's p are infinite (or NaN, where masked) and the vote says to move.
#pragma once
#include "../common/ptx.cuh"
#include "../include/model.h"

namespace msl {

constexpr float kMoveAbove = 32768.0f;
constexpr float kRefBelow = 3.0f;  // log2: the reference point's place below the maximum

__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 2^x; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Four E4M3 bytes as two pairs of halves, exact.
__device__ __forceinline__ void e4m3_to_half(uint32_t w, uint32_t& lo, uint32_t& hi) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(lo), "=r"(hi) : "r"(w));
}
__device__ __forceinline__ uint32_t half2_bits(float lo, float hi) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}
// Transposes an 8 x 8 matrix of halves held as accumulators hold it (row g, columns 2 c and 2 c + 1).
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// Where the 16-byte piece `piece` of row `key` stands in a chunk: K so that 8 lanes reading one 64-byte
// half of two keys, V so that 16 lanes reading 32 bytes of four even or odd keys, meet no bank twice.
__device__ __forceinline__ int k_offset(int key, int piece) { return key * 128 + ((piece ^ ((key & 1) << 2)) << 4); }
__device__ __forceinline__ int v_offset(int key, int piece) { return key * 128 + ((piece ^ (key & 6)) << 4); }

// A warp's queries and results. Decode: 2 column tiles = the 8 queries of each KV head; verify: 4 =
// four tokens' 8 queries of one KV head. minus_ref and sum: decode [KV head][column 2 c + e], verify
// [tile], row g; sum is the lane's share.
template <int kColumnTiles, int kQueryRows>
struct WarpState {
  uint32_t q[kQueryRows][8];
  float o[kColumnTiles][4][4];  // [tile][d tile t][e]: d = 8 g + 2 t + (e >> 1), column 2 c + (e & 1)
  float minus_ref[4];
  float sum[4];
};

// The new reference point for a column whose highest score is `high`: updates the sum, returns the
// factor for what was added so far. A column that has seen nothing stays at -inf.
template <class State>
__device__ __forceinline__ float move_reference(State& w, int r, float high) {
  const float to = fminf(w.minus_ref[r], kRefBelow - high);
  const float factor = w.minus_ref[r] == INFINITY ? 0.0f : exp2_approx(to - w.minus_ref[r]);
  w.minus_ref[r] = to;
  w.sum[r] *= factor;
  return factor;
}
// 2^(score + minus_ref) where minus_ref may still be inf (then the score is -inf and p is 0).
__device__ __forceinline__ float started(float minus_ref) { return minus_ref == INFINITY ? 0.0f : minus_ref; }

struct ChunkKeys {
  uint32_t valid;  // bit i: key i of the chunk may be seen
  int key0;        // its first key
  int window;      // 0: full
  bool clean;      // every key is visible to every query of the CTA
};

// Moves column tile n's results from one reference point to another.
template <int kColumnTiles, int kQueryRows>
__device__ __forceinline__ void scale_tile(WarpState<kColumnTiles, kQueryRows>& w, int n, float f0, float f1) {
#pragma unroll
  for (int t = 0; t < 4; t++) {
    w.o[n][t][0] *= f0, w.o[n][t][1] *= f1;
    w.o[n][t][2] *= f0, w.o[n][t][3] *= f1;
  }
}

// One token, both KV heads, 16 keys: S^T = K Q^T with keys on M, so that 8 queries waste nothing. Its
// accumulators become B fragments by a transposition of 8 x 8 halves (movmatrix).
__device__ __forceinline__ void decode_scores(WarpState<2, 2>& w, const char* k_tile, const ChunkKeys& keys, int pos,
                                              float scale, int g, int c, uint32_t (&prob)[2][2]) {
  float s[2][4];  // [KV head]: key g (e = 0, 1) or g + 8 (2, 3), query 2 c + (e & 1)
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 x = *reinterpret_cast<const uint4*>(k_tile + k_offset(g, h * 4 + c));
    const uint4 y = *reinterpret_cast<const uint4*>(k_tile + k_offset(g + 8, h * 4 + c));
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; e++) s[h][e] = 0.0f;
#pragma unroll
    for (int st = 0; st < 4; st++) {
      uint32_t a0, a1, a2, a3;
      e4m3_to_half(xs[st], a0, a2);
      e4m3_to_half(ys[st], a1, a3);
      mma_f16(s[h], a0, a1, a2, a3, w.q[h][2 * st], w.q[h][2 * st + 1]);
    }
  }
  if (!keys.clean) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int at = g + 8 * e, key = keys.key0 + at;
      const bool seen = ((keys.valid >> at) & 1) && key <= pos && (keys.window == 0 || key > pos - keys.window);
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (!seen) s[h][2 * e] = s[h][2 * e + 1] = -INFINITY;
    }
  }
  float part[4];  // this chunk's share of sum
  const auto probabilities = [&](const float (&minus)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; e++) p[e] = exp2_approx(fmaf(s[h][e], scale, minus[2 * h + (e & 1)]));
      part[2 * h] = p[0] + p[2];
      part[2 * h + 1] = p[1] + p[3];
      prob[h][0] = half2_bits(p[0], p[1]);
      prob[h][1] = half2_bits(p[2], p[3]);
    }
  };
  probabilities(w.minus_ref);
  bool fits = true;
#pragma unroll
  for (int r = 0; r < 4; r++) fits = fits && part[r] <= kMoveAbove;
  if (!__all_sync(~0u, fits)) {
    float factor[4], minus[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      float high = fmaxf(s[r >> 1][r & 1] * scale, s[r >> 1][2 + (r & 1)] * scale);
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, x));
      factor[r] = move_reference(w, r, high);
      minus[r] = started(w.minus_ref[r]);
    }
    scale_tile(w, 0, factor[0], factor[1]);
    scale_tile(w, 1, factor[2], factor[3]);
    probabilities(minus);
  }
#pragma unroll
  for (int r = 0; r < 4; r++) w.sum[r] += part[r];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    prob[h][0] = transpose_8x8(prob[h][0]);
    prob[h][1] = transpose_8x8(prob[h][1]);
  }
}

// Four tokens, one KV head, 32 keys: S = Q K^T with queries on M (two tiles of two tokens), whose
// accumulators are the B fragments as they stand.
__device__ __forceinline__ void verify_scores(WarpState<4, 4>& w, const char* k_tile, const ChunkKeys& keys, int kv_head,
                                              int first_pos, float scale, int g, int c, uint32_t (&prob)[4][4]) {
  float s[2][4][4];  // [m tile][key tile]: token (e >> 1) of the tile, query g, key 2 c + (e & 1)
#pragma unroll
  for (int kt = 0; kt < 4; kt++) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[m][kt][e] = 0.0f;
    const uint4 x = *reinterpret_cast<const uint4*>(k_tile + k_offset(kt * 8 + g, kv_head * 4 + c));
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int st = 0; st < 4; st++) {
      uint32_t b0, b1;
      e4m3_to_half(xs[st], b0, b1);
#pragma unroll
      for (int m = 0; m < 2; m++)
        mma_f16(s[m][kt], w.q[2 * m][2 * st], w.q[2 * m + 1][2 * st], w.q[2 * m][2 * st + 1], w.q[2 * m + 1][2 * st + 1],
                b0, b1);
    }
  }
  if (!keys.clean) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int pos = first_pos + n, oldest = keys.window > 0 ? pos - keys.window : -1;
#pragma unroll
      for (int kt = 0; kt < 4; kt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int at = kt * 8 + 2 * c + e, key = keys.key0 + at;
          if (!((keys.valid >> at) & 1) || key > pos || key <= oldest) s[n >> 1][kt][(n & 1) * 2 + e] = -INFINITY;
        }
    }
  }
  float part[4];  // this chunk's share of sum
  const auto probabilities = [&](const float (&minus)[4]) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      part[n] = 0.0f;
#pragma unroll
      for (int kt = 0; kt < 4; kt++) {
        const float p0 = exp2_approx(fmaf(s[n >> 1][kt][(n & 1) * 2], scale, minus[n]));
        const float p1 = exp2_approx(fmaf(s[n >> 1][kt][(n & 1) * 2 + 1], scale, minus[n]));
        part[n] += p0 + p1;
        prob[n][kt] = half2_bits(p0, p1);
      }
    }
  };
  probabilities(w.minus_ref);
  bool fits = true;
#pragma unroll
  for (int n = 0; n < 4; n++) fits = fits && part[n] <= kMoveAbove;
  if (!__all_sync(~0u, fits)) {
    float minus[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      float high = -INFINITY;
#pragma unroll
      for (int kt = 0; kt < 4; kt++)
#pragma unroll
        for (int e = 0; e < 2; e++) high = fmaxf(high, s[n >> 1][kt][(n & 1) * 2 + e] * scale);
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float factor = move_reference(w, n, high);
      minus[n] = started(w.minus_ref[n]);
      scale_tile(w, n, __shfl_sync(~0u, factor, 8 * c), __shfl_sync(~0u, factor, 8 * c + 4));
    }
    probabilities(minus);
  }
#pragma unroll
  for (int n = 0; n < 4; n++) w.sum[n] += part[n];
}

// o += V^T P^T for 16 keys from `key0` of the tile, one KV head; prob(n, i) is column tile n's i-th
// register. d tile t holds d = 8 g + 2 t in rows 0-7 and 8 g + 2 t + 1 in rows 8-15, so that a lane
// needs 8 contiguous bytes of keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9.
template <int kFirst, int kCount, int kColumnTiles, int kQueryRows, int kProbs>
__device__ __forceinline__ void add_values(WarpState<kColumnTiles, kQueryRows>& w, const char* v_tile, int kk, int kv_head,
                                           int g, int c, const uint32_t (&prob)[kColumnTiles][kProbs]) {
  uint2 x[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int key = kk * 16 + 2 * c + (j & 1) + (j >> 1) * 8;
    x[j] = *reinterpret_cast<const uint2*>(v_tile + v_offset(key, kv_head * 4 + (g >> 1)) + (g & 1) * 8);
  }
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const uint32_t select = t & 1 ? 0x7362 : 0x5140;
    uint32_t a0, a1, a2, a3;
    e4m3_to_half(t < 2 ? __byte_perm(x[0].x, x[1].x, select) : __byte_perm(x[0].y, x[1].y, select), a0, a1);
    e4m3_to_half(t < 2 ? __byte_perm(x[2].x, x[3].x, select) : __byte_perm(x[2].y, x[3].y, select), a2, a3);
#pragma unroll
    for (int n = kFirst; n < kFirst + kCount; n++) mma_f16(w.o[n][t], a0, a1, a2, a3, prob[n][2 * kk], prob[n][2 * kk + 1]);
  }
}

}  // namespace msl
