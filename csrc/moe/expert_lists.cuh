// expert_lists: from the chosen ids to the local routes sorted by (expert, token).
//
// A token names an expert at most once, so the set of a local expert's tokens is a bit mask, and a route's
// place is the expert's offset plus the tokens before its own in the mask: nothing depends on the order in
// which threads or CTAs come. For many tokens router_topk writes the masks, a word of 32 tokens for each local expert;
// for few they are made from the ids. Up to kListTokens tokens its last CTA builds everything (the masks fill 4 KB);
// beyond that one more launch, with a CTA to 256 tokens, each of which counts what the words before its own hold.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kListThreads = 256;
constexpr int kListTokens = 1024;

// The place of expert `id` in the range from `local_start` on, which wraps; local if below kLocalExperts.
__device__ __forceinline__ uint32_t local_expert(int id, int local_start) {
  return (uint32_t(id) - uint32_t(local_start)) % kExperts;
}
// Local experts of one token, by slot; -1 where not local.
__device__ __forceinline__ void local_experts(const RouterTopkParams& p, int token, int local_start, int limit,
                                              int (&local)[kTopK]) {
  const int4* ids = reinterpret_cast<const int4*>(p.topk_ids + int64_t(token) * kTopK);
  const int4 a = __ldcg(ids), b = __ldcg(ids + 1);
  const int id[kTopK] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int s = 0; s < kTopK; s++) {
    const uint32_t e = local_expert(id[s], local_start);
    local[s] = e < kLocalExperts && token < limit ? int(e) : -1;
  }
}
// Tokens from this one on take no local route.
__device__ __forceinline__ int list_limit(const RouterTopkParams& p) {
  return p.num_tokens_non_padded != nullptr ? __ldcg(p.num_tokens_non_padded) : p.tokens;
}

// kWords words of 32 tokens for each local expert.
template <int kWords>
struct ListMasks {
  uint32_t mask[kWords][kLocalExperts];
  int before[kWords][kLocalExperts];  // the expert's offset and its tokens in earlier words

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kWords * kLocalExperts; i += kListThreads) (&mask[0][0])[i] = 0;
  }
  __device__ __forceinline__ void add(int token, const int (&local)[kTopK]) {
#pragma unroll
    for (int s = 0; s < kTopK; s++)
      if (local[s] >= 0) atomicOr(&mask[token / 32][local[s]], 1u << (token % 32));
  }
  // `words` words of the step's, from word `first` on.
  __device__ __forceinline__ void load(const RouterTopkParams& p, int first, int words) {
    for (int i = threadIdx.x; i < words * kLocalExperts; i += kListThreads)
      (&mask[0][0])[i] = __ldcg(p.token_masks + first * kLocalExperts + i);
  }
  // The first warp, one expert a lane: this expert's routes.
  __device__ __forceinline__ int count(int words) const {
    int n = 0;
    for (int w = 0; w < words; w++) n += __popc(mask[w][threadIdx.x]);
    return n;
  }
  __device__ __forceinline__ void set_before(int words, int offset) {
    for (int w = 0; w < words; w++) {
      before[w][threadIdx.x] = offset;
      offset += __popc(mask[w][threadIdx.x]);
    }
  }
  __device__ __forceinline__ int place(int token, int expert) const {
    return before[token / 32][expert] + __popc(mask[token / 32][expert] & ((1u << (token % 32)) - 1));
  }
};

__device__ __forceinline__ int warp_exclusive_scan(int v) {
  const int lane = threadIdx.x & 31;
  int sum = v;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int up = __shfl_up_sync(0xFFFFFFFFu, sum, d);
    if (lane >= d) sum += up;
  }
  return sum - v;
}

// Writes a token's places: `token` among all, `index` in the masks.
template <int kWords>
__device__ __forceinline__ void write_routes(const RouterTopkParams& p, const ListMasks<kWords>& masks, int token,
                                             int index, const int (&local)[kTopK]) {
  int place[kTopK];
#pragma unroll
  for (int s = 0; s < kTopK; s++) {
    place[s] = local[s] >= 0 ? masks.place(index, local[s]) : -1;
    if (local[s] >= 0) p.route_token[place[s]] = token;
  }
  int4* out = reinterpret_cast<int4*>(p.token_route + int64_t(token) * kTopK);
  out[0] = make_int4(place[0], place[1], place[2], place[3]);
  out[1] = make_int4(place[4], place[5], place[6], place[7]);
}

// One CTA of kListThreads threads, up to kListTokens tokens.
template <bool kMasks>
__device__ __forceinline__ void build_expert_lists(const RouterTopkParams& p, ListMasks<kListTokens / 32>& masks) {
  const int words = (p.tokens + 31) / 32;
  int local[kTopK];
  const int local_start = __ldcg(p.local_start), limit = list_limit(p);
  if constexpr (kMasks) {
    masks.load(p, 0, words);
  } else {
    masks.clear();
    __syncthreads();
    for (int token = threadIdx.x; token < p.tokens; token += kListThreads) {
      local_experts(p, token, local_start, limit, local);
      masks.add(token, local);
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int n = masks.count(words);
    const int offset = warp_exclusive_scan(n);
    p.expert_offsets[threadIdx.x] = offset;
    if (threadIdx.x == 31) p.expert_offsets[kLocalExperts] = offset + n;
    masks.set_before(words, offset);
  }
  __syncthreads();
  for (int token = threadIdx.x; token < p.tokens; token += kListThreads) {
    if (kMasks || p.tokens > kListThreads) local_experts(p, token, local_start, limit, local);
    write_routes(p, masks, token, token, local);
  }
}

// Many tokens: offsets and lists from the masks.
__global__ void __launch_bounds__(kListThreads) expert_lists_kernel(const RouterTopkParams p) {
  constexpr int kWords = kListThreads / 32, kGroups = kListThreads / kLocalExperts;
  __shared__ ListMasks<kWords> masks;
  __shared__ int total_of[kGroups][kLocalExperts], earlier_of[kGroups][kLocalExperts];
  pdl_launch();
  pdl_wait();
  const int token = blockIdx.x * kListThreads + threadIdx.x;
  const int words = (p.tokens + 31) / 32, first = blockIdx.x * kWords;
  masks.load(p, first, min(kWords, words - first));
  int local[kTopK];
  if (token < p.tokens) local_experts(p, token, __ldcg(p.local_start), list_limit(p), local);
  // This expert's routes: of all words, of those before this CTA's.
  const int expert = threadIdx.x % kLocalExperts, group = threadIdx.x / kLocalExperts;
  int total = 0, earlier = 0;
#pragma unroll 8
  for (int w = group; w < words; w += kGroups) {
    const int n = __popc(__ldcg(p.token_masks + w * kLocalExperts + expert));
    total += n;
    if (w < first) earlier += n;
  }
  total_of[group][expert] = total;
  earlier_of[group][expert] = earlier;
  __syncthreads();
  if (threadIdx.x < 32) {
    total = earlier = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      total += total_of[g][threadIdx.x];
      earlier += earlier_of[g][threadIdx.x];
    }
    const int offset = warp_exclusive_scan(total);
    if (blockIdx.x == 0) {
      p.expert_offsets[threadIdx.x] = offset;
      if (threadIdx.x == 31) p.expert_offsets[kLocalExperts] = offset + total;
    }
    masks.set_before(min(kWords, words - first), offset + earlier);
  }
  __syncthreads();
  if (token < p.tokens) write_routes(p, masks, token, threadIdx.x, local);
}

}  // namespace msl
