// attention, decode: one query token a request, 8 heads on each of the 2 KV heads.
//
// A CTA (split, request) has 8 warps; each walks its own chunks of 16 keys through its own ring in
// shared memory, so warps never wait for each other before the end.
//   load     cp.async of 16 bytes, 8 lanes a row, K and V; page ids are fetched one chunk ahead.
//            Rows that must not be read (past the range, invalid page) are filled with zeros.
//   S^T      mma m16n8k16, FP16: keys on M, the 8 queries of a KV head on N: nothing is wasted. A lane
//            reads 16 contiguous bytes of two keys; the queries' registers hold the same order of the
//            head dimension, so E4M3 -> FP16 is one instruction a register.
//   softmax  on registers, relative to a reference point r of each query, which moves only when a
//            lane's probabilities of a chunk add up to more than 2^15: one vote, no maximum otherwise.
//            r starts at -inf, so that the first chunk's p are infinite (NaN where masked) and the vote
//            says to move.
//   O^T      V^T on M, queries on N; S^T's accumulators become B fragments by movmatrix.
// At the end the warps are joined in a fixed order through shared memory.
//
// kAppend: qk_norm_rope_append is folded in (entry point append_attention). Every CTA norms and rotates
// its request's 16 query rows (two a warp) while its keys arrive; the CTA that sees the new key puts
// that row into its ring itself, so that nothing waits for the cache; split 0 writes the cache row and
// the gate. Same functions, same bits as the separate launch.
//
// Sizes: 8 rings of 3 x 4 KB (96 KB) and 120 registers let two CTAs, or one and a neighbouring
// kernel's, share an SM; 64 KB in flight a CTA is more than bandwidth x latency needs. Splits are
// multiples of 64 keys: with one request of 8k tokens all SMs then work.
#pragma once
#include "attention_split.cuh"
#include "qk_norm_rope_append.cuh"

