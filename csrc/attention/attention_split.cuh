// attention, split kernel: a few queries a request (decode, verify) over the paged E4M3 cache.
//
// A CTA owns one split of the visible keys of one tile of queries (1 token, or up to 8, of one
// request) for all 16 heads: a cache row of 128 bytes holds both KV heads. Its 8 warps form groups
// (1 warp for decode, 4 for verify: KV head x half of the tokens); a group walks its own chunks of 16
// (32) keys through its own ring in shared memory, so groups never wait for each other before the end.
//   load     cp.async of 16 bytes, 8 lanes a row, K and V; page ids are fetched one chunk ahead.
//            Rows that must not be read (past the range, invalid page) are filled with zeros.
//   S        m16n8k16, FP16: queries on M, keys on N. A lane reads 16 contiguous bytes of a key, and
//            the queries' registers hold the same order of the head dimension, so E4M3 -> FP16 is one
//            instruction a register. Decode: rows 0-7 are KV head 0's queries and rows 8-15 head 1's;
//            zeros in the other half of each A fragment let both heads share one S tile.
//   softmax  on registers. The reference point r of a row moves only when a score passes it by 2^14
//            (one vote a chunk); it starts 8 below the maximum so that FP16 probabilities keep 2^-32.
//   O^T      V^T on M, queries on N: the S accumulators are the B fragments as they stand, and V's
//            fragments are byte pairs of adjacent keys (one byte permute per two registers).
// At the end the groups are joined in a fixed order through shared memory and the CTA writes one
// partial: acc = sum p v, lse = (r, sum p). A split without keys writes (-inf, 0) and no acc.
//
// The split of keys depends on the request's own lengths and the plan, never on the batch. Which rows
// may be loaded before the wait: those older than this step's tokens (no kernel of the step writes
// them); page table and lengths are the caller's and no kernel writes them either.
//
// Sizes: rings of 96 KB (decode 8 x 3 x 4 KB, verify 2 x 6 x 8 KB) leave room for a second CTA or the
// neighbouring kernel's on the SM and keep 64-96 KB in flight, more than bandwidth x latency needs.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../include/model.h"
#include "attention.h"

namespace msl {

template <int kTokens_>
struct SplitConfig {
  static constexpr int kTokens = kTokens_;                  // queries a tile: 1 or 8
  static constexpr int kWarps = 8;
  static constexpr int kGroupWarps = kTokens == 1 ? 1 : 4;
  static constexpr int kGroups = kWarps / kGroupWarps;
  static constexpr int kChunk = kTokens == 1 ? 16 : 32;     // keys a group handles at a time
  static constexpr int kStages = kTokens == 1 ? 3 : 6;
  static constexpr int kMTiles = kTokens == 1 ? 1 : 2;      // m16 tiles of queries a warp
  static constexpr int kNTiles = 2 * kMTiles;               // 8-query columns of O^T a warp
  static constexpr int kRows = kTokens * kQHeads;           // queries x heads a CTA
  static constexpr int kUnit = kGroups * kChunk;            // splits are multiples of this
  static constexpr int kStageBytes = kChunk * kKvSize * 2;
  static constexpr int kRingBytes = kGroups * kStages * kStageBytes;
  static constexpr int kOutStride = kHeadDim + 4;           // floats between rows in the join
  static constexpr int kJoinBytes = kGroups * kRows * (kOutStride + 2) * 4;
  static constexpr int kSharedBytes = (kRingBytes > kJoinBytes ? kRingBytes : kJoinBytes) + kGroups * kStages * 4;
  static constexpr int kMinCtas = kTokens == 1 ? 2 : 1;
};

__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 2^x; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Bytes 0, 1 (kHigh: 2, 3) of a word of E4M3 as two halves, exact.
template <bool kHigh>
__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t w) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(kHigh ? w >> 16 : w)));
  return r;
}
__device__ __forceinline__ uint32_t half2_bits(float lo, float hi) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Where the 16-byte piece `piece` of row `key` stands in a chunk: K so that 8 lanes reading one 64-byte
// half of two keys, V so that 16 lanes reading 32 bytes of four even or odd keys, meet no bank twice.
__device__ __forceinline__ int k_offset(int key, int piece) { return key * 128 + ((piece ^ ((key & 1) << 2)) << 4); }
__device__ __forceinline__ int v_offset(int key, int piece) { return key * 128 + ((piece ^ (key & 6)) << 4); }

