// attention, verify, many keys a split: what attention_verify.cuh does, with warps for loading and warps for
// multiplying. Measured on an H200: one request of 128k 24.7 us against 29.2, 32 requests of 8k (2050 keys a split) 42
// against 44.6; with 250 keys a split a whole step of 32 tokens is 0.8% slower with it.
//
// A CTA (split, request, tile of tokens) walks its keys in chunks of 64, in two roles that meet at the barriers of a
// ring of FP16 tiles [K head 0, K head 1, V head 0, V head 1][64 keys][64], 128-byte swizzled:
//   loading      8 warps: a thread brings two pieces of 16 bytes of K rows and two of V rows, three chunks ahead, in
//                registers (page ids three chunks further ahead); when the chunk's place in the ring is free it turns
//                them into halves and writes them there. Rows that must not be read (past the range, invalid page) are
//                zeros. In warps of their own, because a wgmma would wait for every load to a register in flight.
//   multiplying  2 warpgroups, one KV head each: S by wgmma m64n64k16, queries from registers (warp w of the
//                warpgroup: tokens 2 w and 2 w + 1), one chunk ahead of the softmax; softmax on registers, as in
//                attention_verify.cuh; O by wgmma m64n64k16, probabilities from registers, V as it stands (MN-major).
// The partial goes to memory straight from the accumulators.
//
// Sizes: a ring of 3 x 32 KB (5 are not faster); 48 KB in flight in the loading warps' registers cover the latency of
// device memory. 80 registers a loading thread and 168 a multiplying one: one CTA an SM.
#pragma once
#include "attention_verify.cuh"

namespace msl {

struct VerifyLongConfig {
  static constexpr int kTokens = kSplitTokens;
  static constexpr int kConsumers = 256, kProducers = 256, kThreads = kConsumers + kProducers;
  static constexpr int kChunk = 64;
  static constexpr int kDepth = 3;                          // chunks of the ring, and in a producer's registers
  static constexpr int kUnit = kChunk;
  static constexpr int kTileBytes = kChunk * 128;           // one head's K or V, FP16
  static constexpr int kBufferBytes = 4 * kTileBytes;       // K head 0, K head 1, V head 0, V head 1
  static constexpr int kMasks = kDepth * kBufferBytes;      // 64 bits a chunk: its keys that may be seen
  static constexpr int kBarriers = kMasks + kDepth * 8;     // full, empty
  static constexpr int kSharedBytes = kBarriers + 2 * kDepth * 8;
};

// The loading half of a CTA.
__device__ __forceinline__ void verify_long_load(const AttentionParams& p, const SplitRange& range, int request, int chunks,
                                               char* ring, uint64_t* full, uint64_t* empty) {
  using C = VerifyLongConfig;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - C::kConsumers / 32;
  const int piece = lane & 7, key_in_chunk = warp * 8 + (lane >> 3);  // and four keys on
  const char* k_src = static_cast<const char*>(p.k_cache) + piece * 16;
  const char* v_src = static_cast<const char*>(p.v_cache) + piece * 16;
  const KeyCursor cursor(p, request, 0, 0, 0);
  const auto fetch_id = [&](int chunk) {  // of the warp's key lane mod 8
    const int key = range.begin + chunk * C::kChunk + warp * 8 + piece;
    return key < range.end ? __ldcg(cursor.table + (key >> p.page_log2)) : -1;
  };
  uint4 k[C::kDepth][2], v[C::kDepth][2];
  int ids[C::kDepth];
  uint32_t seen[C::kDepth];
  bool waited = false;
  const auto load = [&](int chunk, int s) {
    if (!waited && range.begin + (chunk + 1) * C::kChunk > range.old_end) {
      pdl_wait();
      waited = true;
    }
    uint32_t mask[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int key = range.begin + chunk * C::kChunk + key_in_chunk + 4 * j;
      const uint32_t row = cursor.row(key, __shfl_sync(~0u, ids[s], (lane >> 3) + 4 * j));
      const uint64_t at = static_cast<uint64_t>(row) * kKvSize;
      k[s][j] = v[s][j] = make_uint4(0, 0, 0, 0);
      if (row != kNoRow) {
        k[s][j] = __ldcg(reinterpret_cast<const uint4*>(k_src + at));
        v[s][j] = __ldcg(reinterpret_cast<const uint4*>(v_src + at));
      }
      mask[j] = __ballot_sync(~0u, row != kNoRow) & 0x01010101u;  // one bit a row
    }
    seen[s] = (mask[0] * 0x10204080u) >> 28 | (mask[1] * 0x10204080u) >> 28 << 4;
  };
#pragma unroll
  for (int s = 0; s < C::kDepth; s++) ids[s] = fetch_id(s);
#pragma unroll
  for (int s = 0; s < C::kDepth; s++)
    if (s < chunks) load(s, s);
#pragma unroll
  for (int s = 0; s < C::kDepth; s++) ids[s] = fetch_id(s + C::kDepth);

  // Where the thread's first piece goes in the K tiles; four keys on, the swizzle differs in one bit.
  const int half_head = piece >> 2;
  const int place = half_head * C::kTileBytes + key_in_chunk * 128 + ((((piece & 3) * 2 + half_head) ^ (key_in_chunk & 7)) << 4);
  uint32_t phase = 1;  // an empty ring: the first pass does not wait
  for (int first = 0; first < chunks; first += C::kDepth, phase ^= 1) {
#pragma unroll
    for (int s = 0; s < C::kDepth; s++) {
      const int chunk = first + s;
      if (chunk >= chunks) break;
      mbar_wait(&empty[s], phase);
      char* to = ring + s * C::kBufferBytes;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        store_halves(to, j ? (place ^ 64) + 512 : place, half_head != 0, k[s][j]);
        store_halves(to + 2 * C::kTileBytes, j ? (place ^ 64) + 512 : place, half_head != 0, v[s][j]);
      }
      if (lane == 0) ring[C::kMasks + s * 8 + warp] = static_cast<char>(seen[s]);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(&full[s]);
      if (chunk + C::kDepth < chunks) {
        load(chunk + C::kDepth, s);
        ids[s] = fetch_id(chunk + 2 * C::kDepth);
      }
    }
  }
}

