// attention, verify, few keys a split (a chunk or two of 64): what attention_verify.cuh does, by a CTA of
// two warpgroups, one KV head each, that is quick to start and to end: no join of groups, the partial goes
// to memory straight from the accumulators, and half an SM's registers and shared memory let it become
// resident and load beside its predecessor. Measured on an H200, the three launches of the family, one
// request of 8k: 11.2 us against 13.8; with 1024 keys a split the other kernel is 15 to 20% faster.
//
// It walks its keys in chunks of 64:
//   load     cp.async of 16 bytes: a thread brings two pieces of K rows and two of V rows to its own
//            places in a ring of raw bytes, two chunks ahead. Page ids come by cp.async too, two chunks
//            further ahead: a load to a register in flight would make every wgmma wait for it.
//            Rows that must not be read (past the range, invalid page) are filled with zeros.
//   convert  the thread that loaded a piece turns it into halves and writes them to the FP16 tiles
//            [2 heads][64 keys][64], 128-byte swizzled, double-buffered: one barrier a chunk.
//   S        wgmma m64n64k16, queries from shared memory (warp w of the warpgroup: tokens 2 w, 2 w + 1).
//   softmax  on registers, relative to a reference point r of each row, which moves only when a lane's
//            probabilities of a chunk add up to more than 2^15: one vote a warp, no maximum otherwise.
//            r starts at -inf, so that the first chunk's p are infinite (NaN where masked) and the vote
//            says to move.
//   O        wgmma m64n64k16, probabilities from registers, V as it stands (MN-major); it runs while the
//            next chunk is converted.
//
// Sizes: 16 KB of queries, 2 x 32 KB of FP16 tiles, 2 x 16 KB raw: 112.5 KB and at most 128 registers, so
// that two CTAs share an SM and hide each other's waits (or one and a neighbouring kernel's); 64 KB in
// flight on an SM cover the latency.
#pragma once
#include "attention_verify.cuh"

namespace msl {

struct VerifyFewConfig {
  static constexpr int kTokens = kSplitTokens;
  static constexpr int kThreads = 256;
  static constexpr int kChunk = 64;
  static constexpr int kStages = 2;
  static constexpr int kUnit = kChunk;
  static constexpr int kRawBytes = kChunk * kKvSize * 2;    // a stage: 4 x 256 pieces of 16 bytes, K K V V
  static constexpr int kTileBytes = kChunk * 128;           // one head's K or V, or queries, FP16
  static constexpr int kBufferBytes = 4 * kTileBytes;       // K head 0, K head 1, V head 0, V head 1
  static constexpr int kRing = 2 * kTileBytes + 2 * kBufferBytes;  // offset: after queries and buffers
  static constexpr int kIds = kRing + kStages * kRawBytes;  // int32 [2][64]: chunk mod 2
  static constexpr int kMasks = kIds + 2 * kChunk * 4;      // 64 bits [4]: chunk mod 4
  static constexpr int kSharedBytes = kMasks + 4 * 8;
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

  // --- loading: the warp has 8 keys of a chunk; a thread, piece lane mod 8 of keys lane / 8 and + 4 -------
  char* raw = shared + C::kRing + threadIdx.x * 16;
  int32_t* ids = reinterpret_cast<int32_t*>(shared + C::kIds) + warp * 8;  // the warp's own
  uint8_t* masks = reinterpret_cast<uint8_t*>(shared + C::kMasks);
  const int chunks = (range.end - range.begin + C::kChunk - 1) / C::kChunk;
  const int piece = lane & 7, key_in_chunk = warp * 8 + (lane >> 3);
  const char* k_src = static_cast<const char*>(p.k_cache) + piece * 16;
  const char* v_src = static_cast<const char*>(p.v_cache) + piece * 16;
  KeyCursor cursor(p, request, range.begin + key_in_chunk, C::kChunk, range.end);
  const auto issue = [&](int chunk, int id0, int id1) {  // page ids of the thread's two keys
    const int key = range.begin + key_in_chunk + chunk * C::kChunk;
    uint32_t row[2] = {key < range.end ? cursor.row(key, id0) : kNoRow,
                       key + 4 < range.end ? cursor.row(key + 4, id1) : kNoRow};
    // Bits 0, 8, 16, 24 are the warp's keys 0-3, and 4-7.
    const uint32_t seen0 = __ballot_sync(~0u, row[0] != kNoRow) & 0x01010101u;
    const uint32_t seen1 = __ballot_sync(~0u, row[1] != kNoRow) & 0x01010101u;
    if (lane == 0)
      masks[(chunk & 3) * 8 + warp] = static_cast<uint8_t>(((seen0 * 0x10204080u) >> 28) | ((seen1 * 0x10204080u) >> 28 << 4));
    char* dst = raw + (chunk & 1) * C::kRawBytes;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool load = row[i] != kNoRow;
      const uint64_t at = static_cast<uint64_t>(load ? row[i] : 0) * kKvSize;
      cp_async16(dst + i * 4096, k_src + at, load);
      cp_async16(dst + (2 + i) * 4096, v_src + at, load);
    }
  };
  const int32_t* table = cursor.table;
  asm volatile("" : "+l"(table));  // kept, not computed again for every chunk
  const auto fetch_ids = [&](int chunk) {  // lanes 0-7, the warp's 8 keys
    const int key = range.begin + warp * 8 + lane + chunk * C::kChunk;
    if (lane < 8 && key < range.end) cp_async4(ids + (chunk & 1) * C::kChunk + lane, table + (key >> p.page_log2));
  };

