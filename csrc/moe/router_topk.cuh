// router_topk: the 8 experts of each token and their weights, then the expert lists.
//
// Up to kTopkCtaTokens tokens 256 threads own one, a thread one expert: it adds the router's splits in order (all loads under way at
// once), takes the sigmoid and the biased score. Exact top 8 by few steps: the least of the eight warps' maxima
// bounds the eighth best from below, what reaches it (about 20 of 256) is compacted, and each of these counts
// the better ones: its rank is its slot. Keys hold the score's order and, below it, the id, so that ties go to
// the lowest id, ranks are distinct and the order of compaction does not matter. A NaN score ranks below
// everything: whatever the activations, the ids are 8 distinct ones in range. Beyond, where throughput counts, a warp
// owns a token, a lane eight experts, and the best is taken eight times.
//
// Who builds the lists (expert_lists.cuh):
//   up to 16 tokens      one cluster of 8 CTAs has all tokens, one or two a CTA. The CTAs exchange one word a
//                        token, its set of local experts, and each places its own tokens' routes: the pooler,
//                        the experts and so the whole step wait for this kernel, and a ticket through device
//                        memory costs 1.4 us more. (One token: one CTA, no exchange.)
//   17 to 64 tokens      router_topk_tokens.cuh
//   up to kListTokens    the CTA that finishes last builds everything. Its ticket is in the control block; it sets it
//                        back to zero.
//   beyond               one more launch.
#pragma once
#include "expert_lists.cuh"

namespace msl {

constexpr int kTopkThreads = kExperts;  // of a token
constexpr int kTopkCtas = 8;            // of the cluster
constexpr int kTopkCtaTokens = 512;

__device__ __forceinline__ float expert_score(float logit) { return 1.0f / (1.0f + expf(-logit * kRouterMultiplier)); }

// Unsigned order of the scores; 0 for NaN.
__device__ __forceinline__ uint32_t score_order(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A candidate's rank: the score's order, and below it the id, so that of equals the lowest id is the greatest.
__device__ __forceinline__ uint64_t candidate_key(uint32_t order, int expert) {
  return uint64_t(order) << 32 | uint32_t(kExperts - 1 - expert);
}
__device__ __forceinline__ int candidate_expert(uint64_t key) { return kExperts - 1 - int(uint32_t(key)); }

struct TopkShared {
  ulonglong2 key[kExperts / 2 + 4];  // zeros behind the candidates, up to a multiple of 8
  float score[kExperts];
  uint32_t warp_max[kTopkThreads / 32];
  int candidates;
  int id[kTopK];
  float chosen[kTopK];
};

__device__ __forceinline__ void topk_begin(TopkShared& top, int expert) {
  reinterpret_cast<uint64_t*>(top.key)[expert] = 0;
  if (expert < 8) reinterpret_cast<uint64_t*>(top.key)[kExperts + expert] = 0;
  if (expert == 0) top.candidates = 0;
}

// The logit of a token's expert: the router's splits added in order, sixteen loads under way.
__device__ __forceinline__ float sum_of_splits(const RouterTopkParams& p, int token, int expert) {
  const float* logits = p.logits + int64_t(token) * kExperts + expert;
  const int64_t stride = int64_t(p.tokens) * kExperts;
  float logit = 0.0f;
  for (int s = 0; s < p.splits; s += 16) {
    float part[16];
#pragma unroll
    for (int j = 0; j < 16; j++)
      if (s + j < p.splits) part[j] = __ldcg(logits + (s + j) * stride);
#pragma unroll
    for (int j = 0; j < 16; j++)
      if (s + j < p.splits) logit += part[j];
  }
  return logit;
}

// One token by 256 threads that share the named barrier `barrier`; `expert` is the thread's number among them.
// topk_begin() has run (the first barrier in here orders it). Writes ids and weights; the first warp returns
// each slot's id in its first 8 lanes.
__device__ __forceinline__ int topk_of_token(const RouterTopkParams& p, TopkShared& top, int barrier, int expert,
                                             float bias, int token, float logit) {
  const int lane = expert & 31;
  if (p.router_logits != nullptr) p.router_logits[int64_t(token) * kExperts + expert] = logit;
  const float score = expert_score(logit);
  const uint32_t order = score_order(score + bias);
  const uint32_t best = __reduce_max_sync(0xFFFFFFFFu, order);
  if (lane == 0) top.warp_max[expert >> 5] = best;
  named_barrier(barrier, kTopkThreads);
  uint32_t bound = top.warp_max[0];
#pragma unroll
  for (int w = 1; w < kTopkThreads / 32; w++) bound = min(bound, top.warp_max[w]);
  const uint32_t among = __ballot_sync(0xFFFFFFFFu, order >= bound);
  int place = 0;
  if (lane == 0) place = atomicAdd(&top.candidates, __popc(among));
  place = __shfl_sync(0xFFFFFFFFu, place, 0) + __popc(among & ((1u << lane) - 1));
  if (order >= bound) {
    reinterpret_cast<uint64_t*>(top.key)[place] = candidate_key(order, expert);
    top.score[place] = score;
  }
  named_barrier(barrier, kTopkThreads);
  const int n = top.candidates;
  if (n <= 32 && expert >= 32) return 0;  // the first warp has them all
  if (expert < n) {
    const uint64_t mine = reinterpret_cast<const uint64_t*>(top.key)[expert];
    int rank = 0;
    for (int i = 0; i < n; i += 8) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const ulonglong2 other = top.key[i / 2 + j];
        rank += (other.x > mine) + (other.y > mine);
      }
    }
    if (rank < kTopK) {
      top.id[rank] = candidate_expert(mine);
      top.chosen[rank] = top.score[expert];
    }
  }
  if (n > 32) named_barrier(barrier, kTopkThreads);
  if (expert >= 32) return 0;
  __syncwarp();
  int id = 0;
  if (lane < kTopK) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < kTopK; s++) total += top.chosen[s];
    id = top.id[lane];
    p.topk_ids[int64_t(token) * kTopK + lane] = id;
    p.topk_scores[int64_t(token) * kTopK + lane] = top.chosen[lane] / (total + kRouteEps);
  }
  return id;
}

