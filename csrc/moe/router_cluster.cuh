// router for some tokens: the products of router_tiled.cuh, with K cut over all SMs and summed inside clusters.
//
// Logits, cuts and packed weights are router_tiled.cuh's; what differs is where time goes. Up to 128 tokens a step
// waits for latencies and for partial sums more than for the tensor cores. So each CTA has its share of the weights (128
// experts by 2 or 4 k tiles) in shared memory before pdl_wait(), and a thread loads its part of the tokens from global
// memory straight into the places of its fragments (16 bytes, 4 neighbouring columns, of a row): no barrier stands
// between the end of the boundary and the products.
//
// The CTAs of a cluster have neighbouring slices of K, and each owns every kCluster-th token: the others send it their
// sums of these (st.async, complete on its barrier), it adds them in the order of the CTAs and writes one split.
// The consumer (router_topk) then finds 8 splits of K instead of the 64 or 32 there are.
//
//   64 tokens    both warpgroups take the same tokens and one k tile each, and add their sums in shared memory; two CTAs
//                fit on an SM, which matters: of clusters of 8 an H200 holds 15 with one CTA an SM, and 16 are launched.
//   128 tokens   a warpgroup takes 64 tokens and all of the CTA's k tiles, in 64 CTAs: clusters of 4.
// Row r of a warp's 16 stands for the warpgroup's token 4 r + warp, so that few tokens spread over the warps and each
// thread's rows have one owner.
#pragma once
#include "router_tiled.cuh"

namespace msl {

constexpr int kRouterClusterThreads = 256;

template <int kTokens, int kSteps, int kCluster>
struct RouterClusterShared {
  uint8_t weight[kSteps][kRouterImageBytes];
  float4 sums[kCluster][kTokens / kCluster][32];  // [from][own token][experts 16 i + 2 c, + 1, + 8, + 9: 4 i + c]
  uint64_t full[kSteps], all;
};
template <int kTokens, int kSteps, int kCluster>
constexpr size_t kRouterClusterBytes = sizeof(RouterClusterShared<kTokens, kSteps, kCluster>) + 1024;  // aligned to 1024 by hand

// kSteps k tiles of 64 columns a CTA.
template <int kTokens, int kSteps, int kCluster>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kRouterClusterThreads, 1)
    router_cluster_kernel(const RouterTiledParams p) {
  constexpr bool kShared = kTokens == 64;  // tokens of both warpgroups
  static_assert(kShared ? kSteps == 2 : kTokens == 128);
  static_assert(kCluster >= 4, "the four warps' tokens 4 r + warp have owners of their own");
  constexpr int kOwn = kShared ? 1 : kSteps;  // k tiles of a warpgroup
  using Shared = RouterClusterShared<kTokens, kSteps, kCluster>;
  extern __shared__ uint8_t raw_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(raw_shared + ((1024 - (smem_u32(raw_shared) & 1023)) & 1023));
  pdl_launch();
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0) & 3;
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int rank = cluster_rank();
  const int cluster = blockIdx.x / kCluster, split = cluster % p.splits, half = cluster / p.splits & 1;
  const int token0 = cluster / p.splits / 2 * kTokens, n = min(kTokens, p.tokens - token0);
  const int k_tile = (split * kCluster + rank) * kSteps;
  const int owned = (n - rank + kCluster - 1) / kCluster;
  const uint8_t* packed = static_cast<const uint8_t*>(p.weight);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kSteps; s++) mbar_init(&shared.full[s], 1);
    mbar_init(&shared.all, 1);
    mbar_init_fence();
    mbar_expect_tx(&shared.all, kCluster * owned * 512);
    for (int s = 0; s < kSteps; s++) {
      mbar_expect_tx(&shared.full[s], kRouterImageBytes);
      bulk_load(shared.weight[s], packed + (int64_t(k_tile + s) * 2 + half) * kRouterImageBytes, kRouterImageBytes,
                &shared.full[s], p.tokens > kTokens ? kEvictNormal : kEvictFirst);
    }
  }
  __syncthreads();
  cluster_arrive();
  const int at = threadIdx.x & 31;  // a float4 of a row of sums
  const int expert = half * 128 + (at >> 2) * 16 + (at & 3) * 2;
  const float* scales = reinterpret_cast<const float*>(packed + kRouterScaleOffset) + expert;
  const float2 scale0 = *reinterpret_cast<const float2*>(scales), scale1 = *reinterpret_cast<const float2*>(scales + 8);
  cluster_wait();
  pdl_wait();
  if (p.ready != nullptr && blockIdx.x == 0 && threadIdx.x == 0) store_release(p.ready, 1);

  const int first = (kShared ? 0 : group * 64) + 4 * g + warp;  // this thread's rows: this token and 32 further
  const bool valid[2] = {first < n, first + 32 < n};
  const float* x = p.stream + int64_t(token0 + first) * kHidden + (k_tile + (kShared ? group : 0)) * kRouterTileK + 4 * c;
  float4 raw[4][2];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        raw[j][r] = valid[r] ? __ldcg(reinterpret_cast<const float4*>(x + r * 32 * kHidden + step * kRouterTileK + j * 16))
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  };
  load(0);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; r++) factor[r] = valid[r] ? kRouterTokenScale * __ldcg(p.factor + token0 + first + 32 * r) : 0.0f;
  float acc[64], sum[kOwn > 1 ? 64 : 1];
  uint32_t hi[4][4], lo[4][4];