// The keys of one CTA.
struct SplitRange {
  int tokens;       // queries of this tile, 0: nothing to do
  int first_token;  // row of q
  int first_pos;    // position of the tile's first query
  int begin, end;   // keys of this split
  int old_end;      // keys below it were not written in this step
};

template <class C>
__device__ __forceinline__ SplitRange split_range(const AttentionParams& p, int request, int tile, int split) {
  SplitRange r;
  const int q_begin = __ldcg(p.cu_seqlens_q + request), q_end = __ldcg(p.cu_seqlens_q + request + 1);
  const int length = __ldcg(p.cache_seqlens + request);
  const int q_len = q_end - q_begin;
  r.tokens = min(q_len - tile * C::kTokens, C::kTokens);
  r.first_token = q_begin + tile * C::kTokens;
  r.old_end = length - q_len;
  r.first_pos = r.old_end + tile * C::kTokens;
  const int last = min(r.first_pos + r.tokens, static_cast<int>(min(static_cast<int64_t>(p.table_width) << p.page_log2,
                                                                    static_cast<int64_t>(0x7fffffff))));
  const int first = p.window > 0 ? max(0, r.first_pos - p.window + 1) : 0;
  const int visible = max(0, last - first);
  const int per_split = ((visible + p.splits - 1) / p.splits + C::kUnit - 1) / C::kUnit * C::kUnit;
  r.begin = first + static_cast<int>(min(static_cast<int64_t>(split) * per_split, static_cast<int64_t>(visible)));
  r.end = min(first + visible, r.begin + per_split);
  return r;
}

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, C::kMinCtas) attention_split_kernel(const __grid_constant__
                                                                                       AttentionParams p) {
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int group = warp / C::kGroupWarps, member = warp % C::kGroupWarps;
  const int split = blockIdx.x, request = blockIdx.y, tile = blockIdx.z;
  const SplitRange range = split_range<C>(p, request, tile, split);

  // Rows of q that belong to no request (a padded step) are empty too.
  if (request == p.requests - 1 && tile == 0) {
    const int covered = __ldcg(p.cu_seqlens_q + p.requests);
    if (covered < p.tokens) {
      pdl_wait();
      for (int64_t i = static_cast<int64_t>(covered) * kQHeads + threadIdx.x; i < static_cast<int64_t>(p.tokens) * kQHeads;
           i += C::kWarps * 32)
        reinterpret_cast<float2*>(p.lse)[i * p.splits + split] = make_float2(-INFINITY, 0.0f);
    }
  }
  const int keys = range.end - range.begin;
  if (range.tokens <= 0 || keys <= 0) {
    pdl_wait();
    for (int i = threadIdx.x; i < max(range.tokens, 0) * kQHeads; i += C::kWarps * 32)
      reinterpret_cast<float2*>(p.lse)[(static_cast<int64_t>(range.first_token) * kQHeads + i) * p.splits + split] =
          make_float2(-INFINITY, 0.0f);
    return;
  }

  // --- loading -------------------------------------------------------------------------------------
  constexpr int kWarpRows = C::kChunk / C::kGroupWarps;  // rows of a chunk that this warp loads
  constexpr int kPasses = kWarpRows / 4;
  char* ring = shared + group * (C::kStages * C::kStageBytes);
  uint32_t* valid = reinterpret_cast<uint32_t*>(shared + C::kSharedBytes - C::kGroups * C::kStages * 4) +
                    group * C::kStages;
  const int32_t* table = p.page_table + request * p.table_stride;
  const int page_mask = (1 << p.page_log2) - 1;
  const int own_key = member * kWarpRows + (lane & (kWarpRows - 1));  // the key whose page id this lane fetches
  const int chunks = (keys + C::kChunk - 1) / C::kChunk;
  const int mine = chunks > group ? (chunks - group + C::kGroups - 1) / C::kGroups : 0;  // chunks of this group

  auto chunk_key = [&](int i) { return range.begin + (group + i * C::kGroups) * C::kChunk; };
  auto fetch_id = [&](int i) {
    const int key = chunk_key(i) + own_key;
    return i < mine && key < range.end ? __ldcg(table + (key >> p.page_log2)) : -1;
  };
  auto issue = [&](int i, int id) {
    const int stage = i % C::kStages;
    const int key0 = chunk_key(i);
    char* k_tile = ring + stage * C::kStageBytes;
    char* v_tile = k_tile + C::kChunk * kKvSize;
    const bool ok = id >= 0 && id < p.pages;
    const uint32_t mask = __ballot_sync(~0u, ok);
    if (lane == 0) {
      if constexpr (C::kGroupWarps == 1) valid[stage] = mask & 0xffff;
      else reinterpret_cast<uint8_t*>(valid + stage)[member] = static_cast<uint8_t>(mask);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const int r = pass * 4 + (lane >> 3), key = member * kWarpRows + r, piece = lane & 7;
      const int page = __shfl_sync(~0u, id, r);
      const bool load = (mask >> r) & 1;
      const int64_t row = load ? (static_cast<int64_t>(page) << p.page_log2) + ((key0 + key) & page_mask) : 0;
      cp_async16(k_tile + k_offset(key, piece), static_cast<const char*>(p.k_cache) + row * kKvSize + piece * 16, load);
      cp_async16(v_tile + v_offset(key, piece), static_cast<const char*>(p.v_cache) + row * kKvSize + piece * 16, load);
    }
  };

  constexpr int kAhead = C::kStages - 1;
  int ids[kAhead + 1];
#pragma unroll
  for (int i = 0; i <= kAhead; i++) ids[i] = fetch_id(i);
  bool waited = false;
#pragma unroll
  for (int i = 0; i < kAhead; i++) {
    if (i < mine) {
      if (!waited && chunk_key(i) + C::kChunk > range.old_end) {
        pdl_wait();
        waited = true;
      }
      issue(i, ids[i]);
    }
    cp_async_commit();
  }
  int next_id = ids[kAhead];
  if (!waited) pdl_wait();

  // --- queries: A fragments, MMA k index (step s; 2 c, 2 c + 1, 2 c + 8, 2 c + 9) <-> 16 c + 4 s + 0..3
  constexpr int kQ = C::kTokens == 1 ? 2 : C::kMTiles * 2;  // rows of q a lane holds
  const int kv_head = C::kTokens == 1 ? 0 : member >> 1;    // decode: both
  const int first_tile_token = C::kTokens == 1 ? 0 : (member & 1) * 4;
  uint32_t q[kQ][8];
#pragma unroll
  for (int i = 0; i < kQ; i++) {
    const int token = C::kTokens == 1 ? 0 : first_tile_token + i;
    const int head = C::kTokens == 1 ? i * kGroup + g : kv_head * kGroup + g;
    const bool live = token < range.tokens;
    const uint4* src = reinterpret_cast<const uint4*>(
        static_cast<const __half*>(p.q) + (static_cast<int64_t>(range.first_token + (live ? token : 0)) * kQHeads + head) * kHeadDim +
        c * 16);
    const uint4 lo = live ? __ldcg(src) : make_uint4(0, 0, 0, 0), hi = live ? __ldcg(src + 1) : make_uint4(0, 0, 0, 0);
    q[i][0] = lo.x, q[i][1] = lo.y, q[i][2] = lo.z, q[i][3] = lo.w;
    q[i][4] = hi.x, q[i][5] = hi.y, q[i][6] = hi.z, q[i][7] = hi.w;
  }
  const float scale = p.softmax_scale * __ldcg(p.k_scale) * 1.4426950408889634f;

  float o[C::kNTiles][4][4];
#pragma unroll
  for (int n = 0; n < C::kNTiles; n++)
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][t][e] = 0.0f;
  float ref[C::kNTiles], sum[C::kNTiles];  // of row g of each 8-query tile; `sum` is this lane's share
