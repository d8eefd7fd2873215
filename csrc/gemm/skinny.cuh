// The skinny projection: few tokens (<= 64 a tile), bound by the weights' bytes.
//
// A CTA owns kMT * 64 weight rows (kMT consecutive m-tiles), one run of k tiles (its split) and one tile of
// kN tokens. Weights are the A operand of wgmma m64nNk16 (64 rows fill M, tokens stand on N, so that one token
// wastes no bandwidth and little arithmetic), tokens the B operand, both from shared memory.
//
// Pipeline: one producer thread fills a ring of stages, each kKS k tiles deep: weights by 1-D bulk copies of
// contiguous packed tiles (they go past L2's working set: evict_first), tokens by TMA into the same stage and
// the same barrier. The first ring-full of weights is issued before the wait on the predecessor; tokens follow
// after it. kMT warpgroups consume, one m-tile each, and release a stage once the next one's wgmmas are issued.
//
// Shared memory: the ring alone, kRing bytes. It is chosen so that two CTAs fit on an SM: either two of this
// kernel, or this one and its successor in the chain, already resident and prefetching. 96 KB in flight a SM
// is two to three times what 4.5 TB/s needs at one microsecond of latency.
#pragma once
#include "../common/wgmma.cuh"
#include "dense_tile.h"

