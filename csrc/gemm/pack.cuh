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

}  // namespace msl
