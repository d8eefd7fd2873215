// pack_router: the router's weights and the norm's before it into router_layout.h, a CTA an expert.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "router_layout.h"

namespace msl {

constexpr int kPackRouterThreads = 256;

__global__ void __launch_bounds__(kPackRouterThreads) pack_router_kernel(const PackRouterParams p) {
  __shared__ float largest_of[kPackRouterThreads / 32];
  pdl_launch();
  pdl_wait();
  const int expert = blockIdx.x;
  const float* row = p.src + int64_t(expert) * kHidden;
  float largest = 0.0f;
  for (int k = threadIdx.x; k < kHidden; k += kPackRouterThreads) largest = fmaxf(largest, fabsf(row[k] * p.norm_weight[k]));
  // As an integer: the order of floats that are not negative.
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  if ((threadIdx.x & 31) == 0) largest_of[threadIdx.x >> 5] = largest;
  __syncthreads();
  for (int w = 0; w < kPackRouterThreads / 32; w++) largest = fmaxf(largest, largest_of[w]);
  // Within FP32's own range in both directions, and 1 for a row of zeros.
  const int exponent = largest > 0.0f && largest < INFINITY ? min(max(13 - ilogbf(largest), -100), 100) : 0;
  const float scale = scalbnf(1.0f, exponent);
  uint8_t* images = static_cast<uint8_t*>(p.dst) + (expert >> 7) * int64_t(kRouterImageBytes);
  for (int k = threadIdx.x; k < kHidden; k += kPackRouterThreads) {
    const float w = row[k] * p.norm_weight[k] * scale;
    const __half hi = __float2half_rn(w), lo = __float2half_rn(w - __half2float(hi));
    const int in_group = k & 15, position = (k & 63 & ~15) + (in_group >> 2) * 2 + (in_group & 1) + (in_group & 2) * 4;
    uint8_t* at = images + int64_t(k / kRouterTileK) * 2 * kRouterImageBytes + sw128_offset(expert & 127, position);
    *reinterpret_cast<__half*>(at) = hi;
    *reinterpret_cast<__half*>(at + kRouterImageBytes / 2) = lo;
  }
  if (threadIdx.x == 0)
    reinterpret_cast<float*>(static_cast<uint8_t*>(p.dst) + kRouterScaleOffset)[expert] = scalbnf(1.0f / kRouterTokenScale, -exponent);
}

}  // namespace msl
