// boundary_router and boundary_topk: attn_boundary, router and router_topk of one token in two launches instead of three.
// The boundary's two norms are factors: with b the branch, r its norm's factor and q the other's,
//   s' = alpha s + r beta b,   h = q s' (1 + w),   logits = q (A + r B),
//   A = W (alpha s (1 + w)),   B = W (beta b (1 + w)),
// so the router need not wait for them. boundary_router is router.cuh's kernel over two rows, and the sums over its
// slice of K that both factors are made of (boundary.cuh). boundary_topk adds the slices: its first CTA goes on to the
// top 8 and the lists (router_topk.cuh), the others write s' and h, 1024 columns each, and let the pooler go on; all
// work the factors out for themselves, in the same order.
//
// Where the parts of sum s'^2 nearly cancel, or are not finite, each of these CTAs takes the sum itself.
//
// With more tokens it does not pay: the router multiplies twice as much (2 tokens no difference, 4 tokens 0.9 us slower).
#pragma once
#include "../residual/boundary.cuh"
#include "router.cuh"
#include "router_topk.cuh"

namespace msl {

constexpr int kBoundarySplits = 16;
constexpr int kApplyCtas = kHidden / (4 * kTopkThreads);
static_assert(kApplyCtas == 8, "BOUNDARY_PARTS of ops.rs");

template <int kSplits>
__global__ void __launch_bounds__(kRouterThreads, 2) boundary_router_kernel(const BoundaryRouterParams p) {
  using S = RouterShape<kSplits>;
  static_assert(S::kSlice == 2 * kRouterThreads);
  __shared__ __align__(16) float rows[2][S::kSlice];  // alpha s (1 + w), beta b (1 + w)
  __shared__ float4 squares[kRouterThreads / 32];
  pdl_launch();
  const int split = blockIdx.x % kSplits, block = blockIdx.x / kSplits;
  const int row = block * S::kRows + (threadIdx.x >> 5) * S::kWarpRows;
  const int k = split * S::kSlice;
  float4 w[S::kWarpRows][S::kQuads];
#pragma unroll
  for (int r = 0; r < S::kWarpRows; r++)
#pragma unroll
    for (int q = 0; q < S::kQuads; q++)
      w[r][q] = load_weight(p.weight + int64_t(row + r) * kHidden + k + q * 128 + (threadIdx.x & 31) * 4);
  const int column = k + 2 * threadIdx.x;
  const float2 alpha = *reinterpret_cast<const float2*>(p.alpha + column);
  const float2 beta = *reinterpret_cast<const float2*>(p.beta + column);
  const float2 norm = *reinterpret_cast<const float2*>(p.norm_weight + column);
  pdl_wait();

  const float2 s = __ldcg(reinterpret_cast<const float2*>(p.stream + column));
  const uint32_t raw = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(p.branch) + column));
  const float2 b = make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xFFFF0000u));
  const float2 a = make_float2(alpha.x * s.x, alpha.y * s.y), c = make_float2(beta.x * b.x, beta.y * b.y);
  *reinterpret_cast<float2*>(&rows[0][2 * threadIdx.x]) = make_float2(a.x * norm.x, a.y * norm.y);
  *reinterpret_cast<float2*>(&rows[1][2 * threadIdx.x]) = make_float2(c.x * norm.x, c.y * norm.y);
  const float part[4] = {a.x * a.x + a.y * a.y, a.x * c.x + a.y * c.y, c.x * c.x + c.y * c.y, b.x * b.x + b.y * b.y};
  const float sum = warp_sum_transposed<4>(part);  // lane 8 i: value i
  if ((threadIdx.x & 7) == 0) reinterpret_cast<float*>(&squares[threadIdx.x >> 5])[(threadIdx.x & 31) >> 3] = sum;
  __syncthreads();
  if (block == 0 && threadIdx.x < 4) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kRouterThreads / 32; i++) total += reinterpret_cast<const float*>(&squares[i])[threadIdx.x];
    p.sums[split * 4 + threadIdx.x] = total;
  }
  router_multiply<S::kWarpRows, S::kQuads, 2>(w, rows[0], S::kSlice, p.logits + split * 2 * kExperts + row);
}

