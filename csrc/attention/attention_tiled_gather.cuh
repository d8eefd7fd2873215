// Gather: the visible pages of every request become FP16 tiles of 128 keys, once a call.
//
// A CTA of 256 threads owns a part of a tile of one request, both KV heads, K and V (32 cached tokens: 8 KiB of E4M3
// in, 16 KiB of FP16 out), and walks on by gridDim.x. A warp looks up the keys' pages (shared memory: 32 row numbers);
// then each thread brings 16 E4M3 values of K and 16 of V and stores each as one 32-byte sector of the swizzled image.
// So little a thread, because what the kernel after it waits for is not bytes but one thread's chain of loads,
// conversions and stores. E4M3 to FP16 is exact. Keys that do not exist (past the length, page id out of range) are never
// dereferenced: their rows are zeros and their bits in the tile's header clear. The grid is bounded by the plan; how many
// tiles there are is read from the lengths on the device, and a CTA without a part leaves at once.
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
__device__ __forceinline__ KeyRange key_range(const AttentionParams& p, int key_tiles, int queries, int length) {
  KeyRange r{0, 0};
  if (queries <= 0 || length <= 0) return r;
  if (p.window > 0) r.first = max(0, length - queries - p.window + 1);
  r.count = min(length - r.first, key_tiles * kKeys);
  return r;
}

// The `index`-th tile, counting requests from `begin` in steps of `step` (1 or -1), each of which has
// count(request) tiles. Whole warps call it; returns the request (or -1), leaves the tile in `index` and in `who` the lane
// whose last call of `count` was for that request: what that lane has loaded need not be loaded again.
template <class Count>
__device__ __forceinline__ int find_tile(int requests, bool backward, int& index, int& who, Count count) {
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
      who = __ffs(past) - 1;
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

constexpr int kGatherThreads = 8 * kPartKeys;

__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const AttentionParams p, const Plan plan) {
  pdl_launch();
  __shared__ int64_t rows[kPartKeys];
  __shared__ float norms[kKvHeads][kGatherThreads / 32];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  // What is read before the wait: lengths and page ids, which are the caller's, and the rows of a first part whose keys
  // are all older than the step.
  bool waited = false;
  const auto wait = [&] {
    if (!waited) pdl_wait();
    waited = true;
  };
  const int tokens_end = p.cu_seqlens_q[p.requests];

  auto* images = static_cast<uint8_t*>(p.kv_scratch);
  auto* headers = reinterpret_cast<TileHeader*>(images + plan.header_offset);
  const int64_t units = static_cast<int64_t>(p.requests) * plan.key_tiles * kParts;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    int tile = static_cast<int>(unit / kParts), who = 0, queries = 0, length = 0;
    const int part = static_cast<int>(unit % kParts);
    const int request = find_tile(p.requests, false, tile, who, [&](int b) {
      queries = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b], length = p.cache_seqlens[b];
      return (key_range(p, plan.key_tiles, queries, length).count + kKeys - 1) / kKeys;
    });
    if (request < 0) break;
    queries = __shfl_sync(~0u, queries, who), length = __shfl_sync(~0u, length, who);
    const KeyRange range = key_range(p, plan.key_tiles, queries, length);
    const int first_key = tile * kKeys + part * kPartKeys;  // counted from range.first

    uint32_t visible = 0;
    if (warp == 0) {
      int64_t row = -1;
      if (first_key + lane < range.count) {
        const int position = range.first + first_key + lane;
        const int column = position >> p.page_log2;
        if (column < p.table_width) {
          const int id = p.page_table[request * p.table_stride + column];
          if (id >= 0 && id < p.pages)
            row = (static_cast<int64_t>(id) << p.page_log2) + (position & ((1 << p.page_log2) - 1));
        }
      }
      rows[lane] = row;
      visible = __ballot_sync(~0u, row >= 0);
    }
    if (range.first + first_key + kPartKeys > length - queries) wait();
    __syncthreads();

    // A thread's piece: of key thread / 8 the 16 of 128 bytes at 16 (thread % 8).
    const int key = thread >> 3, piece = thread & 7, head = piece >> 2;
    uint4 k = make_uint4(0, 0, 0, 0), v = k;
    if (const int64_t row = rows[key]; row >= 0) {
      k = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.k_cache) + row * kKvSize + piece * 16);
      v = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.v_cache) + row * kKvSize + piece * 16);
    }
    wait();
    // The four threads of a (key, head) agree on whether its value row holds a NaN.
    const unsigned bad = __ballot_sync(~0u, has_nan(v));
    if ((bad >> (lane & 28)) & 15) v = make_uint4(0, 0, 0, 0), k = make_uint4(~0u, ~0u, ~0u, ~0u);
    const uint32_t in[2][4] = {{k.x, k.y, k.z, k.w}, {v.x, v.y, v.z, v.w}};
    uint8_t* image = images + ((static_cast<int64_t>(request) * kKvHeads + head) * plan.key_tiles + tile) * kImageBytes +
                     (part * kPartKeys + key) * 128;
    float square = 0.f;
#pragma unroll
    for (int m = 0; m < 2; m++) {
      uint32_t out[8];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        out[2 * w] = e4m3x2_to_half2(in[m][w] & 0xFFFF);
        out[2 * w + 1] = e4m3x2_to_half2(in[m][w] >> 16);
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<uint4*>(image + m * kTileBytes + (((2 * (piece & 3) + h) ^ (key & 7)) << 4)) =
            make_uint4(out[4 * h], out[4 * h + 1], out[4 * h + 2], out[4 * h + 3]);
      if (m == 0) {
#pragma unroll
        for (int w = 0; w < 8; w++) {
          const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&out[w]));
          square = fmaf(f.x, f.x, fmaf(f.y, f.y, square));
        }
      }
    }
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    // Lanes of one head: bit 2 of the lane. Then one value a warp and head, joined by two threads of warp 0.
    square = fmaxf(square, __shfl_xor_sync(~0u, square, 8));
    square = fmaxf(square, __shfl_xor_sync(~0u, square, 16));
    if ((lane & 27) == 0) norms[head][warp] = square;
    __syncthreads();
    TileHeader& header = headers[static_cast<int64_t>(request) * plan.key_tiles + tile];
    if (thread < kKvHeads) {
      float n = 0.f;
#pragma unroll
      for (int w = 0; w < kGatherThreads / 32; w++) n = fmaxf(n, norms[thread][w]);
      header.max_norm[thread][part] = sqrtf(n) * 1.0001f;
    }
    if (thread == 0) header.visible[part] = visible;
  }
  wait();

  // Tokens behind the last request's belong to nobody and see no key.
  int64_t i = static_cast<int64_t>(tokens_end) * (kQSize / 8) + blockIdx.x * kGatherThreads + thread;
  for (; i < static_cast<int64_t>(p.tokens) * (kQSize / 8); i += gridDim.x * kGatherThreads) {
    static_cast<uint4*>(p.out)[i] = make_uint4(0, 0, 0, 0);
    if (p.attn_core == nullptr) continue;
    reinterpret_cast<float4*>(p.attn_core)[2 * i] = make_float4(0.f, 0.f, 0.f, 0.f);
    reinterpret_cast<float4*>(p.attn_core)[2 * i + 1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

}  // namespace tiled
}  // namespace msl