// The multiplying half.
__device__ __forceinline__ void verify_long_multiply(const AttentionParams& p, const SplitRange& range, int split, int chunks,
                                               const char* ring, uint64_t* full, uint64_t* empty) {
  using C = VerifyLongConfig;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int kv_head = warp >> 2, pair = warp & 3;  // rows 16 pair .. + 15: tokens 2 pair, 2 pair + 1
  const float scale = p.softmax_scale * __ldcg(p.k_scale) * kLog2e;
  pdl_wait();
  uint32_t q[4][4];  // A fragments of the 4 k16 steps
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int token = 2 * pair + r;
    const bool live = token < range.tokens;
    const int64_t row = static_cast<int64_t>(range.first_token + (live ? token : 0)) * kQHeads + kv_head * kGroup + g;
    const uint32_t* src = reinterpret_cast<const uint32_t*>(static_cast<const __half*>(p.q) + row * kHeadDim);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      q[s][r] = live ? __ldcg(src + 8 * s + c) : 0;
      q[s][2 + r] = live ? __ldcg(src + 8 * s + 4 + c) : 0;
    }
  }
  const int pos0 = range.first_pos + 2 * pair;  // of the lane's rows: pos0 (row g), pos0 + 1 (row g + 8)
  // Chunks whose first key is in [clean_from, clean_to] are visible to every query if their pages are valid.
  const int clean_to = range.first_pos - (C::kChunk - 1);
  const int clean_from = p.window > 0 ? range.first_pos + range.tokens - p.window : INT32_MIN;

  float o[32];
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.0f;
  float minus_ref[2] = {INFINITY, INFINITY}, sum[2] = {0.0f, 0.0f};

  const auto scores = [&](int i, float (&s)[32]) {
    const int at = i % C::kDepth;
    mbar_wait(&full[at], (i / C::kDepth) & 1);
    const uint64_t k_desc = desc_sw128(ring + at * C::kBufferBytes + kv_head * C::kTileBytes);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int st = 0; st < 4; st++) wgmma_rs<C::kChunk, true>(s, q[st], k_desc + 2 * st, st > 0);
    wgmma_commit();
  };
  // O of chunk i from its scores, once that of the chunk before is done.
  const auto values = [&](int i, const float (&s)[32]) {
    const int at = i % C::kDepth, key0 = range.begin + i * C::kChunk;
    wgmma_fence_operand(o);
    if (i > 0 && lane == 0) mbar_arrive(&empty[(i - 1) % C::kDepth]);
    const uint2 seen = *reinterpret_cast<const uint2*>(ring + C::kMasks + at * 8);
    const bool clean = (seen.x & seen.y) == 0xffffffffu && key0 <= clean_to && key0 >= clean_from;
    // s[4 j + 2 r + e] is row r, key 8 j + 2 c + e; prob[j][r] the pair of keys as halves.
    uint32_t prob[8][2];
    float part[2], high[2];
    const auto softmax = [&](auto value) {
      const auto probabilities = [&](float minus0, float minus1) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float minus = r ? minus1 : minus0;
            const float p0 = exp2_approx(fmaf(value(4 * j + 2 * r), scale, minus));
            const float p1 = exp2_approx(fmaf(value(4 * j + 2 * r + 1), scale, minus));
            part[r] = j == 0 ? p0 + p1 : part[r] + (p0 + p1);
            prob[j][r] = half2_bits(p0, p1);
          }
      };
      probabilities(minus_ref[0], minus_ref[1]);
      if (__all_sync(~0u, part[0] <= kMoveAbove && part[1] <= kMoveAbove)) return;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        high[r] = -INFINITY;