#pragma unroll
  for (int n = 0; n < C::kNTiles; n++) ref[n] = -INFINITY, sum[n] = 0.0f;

  // --- chunks --------------------------------------------------------------------------------------
  for (int i = 0; i < mine; i++) {
    cp_async_wait<kAhead - 1>();
    if constexpr (C::kGroupWarps == 1) __syncwarp(); else named_barrier(1 + group, C::kGroupWarps * 32);
    if (i + kAhead < mine) issue(i + kAhead, next_id);
    cp_async_commit();
    next_id = fetch_id(i + kAhead + 1);

    const int stage = i % C::kStages, key0 = chunk_key(i);
    const char* k_tile = ring + stage * C::kStageBytes;
    const char* v_tile = k_tile + C::kChunk * kKvSize;

    constexpr int kKeyTiles = C::kChunk / 8;
    float s[C::kMTiles][kKeyTiles][4];
#pragma unroll
    for (int kt = 0; kt < kKeyTiles; kt++) {
#pragma unroll
      for (int m = 0; m < C::kMTiles; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[m][kt][e] = 0.0f;
      const int key = kt * 8 + g;
#pragma unroll
      for (int h = 0; h < (C::kTokens == 1 ? 2 : 1); h++) {
        const uint4 w4 = *reinterpret_cast<const uint4*>(k_tile + k_offset(key, (C::kTokens == 1 ? h : kv_head) * 4 + c));
        const uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int st = 0; st < 4; st++) {
          const uint32_t b0 = e4m3_to_half2<false>(w[st]), b1 = e4m3_to_half2<true>(w[st]);
          if constexpr (C::kTokens == 1) {
            if (h == 0) mma_f16(s[0][kt], q[0][2 * st], 0u, q[0][2 * st + 1], 0u, b0, b1);
            else mma_f16(s[0][kt], 0u, q[1][2 * st], 0u, q[1][2 * st + 1], b0, b1);
          } else {
#pragma unroll
            for (int m = 0; m < C::kMTiles; m++)
              mma_f16(s[m][kt], q[2 * m][2 * st], q[2 * m + 1][2 * st], q[2 * m][2 * st + 1], q[2 * m + 1][2 * st + 1], b0, b1);
          }
        }
      }
    }

    // Masks, only where a chunk needs them.
    const uint32_t mask = valid[stage];
    const int last_pos = range.first_pos + range.tokens - 1;
    const bool clean = mask == (C::kChunk == 32 ? ~0u : 0xffffu) && key0 + C::kChunk - 1 <= range.first_pos &&
                       (p.window == 0 || key0 > last_pos - p.window);
    if (!clean) {
#pragma unroll
      for (int n = 0; n < C::kNTiles; n++) {
        const int pos = range.first_pos + (C::kTokens == 1 ? 0 : first_tile_token + n);
        const int oldest = p.window > 0 ? pos - p.window : -1;
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; kt++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int at = kt * 8 + 2 * c + e, key = key0 + at;
            if (!((mask >> at) & 1) || key > pos || key <= oldest) s[n / 2][kt][(n & 1) * 2 + e] = -INFINITY;
          }
      }
    }

    // Move the reference points if some score is far above one.
    float high[C::kNTiles];
    bool move = false;
