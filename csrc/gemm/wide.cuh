// The wide projection: 129 tokens and more, in token tiles of any multiple of 8 up to 256. Bound by the tensor
// cores from a few hundred tokens, by the weights' bytes below.
//
// Weights stand on M, 64 rows an instruction; tokens on N, kN of them: 576 tokens are 4 tiles of 144 and 200 are one
// of 200, where tiles with tokens on M come in multiples of 64 or 128 and 64 tokens too many cost a whole wave. Two
// consumer warpgroups own kMT m-tiles (of 64 rows) each and all kN tokens. A persistent grid walks (split, tile)
// items; tiles are ordered so that the CTAs at work at one time share few token tiles and few row tiles in L2.
//
// Pipeline: a ring of stages of one k tile each: weights 16 kMT KB by bulk copies of packed tiles, tokens kN x 128 bytes
// by TMA (rows past T arrive as zeros). One producer thread; its warpgroup gives its registers to the consumers
// (setmaxnreg). The first ring-full of weights is issued before the wait on the predecessor; the pooler's tokens
// may come before it too (dense_grid.cuh).
//
// Output: straight from registers, FP32 in full 32-byte sectors (a thread holds two weight rows of a token; eight lanes
// make a sector); BF16 after a transposition of 8 x 8 blocks (movmatrix) and one of 4 x 4 in each quad, again in full
// sectors. It leaves shared memory to the ring, which the producer goes on filling for the next item.
//
// Shared memory: the ring, 3 to 8 stages of 28 to 58 KB. One CTA an SM.
#pragma once
#include "../common/wgmma.cuh"
#include "dense_grid.cuh"