namespace msl {

struct DecodeConfig {
  static constexpr int kWarps = 8;
  static constexpr int kChunk = 16;
  static constexpr int kStages = 3;
  static constexpr int kUnit = 64;
  static constexpr int kStep = kWarps * kChunk;             // keys between a warp's chunks
  static constexpr int kStageBytes = kChunk * kKvSize * 2;  // K, then V
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kOutStride = kHeadDim + 4;           // floats between rows in the join
  static constexpr int kJoinBytes = kWarps * kQHeads * (kOutStride + 2) * 4;
  static constexpr int kMaskBytes = kWarps * kStages * 4;   // a stage's keys that may be seen; kPatched: see issue
  static constexpr int kQueryBytes = kQSize * 2;            // kAppend: the queries, and the new K and V rows
  static constexpr int kSharedBytes = kRingBytes + kMaskBytes + kQueryBytes + 2 * kKvSize;
  static constexpr uint32_t kPatched = 0x10000u;
  static_assert(kJoinBytes <= kRingBytes);
};

__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where the 16-byte piece `piece` of row `key` stands in a chunk: K so that 8 lanes reading one 64-byte
// half of two keys, V so that 16 lanes reading 32 bytes of four even or odd keys, meet no bank twice.
__device__ __forceinline__ int k_offset(int key, int piece) { return key * 128 + ((piece ^ ((key & 1) << 2)) << 4); }
__device__ __forceinline__ int v_offset(int key, int piece) { return key * 128 + ((piece ^ (key & 6)) << 4); }

// A warp's queries (B fragments: MMA k index 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of step s <-> d = 16 c + 4 s
// + 0..3) and results; minus_ref and sum by [KV head][column 2 c + e], sum is the lane's share.
struct DecodeState {
  uint32_t q[2][8];
  float o[2][4][4];  // [KV head][d tile t][e]: d = 8 g + 2 t + (e >> 1), column 2 c + (e & 1)
  float minus_ref[4];
  float sum[4];
};

struct ChunkKeys {
  uint32_t valid;  // bit i: key i of the chunk may be seen
  int key0;        // its first key
  int window;      // 0: full
  bool clean;      // every key is visible
};

// Moves one KV head's results from one reference point to another.
__device__ __forceinline__ void scale_head(DecodeState& w, int h, float f0, float f1) {
#pragma unroll
  for (int t = 0; t < 4; t++) {
    w.o[h][t][0] *= f0, w.o[h][t][1] *= f1;
    w.o[h][t][2] *= f0, w.o[h][t][3] *= f1;
  }
}

// One token, both KV heads, 16 keys: S^T = K Q^T with keys on M, so that 8 queries waste nothing. Its
// accumulators become B fragments by a transposition of 8 x 8 halves (movmatrix).
__device__ __forceinline__ void decode_scores(DecodeState& w, const char* k_tile, const ChunkKeys& keys, int pos,
                                              float scale, int g, int c, uint32_t (&prob)[2][2]) {
  float s[2][4];  // [KV head]: key g (e = 0, 1) or g + 8 (2, 3), query 2 c + (e & 1)
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 x = *reinterpret_cast<const uint4*>(k_tile + k_offset(g, h * 4 + c));
    const uint4 y = *reinterpret_cast<const uint4*>(k_tile + k_offset(g + 8, h * 4 + c));
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; e++) s[h][e] = 0.0f;
#pragma unroll
    for (int st = 0; st < 4; st++) {
      uint32_t a0, a1, a2, a3;
      e4m3_to_half(xs[st], a0, a2);
      e4m3_to_half(ys[st], a1, a3);
      mma_f16(s[h], a0, a1, a2, a3, w.q[h][2 * st], w.q[h][2 * st + 1]);
    }
  }
  if (!keys.clean) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int at = g + 8 * e, key = keys.key0 + at;
      const bool seen = ((keys.valid >> at) & 1) && key <= pos && (keys.window == 0 || key > pos - keys.window);
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (!seen) s[h][2 * e] = s[h][2 * e + 1] = -INFINITY;
    }
  }
  float part[4];  // this chunk's share of sum
  const auto probabilities = [&](const float (&minus)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; e++) p[e] = exp2_approx(fmaf(s[h][e], scale, minus[2 * h + (e & 1)]));
      part[2 * h] = p[0] + p[2];
      part[2 * h + 1] = p[1] + p[3];
      prob[h][0] = half2_bits(p[0], p[1]);
      prob[h][1] = half2_bits(p[2], p[3]);
    }
  };
  probabilities(w.minus_ref);
  bool fits = true;
#pragma unroll
  for (int r = 0; r < 4; r++) fits = fits && part[r] <= kMoveAbove;
  if (!__all_sync(~0u, fits)) {
    float factor[4], minus[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      float high = fmaxf(s[r >> 1][r & 1] * scale, s[r >> 1][2 + (r & 1)] * scale);
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, x));
      factor[r] = move_reference(w.minus_ref[r], w.sum[r], high);
      minus[r] = started(w.minus_ref[r]);
    }
    scale_head(w, 0, factor[0], factor[1]);
    scale_head(w, 1, factor[2], factor[3]);
    probabilities(minus);
  }
#pragma unroll
  for (int r = 0; r < 4; r++) w.sum[r] += part[r];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    prob[h][0] = transpose_8x8(prob[h][0]);
    prob[h][1] = transpose_8x8(prob[h][1]);
  }
}

// o += V^T P^T for the 16 keys of a chunk, one KV head. d tile t holds d = 8 g + 2 t in rows 0-7 and
// 8 g + 2 t + 1 in rows 8-15, so that a lane needs 8 contiguous bytes of keys 2 c, 2 c + 1, 2 c + 8,
// 2 c + 9 and one byte permute makes the pairs of two registers.
__device__ __forceinline__ void decode_values(DecodeState& w, const char* v_tile, int h, int g, int c, const uint32_t (&prob)[2]) {
  uint2 x[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int key = 2 * c + (j & 1) + (j >> 1) * 8;
    x[j] = *reinterpret_cast<const uint2*>(v_tile + v_offset(key, h * 4 + (g >> 1)) + (g & 1) * 8);
  }
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const uint32_t select = t & 1 ? 0x7362 : 0x5140;
    uint32_t a0, a1, a2, a3;
    e4m3_to_half(t < 2 ? __byte_perm(x[0].x, x[1].x, select) : __byte_perm(x[0].y, x[1].y, select), a0, a1);
    e4m3_to_half(t < 2 ? __byte_perm(x[2].x, x[3].x, select) : __byte_perm(x[2].y, x[3].y, select), a2, a3);
    mma_f16(w.o[h][t], a0, a1, a2, a3, prob[0], prob[1]);
  }
}

