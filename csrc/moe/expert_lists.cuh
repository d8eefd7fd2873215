// expert_lists: from the chosen ids to the local routes sorted by (expert, token).
//
// A token names an expert at most once, so the set of a local expert's tokens is a bit mask, and a route's
// place is the expert's offset plus the tokens before its own in the mask: nothing depends on the order in
// which threads or CTAs come. Up to kListTokens tokens the last CTA of router_topk builds everything (its
// masks fill 4 KB); beyond that two more launches, with a CTA of 256 threads to 256 tokens: the first counts
// each block's routes per expert, the second adds the counts of the blocks before its own and fills the lists.
#pragma once
#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../include/model.h"

namespace msl {

constexpr int kListThreads = 256;
constexpr int kListTokens = 1024;

// Local experts of one token, by slot; -1 where not local.
__device__ __forceinline__ void local_experts(const RouterTopkParams& p, int token, int local_start, int limit,
                                              int (&local)[kTopK]) {
  const int4* ids = reinterpret_cast<const int4*>(p.topk_ids + int64_t(token) * kTopK);
  const int4 a = __ldcg(ids), b = __ldcg(ids + 1);
  const int id[kTopK] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int s = 0; s < kTopK; s++) {
    const uint32_t e = (uint32_t(id[s]) - uint32_t(local_start)) % kExperts;
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
__device__ __forceinline__ void build_expert_lists(const RouterTopkParams& p, ListMasks<kListTokens / 32>& masks) {
  const int local_start = __ldcg(p.local_start);
  const int limit = list_limit(p);
  const int words = (p.tokens + 31) / 32;
  masks.clear();
  __syncthreads();
  int local[kTopK];
  for (int token = threadIdx.x; token < p.tokens; token += kListThreads) {
    local_experts(p, token, local_start, limit, local);
    masks.add(token, local);
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
    if (p.tokens > kListThreads) local_experts(p, token, local_start, limit, local);
    write_routes(p, masks, token, token, local);
  }
}

// Many tokens, first launch: block_counts[b][e].
__global__ void __launch_bounds__(kListThreads) expert_lists_count_kernel(const RouterTopkParams p) {
  __shared__ ListMasks<kListThreads / 32> masks;
  pdl_launch();
  masks.clear();
  __syncthreads();
  pdl_wait();
  const int token = blockIdx.x * kListThreads + threadIdx.x;
  if (token < p.tokens) {
    int local[kTopK];
    local_experts(p, token, __ldcg(p.local_start), list_limit(p), local);
    masks.add(threadIdx.x, local);
  }
  __syncthreads();
  if (threadIdx.x < 32) p.block_counts[blockIdx.x * kLocalExperts + threadIdx.x] = masks.count(kListThreads / 32);
}

// Second launch: offsets and lists.
__global__ void __launch_bounds__(kListThreads) expert_lists_fill_kernel(const RouterTopkParams p) {
  __shared__ ListMasks<kListThreads / 32> masks;
  pdl_launch();
  masks.clear();
  __syncthreads();
  pdl_wait();
  const int token = blockIdx.x * kListThreads + threadIdx.x;
  int local[kTopK];
  if (token < p.tokens) {
    local_experts(p, token, __ldcg(p.local_start), list_limit(p), local);
    masks.add(threadIdx.x, local);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int total = 0, earlier = 0;  // this expert's routes: of all blocks, of those before this one
#pragma unroll 8
    for (int b = 0; b < int(gridDim.x); b++) {
      const int n = __ldcg(p.block_counts + b * kLocalExperts + threadIdx.x);
      total += n;
      if (b < int(blockIdx.x)) earlier += n;
    }
    const int offset = warp_exclusive_scan(total);
    if (blockIdx.x == 0) {
      p.expert_offsets[threadIdx.x] = offset;
      if (threadIdx.x == 31) p.expert_offsets[kLocalExperts] = offset + total;
    }
    masks.set_before(kListThreads / 32, offset + earlier);
  }
  __syncthreads();
  if (token < p.tokens) write_routes(p, masks, token, threadIdx.x, local);
}

}  // namespace msl
