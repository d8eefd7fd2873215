// attention, verify: what the two kernels (attention_verify.cuh, attention_verify_few.cuh) share. Both work on tiles of up
// to 8 query tokens of a request and chunks of 64 keys: 8 tokens x 8 heads are the 64 rows of one wgmma for each of the 2
// KV heads, one warpgroup a KV head, and its warp w has tokens 2 w and 2 w + 1. K and V come as E4M3 rows of 128 bytes
// from anywhere and are turned into FP16 tiles of 128-byte swizzled rows, once a key.
#pragma once
#include "../common/wgmma.cuh"
#include "attention_split.cuh"

namespace msl {

constexpr int kVerifyChunk = 64;                          // keys
constexpr int kVerifyTileBytes = kVerifyChunk * 128;      // one head's K or V of a chunk, FP16, 128-byte swizzled
constexpr int kVerifyChunkBytes = 4 * kVerifyTileBytes;   // K head 0, K head 1, V head 0, V head 1
constexpr int kVerifyRawBytes = kVerifyChunk * kKvSize * 2;  // its K and V as they come from the cache

// 4-byte cp.async.
__device__ __forceinline__ void cp_async4(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_u32(dst)), "l"(src) : "memory");
}

// 16 E4M3 bytes as 16 halves, to the places `at` and at ^ 16.
__device__ __forceinline__ void store_halves(char* tile, int at, uint4 raw) {
  uint4 a, b;
  e4m3_to_half(raw.x, a.x, a.y);
  e4m3_to_half(raw.y, a.z, a.w);
  e4m3_to_half(raw.z, b.x, b.y);
  e4m3_to_half(raw.w, b.z, b.w);
  *reinterpret_cast<uint4*>(tile + at) = a;
  *reinterpret_cast<uint4*>(tile + (at ^ 16)) = b;
}

// The loading half, in 8 warps of 8 keys of each chunk: rows of K and V by cp.async into a ring of kStages raw chunks,
// kStages ahead, and from there as halves to the FP16 tiles, each piece of 16 bytes by the thread that brought it. A lane
// finds the row of key lane mod 8 of its warp; page ids come by cp.async too, kStages further ahead: a load to a register
// in flight would be waited for. Rows that must not be read (past the range, invalid page) are filled with zeros.
template <int kStages, int kMaskSlots>
struct VerifyLoader {
  const KeyCursor cursor;
  const char *k_src, *v_src;
  char* raw;       // the thread's pieces: K, K four keys on, V, V four keys on, 4096 bytes apart
  int32_t* ids;    // [kStages][64]
  uint8_t* masks;  // [kMaskSlots][8]: the keys that may be seen, a byte a warp
  int own_key, end, place, lane;

  // `thread`: of the 256; raw_, ids_ and masks_: the CTA's.
  __device__ __forceinline__ VerifyLoader(const AttentionParams& p, const SplitRange& range, int request, int thread,
                                          char* raw_, char* ids_, char* masks_)
      : cursor(p, request, 0, 0, 0), raw(raw_ + thread * 16), end(range.end), lane(thread & 31) {
    const int warp = thread >> 5, own = warp * 8 + (lane & 7);
    // A quarter of the warp holds one head's pieces of two neighbouring keys, so that they meet no bank twice when they
    // go to the swizzled tile as halves.
    const int piece = (lane & 3) | ((lane >> 1) & 4), key = warp * 8 + key_in_warp();
    k_src = static_cast<const char*>(p.k_cache) + piece * 16;
    v_src = static_cast<const char*>(p.v_cache) + piece * 16;
    ids = reinterpret_cast<int32_t*>(ids_) + own;
    masks = reinterpret_cast<uint8_t*>(masks_) + warp;
    own_key = range.begin + own;
    place = (piece >> 2) * kVerifyTileBytes + key * 128 + ((((piece & 3) * 2) ^ (key & 7)) << 4);
  }
  __device__ __forceinline__ int key_in_warp() const { return ((lane >> 2) & 1) | ((lane >> 3) & 2); }  // and 4 on

  __device__ __forceinline__ int first_id(int chunk) const {
    const int key = own_key + chunk * kVerifyChunk;
    return key < end ? __ldcg(cursor.table + (key >> cursor.page_log2)) : -1;
  }
  __device__ __forceinline__ void fetch_id(int chunk, int stage) const {
    const int key = own_key + chunk * kVerifyChunk;
    if (lane < 8 && key < end) cp_async4(ids + stage * kVerifyChunk, cursor.table + (key >> cursor.page_log2));
  }
  // Starts the chunk's loads; id: the page of the lane's key.
  __device__ __forceinline__ void issue(int chunk, int stage, int id) const {
    const int key = own_key + chunk * kVerifyChunk;
    const uint32_t row = key < end ? cursor.row(key, id) : kNoRow;
    const uint32_t seen = __ballot_sync(~0u, row != kNoRow);
    if (lane == 0) masks[(chunk & (kMaskSlots - 1)) * 8] = static_cast<uint8_t>(seen);
    char* to = raw + stage * kVerifyRawBytes;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t r = __shfl_sync(~0u, row, key_in_warp() + 4 * i);
      const bool load = seen == ~0u || r != kNoRow;
      const uint64_t at = static_cast<uint64_t>(load ? r : 0) * kKvSize;
      cp_async16(to + i * 4096, k_src + at, load);
      cp_async16(to + (2 + i) * 4096, v_src + at, load);
    }
  }
  // The thread's pieces of the chunk in `stage`, which have landed.
  __device__ __forceinline__ void take(int stage, uint4 (&x)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = *reinterpret_cast<const uint4*>(raw + stage * kVerifyRawBytes + j * 4096);
  }
  // ... as halves to a chunk's tiles.
  __device__ __forceinline__ void put(char* tiles, const uint4 (&x)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; j++)  // four keys on, the swizzle differs in one bit
      store_halves(tiles + (j >> 1) * 2 * kVerifyTileBytes, j & 1 ? (place ^ 64) + 512 : place, x[j]);
  }
};

