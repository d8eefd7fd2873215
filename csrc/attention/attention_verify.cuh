// attention, verify: tiles of up to 8 query tokens of a request; 8 tokens x 8 heads are the 64 rows of
// one wgmma for each of the 2 KV heads.
//
// A CTA (split, request, tile of tokens) has two groups of 8 warps, each group two warpgroups: one KV
// head each. A group walks every other chunk of 32 keys:
//   load     cp.async of 16 bytes: a thread brings one piece of a K row and one of a V row to its own
//            place in a ring of raw bytes, three chunks ahead. Page ids come by cp.async too, three
//            chunks further ahead: a load to a register in flight would make every wgmma wait for it.
//            Rows that must not be read (past the range, invalid page) are filled with zeros.
//   convert  the thread that loaded a piece turns it into halves and writes them to the FP16 tiles
//            [2 heads][32 keys][64], 128-byte swizzled, double-buffered: one barrier a chunk.
//   S        wgmma m64n32k16, queries from registers (warp w of the warpgroup: tokens 2 w and 2 w + 1).
//   softmax  on registers, relative to a reference point r of each row, which moves only when a lane's
//            probabilities of a chunk add up to more than 2^15: one vote a warp, no maximum otherwise.
//            r starts at -inf, so that the first chunk's p are infinite (NaN where masked) and the vote
//            says to move.
//   O        wgmma m64n64k16, probabilities from registers, V as it stands (MN-major); it runs while the
//            next chunk is converted.
// At the end the groups are joined in a fixed order through shared memory.
//
// Sizes: per group 3 x 8 KB raw and 2 x 16 KB of FP16 tiles, 112 KB a CTA; 16 warps of at most 128
// registers: four warpgroups an SM hide each other's waits, and 48 KB in flight cover the latency.
#pragma once
#include "../common/wgmma.cuh"
#include "attention_split.cuh"

namespace msl {

struct VerifyConfig {
  static constexpr int kTokens = kSplitTokens;
  static constexpr int kGroups = 2;
  static constexpr int kGroupThreads = 256;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kChunk = 32;
  static constexpr int kStages = 3;
  static constexpr int kUnit = kGroups * kChunk;
  static constexpr int kStep = kGroups * kChunk;            // keys between a group's chunks
  static constexpr int kRows = kTokens * kQHeads;
  static constexpr int kRawBytes = kChunk * kKvSize * 2;    // a stage: K pieces by thread, then V pieces
  static constexpr int kTileBytes = kChunk * 128;           // one head's K or V, FP16
  static constexpr int kBufferBytes = 4 * kTileBytes;       // K head 0, K head 1, V head 0, V head 1
  static constexpr int kGroupBytes = 2 * kBufferBytes + kStages * kRawBytes;
  static constexpr int kSlots = 8;                          // chunks whose key masks and page ids are kept
  static constexpr int kSlotBytes = kSlots * (8 + kChunk * 4);
  static constexpr int kSharedBytes = kGroups * (kGroupBytes + kSlotBytes) + 1024;  // 1024: for alignment
  static constexpr int kOutStride = kHeadDim + 4;
  static_assert(kGroups * kRows * (kOutStride + 2) * 4 <= kGroups * kGroupBytes);
};

// 4-byte cp.async.
__device__ __forceinline__ void cp_async4(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_u32(dst)), "l"(src) : "memory");
}

// Nibbles of 8 bytes side by side: bit i of the result is key i of the chunk.
__device__ __forceinline__ uint32_t gather_nibbles(uint2 v) {
  uint32_t r = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    r |= ((v.x >> (8 * i)) & 15) << (4 * i);
    r |= ((v.y >> (8 * i)) & 15) << (4 * i + 16);
  }
  return r;
}

// 16 E4M3 bytes as 16 halves, to the two 16-byte pieces of a swizzled FP16 row at offsets `at` and at ^ 16.
// `swap` (head 1) writes the second piece first (`at` is its place then), so that the 8 lanes of a key,
// which write to two tiles, never meet a bank twice.
__device__ __forceinline__ void store_halves(char* tile, int at, bool swap, uint4 raw) {
  const uint32_t w0 = swap ? raw.z : raw.x, w1 = swap ? raw.w : raw.y, w2 = swap ? raw.x : raw.z, w3 = swap ? raw.y : raw.w;
  uint4 a, b;
  e4m3_to_half(w0, a.x, a.y);
  e4m3_to_half(w1, a.z, a.w);
  e4m3_to_half(w2, b.x, b.y);
  e4m3_to_half(w3, b.z, b.w);
  *reinterpret_cast<uint4*>(tile + at) = a;
  *reinterpret_cast<uint4*>(tile + (at ^ 16)) = b;
}

