// combine: moe_mix[t] = sum over the token's local routes, in slot order, of score * rms(y (1 + w), 1e-8).
//
// 512 threads own a token, 8 columns each: one CTA, or with few tokens a cluster of 4 CTAs of 128. Routes go
// four at a time: their rows are loaded together, and one exchange sums the four norms. A token without local
// routes writes exact zeros. With several passes the sum stays in FP32 in `accumulate` between them. Norm
// weights are in registers before pdl_wait(); with many tokens a CTA walks over them and keeps the weights.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kCombineThreads = 512;  // of a token
constexpr int kCombineBatch = 4;      // routes at a time: the four sums of ClusterSum

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

template <int kCtas, bool kFloat>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kCombineThreads / kCtas)
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
  cluster.ready();
  pdl_wait();

  const int64_t stride = int64_t(p.route_bound) * kExpertDim;  // between splits
  int round = 0;
  for (int token = blockIdx.x / kCtas; token < p.tokens; token += gridDim.x / kCtas) {
    // Lane s < 8 has slot s: its place in this pass and its score.
    uint32_t place = 0xFFFFFFFFu;
    float score = 0.0f;
    if (lane < kTopK) {
      const int32_t route = __ldcg(p.token_route + int64_t(token) * kTopK + lane);
      score = __ldcg(p.topk_scores + int64_t(token) * kTopK + lane);
      if (route >= 0) place = uint32_t(route) - uint32_t(p.route_begin);
    }
    uint32_t slots = __ballot_sync(0xFFFFFFFFu, place < uint32_t(p.route_bound));
    const int64_t row = int64_t(token) * kExpertDim + column;
    if (slots == 0 && !p.first_pass && !p.last_pass) continue;
    Float8 sum = {};
    if (!p.first_pass) sum = load8(p.accumulate + row);

    for (; slots != 0; round ^= 1) {
      Float8 y[kCombineBatch];
      float route_score[kCombineBatch];
      const int n = min(__popc(slots), kCombineBatch);
      if constexpr (kFloat) {
#pragma unroll
        for (int i = 0; i < kCombineBatch; i++) {
          if (i < n) {
            const int slot = __ffs(slots) - 1;
            slots &= slots - 1;
            route_score[i] = __shfl_sync(0xFFFFFFFFu, score, slot);
            const float* src =
                static_cast<const float*>(p.y) + int64_t(__shfl_sync(0xFFFFFFFFu, place, slot)) * kExpertDim + column;
            y[i] = load8(src);
            for (int s = 1; s < p.splits; s++) {
              const Float8 more = load8(src + s * stride);
#pragma unroll
              for (int j = 0; j < 8; j++) y[i].v[j] += more.v[j];
            }
          }
        }
      } else {
        uint4 raw[kCombineBatch];
#pragma unroll
        for (int i = 0; i < kCombineBatch; i++) {
          if (i < n) {
            const int slot = __ffs(slots) - 1;
            slots &= slots - 1;
            route_score[i] = __shfl_sync(0xFFFFFFFFu, score, slot);
            raw[i] = __ldcg(reinterpret_cast<const uint4*>(
                static_cast<const __nv_bfloat16*>(p.y) +
                int64_t(__shfl_sync(0xFFFFFFFFu, place, slot)) * kExpertDim + column));
          }
        }
#pragma unroll
        for (int i = 0; i < kCombineBatch; i++)
          if (i < n) y[i] = floats8(raw[i]);
      }
      float square[kCombineBatch] = {};
#pragma unroll
      for (int i = 0; i < kCombineBatch; i++) {
        if (i < n) {
#pragma unroll
          for (int j = 0; j < 8; j++) {
            y[i].v[j] *= w.v[j];
            square[i] += y[i].v[j] * y[i].v[j];
          }
        }
      }
      const float4 sums = cluster.sum(round, make_float4(square[0], square[1], square[2], square[3]));
      const float total[kCombineBatch] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
      for (int i = 0; i < kCombineBatch; i++) {
        if (i < n) {
          const float factor = rsqrtf(total[i] * (1.0f / kExpertDim) + kPostNormEps) * route_score[i];
#pragma unroll
          for (int j = 0; j < 8; j++) sum.v[j] += y[i].v[j] * factor;
        }
      }
    }
    if (p.last_pass) {
      uint4 packed;
      uint32_t* word = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(sum.v[2 * i], sum.v[2 * i + 1]);
        word[i] = reinterpret_cast<const uint32_t&>(pair);
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.moe_mix) + row) = packed;
    } else {
      store8(p.accumulate + row, sum);
    }
    if (kCtas > 1) return;  // one token a cluster
  }
}

}  // namespace msl
