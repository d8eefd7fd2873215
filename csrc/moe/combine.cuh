// combine: moe_mix[t] = sum over the token's local routes, in slot order (one pass), of score * rms(y (1 + w), 1e-8).
//
// 512 threads own a token, 8 columns each: one CTA, or with few tokens a cluster of 4 CTAs of 128. Routes go
// kBatch at a time: their rows are loaded together, and one exchange sums four norms. A token without local
// routes writes exact zeros. With several passes the sum stays in FP32 in `accumulate` between them, and routes go
// in the order of the sorted list instead: where a pass ends depends on the other tokens' routes, and moves no bit so. Norm
// weights are in registers before pdl_wait(); with many tokens a CTA walks over them and keeps the weights.
//
// The cluster form also reads token_route and topk_scores before pdl_wait(), so that the rows are the only
// loads left after it. It may, for the reason w13 may read the expert lists: the pooler, which stands between,
// triggers only after its own wait, so router_topk is complete when any kernel after the pooler starts.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kCombineThreads = 512;  // of a token
struct Float8 {
  float v[8];
};
__device__ __forceinline__ Float8 floats8(uint4 raw) {
  Float8 f;
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f.v[2 * i] = __uint_as_float(word[i] << 16);
    f.v[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000u);
  }
  return f;
}
__device__ __forceinline__ Float8 load8(const float* p) {
  const float4 a = __ldcg(reinterpret_cast<const float4*>(p)), b = __ldcg(reinterpret_cast<const float4*>(p) + 1);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ void store8(float* p, const Float8& f) {
  reinterpret_cast<float4*>(p)[0] = make_float4(f.v[0], f.v[1], f.v[2], f.v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(f.v[4], f.v[5], f.v[6], f.v[7]);
}

__device__ __forceinline__ void store_bf16x8(__nv_bfloat16* p, const Float8& f) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(f.v[0], f.v[1]), pack_bf16(f.v[2], f.v[3]), pack_bf16(f.v[4], f.v[5]),
                                            pack_bf16(f.v[6], f.v[7]));
}

// Slots 0 .. 7 of a warp's lanes by ascending place.
__device__ __forceinline__ void sort_routes(uint32_t& place, float& score) {
  const int lane = threadIdx.x & 31;
  int rank = 0, from = lane;
#pragma unroll
  for (int s = 0; s < kTopK; s++) {
    const uint32_t other = __shfl_sync(0xFFFFFFFFu, place, s);
    rank += other < place || (other == place && s < lane);
  }
#pragma unroll
  for (int s = 0; s < kTopK; s++)
    if (__shfl_sync(0xFFFFFFFFu, rank, s) == lane) from = s;
  place = __shfl_sync(0xFFFFFFFFu, place, from);
  score = __shfl_sync(0xFFFFFFFFu, score, from);
}

// Whether a pass is the first, and whether it reaches the end of the routes: those behind that one have nothing to do.
struct Pass {
  bool first, last, beyond;
};
__device__ __forceinline__ Pass which_pass(const CombineParams& p) {
  const int routes = __ldcg(p.expert_offsets + kLocalExperts);
  return {p.route_begin == 0, routes - p.route_begin <= p.route_bound, p.route_begin > 0 && routes <= p.route_begin};
}

// Rows of the first kBatch routes in `slots` (which loses them), the splits added in order. Lane s of each
// warp holds slot s's place and score.
template <int kBatch, bool kFloat>
__device__ __forceinline__ void load_routes(const CombineParams& p, int column, uint32_t& slots, uint32_t place,
                                            float score, Float8 (&y)[kBatch], float (&route_score)[kBatch]) {
  const int n = min(__popc(slots), kBatch);
  int64_t row[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    const int slot = i < n ? __ffs(slots) - 1 : 0;
    slots &= slots - 1;  // 0 stays 0
    row[i] = int64_t(__shfl_sync(0xFFFFFFFFu, place, slot)) * kExpertDim + column;
    route_score[i] = __shfl_sync(0xFFFFFFFFu, score, slot);
  }
  if constexpr (!kFloat) {
    uint4 raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++)
      if (i < n) raw[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.y) + row[i]));
