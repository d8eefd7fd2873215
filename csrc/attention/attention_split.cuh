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
//            (one vote a chunk); it starts 3 below the maximum so that FP16 probabilities keep 2^-27.
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
#include "attention_split_math.cuh"

namespace msl {

template <int kTokens_>
struct SplitConfig {
  static constexpr int kTokens = kTokens_;                  // queries a tile: 1 or 8
#ifndef VG
#define VG 2
#define VS 6
#define VM 1
#endif
#ifndef DW
#define DW 8
#define DS 3
#define DM 2
#endif
  static constexpr int kGroupWarps = kTokens == 1 ? 1 : 4;
  static constexpr int kWarps = kTokens == 1 ? DW : VG * 4;
  static constexpr int kGroups = kWarps / kGroupWarps;
  static constexpr int kChunk = kTokens == 1 ? 16 : 32;     // keys a group handles at a time
  static constexpr int kStages = kTokens == 1 ? DS : VS;
  static constexpr int kColumnTiles = kTokens == 1 ? 2 : 4; // tiles of 8 queries (one token, one KV head) a warp
  static constexpr int kRows = kTokens * kQHeads;           // queries x heads a CTA
  static constexpr int kUnit = kGroups * kChunk;            // splits are multiples of this
  static constexpr int kStageBytes = kChunk * kKvSize * 2;
  static constexpr int kRingBytes = kGroups * kStages * kStageBytes;
  static constexpr int kOutStride = kHeadDim + 4;           // floats between rows in the join
  static constexpr int kJoinBytes = kGroups * kRows * (kOutStride + 2) * 4;
  static constexpr int kSharedBytes = (kRingBytes > kJoinBytes ? kRingBytes : kJoinBytes) + kGroups * kStages * 4;
  static constexpr int kMinCtas = kTokens == 1 ? DM : VM;
};

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

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
  // The warp loads kWarpRows rows of each of its group's chunks. Lane l fetches the page id of row
  // l mod kWarpRows, one chunk ahead, and turns it into a cache row (fewer than 2^32 - 1 of them exist);
  // the 8 lanes of a row get it by shuffle.
  constexpr int kWarpRows = C::kChunk / C::kGroupWarps;
  constexpr int kAhead = C::kStages - 1;
  constexpr int kStep = C::kGroups * C::kChunk;  // keys between a group's chunks
  constexpr uint32_t kNoRow = 0xffffffffu;
  char* ring = shared + group * (C::kStages * C::kStageBytes);
  uint32_t* valid = reinterpret_cast<uint32_t*>(shared + C::kSharedBytes - C::kGroups * C::kStages * 4) +
                    group * C::kStages;
  const int32_t* table = p.page_table + request * p.table_stride;
  const uint32_t page_mask = (1u << p.page_log2) - 1;
  const uint32_t pages = static_cast<uint32_t>(min(p.pages, static_cast<int64_t>(0x7fffffff)));
  const int first_key = range.begin + group * C::kChunk;  // of the group's first chunk
  const int mine = first_key < range.end ? (range.end - first_key + kStep - 1) / kStep : 0;  // its chunks
  const int row_in_pass = member * kWarpRows + (lane >> 3), piece = lane & 7;
  const int k_dst = k_offset(row_in_pass, piece), v_dst = C::kChunk * kKvSize + v_offset(row_in_pass, piece);
  const char* k_src = static_cast<const char*>(p.k_cache) + piece * 16;
  const char* v_src = static_cast<const char*>(p.v_cache) + piece * 16;