// Publishes this CTA's ids; the last one to come sees everyone's.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* counter) {
  uint32_t ticket;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(counter) : "memory");
  return ticket;
}

// A CTA a token; the last one builds the lists.
//
// Behind the pooler (RouterTopkParams::behind) the logits are there when a CTA starts, since the pooler triggers when the
// router is complete, and it runs beside the pooler on what room that leaves. So that what comes later still starts with
// complete lists, it triggers when they are written; and the last CTA waits for the pooler, so that this kernel's end is
// its end too. The others leave their room to CTAs that have not begun.
__global__ void __launch_bounds__(kTopkThreads) router_topk_kernel(const RouterTopkParams p) {
  __shared__ __align__(16) TopkShared top;
  __shared__ ListMasks<kListTokens / 32> masks;
  __shared__ bool last;
  if (!p.behind) pdl_launch();
  const float bias = p.bias[threadIdx.x];
  topk_begin(top, threadIdx.x);
  if (!p.behind) pdl_wait();
  topk_of_token(p, top, 1, threadIdx.x, bias, blockIdx.x, sum_of_splits(p, blockIdx.x, threadIdx.x));
  if (threadIdx.x < 32) {
    __syncwarp();
    if (threadIdx.x == 0) {
      last = take_ticket(p.counters) == gridDim.x - 1;
      if (last) *p.counters = 0;
    }
  }
  __syncthreads();
  if (!last) return;
  build_expert_lists<false>(p, masks);
  if (p.behind) {
    __threadfence();
    __syncthreads();
    pdl_launch();
    pdl_wait();
  }
}

