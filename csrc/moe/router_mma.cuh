// router for some tokens: the same partial logits as router.cuh, by tensor cores and as exact.
//
// From a few tokens on, FP32 FMA is the router's bound (4 T MFLOP: 5 us at 64 tokens at its peak, four times that
// in practice). Here the FP32 weights are cut in registers into the same three BF16 planes as h, whose
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
//
// 168 registers a thread: with those of attn_boundary (512 threads of 40) they fill the SM, so that the weights
// come while the boundary runs.
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

// kTiles column tiles of 8 tokens at once by a warp: 16 experts, 128 columns. `x` is this thread's place in the
// first token row of its quad; `sums` its first token and expert.
template <int kTiles, int kPlaneBytes, int kStride>
__device__ __forceinline__ void multiply_tiles(const uint32_t (&a)[3][8][4], const uint8_t* x, float* sums, int sum_stride) {
  // Four chains of additions a tile: by order of magnitude, and the smallest in two.
  float high[kTiles][4] = {}, middle[kTiles][4] = {}, low[kTiles][4] = {}, low2[kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint4 b[kTiles][3];
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int plane = 0; plane < 3; plane++)
        b[t][plane] = *reinterpret_cast<const uint4*>(x + plane * kPlaneBytes + t * 8 * kStride + j * 64);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int s = 2 * j + h;
      // Product after product over the tiles, so that a chain's next addition is not the next instruction.
      const auto product = [&](float (&d)[kTiles][4], int weight_plane, int token_plane) {
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
          const uint4& v = b[t][token_plane];
          mma_bf16(d[t], a[weight_plane][s], h == 0 ? v.x : v.z, h == 0 ? v.y : v.w);
        }
      };
      product(high, 0, 0);
      product(middle, 0, 1);
      product(low, 1, 1);
      product(low2, 0, 2);
      product(middle, 1, 0);
      product(low2, 2, 0);
    }
  }
  // d[0], d[1]: expert g, tokens 2 c, 2 c + 1; d[2], d[3]: expert g + 8.
#pragma unroll
  for (int t = 0; t < kTiles; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      sums[(t * 8 + (i & 1)) * sum_stride + (i >> 1) * 8] = high[t][i] + (middle[t][i] + (low[t][i] + low2[t][i]));
}

template <int kSplits>
__global__ void __maxnreg__(168) router_mma_kernel(const RouterParams p) {
  using S = RouterMmaShape<kSplits>;
  extern __shared__ __align__(128) uint8_t shared[];
  // Two rows are 8 banks apart: the quad's tokens and the eight experts of a store meet no conflict.
  __shared__ float sums[S::kParts][kMmaTokens][S::kRows + 4];
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

  // A thread brings the same 16 bytes of every kLines-th (plane, token): constant strides, no index arithmetic.
  constexpr int kPieces = S::kSlice / 8, kLines = kRouterThreads / kPieces;
  const int piece = threadIdx.x % kPieces, line = threadIdx.x / kPieces;
  const __nv_bfloat16* src = static_cast<const __nv_bfloat16*>(p.ffn_input) + k + int64_t(line) * 3 * kHidden + piece * 8;
  uint8_t* dst = shared + line * S::kStride + piece * 16;
  const auto load = [&](int first, uint8_t* to) {
    const __nv_bfloat16* from = src + int64_t(first) * 3 * kHidden;
#pragma unroll
    for (int t = 0; t < kMmaTokens; t += kLines) {
      if (first + line + t < p.tokens) {
#pragma unroll
        for (int plane = 0; plane < 3; plane++)
          cp_async16(to + plane * S::kPlaneBytes + t * S::kStride, from + (t * 3 + plane) * kHidden);
      }
    }
  };
  load(0, dst);

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
    if (first + kMmaTokens < p.tokens) load(first + kMmaTokens, dst + (buffer ^ 1) * S::kBufferBytes);
    const uint8_t* x = shared + buffer * S::kBufferBytes + g * S::kStride + part * 256 + c * 16;
    float* mine = &sums[part][2 * c][block_row + g];
    if (n > 8) multiply_tiles<2, S::kPlaneBytes, S::kStride>(a, x, mine, S::kRows + 4);
    else multiply_tiles<1, S::kPlaneBytes, S::kStride>(a, x, mine, S::kRows + 4);
    __syncthreads();
    float* out = p.logits + (int64_t(split) * p.tokens + first) * kExperts + blockIdx.x / kSplits * S::kRows;
    for (int i = threadIdx.x; i < n * S::kRows; i += kRouterThreads) {
      const int token = i / S::kRows, expert = i % S::kRows;
      float sum = sums[0][token][expert];
#pragma unroll
      for (int q = 1; q < S::kParts; q++) sum += sums[q][token][expert];
      out[int64_t(token) * kExperts + expert] = sum;
    }
  }
}

}  // namespace msl