// kAppend, what a warp of a CTA does for token t: queries to shared memory (rows warp and warp + 8), and,
// where `keys` or `store`, the new cache row there too; `store` also writes it to the cache.
__device__ __forceinline__ void append_token(const QkNormRopeAppendParams& a, int64_t t, int64_t slot, float sn, float cs,
                                             bool keys, bool store, char* queries) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool rope = a.inv_freq != nullptr;
  float2 x[3];
  if ((keys || store) && warp < 2 * kKvHeads) {
    const int row = kFirstK + warp;
    const float scale = cache_scale(a, row);  // the caller's, as positions and slots are: no kernel writes it
    add_splits<3>(a, t, {warp, warp + 8, row}, lane, x);
    if (row < kFirstV) x[2] = norm_rope(x[2], rope, sn, cs);
    const uint16_t bytes = cache_bytes(x[2], scale);
    reinterpret_cast<uint16_t*>(queries + DecodeConfig::kQueryBytes)[warp * (kHeadDim / 2) + lane] = bytes;
    if (store && slot >= 0) *cache_place(a, row, slot, lane) = bytes;
  } else {
    float2 q[2];
    add_splits<2>(a, t, {warp, warp + 8}, lane, q);
    x[0] = q[0], x[1] = q[1];
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
    reinterpret_cast<uint32_t*>(queries)[(warp + 8 * i) * (kHeadDim / 2) + lane] =
        query_half2(norm_rope(x[i], rope, sn, cs), a.e4m3_query);
}
// ... and the gate, by one CTA of the token's.
__device__ __forceinline__ void append_gate(const QkNormRopeAppendParams& a, int64_t t) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float2 x[2];
  add_splits<2>(a, t, {kFirstGate + warp, kFirstGate + warp + 8}, lane, x);
#pragma unroll
  for (int i = 0; i < 2; i++)
    *reinterpret_cast<float2*>(a.gate + t * kQSize + (warp + 8 * i) * kHeadDim + 2 * lane) = x[i];
}