// The 16 rows of a warp, of one KV head: row g of 8 is head g of the warp's first token, row g + 8 that of its second.
// Probabilities are relative to a reference point r of each row, which moves only when a lane's probabilities of a chunk
// add up to more than 2^15: one vote a warp, no maximum otherwise. r starts at -inf, so that the first chunk's p are
// infinite (NaN where masked) and the vote says to move.
struct VerifyRows {
  float o[32];
  float minus_ref[2], sum[2];  // sum: the lane's share
  float scale;
  int first_pos;               // position of row g; row g + 8: one more
  int clean_from, clean_to;    // a chunk whose first key is between is visible to every query, if its pages are valid
  int window;

  __device__ __forceinline__ void start(const AttentionParams& p, const SplitRange& range, int pair, float scale_) {
    scale = scale_;
#pragma unroll
    for (int i = 0; i < 32; i++) o[i] = 0.0f;
    minus_ref[0] = minus_ref[1] = INFINITY;
    sum[0] = sum[1] = 0.0f;
    first_pos = range.first_pos + 2 * pair;
    clean_to = range.first_pos - (kVerifyChunk - 1);
    clean_from = p.window > 0 ? range.first_pos + range.tokens - p.window : INT32_MIN;
    window = p.window;
  }

  __device__ __forceinline__ void probabilities(const float (&s)[32], uint32_t (&prob)[4][4], float (&part)[2], float minus0,
                                                float minus1) const {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float minus = r ? minus1 : minus0;
        const float p0 = exp2_approx(fmaf(s[4 * j + 2 * r], scale, minus));
        const float p1 = exp2_approx(fmaf(s[4 * j + 2 * r + 1], scale, minus));
        part[r] = j == 0 ? p0 + p1 : part[r] + (p0 + p1);
        prob[j >> 1][2 * (j & 1) + r] = half2_bits(p0, p1);
      }
  }

  // Scores of the chunk that begins with key0 to probabilities, as the A fragments of the products with V; bit i of
  // `seen`: key i may be seen. s[4 j + 2 r + e] is row g + 8 r, key 8 j + 2 c + e.
  __device__ __forceinline__ void softmax(float (&s)[32], uint32_t (&prob)[4][4], int key0, uint2 seen, int c) {
    if ((seen.x & seen.y) != ~0u || key0 > clean_to || key0 < clean_from) {
      int first = key0 + 2 * c;
      asm volatile("" : "+r"(first));  // nothing of this rare block is to be prepared outside it
      const uint32_t lo = seen.x >> (2 * c), hi = seen.y >> (2 * c);
#pragma unroll
      for (int e = 0; e < 32; e++) {
        const int key = first + 8 * (e >> 2) + (e & 1), pos = first_pos + ((e >> 1) & 1);
        const uint32_t bit = ((e < 16 ? lo : hi) >> (8 * ((e >> 2) & 3) + (e & 1))) & 1;
        if (!bit || key > pos || (window > 0 && key <= pos - window)) s[e] = -INFINITY;
      }
    }
    float part[2];
    probabilities(s, prob, part, minus_ref[0], minus_ref[1]);
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
      probabilities(s, prob, part, started(minus_ref[0]), started(minus_ref[1]));
    }
    sum[0] += part[0];
    sum[1] += part[1];
  }

  // The split's partial, straight from the accumulators.
  __device__ __forceinline__ void write(const AttentionParams& p, const SplitRange& range, int split, int kv_head, int pair,
                                        int g, int c) {
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
        *reinterpret_cast<float2*>(p.acc + at * kHeadDim + 8 * j + 2 * c) =
            make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
    }
  }
};

// O += P V of a chunk: `v` describes the head's V tile, as it stands (MN-major).
__device__ __forceinline__ void verify_values(float (&o)[32], const uint32_t (&prob)[4][4], uint64_t v) {
  wgmma_fence_operand(o);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kVerifyChunk / 16; kk++) wgmma_rs<kHeadDim, true, true>(o, prob[kk], v + 128 * kk, 1);
  wgmma_commit();
}

}  // namespace msl
