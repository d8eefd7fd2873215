// The packed layout of dense BF16 weights, and how a projection's k range is walked.
//
// A weight [rows][k] is stored as tiles of 64 rows x 64 k, in the order [rows / 64][k / 64]; each tile is
// 8192 contiguous bytes and already the 128-byte-swizzled image that wgmma reads (ptx.cuh, sw128_offset),
// so that one 1-D bulk copy brings it into place. Consecutive tiles along k are contiguous in memory: a CTA
// that walks k streams one run of addresses. Four (or 1, 2, 3) consecutive tiles along the rows, put one
// after the other in shared memory, are one B operand of 256 (64, 128, 192) columns.
#pragma once
#include <cstdint>

#include "../common/ptx.cuh"

namespace msl {
constexpr int kTileRows = 64;
constexpr int kTileK = 64;
constexpr int kTileBytes = kTileRows * kTileK * 2;

// Byte offset of weight element (row, col) of a matrix of k columns.
__device__ __host__ __forceinline__ constexpr int64_t dense_tile_offset(int64_t row, int64_t col, int64_t k) {
  return ((row / kTileRows) * (k / kTileK) + col / kTileK) * kTileBytes +
         sw128_offset(static_cast<uint32_t>(row % kTileRows), static_cast<uint32_t>(col % kTileK));
}

// Split s of `splits` takes the k tiles [begin(s), begin(s + 1)): as even as whole tiles allow.
__device__ __host__ __forceinline__ constexpr int split_begin(int s, int splits, int k_tiles) {
  return static_cast<int>(static_cast<int64_t>(s) * k_tiles / splits);
}
}  // namespace msl
