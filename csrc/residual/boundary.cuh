// The two residual boundaries, one token to a cluster of CTAs.
//
//   attn_boundary  s' = alpha s + beta rms(b, 1e-8);  h = rms(s', 1e-5) (1 + w), kept as BF16 planes:
//                  three whose sum it is (for the router's rows, and a tap), or the first alone (for the pooler, while the
//                  router reads s' and the norm's factor)
//   ffn_boundary   f = (sum of the unpooler's splits, or the ranks' gathered slices; zero outside their columns)
//                  (1 + post);
//                  s' = alpha s + beta rms(f, 1e-8);  hidden = rms(s', 1e-5) (1 + next), BF16
//
// A CTA owns 8192 / kCtas columns of one token, in runs of 128 columns a warp, dealt in turn to the CTAs of
// the cluster (so that the 1024 columns of the sliced unpooler, whose splits cost most, spread over all of
// them). A thread keeps its 4 or 8 columns in registers from the loads to the stores; the weights (alpha,
// beta, norms) are there before pdl_wait().
//
// The two norms depend on one another, but one exchange serves both: with r the branch's norm factor,
//   sum s'^2 = sum (alpha s)^2 + 2 r sum (alpha s)(beta b) + r^2 sum (beta b)^2,
// so four sums travel together. Where these nearly cancel, or are not finite, the sum of s'^2 itself is
// taken in a second round; every thread of the cluster decides that from the same four numbers.
//
// Sizes: cluster of 8 x 256 threads with 4 columns a thread for the fewest tokens (a chain of dependent steps:
// latency counts), 4 x 512 and 2 x 512 as tokens fill the chip. Then boundary_stream.cuh takes over.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }
__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

__device__ __forceinline__ uint2 bf16x4(float4 v) {
  return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}
__device__ __forceinline__ float4 floats(uint2 v) {
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xFFFF0000u));
}

// Four columns of h as planes: hi = bf16(h), mid = bf16(h - hi), lo = bf16(h - hi - mid); or hi alone.
__device__ __forceinline__ void store_planes(void* base, int64_t token, int planes, int column, float4 h) {
  __nv_bfloat16* row = static_cast<__nv_bfloat16*>(base) + token * planes * kHidden;
#pragma unroll
  for (int plane = 0; plane < 3; plane++) {
    if (plane == planes) break;
    const uint2 packed = bf16x4(h);
    *reinterpret_cast<uint2*>(row + plane * kHidden + column) = packed;
    const float4 f = floats(packed);
    h = make_float4(h.x - f.x, h.y - f.y, h.z - f.z, h.w - f.w);
  }
}

template <int kCtas, int kThreads>
struct BoundaryShape {
  static constexpr int kChunks = kHidden / (kCtas * kThreads * 4);  // of four columns a thread
  static constexpr int kWarps = kThreads / 32;
  static_assert(kChunks * kCtas * kThreads * 4 == kHidden);
  static __device__ __forceinline__ int column(int chunk) {
    const int rank = kCtas > 1 ? cluster_rank() : 0;
    return (((chunk * kWarps) + (threadIdx.x >> 5)) * kCtas + rank) * 128 + (threadIdx.x & 31) * 4;
  }
};

// A thread's columns of a row.
template <class Shape>
__device__ __forceinline__ void load_columns(float4 (&v)[Shape::kChunks], const float* row) {
#pragma unroll
  for (int i = 0; i < Shape::kChunks; i++) v[i] = *reinterpret_cast<const float4*>(row + Shape::column(i));
}

// From a = alpha s, b (the branch) and beta: s' into `out`, and the factor of its norm.
template <int kCtas, int kThreads, int kChunks>
__device__ __forceinline__ float boundary_norms(ClusterSum<kCtas, kThreads, 2>& cluster, const float4 (&a)[kChunks],
                                                const float4 (&b)[kChunks], const float4 (&beta)[kChunks],
                                                float4 (&out)[kChunks]) {
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // (alpha s)^2, (alpha s)(beta b), (beta b)^2, b^2
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    const float4 bb = beta[i] * b[i];
    sums = sums + make_float4(dot(a[i], a[i]), dot(a[i], bb), dot(bb, bb), dot(b[i], b[i]));
  }
  sums = cluster.sum(0, sums);
  const float r = rsqrtf(sums.w * (1.0f / kHidden) + kPostNormEps);
  const float parts = sums.x + r * r * sums.z;
  float total = parts + 2.0f * r * sums.y;
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    out[i] = a[i] + beta[i] * scaled(b[i], r);
    square += dot(out[i], out[i]);
  }
  if (!(total > 0.05f * parts && total < 1e30f))
    total = cluster.sum(1, make_float4(square, 0.0f, 0.0f, 0.0f)).x;
  return rsqrtf(total * (1.0f / kHidden) + kRmsEps);
}

