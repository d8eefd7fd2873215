// pre_expert_norm: x = rms(sum of the pooler's splits, 1e-5) (1 + w), BF16, once for each local route of the
// token, at the route's sorted place and in the experts' k order (moe/nvfp4_layout.h).
//
// 512 threads own a token, 8 columns each: one CTA, or with few tokens a cluster of 4 CTAs of 128, since the
// splits of a token are many bytes for one SM. In a group of 64 columns, the 16 bytes at positions 8 m .. 8 m + 7
// hold the natural columns 2 m + 16 c, 2 m + 16 c + 1 of c = 0 .. 3: a thread loads four pairs (eight neighbours
// read 64 contiguous bytes) and stores 16 bytes, 128 contiguous ones with its neighbours. Norm weights are in
// registers before pdl_wait(); with many tokens a CTA walks over them and keeps the weights. With few, the token's
// routes are too: the pooler stands between router_topk and this kernel (see combine.cuh).
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kPreNormThreads = 512;  // of a token

// A thread's columns x r w, from element `at` of the tap on, as the experts read them.
__device__ __forceinline__ uint4 normed_columns(const PreExpertNormParams& p, int64_t at, float2 (&x)[4], const float2 (&w)[4],
                                                float r) {
  uint32_t word[4];
#pragma unroll
  for (int c = 0; c < 4; c++) {
    x[c] = make_float2(x[c].x * r * w[c].x, x[c].y * r * w[c].y);
    word[c] = pack_bf16(x[c].x, x[c].y);
    if (p.expert_input != nullptr) *reinterpret_cast<float2*>(p.expert_input + at + 16 * c) = x[c];
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <int kCtas>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kPreNormThreads / kCtas, kCtas == 1 ? 3 : 1)
    pre_expert_norm_kernel(const PreExpertNormParams p) {
  constexpr int kThreads = kPreNormThreads / kCtas;
  constexpr int kSplits = kCtas > 1 ? 4 : 1;  // loaded together, added in order
  __shared__ ClusterSum<kCtas, kThreads, 2> cluster;
  pdl_launch();
  cluster.begin();
  const int thread = (kCtas > 1 ? cluster_rank() : 0) * kThreads + threadIdx.x;
  const int column = thread / 8 * 64 + thread % 8 * 2;  // the first of four pairs, 16 apart
  float2 w[4];
#pragma unroll
  for (int c = 0; c < 4; c++) w[c] = *reinterpret_cast<const float2*>(p.norm_weight + column + 16 * c);
  int4 r0 = {}, r1 = {};
  const auto look_up = [&](int token) {
    const int4* routes = reinterpret_cast<const int4*>(p.token_route + int64_t(token) * kTopK);
    r0 = __ldcg(routes), r1 = __ldcg(routes + 1);
  };
  if constexpr (kCtas > 2) look_up(blockIdx.x / kCtas);
  cluster.ready();
  pdl_wait();
  if (p.ready != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.ready = 0;

  const int64_t stride = int64_t(p.tokens) * kExpertDim;
  int round = 0;
  for (int token = blockIdx.x / kCtas; token < p.tokens; token += gridDim.x / kCtas) {
    if constexpr (kCtas <= 2) look_up(token);
    const uint32_t begin = p.route_begin;
    const uint32_t place[kTopK] = {r0.x - begin, r0.y - begin, r0.z - begin, r0.w - begin,
                                   r1.x - begin, r1.y - begin, r1.z - begin, r1.w - begin};
    // A route of this pass has place < bound; -1 (not local) and earlier ones wrap far above.
    bool any = p.expert_input != nullptr;
#pragma unroll
    for (int s = 0; s < kTopK; s++) any |= place[s] < uint32_t(p.route_bound);
    const float* pooled = p.pooled + int64_t(token) * kExpertDim + column;
    if (kCtas == 1 && !any) continue;  // many tokens: no bytes for nothing

    float2 x[4] = {};
    float square = 0.0f;
    for (int split = 0; split < p.splits; split += kSplits) {
      float2 part[kSplits][4];
#pragma unroll
      for (int j = 0; j < kSplits; j++)
        if (split + j < p.splits) {
#pragma unroll
          for (int c = 0; c < 4; c++)
            part[j][c] = __ldcg(reinterpret_cast<const float2*>(pooled + (split + j) * stride + 16 * c));
        }
#pragma unroll
      for (int j = 0; j < kSplits; j++)
        if (split + j < p.splits) {
#pragma unroll
          for (int c = 0; c < 4; c++) x[c] = make_float2(x[c].x + part[j][c].x, x[c].y + part[j][c].y);
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) square += x[c].x * x[c].x + x[c].y * x[c].y;
    if (kCtas > 1 && !any) return;  // few tokens: the test did not hold up the loads; all CTAs leave alike
    const float4 sums = cluster.sum(kCtas > 1 ? 0 : round, make_float4(square, 0.0f, 0.0f, 0.0f));
    round ^= 1;
    const float r = rsqrtf(sums.x * (1.0f / kExpertDim) + kRmsEps);
    const uint4 packed = normed_columns(p, int64_t(token) * kExpertDim + column, x, w, r);
#pragma unroll
    for (int s = 0; s < kTopK; s++)
      if (place[s] < uint32_t(p.route_bound))
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.x) + int64_t(place[s]) * kExpertDim + thread * 8) = packed;
    if (kCtas > 1) return;  // one token a cluster
  }
}

}  // namespace msl