__global__ void __launch_bounds__(VerifyConfig::kThreads, 1) attention_verify_kernel(const __grid_constant__
                                                                                      AttentionParams p) {
  using C = VerifyConfig;
  extern __shared__ __align__(128) char shared_raw[];
  pdl_launch();
  char* shared = shared_raw + ((1024 - (smem_u32(shared_raw) & 1023)) & 1023);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int group = warp >> 3, member = warp & 7;        // member: warp of the group
  const int kv_head = member >> 2, pair = member & 3;    // rows 16 pair .. + 15: tokens 2 pair, 2 pair + 1
  const int split = blockIdx.x, request = blockIdx.y, tile = blockIdx.z;
  const SplitRange range = split_range<C::kTokens, C::kUnit>(p, request, tile, split);
  if (write_empty(p, range, request, tile, split)) return;

  // --- loading: the thread's piece is (key 4 member + lane / 8, piece lane mod 8) of each chunk --------
  char* buffers = shared + group * C::kGroupBytes;
  char* raw = buffers + 2 * C::kBufferBytes + (threadIdx.x & (C::kGroupThreads - 1)) * 16;
  char* slots = shared + C::kGroups * C::kGroupBytes + group * C::kSlotBytes;
  uint8_t* masks = reinterpret_cast<uint8_t*>(slots);                   // [kSlots][8 warps], 4 bits each
  int32_t* ids = reinterpret_cast<int32_t*>(slots + C::kSlots * 8);    // [kSlots][kChunk], a warp's 4 are its own
  const int first_key = range.begin + group * C::kChunk;
  const int mine = first_key < range.end ? (range.end - first_key + C::kStep - 1) / C::kStep : 0;
  const int piece = lane & 7, key_in_chunk = member * 4 + (lane >> 3);
  const char* k_src = static_cast<const char*>(p.k_cache) + piece * 16;
  const char* v_src = static_cast<const char*>(p.v_cache) + piece * 16;
  KeyCursor cursor(p, request, first_key + key_in_chunk, C::kStep, range.end);
  const auto issue = [&](int chunk, int stage, int id) {
    const int key = first_key + key_in_chunk + chunk * C::kStep;
    uint32_t row = key < range.end ? cursor.row(key, id) : kNoRow;
    const bool load = row != kNoRow;
    const uint32_t mask = __ballot_sync(~0u, load) & 0x01010101u;  // one bit a row
    if (lane == 0) masks[(chunk & (C::kSlots - 1)) * 8 + member] = static_cast<uint8_t>((mask * 0x10204080u) >> 28);
    row = load ? row : 0;
    char* dst = raw + stage * C::kRawBytes;
    cp_async16(dst, k_src + static_cast<uint64_t>(row) * kKvSize, load);
    cp_async16(dst + C::kRawBytes / 2, v_src + static_cast<uint64_t>(row) * kKvSize, load);
  };
  const int id_key = first_key + member * 4 + (lane & 3);  // lanes 0-3 fetch the warp's page ids
  const auto fetch_ids = [&](int chunk) {
    const int key = id_key + chunk * C::kStep;
    if (lane < 4 && chunk < mine && key < range.end)
      cp_async4(ids + (chunk & (C::kSlots - 1)) * C::kChunk + member * 4 + lane, cursor.table + (key >> p.page_log2));
  };

  int first_ids[C::kStages];
#pragma unroll
  for (int i = 0; i < C::kStages; i++) first_ids[i] = cursor.fetch();
  const float scale = p.softmax_scale * __ldcg(p.k_scale) * kLog2e;
  bool waited = false;
#pragma unroll
  for (int i = 0; i < C::kStages; i++) {
    fetch_ids(i + C::kStages);
    if (i < mine) {
      if (!waited && first_key + i * C::kStep + C::kChunk > range.old_end) {
        pdl_wait();
        waited = true;
      }
      issue(i, i, first_ids[i]);
    }
    cp_async_commit();
  }
  if (!waited) pdl_wait();

  // --- queries: A fragments of the 4 k16 steps ---------------------------------------------------------
  uint32_t q[4][4];
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

  float o[32];
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.0f;
  float minus_ref[2] = {INFINITY, INFINITY}, sum[2] = {0.0f, 0.0f};

  // Where the thread's first piece goes in the K tile of its head; V's is two tiles on.
  const int half_head = piece >> 2;
  const int place = half_head * C::kTileBytes + key_in_chunk * 128 + ((((piece & 3) * 2 + half_head) ^ (key_in_chunk & 7)) << 4);
  int stage = 0, key0 = first_key;
  // Turns chunk i's bytes (this thread's own: no barrier before) into halves and starts the loading of the
  // chunk that takes their place. Past the last chunk it converts bytes that nothing reads.
  const auto convert = [&](int i) {
    cp_async_wait<C::kStages - 1>();
    __syncwarp();  // the warp's page ids have landed too
    const char* mine_raw = raw + stage * C::kRawBytes;
    const uint4 k_raw = *reinterpret_cast<const uint4*>(mine_raw);
    const uint4 v_raw = *reinterpret_cast<const uint4*>(mine_raw + C::kRawBytes / 2);
    char* buffer = buffers + (i & 1) * C::kBufferBytes;
    store_halves(buffer, place, half_head != 0, k_raw);
    store_halves(buffer + 2 * C::kTileBytes, place, half_head != 0, v_raw);
    fence_proxy_async();
    const int next = i + C::kStages;
    if (next < mine) issue(next, stage, ids[(next & (C::kSlots - 1)) * C::kChunk + key_in_chunk]);
    fetch_ids(next + C::kStages);
    cp_async_commit();
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
  };
  if (mine > 0) convert(0);
  for (int i = 0; i < mine; i++, key0 += C::kStep) {
    // Chunk i's tiles are written, and every warp is done with chunk i - 1's, whose buffer the next
    // conversion takes.
    named_barrier(1 + group, C::kGroupThreads);
    const char* buffer = buffers + (i & 1) * C::kBufferBytes;

    // --- S ---
    float s[16];
    const uint64_t k_desc = desc_sw128(buffer + kv_head * C::kTileBytes);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int st = 0; st < 4; st++) wgmma_rs<32, true>(s, q[st], k_desc + 2 * st, st > 0);
    wgmma_commit();
    const uint2 mask = *reinterpret_cast<const uint2*>(masks + (i & (C::kSlots - 1)) * 8);
    const bool clean = mask.x == 0x0f0f0f0fu && mask.y == 0x0f0f0f0fu && key0 + C::kChunk - 1 <= range.first_pos &&
                       (p.window == 0 || key0 > range.first_pos + range.tokens - 1 - p.window);
    wgmma_wait<0>();
    wgmma_fence_operand(s);

    if (!clean) {
      const uint32_t seen = gather_nibbles(mask);
#pragma unroll
      for (int e = 0; e < 16; e++) {
        const int at = 8 * (e >> 2) + 2 * c + (e & 1), key = key0 + at, pos = pos0 + ((e >> 1) & 1);
        if (!((seen >> at) & 1) || key > pos || (p.window > 0 && key <= pos - p.window)) s[e] = -INFINITY;
      }
    }

    // --- softmax: s[4 j + 2 r + e] is row r, key 8 j + 2 c + e; prob[j][r] the pair of keys as halves ---
    uint32_t prob[4][2];
    float part[2];
    const auto probabilities = [&](float minus0, float minus1) {
      part[0] = part[1] = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float minus = r ? minus1 : minus0;
          const float p0 = exp2_approx(fmaf(s[4 * j + 2 * r], scale, minus));
          const float p1 = exp2_approx(fmaf(s[4 * j + 2 * r + 1], scale, minus));
          part[r] += p0 + p1;
          prob[j][r] = half2_bits(p0, p1);
        }
    };
    probabilities(minus_ref[0], minus_ref[1]);
    if (!__all_sync(~0u, part[0] <= kMoveAbove && part[1] <= kMoveAbove)) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float high = -INFINITY;
