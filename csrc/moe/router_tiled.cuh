// router for many tokens: partial logits [S, T, 256] by wgmma, from the residual stream itself.
//
// The logits are h W^T with h = s' q (1 + n): s' the FP32 stream, q the token's norm factor (both written by
// attn_boundary), n the norm's weight. pack_router has put 1 + n into W's columns, so the kernel reads 4 bytes an
// element, s', and no plane of h. A = 256 s' q and W are cut into two FP16 values each, hi + lo, which keep 23
// bits: |s' q| <= sqrt(8192), so A stays inside FP16's range whatever the weights, and W's rows are scaled by powers
// of two for the same. hi hi + hi lo + lo hi is the product but for 2^-24 of its terms.
//
// A tensor core truncates what it adds, so a run is 64 columns: the small products first, then four additions of
// hi hi, after which the sums move to FP32 registers and are added rounded. Error of the logits: below 2e-7 of
// their RMS with any number of splits.
//
// A CTA owns 128 tokens and 128 experts of one split of K; two CTAs, the experts' halves, share their tokens' rows by
// multicast. Two warpgroups take 64 tokens each: A goes from shared memory through registers, where it is cut (a
// thread's 16 bytes are 4 neighbouring columns: pack_router orders K in a group of 16 accordingly), W lies ready in
// swizzled images. While one k tile's products run, a warpgroup cuts the next. One thread brings k tiles of 64
// columns, by tensor copies (a bulk copy a row is too slow: 2.3 us a k tile).
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../common/ring.cuh"
#include "../common/wgmma.cuh"
#include "../include/model.h"
#include "router_layout.h"

