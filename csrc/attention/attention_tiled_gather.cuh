// Gather: the visible pages of every request become FP16 tiles of 128 keys, once a call.
//
// A CTA of 256 threads owns one tile of one request, both KV heads, K and V (128 cached tokens: 32 KiB
// of E4M3 in, 64 KiB of FP16 out), and walks on by gridDim.x. 128 threads look up one key's page each
// (shared memory: 128 row numbers); then each thread brings 8 pieces of 16 E4M3 values, all in flight
// at once, and stores each as one 32-byte sector of the swizzled image. E4M3 to FP16 is exact. Keys
// that do not exist (past the length, page id out of range) are never dereferenced: their rows are
// zeros and their bits in the tile's header clear. The grid is bounded by the plan; how many tiles
// there are is read from the lengths on the device, and a CTA without a tile leaves at once.
//
// A NaN in a value row would pass, as 0 * NaN, to queries that do not see the key: such a row becomes
// zeros, and its key NaN instead, which only the queries that see it take.
#pragma once
#include <cuda_fp8.h>

#include "../common/ptx.cuh"
#include "attention_tiled_plan.h"

namespace msl {
namespace tiled {

// First key that any query of a request sees, and how many from there on: the keys of its scratch.
struct KeyRange {
  int first, count;
};
__device__ __forceinline__ KeyRange key_range(const AttentionParams& p, int key_tiles, int request) {
  int queries = p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
  int length = p.cache_seqlens[request];
  KeyRange r{0, 0};
  if (queries <= 0 || length <= 0) return r;
  if (p.window > 0) r.first = max(0, length - queries - p.window + 1);
  r.count = min(length - r.first, key_tiles * kKeys);
  return r;
}

// The `index`-th tile, counting requests from `begin` in steps of `step` (1 or -1), each of which has
// count(request) tiles. Whole warps call it; returns the request (or -1) and leaves the tile in `index`.
template <class Count>
__device__ __forceinline__ int find_tile(int requests, bool backward, int& index, Count count) {
  int lane = threadIdx.x & 31;
  for (int base = 0; base < requests; base += 32) {
    int i = base + lane;
    int mine = i < requests ? count(backward ? requests - 1 - i : i) : 0;
    int sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int up = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += up;
    }
    unsigned past = __ballot_sync(~0u, sum > index);
    if (past) {
      int who = __ffs(past) - 1;
      index -= __shfl_sync(~0u, sum - mine, who);
      return backward ? requests - 1 - (base + who) : base + who;
    }
    index -= __shfl_sync(~0u, sum, 31);
  }
  return -1;
}

__device__ __forceinline__ uint32_t e4m3x2_to_half2(uint32_t two) {
  uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(static_cast<uint16_t>(two)));
  return out;
}
__device__ __forceinline__ bool has_nan(const uint4& v) {
  auto any = [](uint32_t w) { return __vcmpeq4(w & 0x7F7F7F7Fu, 0x7F7F7F7Fu); };
  return (any(v.x) | any(v.y) | any(v.z) | any(v.w)) != 0;
}

constexpr int kGatherThreads = 256;

