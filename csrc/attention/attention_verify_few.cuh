// attention, verify, few keys a split (a chunk or two of 64): what attention_verify.cuh does, by a CTA of two warpgroups,
// one KV head each, that load and multiply, quick to start and to end, and small: half an SM's registers and shared memory
// let it become resident and load beside its predecessor. Measured on an H200, the three launches of the family, one
// request of 8k: 9.4 us against 10.5.
//
// It walks its keys in chunks: rows come to a raw ring two chunks ahead, S by wgmma with the queries from shared memory,
// softmax on registers, O by wgmma with the probabilities from registers, which runs while the next chunk is turned into
// halves. One barrier a chunk.
//
// Sizes: 16 KB of queries, 2 x 32 KB of FP16 tiles, 2 x 16 KB raw: 112.5 KB and at most 128 registers, so
// that two CTAs share an SM and hide each other's waits (or one and a neighbouring kernel's); 64 KB in
// flight on an SM cover the latency.
#pragma once
#include "attention_verify_parts.cuh"

namespace msl {

struct VerifyFewConfig {
  static constexpr int kTokens = kSplitTokens;
  static constexpr int kThreads = 256;
  static constexpr int kStages = 2;
  static constexpr int kUnit = kVerifyChunk;
  static constexpr int kRing = 2 * kVerifyTileBytes + 2 * kVerifyChunkBytes;  // offset: after queries and two chunks
  static constexpr int kIds = kRing + kStages * kVerifyRawBytes;
  static constexpr int kMaskSlots = 4;
  static constexpr int kMasks = kIds + kStages * kVerifyChunk * 4;
  static constexpr int kSharedBytes = kMasks + kMaskSlots * 8;
};

__global__ void __launch_bounds__(VerifyFewConfig::kThreads, 2) attention_verify_few_kernel(const __grid_constant__
                                                                                      AttentionParams p) {
  using C = VerifyFewConfig;
  extern __shared__ __align__(1024) char shared_verify_few[];
  char* shared = shared_verify_few;
  pdl_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int kv_head = warp >> 2, pair = warp & 3;  // rows 16 pair .. + 15: tokens 2 pair, 2 pair + 1
  const int split = blockIdx.x, request = blockIdx.y, tile = blockIdx.z;
  const SplitRange range = split_range<C::kTokens, C::kUnit>(p, request, tile, split);
  if (write_empty(p, range, request, tile, split)) return;

  // --- loading ---------------------------------------------------------------------------------------------
  const int chunks = (range.end - range.begin + kVerifyChunk - 1) / kVerifyChunk;
  const VerifyLoader<C::kStages, C::kMaskSlots> loader(p, range, request, threadIdx.x, shared + C::kRing, shared + C::kIds,
                                                       shared + C::kMasks);
  int first_ids[C::kStages];
#pragma unroll
  for (int i = 0; i < C::kStages; i++) first_ids[i] = loader.first_id(i);
  const float scale = p.softmax_scale * __ldcg(p.k_scale) * kLog2e;
  bool waited = false;
#pragma unroll
  for (int i = 0; i < C::kStages; i++) {
    loader.fetch_id(i + C::kStages, i);
    if (i < chunks) {
      if (!waited && range.begin + (i + 1) * kVerifyChunk > range.old_end) {
        pdl_wait();
        waited = true;
      }
      loader.issue(i, i, first_ids[i]);
    }
    cp_async_commit();
  }
  if (!waited) pdl_wait();

  // --- queries: row 8 * token + head of each KV head's tile ------------------------------------------------
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = i * C::kThreads + threadIdx.x, row = at >> 3, token = row >> 4, head = row & 15;
    const uint4* src = reinterpret_cast<const uint4*>(static_cast<const __half*>(p.q) +
                                                      (static_cast<int64_t>(range.first_token) * kQHeads + row) * kHeadDim);
    const uint4 x = token < range.tokens ? __ldcg(src + (at & 7)) : make_uint4(0, 0, 0, 0);
    const int tile_row = token * kGroup + (head & (kGroup - 1));
    *reinterpret_cast<uint4*>(shared + (head >> 3) * kVerifyTileBytes + tile_row * 128 + (((at & 7) ^ (tile_row & 7)) << 4)) = x;
  }
  VerifyRows rows;
  rows.start(p, range, pair, scale);
  char* buffers = shared + 2 * kVerifyTileBytes;
  // Turns chunk i's bytes (this thread's own: no barrier before) into halves and starts the loading of the
  // chunk that takes their place.
  const auto convert = [&](int i) {
    cp_async_wait<C::kStages - 1>();
    __syncwarp();  // the warp's page ids have landed too
    uint4 x[4];
    loader.take(i & 1, x);
    loader.put(buffers + (i & 1) * kVerifyChunkBytes, x);
    fence_proxy_async();
    const int next = i + C::kStages;
    if (next < chunks) loader.issue(next, i & 1, loader.ids[(i & 1) * kVerifyChunk]);
    __syncwarp();
    loader.fetch_id(next + C::kStages, i & 1);
    cp_async_commit();
  };
  const uint64_t q_desc = desc_sw128(shared + kv_head * kVerifyTileBytes);
  float s[32];
  uint32_t prob[4][4];
  convert(0);
  for (int i = 0; i < chunks; i++) {
    // Chunk i's tiles are written, and every warp is done with chunk i - 1's, whose buffer the next
    // conversion takes.
    __syncthreads();
    const uint64_t tiles = desc_sw128(buffers + (i & 1) * kVerifyChunkBytes + kv_head * kVerifyTileBytes);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int st = 0; st < 4; st++) wgmma_ss<kVerifyChunk, true>(s, q_desc + 2 * st, tiles + 2 * st, st > 0);
    wgmma_commit();
    const uint2 seen = *reinterpret_cast<const uint2*>(shared + C::kMasks + (i & (C::kMaskSlots - 1)) * 8);
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    rows.softmax(s, prob, range.begin + i * kVerifyChunk, seen, c);
    verify_values(rows.o, prob, tiles + 2 * kVerifyTileBytes / 16);
    if (i + 1 < chunks) convert(i + 1);
    wgmma_wait<0>();
    wgmma_fence_operand(rows.o);
  }
  rows.write(p, range, split, kv_head, pair, g, c);
}

inline int launch_attention_verify_few(const AttentionParams& p, const Launch& l) {
  const int tiles = (p.max_q_len + VerifyFewConfig::kTokens - 1) / VerifyFewConfig::kTokens;
  return launch(attention_verify_few_kernel, dim3(p.splits, p.requests, tiles), dim3(VerifyFewConfig::kThreads),
                VerifyFewConfig::kSharedBytes, l, p);
}

}  // namespace msl