namespace msl {

constexpr int kRouterTileTokens = 128;
constexpr int kRouterTileThreads = 384;  // two consumer warpgroups, and one of which a warp loads
constexpr int kRouterStages = 3;
constexpr int kRouterBoxBytes = kRouterTileTokens * 128;  // 32 columns of the tokens

struct RouterStage {
  uint8_t weight[kRouterImageBytes];
  uint8_t tokens[2][kRouterBoxBytes];
};
struct RouterTiledShared {
  RouterStage stage[kRouterStages];
  uint64_t full[kRouterStages], empty[kRouterStages];
};
constexpr size_t kRouterTiledBytes = sizeof(RouterTiledShared) + 1024;  // aligned to 1024 by hand

__device__ __forceinline__ void mbar_arrive_at(uint32_t bar) {  // in any CTA of the cluster; orders nothing
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ uint32_t half_pair(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// f a, f b as two halves, and what they miss as two more.
__device__ __forceinline__ void cut_halves(float a, float b, float f, uint32_t& hi, uint32_t& lo) {
  hi = half_pair(a * f, b * f);
  const float2 h = __half22float2(reinterpret_cast<const __half2&>(hi));
  lo = half_pair(fmaf(a, f, -h.x), fmaf(b, f, -h.y));
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kRouterTileThreads, 1) router_tiled_kernel(const RouterTiledParams p, const __grid_constant__ CUtensorMap tokens) {
  extern __shared__ uint8_t raw[];
  RouterTiledShared& shared = *reinterpret_cast<RouterTiledShared*>(raw + ((1024 - (smem_u32(raw) & 1023)) & 1023));
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int half = cluster_rank();
  const int tiles = (p.tokens + kRouterTileTokens - 1) / kRouterTileTokens;
  const int token0 = int(blockIdx.x / 2) % tiles * kRouterTileTokens, split = int(blockIdx.x / 2) / tiles;
  const int k_begin = kRouterTilesK * split / p.splits, steps = kRouterTilesK * (split + 1) / p.splits - k_begin;
  pdl_launch();
  if (threadIdx.x == 0) ring_init<kRouterStages>(shared.full, shared.empty, 2 * 8);
  __syncthreads();
  cluster_arrive();

  if (warp >= 8) {
    setmaxnreg_dec<24>();
    if (warp == 8) {
      const uint8_t* weight = static_cast<const uint8_t*>(p.weight) + (int64_t(k_begin) * 2 + half) * kRouterImageBytes;
      const auto load_weight = [&](int i, int stage) {
        mbar_expect_tx(&shared.full[stage], kRouterImageBytes + 2 * kRouterBoxBytes);
        bulk_load(shared.stage[stage].weight, weight + int64_t(i) * 2 * kRouterImageBytes, kRouterImageBytes,
                  &shared.full[stage], kEvictLast);
      };
      if (lane == 0) {
        tma_prefetch_descriptor(&tokens);
        for (int i = 0; i < min(kRouterStages, steps); i++) load_weight(i, i);
      }
      __syncwarp();
      cluster_wait();
      pdl_wait();
      if (lane == 0) {
        if (p.ready != nullptr && blockIdx.x == 0) store_release(p.ready, 1);
        int stage = 0, parity = 1;
        for (int i = 0; i < steps; i++) {
          mbar_wait(&shared.empty[stage], parity);
          if (i >= kRouterStages) load_weight(i, stage);
#pragma unroll
          for (int h = 0; h < 2; h++)
            tma_load_2d_multicast(shared.stage[stage].tokens[h] + half * (kRouterBoxBytes / 2), &tokens,
                                  (k_begin + i) * kRouterTileK + h * 32, token0 + half * 64, &shared.full[stage], 3, kEvictFirst);
          if (++stage == kRouterStages) stage = 0, parity ^= 1;
        }
      }
    } else {
      cluster_wait();
      pdl_wait();
    }
  } else {
    setmaxnreg_inc<240>();
    cluster_wait();
    pdl_wait();
    const int g = lane >> 2, c = lane & 3;
    // The fragment's row g stands for this token, and g + 8 for 8 further: so that a quarter warp reads rows 4 apart.
    const int row = warp * 16 + (g >> 1) + (g & 1) * 4;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
      factor[r] = token0 + row + 8 * r < p.tokens ? kRouterTokenScale * __ldcg(p.factor + token0 + row + 8 * r) : 0.0f;
    float sum[64], acc[64];
#pragma unroll
    for (int i = 0; i < 64; i++) sum[i] = acc[i] = 0.0f;
    struct Fragments {
      uint32_t hi[4][4], lo[4][4];
    };
    const auto cut_tile = [&](Fragments& a, int stage) {
      const uint8_t* x = shared.stage[stage].tokens[0] + row * 128;
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float4 v = *reinterpret_cast<const float4*>(x + (j >> 1) * kRouterBoxBytes + r * 8 * 128 +
                                                            ((((j & 1) * 4 + c) ^ (row & 7)) << 4));
          cut_halves(v.x, v.y, factor[r], a.hi[j][r], a.lo[j][r]);
          cut_halves(v.z, v.w, factor[r], a.hi[j][2 + r], a.lo[j][2 + r]);
        }
    };
    const uint32_t empty = cluster_map(&shared.empty[0], lane & 1);  // lanes 0 and 1: of either CTA
    int stage = 0, parity = 0;
    const auto multiply = [&](const Fragments& now, Fragments& next, bool more) {
      const uint64_t hi = desc_sw128(shared.stage[stage].weight);
      const uint64_t lo = desc_sw128(shared.stage[stage].weight + kRouterImageBytes / 2);
      wgmma_fence_operand(acc);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma_rs<128, true>(acc, now.lo[j], hi + 2 * j, j > 0);
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma_rs<128, true>(acc, now.hi[j], lo + 2 * j, 1);
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma_rs<128, true>(acc, now.hi[j], hi + 2 * j, 1);
      wgmma_commit();
      const int used = stage;
      if (++stage == kRouterStages) stage = 0, parity ^= 1;
      if (more) {
        mbar_wait(&shared.full[stage], parity);
        cut_tile(next, stage);
      }
      wgmma_wait<0>();
      wgmma_fence_operand(acc);
      if (lane < 2) mbar_arrive_at(empty + used * 8);
#pragma unroll
      for (int i = 0; i < 64; i++) sum[i] += acc[i];
    };
    Fragments a, b;
    mbar_wait(&shared.full[0], 0);
    cut_tile(a, 0);
#pragma unroll 1
    for (int i = 0; i < steps; i += 2) {
      multiply(a, b, i + 1 < steps);
      if (i + 1 < steps) multiply(b, a, i + 2 < steps);
    }
    float* out = p.logits + (int64_t(split) * p.tokens + token0 + row) * kExperts + half * 128 + 2 * c;
    const float* scale = reinterpret_cast<const float*>(static_cast<const uint8_t*>(p.weight) + kRouterScaleOffset) + half * 128 + 2 * c;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const float2 s = *reinterpret_cast<const float2*>(scale + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (token0 + row + 8 * r < p.tokens)
          *reinterpret_cast<float2*>(out + r * 8 * kExperts + 8 * j) =
              make_float2(sum[4 * j + 2 * r] * s.x, sum[4 * j + 2 * r + 1] * s.y);
    }
  }
  cluster_arrive();  // no CTA leaves while the other sends to it
  cluster_wait();
}

}  // namespace msl
