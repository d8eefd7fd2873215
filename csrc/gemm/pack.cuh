// Packing row-major weights into the tiles of dense_tile.h. A thread moves eight elements of one row (16 bytes
// of the tile's image); runs once, when weights are loaded.
#pragma once
#include "dense_tile.h"

namespace msl {

constexpr int kPackThreads = 256;

__global__ void __launch_bounds__(kPackThreads) pack_dense_kernel(const uint4* src, uint8_t* dst, int64_t chunks,
                                                                  int k) {
  pdl_launch();
  pdl_wait();
  const int64_t i = int64_t(blockIdx.x) * kPackThreads + threadIdx.x;
  if (i >= chunks) return;
  const int64_t row = i / (k / 8), col = i % (k / 8) * 8;
  *reinterpret_cast<uint4*>(dst + dense_tile_offset(row, col, k)) = src[i];
}

// FP32 -> three BF16 planes that sum to it: each plane is the rounded remainder of those before.
__global__ void __launch_bounds__(kPackThreads) pack_router_kernel(const float* src, uint8_t* dst, int64_t chunks,
                                                                   int k) {
  pdl_launch();
  pdl_wait();
  const int64_t i = int64_t(blockIdx.x) * kPackThreads + threadIdx.x;
  if (i >= chunks) return;
  const int64_t row = i / (k / 8), col = i % (k / 8) * 8;
  float rest[8];
#pragma unroll
  for (int e = 0; e < 8; e++) rest[e] = src[i * 8 + e];
#pragma unroll
  for (int plane = 0; plane < 3; plane++) {
    __nv_bfloat162 v[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[e] = __floats2bfloat162_rn(rest[2 * e], rest[2 * e + 1]);
      rest[2 * e] -= __low2float(v[e]);
      rest[2 * e + 1] -= __high2float(v[e]);
    }
    *reinterpret_cast<uint4*>(dst + dense_tile_offset(row, int64_t(plane) * k + col, 3 * int64_t(k))) =
        *reinterpret_cast<const uint4*>(v);
  }
}

}  // namespace msl