template <bool kAppend>
__global__ void __launch_bounds__(DecodeConfig::kWarps * 32, 2)
    attention_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ QkNormRopeAppendParams a) {
  using C = DecodeConfig;
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  const int split = blockIdx.x, request = blockIdx.y;
  const SplitRange range = split_range<1, C::kUnit>(p, request, 0, split);
  const int64_t token = range.first_token;
  char* queries = shared + C::kRingBytes + C::kMaskBytes;  // [16][64] halves, then the new K and V rows
  if constexpr (kAppend) {
    // Tokens of no request still have a gate and, if they name one, a cache row; so has a token that
    // sees no key.
    if (split == 0 && request == p.requests - 1) {
      for (int t = __ldcg(p.cu_seqlens_q + p.requests); t < p.tokens; t++) {
        float sn = 0.0f, cs = 1.0f;
        if (a.inv_freq) token_sincos(a, t, lane, sn, cs);
        pdl_wait();
        append_token(a, t, append_slot(a, t), sn, cs, false, true, queries);
        append_gate(a, t);
      }
    }
  }
  // Caller's data, read before the wait.
  float sn = 0.0f, cs = 1.0f;
  int64_t slot = -1;
  if (kAppend && range.tokens > 0) {
    slot = append_slot(a, token);
    if (a.inv_freq) token_sincos(a, token, lane, sn, cs);
  }
  if (write_empty(p, range, request, 0, split)) {
    if (kAppend && split == 0 && range.tokens > 0) {
      append_token(a, token, slot, sn, cs, false, true, queries);
      append_gate(a, token);
    }
    return;
  }

  // --- loading: lane l fetches the page id of row l mod 16; the 8 lanes of a row get it by shuffle --
  constexpr int kAhead = C::kStages - 1;
  char* ring = shared + warp * (C::kStages * C::kStageBytes);
  uint32_t* valid = reinterpret_cast<uint32_t*>(shared + C::kRingBytes) + warp * C::kStages;
  const int first_key = range.begin + warp * C::kChunk;  // of the warp's first chunk
  const int mine = first_key < range.end ? (range.end - first_key + C::kStep - 1) / C::kStep : 0;  // its chunks
  const int piece = lane & 7;
  const int k_dst = k_offset(lane >> 3, piece), v_dst = C::kChunk * kKvSize + v_offset(lane >> 3, piece);
  const char* k_src = static_cast<const char*>(p.k_cache) + piece * 16;
  const char* v_src = static_cast<const char*>(p.v_cache) + piece * 16;
  KeyCursor cursor(p, request, first_key + (lane & 15), C::kStep, range.end);
  // kAppend: the new key, if it is in this split and stands where the page table says, is not loaded.
  int new_key = -1;
  uint32_t new_row = kNoRow;
  if constexpr (kAppend) {
    if (range.end > range.first_pos && slot >= 0) new_key = range.first_pos, new_row = static_cast<uint32_t>(slot);
  }
  const auto issue = [&](int stage, int key, int id) {  // `key`: the lane's own key of the chunk, `id` its page
    uint32_t own = cursor.row(key, id);
    uint32_t mask = __ballot_sync(~0u, own != kNoRow) & 0xffff;
    if constexpr (kAppend) {
      const bool patched = key == new_key && own == new_row;
      if (__any_sync(~0u, patched)) mask |= C::kPatched;
      if (patched) own = kNoRow;
    }
    if (lane == 0) valid[stage] = mask;
    char* tile = ring + stage * C::kStageBytes;
#pragma unroll
    for (int pass = 0; pass < C::kChunk / 4; pass++) {
      uint32_t row = __shfl_sync(~0u, own, pass * 4 + (lane >> 3));
      const bool load = row != kNoRow;
      row = load ? row : 0;
      // Four rows on, the swizzle of K is the same and that of V differs in one bit of the piece.
      cp_async16(tile + k_dst + pass * 512, k_src + static_cast<uint64_t>(row) * kKvSize, load);
      cp_async16(tile + (v_dst ^ ((pass & 1) << 6)) + pass * 512, v_src + static_cast<uint64_t>(row) * kKvSize, load);
    }
  };

  const float scale = p.softmax_scale * __ldcg(p.k_scale) * kLog2e;
  const int own_key = cursor.key;
  int ids[kAhead + 1];
#pragma unroll
  for (int i = 0; i <= kAhead; i++) ids[i] = cursor.fetch();
  bool waited = false;
#pragma unroll
  for (int i = 0; i < kAhead; i++) {
    if (i < mine) {
      if (!waited && first_key + i * C::kStep + C::kChunk > range.old_end) {
        const int key = own_key + i * C::kStep;
        if (!kAppend || !__any_sync(~0u, key == new_key && cursor.row(key, ids[i]) == new_row)) {
          pdl_wait();
          waited = true;
        }
      }
      issue(i, own_key + i * C::kStep, ids[i]);
    }
    cp_async_commit();
  }
  int next_id = ids[kAhead];
  if (!waited) pdl_wait();

  if constexpr (kAppend) {
    append_token(a, token, slot, sn, cs, new_key >= 0, split == 0, queries);
    __syncthreads();
    if (split == 0) append_gate(a, token);
  }
  DecodeState w;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint4 lo, hi;
    if constexpr (kAppend) {
      const uint4* src = reinterpret_cast<const uint4*>(queries + (h * kGroup + g) * kHeadDim * 2 + c * 32);
      lo = src[0], hi = src[1];
    } else {
      const int64_t row = token * kQHeads + h * kGroup + g;
      const uint4* src = reinterpret_cast<const uint4*>(static_cast<const __half*>(p.q) + row * kHeadDim + c * 16);
      lo = __ldcg(src), hi = __ldcg(src + 1);
    }
    w.q[h][0] = lo.x, w.q[h][1] = lo.y, w.q[h][2] = lo.z, w.q[h][3] = lo.w;
    w.q[h][4] = hi.x, w.q[h][5] = hi.y, w.q[h][6] = hi.z, w.q[h][7] = hi.w;
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) w.o[h][t][e] = 0.0f;
  }