#pragma unroll
        for (int j = 0; j < 4; j++) high = fmaxf(high, fmaxf(s[4 * j + 2 * r] * scale, s[4 * j + 2 * r + 1] * scale));
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
    const uint64_t v_desc = desc_sw128(buffer + (2 + kv_head) * C::kTileBytes);
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
      const uint32_t a[4] = {prob[2 * kk][0], prob[2 * kk][1], prob[2 * kk + 1][0], prob[2 * kk + 1][1]};
      wgmma_rs<kHeadDim, true, true>(o, a, v_desc + 128 * kk, 1);
    }
    wgmma_commit();
    convert(i + 1);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
  }

  // --- join of the groups, in the buffers' place -------------------------------------------------------
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
  cp_async_wait<0>();
  __syncthreads();
  float* out = reinterpret_cast<float*>(shared);
  float2* stats = reinterpret_cast<float2*>(out + C::kGroups * C::kRows * C::kOutStride);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = group * C::kRows + (2 * pair + r) * kQHeads + kv_head * kGroup + g;
    if (c == 0) stats[row] = make_float2(-minus_ref[r], sum[r]);
#pragma unroll
    for (int j = 0; j < 8; j++)
      *reinterpret_cast<float2*>(out + row * C::kOutStride + 8 * j + 2 * c) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
  }
  __syncthreads();
  join_groups<C::kGroups, C::kRows, C::kOutStride>(p, range, split, out, stats);
}

inline int launch_attention_verify(const AttentionParams& p, const Launch& l) {
  const int tiles = (p.max_q_len + VerifyConfig::kTokens - 1) / VerifyConfig::kTokens;
  return launch(attention_verify_kernel, dim3(p.splits, p.requests, tiles), dim3(VerifyConfig::kThreads),
                VerifyConfig::kSharedBytes, l, p);
}

}  // namespace msl