#pragma unroll
    for (int n = 0; n < C::kNTiles; n++) {
      high[n] = -INFINITY;
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; kt++)
        high[n] = fmaxf(high[n], fmaxf(s[n / 2][kt][(n & 1) * 2], s[n / 2][kt][(n & 1) * 2 + 1]));
      high[n] *= scale;
      move |= high[n] > ref[n] + 14.0f;
    }
    if (__any_sync(~0u, move)) {
#pragma unroll
      for (int n = 0; n < C::kNTiles; n++) {
        float h = fmaxf(high[n], __shfl_xor_sync(~0u, high[n], 1));
        h = fmaxf(h, __shfl_xor_sync(~0u, h, 2));
        const float to = fmaxf(ref[n], h - 8.0f);
        const float factor = ref[n] == -INFINITY ? 0.0f : exp2_approx(ref[n] - to);
        ref[n] = to;
        sum[n] *= factor;
        const float f0 = __shfl_sync(~0u, factor, 8 * c), f1 = __shfl_sync(~0u, factor, 8 * c + 4);
#pragma unroll
        for (int t = 0; t < 4; t++) {
          o[n][t][0] *= f0, o[n][t][1] *= f1;
          o[n][t][2] *= f0, o[n][t][3] *= f1;
        }
      }
    }
    uint32_t prob[C::kNTiles][kKeyTiles];
#pragma unroll
    for (int n = 0; n < C::kNTiles; n++) {
      const float at = ref[n] == -INFINITY ? 0.0f : ref[n];
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; kt++) {
        const float p0 = exp2_approx(fmaf(s[n / 2][kt][(n & 1) * 2], scale, -at));
        const float p1 = exp2_approx(fmaf(s[n / 2][kt][(n & 1) * 2 + 1], scale, -at));
        sum[n] += p0 + p1;
        prob[n][kt] = half2_bits(p0, p1);
      }
    }

    // O^T: m-tile t holds d = 8 g + 2 t (rows 0-7) and 8 g + 2 t + 1 (rows 8-15).
