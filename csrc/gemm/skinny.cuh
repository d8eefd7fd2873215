// The skinny projection: few tokens (<= 128 a tile), bound by the weights' bytes.
//
// A CTA owns kMT * 64 weight rows (kMT consecutive m-tiles), one run of k tiles (its split) and one tile of
// kN tokens. Weights are the A operand of wgmma m64nNk16 (64 rows fill M, tokens stand on N, so that one token
// wastes no bandwidth and little arithmetic), tokens the B operand, both from shared memory.
//
// Pipeline: one producer thread fills two rings, a step being one k tile: weights, kW steps deep, by 1-D bulk
// copies of packed tiles (evict_first: they are read once); tokens, kX steps deep, by TMA. Weights come from
// device memory and the whole ring is issued before the wait on the predecessor, so their ring is as deep as
// shared memory allows; tokens come from L2 after the wait and need only cover its latency. kMT warpgroups
// consume, one m-tile each, and release a step once the next step's wgmmas are issued.
//
// The pooler's tokens do not depend on the routing that stands before it in the chain: with `ready` they are loaded
// as soon as that word says so, and a warp that does nothing else waits for the word, then for the predecessor, then
// triggers. (It is that warp's work because the producer would hold up the ring meanwhile, and because a spin in the
// producer makes ptxas elect a lane for every copy.)
//
// Shared memory: the rings and their barriers, at most 113 KB, so that two CTAs fit on an SM: either two of this
// kernel, or this one and its successor in the chain, already resident and prefetching.
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
  const uint32_t* ready;   // DenseParams::ready, ready_at
  uint32_t ready_at;
};

template <int kN_, int kMT_, int kW_, int kX_>
struct SkinnyConfig {
  static constexpr int kN = kN_, kMT = kMT_, kW = kW_, kX = kX_;
  static constexpr int kTokenBytes = kN * kTileK * 2;
  static constexpr int kRingBytes = kW * kMT * kTileBytes + kX * kTokenBytes;
  static constexpr int kThreads = 128 * kMT + 64;  // consumers, producer, the warp that waits
  static constexpr size_t kShared = kRingBytes + (2 * kW + kX + 1) * 8;
  static_assert(kX <= kW);
};

template <class C>
__global__ void __launch_bounds__(C::kThreads) skinny_kernel(const __grid_constant__ CUtensorMap token_map,
                                                             const SkinnyArgs a) {
  constexpr int kN = C::kN, kMT = C::kMT, kW = C::kW, kX = C::kX;
  if (!a.late_trigger) pdl_launch();

  extern __shared__ __align__(1024) uint8_t ring[];
  uint64_t* weights_full = reinterpret_cast<uint64_t*>(ring + C::kRingBytes);
  uint64_t* tokens_full = weights_full + kW;
  uint64_t* empty = tokens_full + kX;  // of step i: empty[i % kW], for both rings
  uint64_t* ready = empty + kW;
  auto weights_of = [&](int stage) { return ring + stage * (kMT * kTileBytes); };
  auto tokens_of = [&](int stage) { return ring + kW * kMT * kTileBytes + stage * C::kTokenBytes; };

  const int group = blockIdx.x / a.splits, split = blockIdx.x % a.splits;
  const int k_begin = split_begin(split, a.splits, a.k_tiles);
  const int steps = split_begin(split + 1, a.splits, a.k_tiles) - k_begin;
  const int token_begin = blockIdx.y * kN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint8_t* weight = a.weight + (int64_t(group) * kMT * a.k_tiles + k_begin) * kTileBytes;

  auto load_weights = [&](int step, int stage) {
    mbar_expect_tx(&weights_full[stage], kMT * kTileBytes);
#pragma unroll
    for (int mt = 0; mt < kMT; mt++)
      bulk_load(weights_of(stage) + mt * kTileBytes, weight + (int64_t(mt) * a.k_tiles + step) * kTileBytes, kTileBytes,
                &weights_full[stage]);
  };
  auto load_tokens = [&](int step, int stage) {
    mbar_expect_tx(&tokens_full[stage], C::kTokenBytes);
    tma_load_2d(tokens_of(stage), &token_map, (k_begin + step) * kTileK, token_begin, &tokens_full[stage],
                kEvictLast);
  };

  const bool is_producer = warp == 4 * kMT && lane == 0;
  if (is_producer) {
    for (int s = 0; s < kW; s++) {
      mbar_init(&weights_full[s], 1);
      mbar_init(&empty[s], 4 * kMT);
    }
    for (int s = 0; s < kX; s++) mbar_init(&tokens_full[s], 1);
    mbar_init(ready, 1);
    mbar_init_fence();
    for (int i = 0; i < min(kW, steps); i++) load_weights(i, i);
    tma_prefetch_descriptor(&token_map);
  }
  __syncthreads();
  if (warp == 4 * kMT + 1) {
    if (lane == 0 && a.ready != nullptr) {
      while (load_acquire(a.ready) < a.ready_at) {}
      mbar_arrive(ready);
    }
    __syncwarp();
    pdl_wait();
    if (a.late_trigger) pdl_launch();
    return;
  }
  if (a.ready == nullptr) pdl_wait();

  if (warp == 4 * kMT) {
    if (lane == 0) {
      if (a.ready != nullptr) {
        mbar_wait(ready, 0);
        fence_proxy_async_global();
      }
      for (int i = 0; i < min(kX, steps); i++) load_tokens(i, i);
      int w = 0, x = 0;
      uint32_t phase = 0;
      for (int i = 0; i + kX < steps; i++) {
        mbar_wait(&empty[w], phase);
        load_tokens(i + kX, x);
        if (i + kW < steps) load_weights(i + kW, w);
        if (++x == kX) x = 0;
        if (++w == kW) w = 0, phase ^= 1;
      }
    }
    return;
  }

  const int mt = warp / 4;
  float acc[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; i++) acc[i] = 0.f;
  int w = 0, x = 0, previous = 0;
  uint32_t weights_phase = 0, tokens_phase = 0;
  for (int i = 0; i < steps; i++) {
    mbar_wait(&weights_full[w], weights_phase);
    mbar_wait(&tokens_full[x], tokens_phase);
    const uint64_t wd = desc_sw128(weights_of(w) + mt * kTileBytes), td = desc_sw128(tokens_of(x));
    wgmma_fence_operand(acc);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; kk++) wgmma_ss<kN>(acc, wd + 2 * kk, td + 2 * kk, 1);
    wgmma_commit();
    wgmma_fence_operand(acc);
    wgmma_wait<1>();
    if (i > 0 && lane == 0) mbar_arrive(&empty[previous]);
    previous = w;
    if (++x == kX) x = 0, tokens_phase ^= 1;
    if (++w == kW) w = 0, weights_phase ^= 1;
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