__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const AttentionParams p, const Plan plan) {
  pdl_launch();
  __shared__ int64_t rows[kKeys];
  __shared__ uint32_t visible[4];
  __shared__ float norms[2][kGatherThreads / 32];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  // What is read before the wait: lengths and page ids, which are the caller's, and the rows of a first tile whose keys
  // are all older than the step.
  bool waited = false;
  const auto wait = [&] {
    if (!waited) pdl_wait();
    waited = true;
  };

  auto* images = static_cast<uint8_t*>(p.kv_scratch);
  auto* headers = reinterpret_cast<TileHeader*>(images + plan.header_offset);
  for (int unit = blockIdx.x;; unit += gridDim.x) {
    int tile = unit;
    int request = find_tile(p.requests, false, tile, [&](int b) {
      return (key_range(p, plan.key_tiles, b).count + kKeys - 1) / kKeys;
    });
    if (request < 0) break;
    KeyRange range = key_range(p, plan.key_tiles, request);
    const int old = p.cache_seqlens[request] - (p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request]);
    if (range.first + (tile + 1) * kKeys > old) wait();

    if (thread < kKeys) {
      int key = tile * kKeys + thread;
      int64_t row = -1;
      if (key < range.count) {
        int position = range.first + key;
        int column = position >> p.page_log2;
        if (column < p.table_width) {
          int id = p.page_table[request * p.table_stride + column];
          if (id >= 0 && id < p.pages)
            row = (static_cast<int64_t>(id) << p.page_log2) + (position & ((1 << p.page_log2) - 1));
        }
      }
      rows[thread] = row;
      uint32_t bits = __ballot_sync(~0u, row >= 0);
      if (lane == 0) visible[warp] = bits;
    }
    __syncthreads();

    // Piece i of a thread: key 32 i + thread / 8, and of the key's 128 bytes the 16 at 16 (thread % 8).
    const int piece = thread & 7, head = piece >> 2;
    uint4 k[4], v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int64_t row = rows[32 * i + (thread >> 3)];
      k[i] = v[i] = make_uint4(0, 0, 0, 0);
      if (row >= 0) {
        k[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.k_cache) + row * kKvSize + piece * 16);
        v[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.v_cache) + row * kKvSize + piece * 16);
      }
    }
    wait();
    uint8_t* image =
        images + ((static_cast<int64_t>(request) * kKvHeads + head) * plan.key_tiles + tile) * kImageBytes;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = 32 * i + (thread >> 3);
      // The four threads of a (key, head) agree on whether its value row holds a NaN.
      unsigned bad = __ballot_sync(~0u, has_nan(v[i]));
      bool poisoned = (bad >> (lane & 28)) & 15;
      if (poisoned) v[i] = make_uint4(0, 0, 0, 0), k[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
      uint32_t out[2][8];
      const uint32_t in[2][4] = {{k[i].x, k[i].y, k[i].z, k[i].w}, {v[i].x, v[i].y, v[i].z, v[i].w}};
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
          out[m][2 * w] = e4m3x2_to_half2(in[m][w] & 0xFFFF);
          out[m][2 * w + 1] = e4m3x2_to_half2(in[m][w] >> 16);
        }
      float square = 0.f;
#pragma unroll
      for (int w = 0; w < 8; w++) {
        float2 f = __half22float2(*reinterpret_cast<const __half2*>(&out[0][w]));
        square = fmaf(f.x, f.x, fmaf(f.y, f.y, square));
      }
      square += __shfl_xor_sync(~0u, square, 1);
      square += __shfl_xor_sync(~0u, square, 2);
      largest = fmaxf(largest, square);
      const int chunk = 2 * (piece & 3);
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          *reinterpret_cast<uint4*>(image + m * kTileBytes + key * 128 + (((chunk + h) ^ (key & 7)) << 4)) =
              make_uint4(out[m][4 * h], out[m][4 * h + 1], out[m][4 * h + 2], out[m][4 * h + 3]);
    }
    // Lanes of one head: bit 2 of the lane. Then one value a warp and head, joined by thread 0.
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    if ((lane & 27) == 0) norms[head][warp] = largest;
    __syncthreads();
    if (thread == 0) {
      TileHeader h;
      for (int i = 0; i < 4; i++) h.visible[i] = visible[i];
      h.all_visible = (visible[0] & visible[1] & visible[2] & visible[3]) == ~0u;
      for (int m = 0; m < 2; m++) {
        float n = 0.f;
        for (int w = 0; w < kGatherThreads / 32; w++) n = fmaxf(n, norms[m][w]);
        h.max_norm[m] = sqrtf(n) * 1.0001f;
      }
      h.unused = 0;
      headers[static_cast<int64_t>(request) * plan.key_tiles + tile] = h;
    }
    __syncthreads();
  }
  wait();

  // Tokens behind the last request's belong to nobody and see no key.
  int64_t i = static_cast<int64_t>(p.cu_seqlens_q[p.requests]) * (kQSize / 8) + blockIdx.x * kGatherThreads + thread;
  for (; i < static_cast<int64_t>(p.tokens) * (kQSize / 8); i += gridDim.x * kGatherThreads) {
    static_cast<uint4*>(p.out)[i] = make_uint4(0, 0, 0, 0);
    if (p.attn_core == nullptr) continue;
    reinterpret_cast<float4*>(p.attn_core)[2 * i] = make_float4(0.f, 0.f, 0.f, 0.f);
    reinterpret_cast<float4*>(p.attn_core)[2 * i + 1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

}  // namespace tiled
}  // namespace msl