template <int kCtas, int kThreads>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    attn_boundary_kernel(const AttnBoundaryParams p) {
  using Shape = BoundaryShape<kCtas, kThreads>;
  constexpr int kChunks = Shape::kChunks;
  __shared__ ClusterSum<kCtas, kThreads, 2> cluster;
  pdl_launch();
  cluster.begin();
  float4 alpha[kChunks], beta[kChunks], norm[kChunks];
  load_columns<Shape>(alpha, p.alpha);
  load_columns<Shape>(beta, p.beta);
  load_columns<Shape>(norm, p.norm_weight);
  const int64_t token = blockIdx.x / kCtas, row = token * kHidden;
  cluster.ready();
  pdl_wait();

  float4 a[kChunks], b[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    a[i] = __ldcg(reinterpret_cast<const float4*>(p.stream + row + Shape::column(i)));
    const uint2 raw =
        __ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.branch) + row + Shape::column(i)));
    b[i] = floats(raw);
  }
#pragma unroll
  for (int i = 0; i < kChunks; i++) a[i] = alpha[i] * a[i];
  float4 out[kChunks];
  const float q = boundary_norms<kCtas, kThreads>(cluster, a, b, beta, out);
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    *reinterpret_cast<float4*>(p.stream_out + row + Shape::column(i)) = out[i];
    store_planes(p.ffn_input, token, p.planes, Shape::column(i), scaled(out[i], q) * norm[i]);
  }
  if (p.factor != nullptr && threadIdx.x == 0 && blockIdx.x % kCtas == 0) p.factor[token] = q;
}

template <int kCtas, int kThreads>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    ffn_boundary_kernel(const FfnBoundaryParams p) {
  using Shape = BoundaryShape<kCtas, kThreads>;
  constexpr int kChunks = Shape::kChunks;
  __shared__ ClusterSum<kCtas, kThreads, 2> cluster;
  pdl_launch();
  cluster.begin();
  float4 alpha[kChunks], beta[kChunks], post[kChunks], next[kChunks];
  load_columns<Shape>(alpha, p.alpha);
  load_columns<Shape>(beta, p.beta);
  load_columns<Shape>(post, p.post_norm_weight);
  if (p.next_norm_weight != nullptr) load_columns<Shape>(next, p.next_norm_weight);
  const int64_t token = blockIdx.x / kCtas, row = token * kHidden;
  // The stream too: attn_boundary wrote it, and the pooler stands between (see moe/combine.cuh).
  float4 a[kChunks], b[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    a[i] = __ldcg(reinterpret_cast<const float4*>(p.stream + row + Shape::column(i)));
    b[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  cluster.ready();
  pdl_wait();

#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    const int column = Shape::column(i) - p.column_begin;
    if (column < 0 || column >= p.columns) continue;  // whole warps: both ends are multiples of 128
    if (!p.branch_f32) {
      b[i] = floats(__ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.branch) +
                                                          token * p.columns + column)));
      continue;
    }
    // Gathered slices lie rank by rank, each with all tokens; else there is one slice, of all columns.
    const int rank = column / p.slice;
    const float* branch =
        static_cast<const float*>(p.branch) + (int64_t(rank) * p.tokens + token) * p.slice + (column - rank * p.slice);
    const int64_t stride = int64_t(p.tokens) * p.columns;
    for (int s = 0; s < p.splits; s += 8) {  // eight loads under way, added in order
      float4 part[8];
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (s + j < p.splits) part[j] = __ldcg(reinterpret_cast<const float4*>(branch + (s + j) * stride));
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (s + j < p.splits) b[i] = b[i] + part[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    a[i] = alpha[i] * a[i];
    if (p.ffn_out != nullptr) *reinterpret_cast<float4*>(p.ffn_out + row + Shape::column(i)) = b[i];
    b[i] = b[i] * post[i];
  }
  float4 out[kChunks];
  const float q = boundary_norms<kCtas, kThreads>(cluster, a, b, beta, out);
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    *reinterpret_cast<float4*>(p.stream_out + row + Shape::column(i)) = out[i];
    if (p.next_norm_weight != nullptr)
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.hidden) + row + Shape::column(i)) =
          bf16x4(scaled(out[i], q) * next[i]);
  }
}

}  // namespace msl