#pragma unroll
        for (int j = 0; j < 8; j++)
          high[r] = fmaxf(high[r], fmaxf(value(4 * j + 2 * r) * scale, value(4 * j + 2 * r + 1) * scale));
        high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 1));
        high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 2));
        const float factor = move_reference(minus_ref[r], sum[r], high[r]);
#pragma unroll
        for (int j = 0; j < 8; j++) o[4 * j + 2 * r] *= factor, o[4 * j + 2 * r + 1] *= factor;
      }
      probabilities(started(minus_ref[0]), started(minus_ref[1]));
    };
    if (clean) {
      softmax([&](int e) { return s[e]; });
    } else {
      int first = key0 + 2 * c;
      asm volatile("" : "+r"(first));  // nothing of this rare block is to be prepared outside it
      const uint32_t lo = seen.x >> (2 * c), hi = seen.y >> (2 * c);
      softmax([&](int e) {
        const int key = first + 8 * (e >> 2) + (e & 1), pos = pos0 + ((e >> 1) & 1);
        const uint32_t bit = ((e < 16 ? lo : hi) >> (8 * ((e >> 2) & 3) + (e & 1))) & 1;
        return !bit || key > pos || (p.window > 0 && key <= pos - p.window) ? -INFINITY : s[e];
      });
    }
    sum[0] += part[0];
    sum[1] += part[1];
    const uint64_t v_desc = desc_sw128(ring + at * C::kBufferBytes + (2 + kv_head) * C::kTileBytes);
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < C::kChunk / 16; kk++) {
      const uint32_t a[4] = {prob[2 * kk][0], prob[2 * kk][1], prob[2 * kk + 1][0], prob[2 * kk + 1][1]};
      wgmma_rs<kHeadDim, true, true>(o, a, v_desc + 128 * kk, 1);
    }
    wgmma_commit();
  };
  float even[32], odd[32];
  scores(0, even);
  wgmma_wait<0>();
  for (int i = 0;;) {
    wgmma_fence_operand(even);
    if (i + 1 == chunks) {
      wgmma_wait<0>();
      values(i, even);
      break;
    }
    scores(i + 1, odd);
    wgmma_wait<1>();  // O of the chunk before
    values(i++, even);
    wgmma_wait<1>();  // the next scores
    wgmma_fence_operand(odd);
    if (i + 1 == chunks) {
      wgmma_wait<0>();
      values(i, odd);
      break;
    }
    scores(i + 1, even);
    wgmma_wait<1>();
    values(i++, odd);
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  wgmma_fence_operand(o);

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

__global__ void __launch_bounds__(VerifyLongConfig::kThreads, 1) attention_verify_long_kernel(const __grid_constant__
                                                                                      AttentionParams p) {
  using C = VerifyLongConfig;
  extern __shared__ __align__(1024) char shared_verify_long[];
  pdl_launch();
  const int split = blockIdx.x, request = blockIdx.y, tile = blockIdx.z;
  const SplitRange range = split_range<C::kTokens, C::kUnit>(p, request, tile, split);
  if (write_empty(p, range, request, tile, split)) return;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared_verify_long + C::kBarriers);
  uint64_t* empty = full + C::kDepth;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kDepth; s++) {
      mbar_init(&full[s], C::kProducers / 32);
      mbar_init(&empty[s], C::kConsumers / 32);
    }
    mbar_init_fence();
  }
  __syncthreads();
  const int chunks = (range.end - range.begin + C::kChunk - 1) / C::kChunk;
  if (threadIdx.x >= C::kConsumers) {
    setmaxnreg_dec<80>();
    verify_long_load(p, range, request, chunks, shared_verify_long, full, empty);
  } else {
    setmaxnreg_inc<168>();
    verify_long_multiply(p, range, split, chunks, shared_verify_long, full, empty);
  }
}

inline int launch_attention_verify_long(const AttentionParams& p, const Launch& l) {
  const int tiles = (p.max_q_len + VerifyLongConfig::kTokens - 1) / VerifyLongConfig::kTokens;
  return launch(attention_verify_long_kernel, dim3(p.splits, p.requests, tiles), dim3(VerifyLongConfig::kThreads),
                VerifyLongConfig::kSharedBytes, l, p);
}

}  // namespace msl
