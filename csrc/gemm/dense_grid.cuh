// What the projections for many tokens share (tiled.cuh, wide.cuh): a launch's arguments, and how its persistent grid walks
// (split, tile) items. Tiles are ordered so that the CTAs at work at one time share few token tiles and few row tiles in L2.
#pragma once
#include "dense_tile.h"

namespace msl {

struct GridArgs {
  const uint8_t* weight;   // tiles [rows / 64][k_tiles]
  void* out;               // FP32 [splits][T][out_stride] or BF16 [T][out_stride]
  int32_t tokens, out_stride;
  int32_t k_tiles;
  int32_t splits;
  int32_t token_tiles;     // along the tokens; with clusters, tiles of a whole cluster
  int32_t row_tiles;
  int32_t token_group;     // token tiles walked together
  int32_t bf16;            // output type
  int32_t late_trigger;    // 1: pdl_launch only after pdl_wait (the pooler)
  const uint32_t* ready;   // DenseParams::ready
};

struct GridWork {
  int token, row;             // the first of the tile
  int split, k_begin, k_end;  // k tiles, one at least
};

template <int kTokens, int kRows>
__device__ __forceinline__ GridWork grid_work(const GridArgs& a, int item) {
  const int tiles = a.token_tiles * a.row_tiles;
  GridWork w;
  w.split = item / tiles;
  int tile = item - w.split * tiles;
  const int group_tiles = a.token_group * a.row_tiles;
  const int group = tile / group_tiles;
  tile -= group * group_tiles;
  const int width = min(a.token_group, a.token_tiles - group * a.token_group);
  w.token = (group * a.token_group + tile % width) * kTokens;
  w.row = tile / width * kRows;
  w.k_begin = split_begin(w.split, a.splits, a.k_tiles);
  w.k_end = split_begin(w.split + 1, a.splits, a.k_tiles);
  return w;
}

// What a warp beside the producer does in the pooler, so that its tokens need not wait for the routing (skinny.cuh): it lets
// the producer go on when the word says so, and triggers when the predecessor is complete.
__device__ __forceinline__ void await_ready(const GridArgs& a, uint64_t* ready) {
  if (a.ready != nullptr && threadIdx.x % 32 == 0) {
    while (load_acquire(a.ready) == 0) {}
    mbar_arrive(ready);
  }
  __syncwarp();
  pdl_wait();
  pdl_launch();
}

// Transposes 4 x 4 words over a quad: lane c ends with what lanes 0, 1, 2 and 3 had in v[c].
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
  const bool o1 = threadIdx.x & 1, o2 = threadIdx.x & 2;
  uint32_t s = __shfl_xor_sync(~0u, o1 ? v[0] : v[1], 1), u = __shfl_xor_sync(~0u, o1 ? v[2] : v[3], 1);
  if (o1) v[0] = s, v[2] = u; else v[1] = s, v[3] = u;
  s = __shfl_xor_sync(~0u, o2 ? v[0] : v[2], 2), u = __shfl_xor_sync(~0u, o2 ? v[1] : v[3], 2);
  if (o2) v[0] = s, v[1] = u; else v[2] = s, v[3] = u;
}

}  // namespace msl
