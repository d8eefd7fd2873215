// attention, split kernels: what decode (attention_decode.cuh) and verify (attention_verify.cuh) share.
//
// A CTA owns one split of the visible keys of one tile of queries (1 token; up to 8 tokens of one
// request) for all 16 heads: a cache row of 128 bytes holds both KV heads. It writes one partial:
// acc = sum p v, lse = (r, sum p) with p = 2^(score - r). A split without keys writes zeros and (-inf, 0):
// the join loads acc before it knows which splits are empty. The split of keys depends on the request's own
// lengths and the plan, never on the batch.
//
// What is read before the wait: page table and lengths, which are the caller's and no kernel of the
// step writes, and the cache rows of keys older than this step's tokens, which none writes either.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../include/model.h"
#include "attention.h"

namespace msl {

constexpr uint32_t kNoRow = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
// A score may pass a row's reference point r by this much, as p, before r moves (see the kernels), and
// r is then put kRefBelow (log2) below the maximum: FP16 probabilities cannot overflow, and lose only
// what lies 2^-27 below the maximum.
constexpr float kMoveAbove = 32768.0f;
constexpr float kRefBelow = 3.0f;

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// 2^x; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Four E4M3 bytes as two pairs of halves, exact.
__device__ __forceinline__ void e4m3_to_half(uint32_t w, uint32_t& lo, uint32_t& hi) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(lo), "=r"(hi) : "r"(w));
}
__device__ __forceinline__ uint32_t half2_bits(float lo, float hi) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}

// The new reference point of a row whose highest score is `high`: updates point and sum, returns the
// factor for what was added so far. A row that has seen nothing stays at -inf (minus_ref = inf).
__device__ __forceinline__ float move_reference(float& minus_ref, float& sum, float high) {
  const float to = fminf(minus_ref, kRefBelow - high);
  const float factor = minus_ref == INFINITY ? 0.0f : exp2_approx(to - minus_ref);
  minus_ref = to;
  sum *= factor;
  return factor;
}
// For p = 2^(score + started(minus_ref)): a row that has seen nothing has scores of -inf only.
__device__ __forceinline__ float started(float minus_ref) { return minus_ref == INFINITY ? 0.0f : minus_ref; }

// The keys of one CTA.
struct SplitRange {
  int tokens;       // queries of this tile; <= 0: none
  int first_token;  // row of q
  int first_pos;    // position of the tile's first query
  int begin, end;   // keys of this split
  int old_end;      // keys below it were not written in this step
};

// kUnit: splits are multiples of it.
template <int kTokens, int kUnit>
__device__ __forceinline__ SplitRange split_range(const AttentionParams& p, int request, int tile, int split) {
  SplitRange r;
  const int q_begin = __ldcg(p.cu_seqlens_q + request), q_end = __ldcg(p.cu_seqlens_q + request + 1);
  const int length = __ldcg(p.cache_seqlens + request);
  const int q_len = q_end - q_begin;
  r.tokens = min(q_len - tile * kTokens, kTokens);
  r.first_token = q_begin + tile * kTokens;
  r.old_end = length - q_len;
  r.first_pos = r.old_end + tile * kTokens;
  const int64_t listed = min(static_cast<int64_t>(p.table_width) << p.page_log2, static_cast<int64_t>(0x7fffffff));
  const int last = min(r.first_pos + r.tokens, static_cast<int>(listed));
  const int first = p.window > 0 ? max(0, r.first_pos - p.window + 1) : 0;
  const int visible = max(0, last - first);
  const int per_split = ((visible + p.splits - 1) / p.splits + kUnit - 1) / kUnit * kUnit;
  r.begin = first + static_cast<int>(min(static_cast<int64_t>(split) * per_split, static_cast<int64_t>(visible)));
  r.end = min(first + visible, r.begin + per_split);
  return r;
}

// Writes the empty partial for the rows of q that belong to no request (a padded step; the last
// request's first tile does it), and, if `range` is empty, for its rows. True: nothing else to do.
__device__ __forceinline__ bool write_empty(const AttentionParams& p, const SplitRange& range, int request, int tile, int split) {
  const auto fill = [&](int first, int end) {
    pdl_wait();
    constexpr int kQuads = kHeadDim / 4;
    for (int64_t i = int64_t(first) * kQHeads * kQuads + threadIdx.x; i < int64_t(end) * kQHeads * kQuads; i += blockDim.x) {
      const int64_t partial = i / kQuads * p.splits + split;
      reinterpret_cast<float4*>(p.acc)[partial * kQuads + i % kQuads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i % kQuads == 0) reinterpret_cast<float2*>(p.lse)[partial] = make_float2(-INFINITY, 0.0f);
    }
  };
  if (request == p.requests - 1 && tile == 0) {
    const int covered = __ldcg(p.cu_seqlens_q + p.requests);
    if (covered < p.tokens) fill(covered, p.tokens);
  }
  if (range.tokens > 0 && range.end > range.begin) return false;
  fill(range.first_token, range.first_token + max(range.tokens, 0));
  return true;
}

// A lane's walk over the page ids of its own key of each chunk.
struct KeyCursor {
  const int32_t* table;
  uint32_t page_mask, pages;
  int page_log2, key, step, end;

  __device__ __forceinline__ KeyCursor(const AttentionParams& p, int request, int first_key, int step_, int end_)
      : table(p.page_table + request * p.table_stride), page_mask((1u << p.page_log2) - 1),
        pages(static_cast<uint32_t>(min(p.pages, static_cast<int64_t>(0x7fffffff)))), page_log2(p.page_log2), key(first_key),
        step(step_), end(end_) {}
  // The page id of the cursor's key (-1 past the end), then on to the next chunk.
  __device__ __forceinline__ int fetch() {
    const int id = key < end ? __ldcg(table + (key >> page_log2)) : -1;
    key += step;
    return id;
  }
  // The cache row of a key in page `id`; fewer than 2^32 - 1 rows of 256 bytes exist.
  __device__ __forceinline__ uint32_t row(int of_key, int id) const {
    return static_cast<uint32_t>(id) < pages ? (static_cast<uint32_t>(id) << page_log2) + (of_key & page_mask) : kNoRow;
  }
};

// Joins the groups' partials, laid out [kGroups][kRows][kStride] and [kGroups][kRows] in shared memory
// (rows: token * 16 + head), and writes the CTA's partial. All threads; after a barrier.
template <int kGroups, int kRows, int kStride>
__device__ __forceinline__ void join_groups(const AttentionParams& p, const SplitRange& range, int split, const float* out,
                                            const float2* stats) {
  const int quad = threadIdx.x & 15;
  for (int row = threadIdx.x >> 4; row < range.tokens * kQHeads; row += blockDim.x >> 4) {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kGroups; i++) top = fmaxf(top, stats[i * kRows + row].x);
    float total = 0.0f;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      const float2 st = stats[i * kRows + row];
      const float f = st.x == -INFINITY ? 0.0f : exp2_approx(st.x - top);
      const float4 x = *reinterpret_cast<const float4*>(out + (i * kRows + row) * kStride + quad * 4);
      total += f * st.y;
      v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w;
    }
    const int64_t at = (static_cast<int64_t>(range.first_token) * kQHeads + row) * p.splits + split;
    reinterpret_cast<float4*>(p.acc + at * kHeadDim)[quad] = v;
    if (quad == 0) reinterpret_cast<float2*>(p.lse)[at] = make_float2(top, total);
  }
}

}  // namespace msl