  int first_ids[C::kStages][2];
#pragma unroll
  for (int i = 0; i < C::kStages; i++) {
    const int key = range.begin + key_in_chunk + i * C::kChunk;
#pragma unroll
    for (int j = 0; j < 2; j++)
      first_ids[i][j] = key + 4 * j < range.end ? __ldcg(cursor.table + ((key + 4 * j) >> p.page_log2)) : -1;
  }
  const float scale = p.softmax_scale * __ldcg(p.k_scale) * kLog2e;
  bool waited = false;
#pragma unroll
  for (int i = 0; i < C::kStages; i++) {
    fetch_ids(i + C::kStages);
    if (i < chunks) {
      if (!waited && range.begin + (i + 1) * C::kChunk > range.old_end) {
        pdl_wait();
        waited = true;
      }
      issue(i, first_ids[i][0], first_ids[i][1]);
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
    *reinterpret_cast<uint4*>(shared + (head >> 3) * C::kTileBytes + tile_row * 128 + (((at & 7) ^ (tile_row & 7)) << 4)) = x;
  }
  const int pos0 = range.first_pos + 2 * pair;  // of the lane's rows: pos0 (row g), pos0 + 1 (row g + 8)
  // Chunks whose first key is in [clean_from, clean_to] are visible to every query if their pages are valid.
  const int clean_to = range.first_pos - (C::kChunk - 1);
  const int clean_from = p.window > 0 ? range.first_pos + range.tokens - p.window : INT32_MIN;

  float o[32];
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.0f;
  float minus_ref[2] = {INFINITY, INFINITY}, sum[2] = {0.0f, 0.0f};

  char* buffers = shared + 2 * C::kTileBytes;
  // Where the thread's first piece goes in the K tiles; four keys on, the swizzle differs in one bit.
  const int half_head = piece >> 2;
  const int place = half_head * C::kTileBytes + key_in_chunk * 128 + ((((piece & 3) * 2 + half_head) ^ (key_in_chunk & 7)) << 4);
  // Turns chunk i's bytes (this thread's own: no barrier before) into halves and starts the loading of the
  // chunk that takes their place.
  const auto convert = [&](int i) {
    cp_async_wait<C::kStages - 1>();
    __syncwarp();  // the warp's page ids have landed too
    const char* from = raw + (i & 1) * C::kRawBytes;
    char* to = buffers + (i & 1) * C::kBufferBytes;
#pragma unroll
    for (int j = 0; j < 4; j++)  // K, K four keys on, V, V four keys on
      store_halves(to + (j >> 1) * 2 * C::kTileBytes, j & 1 ? (place ^ 64) + 512 : place, half_head != 0,
                   *reinterpret_cast<const uint4*>(from + j * 4096));
    fence_proxy_async();
    const int next = i + C::kStages;
    if (next < chunks) {
      const int32_t* next_ids = ids + (next & 1) * C::kChunk + (lane >> 3);
      issue(next, next_ids[0], next_ids[4]);
    }
    __syncwarp();
    fetch_ids(next + C::kStages);
    cp_async_commit();
  };
  const uint64_t q_desc = desc_sw128(shared + kv_head * C::kTileBytes);
  convert(0);
  for (int i = 0, key0 = range.begin; i < chunks; i++, key0 += C::kChunk) {
    // Chunk i's tiles are written, and every warp is done with chunk i - 1's, whose buffer the next
    // conversion takes.
    __syncthreads();
    const char* buffer = buffers + (i & 1) * C::kBufferBytes + kv_head * C::kTileBytes;

    // --- S ---
    float s[32];
    const uint64_t k_desc = desc_sw128(buffer);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int st = 0; st < 4; st++) wgmma_ss<C::kChunk, true>(s, q_desc + 2 * st, k_desc + 2 * st, st > 0);
    wgmma_commit();
    const uint2 seen = *reinterpret_cast<const uint2*>(masks + (i & 3) * 8);
    const bool clean = (seen.x & seen.y) == 0xffffffffu && key0 <= clean_to && key0 >= clean_from;
    wgmma_wait<0>();
    wgmma_fence_operand(s);

    if (!clean) {
      int first = key0 + 2 * c;
      asm volatile("" : "+r"(first));  // nothing of this rare block is to be prepared outside it
      const uint32_t lo = seen.x >> (2 * c), hi = seen.y >> (2 * c);
#pragma unroll
      for (int e = 0; e < 32; e++) {
        const int key = first + 8 * (e >> 2) + (e & 1), pos = pos0 + ((e >> 1) & 1);
        const uint32_t bit = ((e < 16 ? lo : hi) >> (8 * ((e >> 2) & 3) + (e & 1))) & 1;
        if (!bit || key > pos || (p.window > 0 && key <= pos - p.window)) s[e] = -INFINITY;
      }
    }

    // --- softmax: s[4 j + 2 r + e] is row r, key 8 j + 2 c + e; prob[j][r] the pair of keys as halves ---
    uint32_t prob[8][2];
    float part[2];
    const auto probabilities = [&](float minus0, float minus1) {
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float minus = r ? minus1 : minus0;
          const float p0 = exp2_approx(fmaf(s[4 * j + 2 * r], scale, minus));
          const float p1 = exp2_approx(fmaf(s[4 * j + 2 * r + 1], scale, minus));
          part[r] = j == 0 ? p0 + p1 : part[r] + (p0 + p1);
          prob[j][r] = half2_bits(p0, p1);
        }
    };
    probabilities(minus_ref[0], minus_ref[1]);
    if (!__all_sync(~0u, part[0] <= kMoveAbove && part[1] <= kMoveAbove)) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float high = -INFINITY;
#pragma unroll
        for (int j = 0; j < 8; j++) high = fmaxf(high, fmaxf(s[4 * j + 2 * r] * scale, s[4 * j + 2 * r + 1] * scale));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        const float factor = move_reference(minus_ref[r], sum[r], high);
#pragma unroll
        for (int j = 0; j < 8; j++) o[4 * j + 2 * r] *= factor, o[4 * j + 2 * r + 1] *= factor;
      }
      probabilities(started(minus_ref[0]), started(minus_ref[1]));
    }
    sum[0] += part[0];
    sum[1] += part[1];

    // --- O ---
    const uint64_t v_desc = desc_sw128(buffer + 2 * C::kTileBytes);
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < C::kChunk / 16; kk++) {
      const uint32_t a[4] = {prob[2 * kk][0], prob[2 * kk][1], prob[2 * kk + 1][0], prob[2 * kk + 1][1]};
      wgmma_rs<kHeadDim, true, true>(o, a, v_desc + 128 * kk, 1);
    }
    wgmma_commit();
    if (i + 1 < chunks) convert(i + 1);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
  }

  // --- the partial ---------------------------------------------------------------------------------------
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    const int token = 2 * pair + r;
    if (token >= range.tokens) continue;
    const int64_t row = static_cast<int64_t>(range.first_token + token) * kQHeads + kv_head * kGroup + g;
    const int64_t at = row * p.splits + split;
    if (c == 0) reinterpret_cast<float2*>(p.lse)[at] = make_float2(-minus_ref[r], sum[r]);
#pragma unroll
    for (int j = 0; j < 8; j++)
      *reinterpret_cast<float2*>(p.acc + at * kHeadDim + 8 * j + 2 * c) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
  }
}

inline int launch_attention_verify_few(const AttentionParams& p, const Launch& l) {
  const int tiles = (p.max_q_len + VerifyFewConfig::kTokens - 1) / VerifyFewConfig::kTokens;
  return launch(attention_verify_few_kernel, dim3(p.splits, p.requests, tiles), dim3(VerifyFewConfig::kThreads),
                VerifyFewConfig::kSharedBytes, l, p);
}

}  // namespace msl