#pragma unroll
    for (int i = 0; i < kBatch; i++)
      if (i < n) y[i] = floats8(raw[i]);
  } else {
    const float* src = static_cast<const float*>(p.y);
    const int64_t stride = int64_t(p.route_bound) * kExpertDim;
    Float8 second[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (i < n) y[i] = load8(src + row[i]);
      if (i < n && p.splits > 1) second[i] = load8(src + row[i] + stride);
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (i >= n) continue;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (p.splits > 1) y[i].v[j] += second[i].v[j];
      for (int s = 2; s < p.splits; s++) {
        const Float8 more = load8(src + row[i] + s * stride);
#pragma unroll
        for (int j = 0; j < 8; j++) y[i].v[j] += more.v[j];
      }
    }
  }
}

// kPasses: of several passes, one CTA a token.
template <int kCtas, int kBatch, bool kFloat, bool kPasses>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kCombineThreads / kCtas, kCtas == 1 && !kPasses ? 2 : 1)
    combine_kernel(const CombineParams p) {
  constexpr int kThreads = kCombineThreads / kCtas;
  __shared__ ClusterSum<kCtas, kThreads, 2> cluster;
  pdl_launch();
  cluster.begin();
  const int lane = threadIdx.x & 31;
  const int column = ((kCtas > 1 ? cluster_rank() : 0) * kThreads + threadIdx.x) * 8;
  Float8 w;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4 v = *reinterpret_cast<const float4*>(p.norm_weight + column + 4 * i);
    w.v[4 * i] = v.x, w.v[4 * i + 1] = v.y, w.v[4 * i + 2] = v.z, w.v[4 * i + 3] = v.w;
  }
  // Lane s < 8 has slot s: its place in this pass (far above the bound where there is none) and its score.
  uint32_t place = 0xFFFFFFFFu;
  float score = 0.0f;
  const auto look_up = [&](int token) {
    if (lane < kTopK) {
      const int32_t route = __ldcg(p.token_route + int64_t(token) * kTopK + lane);
      score = __ldcg(p.topk_scores + int64_t(token) * kTopK + lane);
      place = route >= 0 ? uint32_t(route) - uint32_t(p.route_begin) : 0xFFFFFFFFu;
    }
    if constexpr (kPasses) sort_routes(place, score);
  };
  if constexpr (kCtas > 1) look_up(blockIdx.x / kCtas);
  cluster.ready();
  pdl_wait();
  Pass pass = {true, true, false};
  if constexpr (kPasses) {
    pass = which_pass(p);
    if (pass.beyond) return;
  }

  int round = 0;
  for (int token = blockIdx.x / kCtas; token < p.tokens; token += gridDim.x / kCtas) {
    if constexpr (kCtas == 1) look_up(token);
    uint32_t slots = __ballot_sync(0xFFFFFFFFu, place < uint32_t(p.route_bound));
    const int64_t row = int64_t(token) * kExpertDim + column;
    Float8 sum = {};
    if constexpr (kPasses) {
      if (slots == 0 && !pass.first && !pass.last) continue;
      if (!pass.first) sum = load8(p.accumulate + row);
    }
    while (slots != 0) {
      const int n = __popc(slots);
      Float8 y[kBatch];
      float route_score[kBatch];
      load_routes<kBatch, kFloat>(p, column, slots, place, score, y, route_score);
#pragma unroll
      for (int first = 0; first < kBatch; first += 4) {  // the four sums of one exchange
        if (first >= n) break;
        constexpr int kSums = kBatch < 4 ? kBatch : 4;
        float square[4] = {};
#pragma unroll
        for (int i = 0; i < kSums; i++) {
          if (first + i >= n) continue;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            y[first + i].v[j] *= w.v[j];
            square[i] += y[first + i].v[j] * y[first + i].v[j];
          }
        }
        const float4 sums = cluster.sum(round, make_float4(square[0], square[1], square[2], square[3]));
        round ^= 1;
        const float total[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int i = 0; i < kSums; i++) {
          if (first + i >= n) continue;
          const float factor = rsqrtf(total[i] * (1.0f / kExpertDim) + kPostNormEps) * route_score[first + i];
#pragma unroll
          for (int j = 0; j < 8; j++) sum.v[j] += y[first + i].v[j] * factor;
        }
      }
    }
    if (!kPasses || pass.last) {
      store_bf16x8(static_cast<__nv_bfloat16*>(p.moe_mix) + row, sum);
    } else {
      store8(p.accumulate + row, sum);
    }
    if (kCtas > 1) return;  // one token a cluster
  }
}

}  // namespace msl