namespace msl {

template <int kMT_, int kN_>
struct WideConfig {
  static constexpr int kMT = kMT_, kN = kN_, kRows = 2 * kMT * kTileRows;
  static constexpr int kWeightBytes = 2 * kMT * kTileBytes, kTokenBytes = kN * kTileK * 2;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kFit = 226 * 1024 / kStageBytes;
  static constexpr int kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kThreads = 384;
  static constexpr size_t kShared = size_t(kStages) * kStageBytes + (2 * kStages + 1) * 8;
  static_assert(kStages >= 3 && kN % 8 == 0 && kMT * kN <= 384);
};

// One m-tile's accumulators: acc[4 j + 2 h + e] is weight row 16 w + g + 8 h, token 8 j + 2 c + e.
template <int kN>
__device__ __forceinline__ void store_f32(const float (&acc)[kN / 2], float* out, int first, const GridArgs& a) {
  const int c = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
  const int left = a.tokens - first - 2 * c;
  float* p = out + int64_t(first + 2 * c) * a.out_stride + g;
#pragma unroll
  for (int j = 0; j < kN / 8; j++, p += 8 * int64_t(a.out_stride)) {
    if (8 * j < left) p[0] = acc[4 * j], p[8] = acc[4 * j + 2];
    if (8 * j + 1 < left) p[a.out_stride] = acc[4 * j + 1], p[a.out_stride + 8] = acc[4 * j + 3];
  }
}

template <int kN>
__device__ __forceinline__ void store_bf16(const float (&acc)[kN / 2], __nv_bfloat16* out, int first, const GridArgs& a) {
  const int c = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int j = 0; j < kN / 8; j += 2) {
    // v[2 i + h]: rows 8 h + 2 c, + 1 of token 8 (j + i) + g.
    uint32_t v[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (j + i / 2 < kN / 8) {
        const float* x = &acc[4 * (j + i / 2) + 2 * (i % 2)];
        v[i] = transpose_8x8(pack_bf16(x[0], x[1]));
      }
    transpose_quad(v);  // lane c: all eight rows of v[c]
    const int t = first + 8 * (j + c / 2) + g;
    if (t < a.tokens && j + c / 2 < kN / 8)
      *reinterpret_cast<uint4*>(out + int64_t(t) * a.out_stride + 8 * (c % 2)) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wide_kernel(const __grid_constant__ CUtensorMap token_map, const GridArgs a) {
  constexpr int kMT = C::kMT, kN = C::kN, kStages = C::kStages;
  if (!a.late_trigger) pdl_launch();

  extern __shared__ __align__(1024) uint8_t ring[];
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + kStages * C::kStageBytes);
  uint64_t* empty = full + kStages;
  uint64_t* ready = empty + kStages;
  auto weights_of = [&](int stage) { return ring + stage * C::kStageBytes; };
  auto tokens_of = [&](int stage) { return ring + stage * C::kStageBytes + C::kWeightBytes; };

  const int items = a.splits * a.token_tiles * a.row_tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  auto work_of = [&](int item) { return grid_work<kN, C::kRows>(a, item); };
  auto load_weights = [&](const GridWork& w, int k, int stage) {
    mbar_expect_tx(&full[stage], C::kStageBytes);
    const int64_t next = int64_t(a.k_tiles) * kTileBytes;
    const uint8_t* src = a.weight + w.row / kTileRows * next + int64_t(k) * kTileBytes;
#pragma unroll
    for (int r = 0; r < 2 * kMT; r++)
      bulk_load(weights_of(stage) + r * kTileBytes, src + r * next, kTileBytes, &full[stage], kEvictNormal);
  };

  const bool is_producer = threadIdx.x == 256;
  int prefetched = 0;
  if (is_producer) {
    for (int s = 0; s < kStages; s++) {
      mbar_init(&full[s], 1);
      mbar_init(&empty[s], 8);
    }
    mbar_init(ready, 1);
    mbar_init_fence();
    const GridWork w = work_of(blockIdx.x);
    prefetched = min(kStages, w.k_end - w.k_begin);
    for (int i = 0; i < prefetched; i++) load_weights(w, w.k_begin + i, i);
    tma_prefetch_descriptor(&token_map);
  }
  __syncthreads();
  if (a.ready == nullptr) pdl_wait();

  if (warp >= 8) {
    setmaxnreg_dec<40>();
    if (a.late_trigger && warp == 9) await_ready(a, ready);
    if (is_producer) {
      if (a.ready != nullptr) {
        mbar_wait(ready, 0);
        fence_proxy_async_global();
      }
      int stage = 0;
      uint32_t phase = 1;  // an empty ring: the first pass does not wait
      for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const GridWork w = work_of(item);
        for (int k = w.k_begin; k < w.k_end; k++) {
          if (prefetched > 0) {
            prefetched--;
          } else {
            mbar_wait(&empty[stage], phase);
            load_weights(w, k, stage);
          }
          tma_load_2d(tokens_of(stage), &token_map, k * kTileK, w.token, &full[stage]);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int group = warp / 4;
    int stage = 0;
    uint32_t phase = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const GridWork w = work_of(item);
      float acc[kMT][kN / 2];
#pragma unroll
      for (int m = 0; m < kMT; m++)
#pragma unroll
        for (int i = 0; i < kN / 2; i++) acc[m][i] = 0.f;
      int previous = 0;
      for (int k = w.k_begin; k < w.k_end; k++) {
        mbar_wait(&full[stage], phase);
        const uint64_t td = desc_sw128(tokens_of(stage));
#pragma unroll
        for (int m = 0; m < kMT; m++) wgmma_fence_operand(acc[m]);
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < kMT; m++) {
          const uint64_t wd = desc_sw128(weights_of(stage) + (group * kMT + m) * kTileBytes);
#pragma unroll
          for (int kk = 0; kk < 4; kk++) wgmma_ss<kN>(acc[m], wd + 2 * kk, td + 2 * kk, 1);
        }
        wgmma_commit();
#pragma unroll
        for (int m = 0; m < kMT; m++) wgmma_fence_operand(acc[m]);
        wgmma_wait<1>();
        if (k > w.k_begin && lane == 0) mbar_arrive(&empty[previous]);
        previous = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kMT; m++) wgmma_fence_operand(acc[m]);
      if (lane == 0) mbar_arrive(&empty[previous]);

#pragma unroll
      for (int m = 0; m < kMT; m++) {
        const int row = w.row + (group * kMT + m) * kTileRows + 16 * (warp % 4);
        if (a.bf16)
          store_bf16<kN>(acc[m], static_cast<__nv_bfloat16*>(a.out) + row, w.token, a);
        else
          store_f32<kN>(acc[m], static_cast<float*>(a.out) + int64_t(w.split) * a.tokens * a.out_stride + row, w.token, a);
      }
    }
  }
}

}  // namespace msl