#pragma unroll
  for (int r = 0; r < 4; r++) w.minus_ref[r] = INFINITY, w.sum[r] = 0.0f;

  int stage = 0, key0 = first_key;
  for (int i = 0; i < mine; i++, key0 += C::kStep) {
    cp_async_wait<kAhead - 1>();
    __syncwarp();
    if (i + kAhead < mine) issue(stage == 0 ? kAhead : stage - 1, cursor.key - C::kStep, next_id);
    cp_async_commit();
    next_id = cursor.fetch();

    char* k_tile = ring + stage * C::kStageBytes;
    char* v_tile = k_tile + C::kChunk * kKvSize;
    ChunkKeys chunk{valid[stage], key0, p.window, false};
    if (kAppend && (chunk.valid & C::kPatched)) {
      if (lane < 16) {
        const int at = new_key - key0;
        *reinterpret_cast<uint4*>(lane < 8 ? k_tile + k_offset(at, piece) : v_tile + v_offset(at, piece)) =
            *reinterpret_cast<const uint4*>(queries + C::kQueryBytes + lane * 16);
      }
      __syncwarp();
      chunk.valid &= 0xffff;
    }
    chunk.clean = chunk.valid == 0xffff && key0 + C::kChunk - 1 <= range.first_pos &&
                  (p.window == 0 || key0 > range.first_pos - p.window);
    stage = stage == kAhead ? 0 : stage + 1;
    uint32_t prob[2][2];
    decode_scores(w, k_tile, chunk, range.first_pos, scale, g, c, prob);
    decode_values(w, v_tile, 0, g, c, prob[0]);
    decode_values(w, v_tile, 1, g, c, prob[1]);
  }

  // --- join of the warps, in the rings' place ----------------------------------------------------------
#pragma unroll
  for (int r = 0; r < 4; r++) {
#pragma unroll
    for (int x = 4; x < 32; x <<= 1) w.sum[r] += __shfl_xor_sync(~0u, w.sum[r], x);
  }
  cp_async_wait<0>();
  __syncthreads();
  float* out = reinterpret_cast<float*>(shared);
  float2* stats = reinterpret_cast<float2*>(out + C::kWarps * kQHeads * C::kOutStride);
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = warp * kQHeads + h * kGroup + 2 * c + e;
      if (g == 0) stats[row] = make_float2(-w.minus_ref[2 * h + e], w.sum[2 * h + e]);
      float* dst = out + row * C::kOutStride + 8 * g;
      *reinterpret_cast<float4*>(dst) = make_float4(w.o[h][0][e], w.o[h][0][2 + e], w.o[h][1][e], w.o[h][1][2 + e]);
      *reinterpret_cast<float4*>(dst + 4) = make_float4(w.o[h][2][e], w.o[h][2][2 + e], w.o[h][3][e], w.o[h][3][2 + e]);
    }
  }
  __syncthreads();
  join_groups<C::kWarps, kQHeads, C::kOutStride>(p, range, split, out, stats);
}

inline int launch_attention_decode(const AttentionParams& p, const Launch& l) {
  return launch(attention_decode_kernel<false>, dim3(p.splits, p.requests), dim3(DecodeConfig::kWarps * 32),
                DecodeConfig::kSharedBytes, l, p, QkNormRopeAppendParams{});
}
inline int launch_append_attention_decode(const QkNormRopeAppendParams& a, const AttentionParams& p, const Launch& l) {
  return launch(attention_decode_kernel<true>, dim3(p.splits, p.requests), dim3(DecodeConfig::kWarps * 32),
                DecodeConfig::kSharedBytes, l, p, a);
}

}  // namespace msl