struct ListShared {
  ListMasks<kListTokens / 32> masks;
  uint32_t bits[kLocalExperts];  // of this CTA's tokens: a byte of the step's masks
  bool last;
};

// A warp a token, eight tokens a CTA.
constexpr int kTopkWarps = kListThreads / 32;
static_assert(kTopkWarps == 8, "a byte of a mask");

__global__ void __launch_bounds__(kListThreads, 4) router_topk_warps_kernel(const RouterTopkParams p) {
  __shared__ ListShared lists;
  pdl_launch();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int token = blockIdx.x * kTopkWarps + warp;
  if (threadIdx.x < kLocalExperts) lists.bits[threadIdx.x] = 0;
  // Experts 4 lane .. 4 lane + 3 and 128 more of each: in ascending order.
  const auto expert = [&](int j) { return (j & 4) * 32 + 4 * lane + (j & 3); };
  float bias[8], logit[8];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float4 v = *reinterpret_cast<const float4*>(p.bias + expert(4 * h));
    bias[4 * h] = v.x, bias[4 * h + 1] = v.y, bias[4 * h + 2] = v.z, bias[4 * h + 3] = v.w;
  }
  const int local_start = __ldcg(p.local_start), limit = list_limit(p);  // the caller's
  __syncthreads();
  pdl_wait();
  if (token < p.tokens) {
    const float* logits = p.logits + int64_t(token) * kExperts;
    const int64_t stride = int64_t(p.tokens) * kExperts;
#pragma unroll
    for (int j = 0; j < 8; j++) logit[j] = 0.0f;
    for (int s = 0; s < p.splits; s += 4) {  // four splits' loads under way, added in order
      float4 part[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (s + i < p.splits) {
#pragma unroll
          for (int h = 0; h < 2; h++) part[i][h] = __ldcg(reinterpret_cast<const float4*>(logits + (s + i) * stride + expert(4 * h)));
        }
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (s + i < p.splits) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            logit[4 * h] += part[i][h].x, logit[4 * h + 1] += part[i][h].y;
            logit[4 * h + 2] += part[i][h].z, logit[4 * h + 3] += part[i][h].w;
          }
        }
    }
    uint32_t order[8];
    float score[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (p.router_logits != nullptr) p.router_logits[int64_t(token) * kExperts + expert(j)] = logit[j];
      score[j] = expert_score(logit[j]);
      order[j] = score_order(score[j] + bias[j]);
    }
    uint32_t taken = 0;
    int id = 0;
    float chosen = 0.0f, total = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kTopK; slot++) {
      // Of this lane, of the warp; the lowest id among equals.
      uint32_t best = 0;
      int at = -1;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (!(taken >> j & 1) && (at < 0 || order[j] > best)) best = order[j], at = j;
      const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, best);
      const uint32_t winner = __reduce_min_sync(0xFFFFFFFFu, at >= 0 && best == top ? expert(at) : kExperts);
      const int j = winner / 128 * 4 + winner % 4, owner = winner % 128 / 4;
      float its = score[0];
#pragma unroll
      for (int i = 1; i < 8; i++)
        if (i == j) its = score[i];
      its = __shfl_sync(0xFFFFFFFFu, its, owner);
      if (lane == owner) taken |= 1u << j;
      if (lane == slot) id = winner, chosen = its;
      total += its;
    }
    if (lane < kTopK) {
      p.topk_ids[int64_t(token) * kTopK + lane] = id;
      p.topk_scores[int64_t(token) * kTopK + lane] = chosen / (total + kRouteEps);
      const uint32_t local = local_expert(id, local_start);
      if (local < kLocalExperts && token < limit) atomicOr(&lists.bits[local], 1u << warp);
    }
  }
  __syncthreads();
  if (threadIdx.x < kLocalExperts) {
    uint8_t* words = reinterpret_cast<uint8_t*>(p.token_masks + blockIdx.x / 4 * kLocalExperts + threadIdx.x);
    words[blockIdx.x % 4] = uint8_t(lists.bits[threadIdx.x]);
    if (p.tokens <= kListTokens) {
      __syncwarp();
      if (threadIdx.x == 0) {
        lists.last = take_ticket(p.counters) == gridDim.x - 1;
        if (lists.last) *p.counters = 0;
      }
    }
  }
  if (p.tokens > kListTokens) return;
  __syncthreads();
  if (lists.last) build_expert_lists<true>(p, lists.masks);
}

