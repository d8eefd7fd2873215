// This rank's slice of the unpooled branch, complete: what the ranks gather.
//
//   slice_sum  out[t, c] = sum of the unpooler's splits of (t, c), added in order, FP32
//
// It is `ffn_boundary`'s own sum of splits, made before the gather so that one number a column travels instead
// of eight; the same order gives the same bits. A CTA of 128 threads owns 512 columns of one token, a thread four of
// them, all splits' loads under way at once. At 8 tokens that is 16 CTAs and 256 KB: latency only.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace msl {

constexpr int kSliceThreads = 128;

__global__ void __launch_bounds__(kSliceThreads) slice_sum_kernel(const SliceSumParams p) {
  pdl_launch();
  pdl_wait();
  const int column = (blockIdx.x * kSliceThreads + threadIdx.x) * 4;
  if (column >= p.columns) return;
  const int64_t at = int64_t(blockIdx.y) * p.columns + column;
  const int64_t stride = int64_t(p.tokens) * p.columns;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int s = 0; s < p.splits; s += 8) {
    float4 part[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (s + j < p.splits) part[j] = __ldcg(reinterpret_cast<const float4*>(p.parts + at + (s + j) * stride));
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (s + j < p.splits)
        sum = make_float4(sum.x + part[j].x, sum.y + part[j].y, sum.z + part[j].z, sum.w + part[j].w);
  }
  *reinterpret_cast<float4*>(p.out + at) = sum;
}

}  // namespace msl