  int fetch_key = first_key + member * kWarpRows + (lane & (kWarpRows - 1));  // of the next page id
  auto fetch_id = [&]() {
    const int id = fetch_key < range.end ? __ldcg(table + (fetch_key >> p.page_log2)) : -1;
    fetch_key += kStep;
    return id;
  };
  // `key`: the lane's own key of the chunk, `id` its page.
  auto issue = [&](int stage, int key, int id) {
    const uint32_t own = static_cast<uint32_t>(id) < pages ? (static_cast<uint32_t>(id) << p.page_log2) + (key & page_mask) : kNoRow;
    const uint32_t mask = __ballot_sync(~0u, own != kNoRow);
    if (lane == 0) {
      if constexpr (C::kGroupWarps == 1) valid[stage] = mask & 0xffff;
      else reinterpret_cast<uint8_t*>(valid + stage)[member] = static_cast<uint8_t>(mask);
    }
    char* tile = ring + stage * C::kStageBytes;
#pragma unroll
    for (int pass = 0; pass < kWarpRows / 4; pass++) {
      uint32_t row = __shfl_sync(~0u, own, pass * 4 + (lane >> 3));
      const bool load = row != kNoRow;
      row = load ? row : 0;
      // Four rows on, the swizzle of K is the same and that of V differs in one bit of the piece.
      cp_async16(tile + k_dst + pass * 512, k_src + static_cast<uint64_t>(row) * kKvSize, load);
      cp_async16(tile + (v_dst ^ ((pass & 1) << 6)) + pass * 512, v_src + static_cast<uint64_t>(row) * kKvSize, load);
    }
  };

  const int own_key = fetch_key;
  int ids[kAhead + 1];
#pragma unroll
  for (int i = 0; i <= kAhead; i++) ids[i] = fetch_id();
  bool waited = false;
#pragma unroll
  for (int i = 0; i < kAhead; i++) {
    if (i < mine) {
      if (!waited && first_key + i * kStep + C::kChunk > range.old_end) {
        pdl_wait();
        waited = true;
      }
      issue(i, own_key + i * kStep, ids[i]);
    }
    cp_async_commit();
  }
  int next_id = ids[kAhead];
  if (!waited) pdl_wait();

  // --- queries: fragment registers, MMA k index (step s; 2 c, 2 c + 1, 2 c + 8, 2 c + 9) <-> 16 c + 4 s + 0..3
  WarpState<C::kColumnTiles, C::kColumnTiles> w;
  const int kv_head = C::kTokens == 1 ? 0 : member >> 1;  // decode: both
  const int first_tile_token = C::kTokens == 1 ? 0 : (member & 1) * 4;
#pragma unroll
  for (int i = 0; i < C::kColumnTiles; i++) {
    const int token = C::kTokens == 1 ? 0 : first_tile_token + i;
    const int head = (C::kTokens == 1 ? i : kv_head) * kGroup + g;
    const bool live = token < range.tokens;
    const int64_t row = static_cast<int64_t>(range.first_token + (live ? token : 0)) * kQHeads + head;
    const uint4* src = reinterpret_cast<const uint4*>(static_cast<const __half*>(p.q) + row * kHeadDim + c * 16);
    const uint4 lo = live ? __ldcg(src) : make_uint4(0, 0, 0, 0), hi = live ? __ldcg(src + 1) : make_uint4(0, 0, 0, 0);
    w.q[i][0] = lo.x, w.q[i][1] = lo.y, w.q[i][2] = lo.z, w.q[i][3] = lo.w;
    w.q[i][4] = hi.x, w.q[i][5] = hi.y, w.q[i][6] = hi.z, w.q[i][7] = hi.w;
  }
  const float scale = p.softmax_scale * __ldcg(p.k_scale) * 1.4426950408889634f;
#pragma unroll
  for (int n = 0; n < C::kColumnTiles; n++)
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) w.o[n][t][e] = 0.0f;
#pragma unroll
  for (int r = 0; r < 4; r++) w.minus_ref[r] = INFINITY, w.sum[r] = 0.0f;

  // --- chunks --------------------------------------------------------------------------------------
  int stage = 0, key0 = first_key;
  for (int i = 0; i < mine; i++, key0 += kStep) {
    cp_async_wait<kAhead - 1>();
    if constexpr (C::kGroupWarps == 1) __syncwarp(); else named_barrier(1 + group, C::kGroupWarps * 32);
    if (i + kAhead < mine) issue(stage == 0 ? kAhead : stage - 1, fetch_key - kStep, next_id);
    cp_async_commit();
    next_id = fetch_id();

    const char* k_tile = ring + stage * C::kStageBytes;
    const char* v_tile = k_tile + C::kChunk * kKvSize;
    ChunkKeys chunk{valid[stage], key0, p.window, false};
    chunk.clean = chunk.valid == (C::kChunk == 32 ? ~0u : (1u << (C::kChunk & 31)) - 1) &&
                  key0 + C::kChunk - 1 <= range.first_pos &&
                  (p.window == 0 || key0 > range.first_pos + range.tokens - 1 - p.window);
    stage = stage == kAhead ? 0 : stage + 1;
    if constexpr (C::kTokens == 1) {
      uint32_t prob[2][2];
      decode_scores(w, k_tile, chunk, range.first_pos, scale, g, c, prob);
      add_values<0, 1>(w, v_tile, 0, 0, g, c, prob);
      add_values<1, 1>(w, v_tile, 0, 1, g, c, prob);
    } else {
      uint32_t prob[4][4];
      verify_scores(w, k_tile, chunk, kv_head, range.first_pos + first_tile_token, scale, g, c, prob);
      add_values<0, 4>(w, v_tile, 0, kv_head, g, c, prob);
      add_values<0, 4>(w, v_tile, 1, kv_head, g, c, prob);
    }
  }

  // --- join of the groups ----------------------------------------------------------------------------