#pragma unroll
    for (int kk = 0; kk < C::kChunk / 16; kk++) {
#pragma unroll
      for (int h = 0; h < (C::kTokens == 1 ? 2 : 1); h++) {
        uint2 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int key = kk * 16 + 2 * c + (j & 1) + (j >> 1) * 8;
          x[j] = *reinterpret_cast<const uint2*>(v_tile + v_offset(key, (C::kTokens == 1 ? h : kv_head) * 4 + (g >> 1)) +
                                                 (g & 1) * 8);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint32_t x0 = half ? x[0].y : x[0].x, x1 = half ? x[1].y : x[1].x;
          const uint32_t x2 = half ? x[2].y : x[2].x, x3 = half ? x[3].y : x[3].x;
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            const uint32_t lo = __byte_perm(x0, x1, odd ? 0x7362 : 0x5140), hi = __byte_perm(x2, x3, odd ? 0x7362 : 0x5140);
            const uint32_t a0 = e4m3_to_half2<false>(lo), a1 = e4m3_to_half2<true>(lo);
            const uint32_t a2 = e4m3_to_half2<false>(hi), a3 = e4m3_to_half2<true>(hi);
            if constexpr (C::kTokens == 1) {
              mma_f16(o[h][half * 2 + odd], a0, a1, a2, a3, prob[h][2 * kk], prob[h][2 * kk + 1]);
            } else {
#pragma unroll
              for (int n = 0; n < C::kNTiles; n++)
                mma_f16(o[n][half * 2 + odd], a0, a1, a2, a3, prob[n][2 * kk], prob[n][2 * kk + 1]);
            }
          }
        }
      }
    }
  }

  // --- join of the groups ----------------------------------------------------------------------------
#pragma unroll
  for (int n = 0; n < C::kNTiles; n++) {
    sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
    sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
  }
  cp_async_wait<0>();
  __syncthreads();
  float* out = reinterpret_cast<float*>(shared);                                    // [groups][rows][kOutStride]
  float2* stats = reinterpret_cast<float2*>(out + C::kGroups * C::kRows * C::kOutStride);  // [groups][rows]
#pragma unroll
  for (int n = 0; n < C::kNTiles; n++) {
    // Row of the CTA: token * 16 + head.
    const int row0 = C::kTokens == 1 ? n * kGroup : (first_tile_token + n) * kQHeads + kv_head * kGroup;
    if (c == 0) stats[group * C::kRows + row0 + g] = make_float2(ref[n], sum[n]);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float* dst = out + (group * C::kRows + row0 + 2 * c + e) * C::kOutStride + 8 * g;
      *reinterpret_cast<float4*>(dst) = make_float4(o[n][0][e], o[n][0][2 + e], o[n][1][e], o[n][1][2 + e]);
      *reinterpret_cast<float4*>(dst + 4) = make_float4(o[n][2][e], o[n][2][2 + e], o[n][3][e], o[n][3][2 + e]);
    }
  }
  __syncthreads();
  const int quad = threadIdx.x & 15;
  for (int row = threadIdx.x >> 4; row < range.tokens * kQHeads; row += C::kWarps * 2) {
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < C::kGroups; w++) top = fmaxf(top, stats[w * C::kRows + row].x);
    float total = 0.0f;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < C::kGroups; w++) {
      const float2 st = stats[w * C::kRows + row];
      const float f = st.x == -INFINITY ? 0.0f : exp2_approx(st.x - top);
      const float4 x = *reinterpret_cast<const float4*>(out + (w * C::kRows + row) * C::kOutStride + quad * 4);
      total += f * st.y;
      v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w;
    }
    const int64_t at = (static_cast<int64_t>(range.first_token) * kQHeads + row) * p.splits + split;
    if (top == -INFINITY) total = 0.0f;
    reinterpret_cast<float4*>(p.acc + at * kHeadDim)[quad] = v;
    if (quad == 0) reinterpret_cast<float2*>(p.lse)[at] = make_float2(top, total);
  }
}

template <class C>
inline int launch_attention_split_as(const AttentionParams& p, const Launch& l) {
  const int tiles = (p.max_q_len + C::kTokens - 1) / C::kTokens;
  return launch(attention_split_kernel<C>, dim3(p.splits, p.requests, tiles), dim3(C::kWarps * 32), C::kSharedBytes, l, p);
}
inline int launch_attention_split(const AttentionParams& p, const Launch& l) {
  if (p.splits < 1) return static_cast<int>(cudaErrorInvalidValue);
  return p.max_q_len <= 1 ? launch_attention_split_as<SplitConfig<1>>(p, l)
                          : launch_attention_split_as<SplitConfig<kSplitTokens>>(p, l);
}
inline int prepare_attention_split() {
  int e = prepare_kernel(attention_split_kernel<SplitConfig<1>>, SplitConfig<1>::kSharedBytes);
  if (!e) e = prepare_kernel(attention_split_kernel<SplitConfig<kSplitTokens>>, SplitConfig<kSplitTokens>::kSharedBytes);
  return e;
}

}  // namespace msl
