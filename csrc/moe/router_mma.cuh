// router for some tokens: the same partial logits as router.cuh, by tensor cores and as exact.
//
// From a few tokens on, FP32 FMA is the router's bound (2 T MFLOP: 5 us at 64 tokens at its peak, three times
// that in practice). Here the FP32 weights are cut in registers into the same three BF16 planes as h, whose
// products are exact, and six of the nine plane products are summed; those left out are below 2^-24 of the
// result. A tensor core truncates what it adds, so runs are short: 128 columns an accumulator, and one
// accumulator for each order of magnitude (hi hi; hi mid + mid hi; the rest). Error as in FP32: below 2e-7.
//
// 128 CTAs of 8 warps; a CTA owns 2 kSplits experts and 8192 / kSplits columns, a warp 16 experts and 128
// columns of these: 64 FP32 weights a thread, loaded before pdl_wait(), cut after the first token loads are
// issued. h comes by cp.async, 16 tokens x 3 planes at a time, into two buffers. The order of K inside a group
// of 32 is chosen so that a thread's weights and its share of h are contiguous: thread c of a quad has columns
// 8 c .. 8 c + 7, which stand for the fragment's k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of two k16 steps. The warps
// that share experts add their sums through shared memory, in order.
#pragma once
#include "router.cuh"

namespace msl {

constexpr int kMmaTokens = 16;  // tokens a chunk: two column tiles

template <int kSplits>
struct RouterMmaShape {
  static constexpr int kSlice = kHidden / kSplits;
  static constexpr int kRows = 2 * kSplits;
  static constexpr int kParts = kSlice / 128;     // warps that share experts
  static constexpr int kStride = kSlice * 2 + 64;  // bytes of a token's row: neighbours half a bank line apart
  static constexpr int kPlaneBytes = kMmaTokens * kStride;
  static constexpr int kBufferBytes = 3 * kPlaneBytes;
  static constexpr size_t shared_bytes(int tokens) { return (tokens > kMmaTokens ? 2 : 1) * size_t(kBufferBytes); }
};

__device__ __forceinline__ uint32_t bf16_pair(float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(v);
}
// Two weights into three words, one a plane.
__device__ __forceinline__ void cut(float a, float b, uint32_t& hi, uint32_t& mid, uint32_t& lo) {
  hi = bf16_pair(a, b);
  a -= __uint_as_float(hi << 16);
  b -= __uint_as_float(hi & 0xFFFF0000u);
  mid = bf16_pair(a, b);
  lo = bf16_pair(a - __uint_as_float(mid << 16), b - __uint_as_float(mid & 0xFFFF0000u));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int kSplits>
__global__ void __launch_bounds__(kRouterThreads) router_mma_kernel(const RouterParams p) {
  using S = RouterMmaShape<kSplits>;
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kSumStride = 24;  // floats: eight experts' pairs of tokens fall into different banks
  __shared__ __align__(16) float sums[S::kParts][S::kRows][kSumStride];
  pdl_launch();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int g = lane >> 2, c = lane & 3;
  const int split = blockIdx.x % kSplits;
  const int part = warp % S::kParts;
  const int block_row = warp / S::kParts * 16;           // in this CTA
  const int row = blockIdx.x / kSplits * S::kRows + block_row;
  const int k = split * S::kSlice;
  float4 raw[4][2][2];  // [group of 32 columns][expert g, g + 8][half of 8 columns]
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        raw[j][r][h] = load_weight(p.weight + int64_t(row + g + 8 * r) * kHidden + k + part * 128 + j * 32 + c * 8 + h * 4);
  pdl_wait();

  const __nv_bfloat16* planes = static_cast<const __nv_bfloat16*>(p.ffn_input) + k;
  const auto load = [&](int first, uint8_t* buffer) {
    constexpr int kPieces = S::kSlice / 8;  // of 16 bytes in a row
    const int n = min(kMmaTokens, p.tokens - first);
    for (int i = threadIdx.x; i < n * 3 * kPieces; i += kRouterThreads) {
      const int line = i / kPieces, piece = i % kPieces;  // line = token * 3 + plane, as in memory
      cp_async16(buffer + (line % 3) * S::kPlaneBytes + (line / 3) * S::kStride + piece * 16,
                 planes + (int64_t(first) * 3 + line) * kHidden + piece * 8);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(0, shared);

  uint32_t a[3][8][4];  // [plane][k16 step][fragment word]
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4 v = raw[j][r][h];
        cut(v.x, v.y, a[0][2 * j + h][r], a[1][2 * j + h][r], a[2][2 * j + h][r]);
        cut(v.z, v.w, a[0][2 * j + h][2 + r], a[1][2 * j + h][2 + r], a[2][2 * j + h][2 + r]);
      }

  int buffer = 0;
  for (int first = 0; first < p.tokens; first += kMmaTokens, buffer ^= 1) {
    const int n = min(kMmaTokens, p.tokens - first);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // this chunk is there; the one before, and its sums, are done with
    if (first + kMmaTokens < p.tokens) load(first + kMmaTokens, shared + (buffer ^ 1) * S::kBufferBytes);
    const uint8_t* x = shared + buffer * S::kBufferBytes + g * S::kStride + part * 256 + c * 16;
    for (int tile = 0; tile < n; tile += 8) {
      float high[4] = {}, middle[4] = {}, low[4] = {}, low2[4] = {};  // four chains of additions
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint4 b[3];
#pragma unroll
        for (int plane = 0; plane < 3; plane++)
          b[plane] = *reinterpret_cast<const uint4*>(x + plane * S::kPlaneBytes + tile * S::kStride + j * 64);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int s = 2 * j + h;
          uint32_t b0[3], b1[3];
#pragma unroll
          for (int plane = 0; plane < 3; plane++) {
            b0[plane] = h == 0 ? b[plane].x : b[plane].z;
            b1[plane] = h == 0 ? b[plane].y : b[plane].w;
          }
          mma_bf16(high, a[0][s], b0[0], b1[0]);
          mma_bf16(middle, a[0][s], b0[1], b1[1]);
          mma_bf16(low, a[1][s], b0[1], b1[1]);
          mma_bf16(middle, a[1][s], b0[0], b1[0]);
          mma_bf16(low2, a[0][s], b0[2], b1[2]);
          mma_bf16(low2, a[2][s], b0[0], b1[0]);
        }
      }
      // high[0], [1]: expert g, tokens 2 c, 2 c + 1; [2], [3]: expert g + 8.
#pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2*>(&sums[part][block_row + g + 8 * r][tile + 2 * c]) =
            make_float2(high[2 * r] + (middle[2 * r] + (low[2 * r] + low2[2 * r])),
                        high[2 * r + 1] + (middle[2 * r + 1] + (low[2 * r + 1] + low2[2 * r + 1])));
    }
    __syncthreads();
    float* out = p.logits + (int64_t(split) * p.tokens + first) * kExperts + blockIdx.x / kSplits * S::kRows;
    for (int i = threadIdx.x; i < n * S::kRows; i += kRouterThreads) {
      const int token = i / S::kRows, expert = i % S::kRows;
      float sum = sums[0][expert][token];
#pragma unroll
      for (int q = 1; q < S::kParts; q++) sum += sums[q][expert][token];
      out[int64_t(token) * kExperts + expert] = sum;
    }
  }
}

}  // namespace msl