#pragma unroll
  for (int r = 0; r < 4; r++) {
#pragma unroll
    for (int x = C::kTokens == 1 ? 4 : 1; x < (C::kTokens == 1 ? 32 : 4); x <<= 1)
      w.sum[r] += __shfl_xor_sync(~0u, w.sum[r], x);
  }
  cp_async_wait<0>();
  __syncthreads();
  float* out = reinterpret_cast<float*>(shared);                                    // [groups][rows][kOutStride]
  float2* stats = reinterpret_cast<float2*>(out + C::kGroups * C::kRows * C::kOutStride);  // [groups][rows]
#pragma unroll
  for (int n = 0; n < C::kColumnTiles; n++) {
    // Row of the CTA: token * 16 + head.
    const int row0 = C::kTokens == 1 ? n * kGroup : (first_tile_token + n) * kQHeads + kv_head * kGroup;
    if (C::kTokens > 1 && c == 0) stats[group * C::kRows + row0 + g] = make_float2(-w.minus_ref[n], w.sum[n]);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (C::kTokens == 1 && g == 0)
        stats[group * C::kRows + row0 + 2 * c + e] = make_float2(-w.minus_ref[2 * n + e], w.sum[2 * n + e]);
      float* dst = out + (group * C::kRows + row0 + 2 * c + e) * C::kOutStride + 8 * g;
      *reinterpret_cast<float4*>(dst) = make_float4(w.o[n][0][e], w.o[n][0][2 + e], w.o[n][1][e], w.o[n][1][2 + e]);
      *reinterpret_cast<float4*>(dst + 4) = make_float4(w.o[n][2][e], w.o[n][2][2 + e], w.o[n][3][e], w.o[n][3][2 + e]);
    }
  }
  __syncthreads();
  const int quad = threadIdx.x & 15;
  for (int row = threadIdx.x >> 4; row < range.tokens * kQHeads; row += C::kWarps * 2) {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < C::kGroups; i++) top = fmaxf(top, stats[i * C::kRows + row].x);
    float total = 0.0f;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < C::kGroups; i++) {
      const float2 st = stats[i * C::kRows + row];
      const float f = st.x == -INFINITY ? 0.0f : exp2_approx(st.x - top);
      const float4 x = *reinterpret_cast<const float4*>(out + (i * C::kRows + row) * C::kOutStride + quad * 4);
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