#pragma unroll
  for (int i = 0; i < 64; i++) acc[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kOwn; step++) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        cut_halves(raw[j][r].x, raw[j][r].y, factor[r], hi[j][r], lo[j][r]);
        cut_halves(raw[j][r].z, raw[j][r].w, factor[r], hi[j][2 + r], lo[j][2 + r]);
      }
    if (step + 1 < kOwn) load(step + 1);
    const int tile = kShared ? group : step;
    mbar_wait(&shared.full[tile], 0);
    const uint64_t weight_hi = desc_sw128(shared.weight[tile]), weight_lo = desc_sw128(shared.weight[tile] + kRouterImageBytes / 2);
    wgmma_fence_operand(acc);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma_rs<128, true>(acc, lo[j], weight_hi + 2 * j, j > 0);
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma_rs<128, true>(acc, hi[j], weight_lo + 2 * j, 1);
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma_rs<128, true>(acc, hi[j], weight_hi + 2 * j, 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(acc);
    if constexpr (kOwn > 1) {
#pragma unroll
      for (int i = 0; i < 64; i++) sum[i] = step == 0 ? acc[i] : sum[i] + acc[i];
    }
  }

  // Four of this thread's sums: row r, experts 16 i + 2 c, + 1, + 8, + 9.
  const auto four = [&](int i, int r) {
    const auto& v = [&]() -> const float (&)[64] {
      if constexpr (kOwn > 1) return sum;
      else return acc;
    }();
    return make_float4(v[8 * i + 2 * r], v[8 * i + 2 * r + 1], v[8 * i + 4 + 2 * r], v[8 * i + 5 + 2 * r]);
  };
  const int owner = (4 * g + warp) % kCluster, slot = (kShared ? 0 : group * (64 / kCluster)) + 4 * g / kCluster;
  constexpr int kFurther = 32 / kCluster * 512;  // bytes from a token's row to that of the one 32 further
  const uint32_t to = cluster_map(&shared.sums[rank][slot][c], owner), bar = cluster_map(&shared.all, owner);
  if constexpr (kShared) {
    // The half of the experts that the other warpgroup sends goes to it, over this one's k tile.
    float4* exchange = reinterpret_cast<float4*>(shared.weight[group]) + (threadIdx.x & 127);
    const float4* other = reinterpret_cast<const float4*>(shared.weight[group ^ 1]) + (threadIdx.x & 127);
    named_barrier(1 + group, 128);  // all of its warps have multiplied
    const auto hand_over = [&](auto mine) {
      constexpr int kOthers = (1 - decltype(mine)::value) * 4;
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (valid[r]) exchange[(2 * i + r) * 128] = four(kOthers + i, r);
    };
    const auto send = [&](auto mine) {
      constexpr int kMine = decltype(mine)::value * 4;
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (valid[r]) {
            const float4 a = four(kMine + i, r), b = other[(2 * i + r) * 128];
            store_remote(to + r * kFurther + (kMine + i) * 64, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w), bar);
          }
    };
    const std::integral_constant<int, 0> first_half;
    const std::integral_constant<int, 1> second_half;
    if (group == 0) hand_over(first_half);
    else hand_over(second_half);
    __syncthreads();
    if (group == 0) send(first_half);
    else send(second_half);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (valid[r]) store_remote(to + r * kFurther + i * 64, four(i, r), bar);
  }

  if (owned <= 0) return;
  mbar_wait(&shared.all, 0);
  for (int s = threadIdx.x >> 5; s < owned; s += kRouterClusterThreads / 32) {
    float4 total = shared.sums[0][s][at];
#pragma unroll
    for (int from = 1; from < kCluster; from++) {
      const float4 v = shared.sums[from][s][at];
      total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
    float* out = p.logits + (int64_t(split) * p.tokens + token0 + s * kCluster + rank) * kExperts + expert;
    *reinterpret_cast<float2*>(out) = make_float2(total.x * scale0.x, total.y * scale0.y);
    *reinterpret_cast<float2*>(out + 8) = make_float2(total.z * scale1.x, total.w * scale1.y);
  }
}

}  // namespace msl