// r and q, by every thread of a CTA of kTopkThreads.
__device__ __forceinline__ float2 boundary_factors(const BoundaryRouterParams& p, float* scratch) {
  const int lane = threadIdx.x & 31;
  float4 mine = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (lane < p.splits) mine = __ldcg(reinterpret_cast<const float4*>(p.sums) + lane);
  const float part[4] = {mine.x, mine.y, mine.z, mine.w};
  const float sum = warp_sum_transposed<4>(part);
  const float aa = __shfl_sync(~0u, sum, 0), ac = __shfl_sync(~0u, sum, 8), cc = __shfl_sync(~0u, sum, 16),
              bb = __shfl_sync(~0u, sum, 24);
  const float r = rsqrtf(bb * (1.0f / kHidden) + kPostNormEps);
  const float apart = aa + r * r * cc;
  float total = apart + 2.0f * r * ac;
  if (!(total > 0.05f * apart && total < 1e30f)) {
    float square = 0.0f;
    for (int column = 4 * threadIdx.x; column < kHidden; column += 4 * kTopkThreads) {
      const float4 s = __ldcg(reinterpret_cast<const float4*>(p.stream + column));
      const float4 b = floats(__ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.branch) + column)));
      const float4 alpha = *reinterpret_cast<const float4*>(p.alpha + column);
      const float4 beta = *reinterpret_cast<const float4*>(p.beta + column);
      const float4 out = alpha * s + beta * scaled(b, r);
      square += dot(out, out);
    }
    total = block_sum<kTopkThreads>(square, scratch);
  }
  return make_float2(r, rsqrtf(total * (1.0f / kHidden) + kRmsEps));
}

// Columns 1024 `part` .. of s' and h.
__device__ __forceinline__ void boundary_apply(const BoundaryRouterParams& p, int part, float* scratch) {
  const int column = (part * kTopkThreads + threadIdx.x) * 4;
  const float4 alpha = *reinterpret_cast<const float4*>(p.alpha + column);
  const float4 beta = *reinterpret_cast<const float4*>(p.beta + column);
  const float4 norm = *reinterpret_cast<const float4*>(p.norm_weight + column);
  pdl_wait();
  const float4 s = __ldcg(reinterpret_cast<const float4*>(p.stream + column));
  const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.branch) + column));
  const float2 factors = boundary_factors(p, scratch);
  const float4 out = alpha * s + beta * scaled(floats(raw), factors.x);
  *reinterpret_cast<float4*>(p.stream_out + column) = out;
  store_planes(p.ffn_input, 0, 1, column, scaled(out, factors.y) * norm);
  if (p.ready != nullptr) add_release(p.ready, 1);
}

__global__ void __launch_bounds__(kTopkThreads) boundary_topk_kernel(const RouterTopkParams p, const BoundaryRouterParams b) {
  __shared__ float scratch[kTopkThreads / 32];
  if (blockIdx.x > 0) {
    pdl_launch();
    return boundary_apply(b, blockIdx.x - 1, scratch);
  }
  topk_of_cluster<1, 1>(p, [&](int, int expert) {
    const float* logits = b.logits + expert;
    float of_stream = 0.0f, of_branch = 0.0f;
    float part[16][2];
    for (int split = 0; split < b.splits; split += 16) {  // all loads under way, added in order
#pragma unroll
      for (int j = 0; j < 16; j++)
        if (split + j < b.splits)
#pragma unroll
          for (int i = 0; i < 2; i++) part[j][i] = __ldcg(logits + (2 * (split + j) + i) * kExperts);
#pragma unroll
      for (int j = 0; j < 16; j++)
        if (split + j < b.splits) of_stream += part[j][0], of_branch += part[j][1];
    }
    const float2 factors = boundary_factors(b, scratch);
    return factors.y * (of_stream + factors.x * of_branch);
  });
}

}  // namespace msl
