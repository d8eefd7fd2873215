// router_topk: the 8 experts of each token and their weights, then the expert lists.
//
// A CTA of 256 threads owns one token, a thread one expert: it adds the router's splits in order (all loads
// under way at once), takes the sigmoid and the biased score. Exact top 8 by few steps: the least of the eight
// warps' maxima bounds the eighth best from below, what reaches it (about 20 of 256) is compacted, and each of
// these counts the better ones: its rank is its slot. Keys hold the score's order and, below it, the id, so
// that ties go to the lowest id, ranks are distinct and the order of compaction does not matter. A NaN score
// ranks below everything: whatever the activations, the ids are 8 distinct ones in range.
//
// Up to kListTokens tokens the CTA that finishes last (a ticket in the control block, set back to zero by it)
// builds the expert lists (expert_lists.cuh); a single token needs no ticket.
#pragma once
#include "expert_lists.cuh"

namespace msl {

// Unsigned order of the scores; 0 for NaN.
__device__ __forceinline__ uint32_t score_order(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct TopkShared {
  uint64_t key[kExperts];
  float score[kExperts];
  uint32_t warp_max[kListThreads / 32];
  int candidates;
  int id[kTopK];
  float chosen[kTopK];
  bool last;
};

__global__ void __launch_bounds__(kListThreads) router_topk_kernel(const RouterTopkParams p) {
  __shared__ __align__(16) TopkShared top;
  __shared__ ListMasks<kListTokens / 32> masks;
  pdl_launch();
  const int expert = threadIdx.x;
  const int token = blockIdx.x;
  const float bias = p.bias[expert];
  if (threadIdx.x == 0) top.candidates = 0;
  pdl_wait();

  const float* logits = p.logits + int64_t(token) * kExperts + expert;
  const int64_t stride = int64_t(p.tokens) * kExperts;
  float logit = 0.0f;
  for (int s = 0; s < p.splits; s += 16) {  // sixteen loads under way, added in order
    float part[16];
#pragma unroll
    for (int j = 0; j < 16; j++)
      if (s + j < p.splits) part[j] = __ldcg(logits + (s + j) * stride);
#pragma unroll
    for (int j = 0; j < 16; j++)
      if (s + j < p.splits) logit += part[j];
  }
  if (p.router_logits != nullptr) p.router_logits[int64_t(token) * kExperts + expert] = logit;
  const float score = 1.0f / (1.0f + expf(-logit * kRouterMultiplier));
  const uint32_t order = score_order(score + bias);
  const uint32_t best = __reduce_max_sync(0xFFFFFFFFu, order);
  if ((threadIdx.x & 31) == 0) top.warp_max[threadIdx.x >> 5] = best;
  __syncthreads();
  uint32_t bound = top.warp_max[0];
#pragma unroll
  for (int w = 1; w < kListThreads / 32; w++) bound = min(bound, top.warp_max[w]);
  const uint64_t key = uint64_t(order) << 32 | uint32_t(kExperts - 1 - expert);
  const uint32_t among = __ballot_sync(0xFFFFFFFFu, order >= bound);
  int place = 0;
  if ((threadIdx.x & 31) == 0) place = atomicAdd(&top.candidates, __popc(among));
  place = __shfl_sync(0xFFFFFFFFu, place, 0) + __popc(among & ((1u << (threadIdx.x & 31)) - 1));
  if (order >= bound) {
    top.key[place] = key;
    top.score[place] = score;
  }
  __syncthreads();
  const int n = top.candidates;
  if (threadIdx.x < n) {
    const uint64_t mine = top.key[threadIdx.x];
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < n; i++) rank += top.key[i] > mine;
    if (rank < kTopK) {
      top.id[rank] = kExperts - 1 - int(uint32_t(mine));
      top.chosen[rank] = top.score[threadIdx.x];
    }
  }
  __syncthreads();
  if (threadIdx.x < kTopK) {
    float sum = kRouteEps;
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < kTopK; s++) total += top.chosen[s];
    sum += total;
    p.topk_ids[int64_t(token) * kTopK + threadIdx.x] = top.id[threadIdx.x];
    p.topk_scores[int64_t(token) * kTopK + threadIdx.x] = top.chosen[threadIdx.x] / sum;
  }
  if (p.tokens > kListTokens) return;

  if (p.tokens > 1) {
    __syncwarp();
    if (threadIdx.x == 0) {
      __threadfence();
      const uint32_t ticket = atomicAdd(p.counters, 1u);
      top.last = ticket == gridDim.x - 1;
      if (top.last) {
        *p.counters = 0;
        __threadfence();
      }
    }
    __syncthreads();
    if (!top.last) return;
  } else {
    __syncthreads();  // the ids, written by the first warp, are read back below through the L2
    __threadfence_block();
  }
  build_expert_lists(p, masks);
}

}  // namespace msl