// All tokens in one cluster of kCtas CTAs, kGroups in each; logit_of(token, expert) after the wait.
template <int kCtas, int kGroups, class Logit>
__device__ __forceinline__ void topk_of_cluster(const RouterTopkParams& p, Logit logit_of) {
  constexpr int kTokens = kCtas * kGroups;
  __shared__ __align__(16) TopkShared tops[kGroups];
  __shared__ uint32_t sets[kTokens];  // each token's local experts
  __shared__ uint64_t bar;
  pdl_launch();
  const int group = threadIdx.x / kTopkThreads, expert = threadIdx.x % kTopkThreads, lane = threadIdx.x & 31;
  const int rank = kCtas > 1 ? cluster_rank() : 0;
  const int token = group * kCtas + rank;
  const float bias = p.bias[expert];
  topk_begin(tops[group], expert);
  if constexpr (kCtas > 1) {
    if (threadIdx.x == 0) {
      mbar_init(&bar, 1);
      mbar_init_fence();
      mbar_expect_tx(&bar, 4 * p.tokens);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
  int local_start = 0, limit = 0;
  if (expert < 32) {  // the caller's
    local_start = __ldcg(p.local_start);
    limit = list_limit(p);
  }
  pdl_wait();
  uint32_t local = kExperts;  // this slot's local expert (lanes 0 .. 7 of the group's first warp)
  if (token < p.tokens) {
    const int id = topk_of_token(p, tops[group], 1 + group, expert, bias, token, logit_of(token, expert));
    if (expert >= 32) return;
    if (lane < kTopK && token < limit) local = local_expert(id, local_start);
    const uint32_t set = __reduce_or_sync(0xFFFFFFFFu, local < kLocalExperts ? 1u << local : 0u);
    if constexpr (kCtas > 1) {
      if (lane < kCtas) store_remote_word(cluster_map(&sets[token], lane), set, cluster_map(&bar, lane));
    } else {
      if (lane == 0) sets[0] = set;
      __syncwarp();
    }
  } else if (expert >= 32) {
    return;
  }
  if constexpr (kCtas > 1) mbar_wait(&bar, 0);

  // A route's place: all routes of the experts before its own, and its expert's in the tokens before.
  const auto place = [&](uint32_t e, int before_token) {
    int n = 0;
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      const uint32_t set = t < p.tokens ? sets[t] : 0;
      n += __popc(set & ((1u << e) - 1)) + (t < before_token ? (set >> e) & 1 : 0);
    }
    return n;
  };
  if (token < p.tokens && lane < kTopK) {
    const bool is_local = local < kLocalExperts;
    const int at = place(local % kLocalExperts, token);
    if (is_local) p.route_token[at] = token;
    p.token_route[token * kTopK + lane] = is_local ? at : -1;
  }
  if (token == 0) {
    const int offset = place(lane, 0);
    p.expert_offsets[lane] = offset;
    if (lane == 31) p.expert_offsets[kLocalExperts] = place(lane, p.tokens);
  }
}

template <int kCtas, int kGroups>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kGroups* kTopkThreads)
    router_topk_cluster_kernel(const RouterTopkParams p) {
  topk_of_cluster<kCtas, kGroups>(p, [&](int token, int expert) { return sum_of_splits(p, token, expert); });
}

}  // namespace msl