namespace msl {

struct SkinnyArgs {
  const uint8_t* weight;   // tiles [rows / 64][k_tiles]
  void* out;               // FP32 [splits][T][out_stride] or BF16 [T][out_stride]
  int32_t tokens, rows, k_tiles, splits, out_stride;
  int32_t bf16;            // output type
  int32_t late_trigger;    // 1: pdl_launch only after pdl_wait (the pooler)
};

template <int kN_, int kMT_, int kKS_>
struct SkinnyConfig {
  static constexpr int kN = kN_, kMT = kMT_, kKS = kKS_;
  static constexpr int kRing = 96 * 1024;
  static constexpr int kTokenBytes = kN * kTileK * 2;
  static constexpr int kStepBytes = kMT * kTileBytes + kTokenBytes;  // one k tile
  static constexpr int kStageBytes = kKS * kStepBytes;
  static constexpr int kStages = kRing / kStageBytes;
  static constexpr int kThreads = 128 * kMT + 32;
  static constexpr size_t kShared = size_t(kStages) * kStageBytes + 1024;  // 1024: alignment of the ring
  static_assert(kStages >= 3);
};

template <class C>
__global__ void __launch_bounds__(C::kThreads) skinny_kernel(const __grid_constant__ CUtensorMap token_map,
                                                             const SkinnyArgs a) {
  constexpr int kN = C::kN, kMT = C::kMT, kKS = C::kKS, kStages = C::kStages;
  if (!a.late_trigger) pdl_launch();

  extern __shared__ uint8_t shared_raw[];
  __shared__ uint64_t full[kStages], empty[kStages];
  uint8_t* ring = shared_raw + ((1024 - (smem_u32(shared_raw) & 1023)) & 1023);
  // A stage: weights [kMT][kKS] tiles, then tokens [kKS] tiles of kN rows.
  auto weights_of = [&](int stage, int mt) { return ring + stage * C::kStageBytes + mt * kKS * kTileBytes; };
  auto tokens_of = [&](int stage) { return ring + stage * C::kStageBytes + kMT * kKS * kTileBytes; };

  const int group = blockIdx.x / a.splits, split = blockIdx.x % a.splits;
  const int k_begin = split_begin(split, a.splits, a.k_tiles), k_end = split_begin(split + 1, a.splits, a.k_tiles);
  const int steps = (k_end - k_begin + kKS - 1) / kKS;
  const int token_begin = blockIdx.y * kN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_producer = warp == 4 * kMT && lane == 0;

  auto load_weights = [&](int step, int stage) {
    const int k = k_begin + step * kKS, depth = min(kKS, k_end - k);
    mbar_expect_tx(&full[stage], depth * C::kStepBytes);
#pragma unroll
    for (int mt = 0; mt < kMT; mt++)
      bulk_load(weights_of(stage, mt), a.weight + (int64_t(group * kMT + mt) * a.k_tiles + k) * kTileBytes,
                depth * kTileBytes, &full[stage]);
  };
  auto load_tokens = [&](int step, int stage) {
    const int k = k_begin + step * kKS, depth = min(kKS, k_end - k);
    for (int i = 0; i < depth; i++)
      tma_load_2d(tokens_of(stage) + i * C::kTokenBytes, &token_map, (k + i) * kTileK, token_begin, &full[stage],
                  kEvictLast);
  };

  if (is_producer) {
    for (int s = 0; s < kStages; s++) {
      mbar_init(&full[s], 1);
      mbar_init(&empty[s], 4 * kMT);
    }
    mbar_init_fence();
    for (int i = 0; i < min(kStages, steps); i++) load_weights(i, i);
    tma_prefetch_descriptor(&token_map);
  }
  __syncthreads();
  pdl_wait();

  if (warp == 4 * kMT) {
    if (lane == 0) {
      if (a.late_trigger) pdl_launch();
      for (int i = 0; i < min(kStages, steps); i++) load_tokens(i, i);
      int stage = 0;
      uint32_t phase = 0;
      for (int i = kStages; i < steps; i++) {
        mbar_wait(&empty[stage], phase);
        load_weights(i, stage);
        load_tokens(i, stage);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
    return;
  }

  const int mt = warp / 4;
  float acc[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; i++) acc[i] = 0.f;
  int stage = 0;
  uint32_t phase = 0;
  for (int i = 0; i < steps; i++) {
    const int depth = kKS == 1 ? 1 : min(kKS, k_end - k_begin - i * kKS);
    mbar_wait(&full[stage], phase);
    const uint64_t wd = desc_sw128(weights_of(stage, mt)), td = desc_sw128(tokens_of(stage));
    wgmma_fence_operand(acc);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kKS; s++) {
      if (kKS == 1 || s < depth) {
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
          wgmma_ss<kN>(acc, wd + s * (kTileBytes >> 4) + 2 * kk, td + s * (C::kTokenBytes >> 4) + 2 * kk, 1);
      }
    }
    wgmma_commit();
    wgmma_fence_operand(acc);
    wgmma_wait<1>();
    if (i > 0 && lane == 0) mbar_arrive(&empty[stage == 0 ? kStages - 1 : stage - 1]);
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  wgmma_wait<0>();
  wgmma_fence_operand(acc);

  // acc[4 j + 2 h + e]: weight row 16 w + g + 8 h, token 8 j + 2 c + e.
  const int g = lane / 4, c = lane % 4;
  const int row = (group * kMT + mt) * kTileRows + 16 * (warp % 4);
  if (!a.bf16) {
    float* out = static_cast<float*>(a.out) + int64_t(split) * a.tokens * a.out_stride + row + g;
#pragma unroll
    for (int j = 0; j < kN / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int t = token_begin + 8 * j + 2 * c + e;
        if (t < a.tokens) {
          out[int64_t(t) * a.out_stride] = acc[4 * j + e];
          out[int64_t(t) * a.out_stride + 8] = acc[4 * j + 2 + e];
        }
      }
  } else {
    // Lanes g and g ^ 1 trade a token for a row: an even lane then stores rows g, g + 1 of token 2 c, an odd
    // one rows g - 1, g of token 2 c + 1; four lanes fill 16 contiguous bytes.
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(a.out) + row + (g & ~1);
    const bool odd = g & 1;
#pragma unroll
    for (int j = 0; j < kN / 8; j++) {
      const int t = token_begin + 8 * j + 2 * c + odd;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float mine = odd ? acc[4 * j + 2 * h + 1] : acc[4 * j + 2 * h];
        const float theirs = __shfl_xor_sync(~0u, odd ? acc[4 * j + 2 * h] : acc[4 * j + 2 * h + 1], 4);
        const __nv_bfloat162 pair = odd ? __floats2bfloat162_rn(theirs, mine) : __floats2bfloat162_rn(mine, theirs);
        if (t < a.tokens) *reinterpret_cast<__nv_bfloat162*>(out + int64_t(t) * a.out_stride + 8 * h) = pair;
      }
    }
  }
}

}  // namespace msl
