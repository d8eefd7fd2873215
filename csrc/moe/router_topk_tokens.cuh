// router_topk for 17 to 64 tokens: all of them in one cluster of 8 CTAs, which hand each other their words of the expert
// lists' masks: no ticket, and nothing goes through device memory and back.
//
// Two warps own a token, a thread four experts; few threads a CTA, so that it starts beside the router. The choice is
// router_topk.cuh's: eight sets of 32 experts bound the eighth best from below by the least of their maxima, what
// reaches it is compacted, and the token's first warp counts for each of these how many are better.
#pragma once
#include "router_topk.cuh"

namespace msl {

constexpr int kTopkClusterTokens = 64;
constexpr int kTopkEach = 4;                              // experts of a thread
constexpr int kTopkTokenThreads = kExperts / kTopkEach;
constexpr int kTopkLoads = 8;                             // splits under way
static_assert(kTopkClusterTokens / kTopkCtas <= 15, "a named barrier a token of a CTA");

struct TopkToken {
  ulonglong2 key[kExperts / 2 + 4];
  float score[kExperts];
  uint32_t set_max[8];
  float chosen[kTopK];
  int id[kTopK];
  int candidates;
};
struct TopkWords {
  uint32_t bits[kLocalExperts];              // of this CTA's tokens
  uint32_t words[kTopkCtas][kLocalExperts];  // of each CTA's
  uint64_t done, all;
};
constexpr size_t topk_tokens_bytes(int tokens) { return sizeof(TopkWords) + size_t((tokens + kTopkCtas - 1) / kTopkCtas) * sizeof(TopkToken); }

constexpr int kTopkClusterThreads = kTopkClusterTokens / kTopkCtas * kTopkTokenThreads;

__global__ void __cluster_dims__(kTopkCtas, 1, 1) __launch_bounds__(kTopkClusterThreads, 2)
    router_topk_tokens_kernel(const RouterTopkParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  TopkWords& shared = *reinterpret_cast<TopkWords*>(raw);
  pdl_launch();
  const int group = __shfl_sync(~0u, threadIdx.x / kTopkTokenThreads, 0), thread = threadIdx.x % kTopkTokenThreads, lane = threadIdx.x & 31;
  const int rank = cluster_rank(), groups = blockDim.x / kTopkTokenThreads;
  const int token = rank * groups + group;
  TopkToken& top = reinterpret_cast<TopkToken*>(raw + sizeof(TopkWords))[group];
  if (threadIdx.x == 0) {
    mbar_init(&shared.done, groups);
    mbar_init(&shared.all, 1);
    mbar_init_fence();
    mbar_expect_tx(&shared.all, kTopkCtas * kLocalExperts * 4);
  }
  if (threadIdx.x < kLocalExperts) shared.bits[threadIdx.x] = 0;
  if (thread == 0) top.candidates = 0;
  __syncthreads();
  cluster_arrive();
  const int expert = thread * kTopkEach;  // and three more
  const float4 biases = *reinterpret_cast<const float4*>(p.bias + expert);
  const float bias[kTopkEach] = {biases.x, biases.y, biases.z, biases.w};
  cluster_wait();
  pdl_wait();

  uint32_t local = kExperts;  // this slot's local expert (lanes 0 .. 7 of the token's first warp)
  if (token < p.tokens) {
    const int local_start = __ldcg(p.local_start), limit = list_limit(p);
    const float* logits = p.logits + int64_t(token) * kExperts + expert;
    const int64_t stride = int64_t(p.tokens) * kExperts;
    float logit[kTopkEach] = {};
    for (int s = 0; s < p.splits; s += kTopkLoads) {  // loads under way together, added in order
      float4 part[kTopkLoads];
#pragma unroll
      for (int i = 0; i < kTopkLoads; i++)
        if (s + i < p.splits) part[i] = __ldcg(reinterpret_cast<const float4*>(logits + (s + i) * stride));
#pragma unroll
      for (int i = 0; i < kTopkLoads; i++)
        if (s + i < p.splits) logit[0] += part[i].x, logit[1] += part[i].y, logit[2] += part[i].z, logit[3] += part[i].w;
    }
    if (p.router_logits != nullptr)
      *reinterpret_cast<float4*>(p.router_logits + int64_t(token) * kExperts + expert) = make_float4(logit[0], logit[1], logit[2], logit[3]);
    float score[kTopkEach];
    uint32_t order[kTopkEach];
#pragma unroll
    for (int j = 0; j < kTopkEach; j++) {
      score[j] = expert_score(logit[j]);
      order[j] = score_order(score[j] + bias[j]);
    }
    // A warp's experts j are a set.
#pragma unroll
    for (int j = 0; j < kTopkEach; j++) {
      const uint32_t best = __reduce_max_sync(0xFFFFFFFFu, order[j]);
      if (lane == 0) top.set_max[(thread >> 5) * kTopkEach + j] = best;
    }
    named_barrier(1 + group, kTopkTokenThreads);
    uint32_t bound = top.set_max[0];
#pragma unroll
    for (int s = 1; s < 8; s++) bound = min(bound, top.set_max[s]);
    uint32_t among[kTopkEach];
    int n = 0;
#pragma unroll
    for (int j = 0; j < kTopkEach; j++) {
      among[j] = __ballot_sync(0xFFFFFFFFu, order[j] >= bound);
      n += __popc(among[j]);
    }
    int place = 0;
    if (lane == 0 && n > 0) place = atomicAdd(&top.candidates, n);
    place = __shfl_sync(0xFFFFFFFFu, place, 0);
#pragma unroll
    for (int j = 0; j < kTopkEach; j++) {
      const int at = place + __popc(among[j] & ((1u << lane) - 1));
      place += __popc(among[j]);
      if (order[j] >= bound) {
        reinterpret_cast<uint64_t*>(top.key)[at] = candidate_key(order[j], expert + j);
        top.score[at] = score[j];
      }
    }
    if (thread >= 32) {
      named_arrive(1 + group, kTopkTokenThreads);
      return;
    }
    named_barrier(1 + group, kTopkTokenThreads);
    n = top.candidates;
    if (lane < 8) reinterpret_cast<uint64_t*>(top.key)[n + lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < n; i += 32) {  // once, but for crowds of equals
      const uint64_t mine = reinterpret_cast<const uint64_t*>(top.key)[i];
      int better = 0;
#pragma unroll 1
      for (int k = 0; k < n; k += 8) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const ulonglong2 other = top.key[k / 2 + m];
          better += (other.x > mine) + (other.y > mine);
        }
      }
      if (better < kTopK) {
        top.id[better] = candidate_expert(mine);
        top.chosen[better] = top.score[i];
      }
    }
    __syncwarp();
    if (lane < kTopK) {
      float total = 0.0f;
#pragma unroll
      for (int s = 0; s < kTopK; s++) total += top.chosen[s];
      const int id = top.id[lane];
      const uint32_t e = local_expert(id, local_start);
      if (e < kLocalExperts && token < limit) {
        local = e;
        atomicOr(&shared.bits[e], 1u << group);
      }
      p.topk_ids[int64_t(token) * kTopK + lane] = id;
      p.topk_scores[int64_t(token) * kTopK + lane] = top.chosen[lane] / (total + kRouteEps);
    }
  } else if (thread >= 32) {
    return;
  }
  // A word an expert to each CTA of the cluster, by as many warps as there are tokens.
  __syncwarp();
  if (lane == 0) mbar_arrive(&shared.done);
  mbar_wait(&shared.done, 0);
  for (int to = group; to < kTopkCtas; to += groups)
    store_remote_word(cluster_map(&shared.words[rank][lane], to), shared.bits[lane], cluster_map(&shared.all, to));
  mbar_wait(&shared.all, 0);

  // Lane: an expert. Its routes, those of the CTAs before this one and of this CTA's tokens before this one.
  int routes = 0, before = 0;
#pragma unroll
  for (int from = 0; from < kTopkCtas; from++) {
    const uint32_t word = shared.words[from][lane];
    routes += __popc(word);
    before += from < rank ? __popc(word) : from == rank ? __popc(word & ((1u << group) - 1)) : 0;
  }
  const int offset = warp_exclusive_scan(routes);
  if (token == 0) {
    p.expert_offsets[lane] = offset;
    if (lane == 31) p.expert_offsets[kLocalExperts] = offset + routes;
  }
  const int place = __shfl_sync(0xFFFFFFFFu, offset + before, local & 31);
  if (token < p.tokens && lane < kTopK) {
    const bool is_local = local < kLocalExperts;
    if (is_local) p.route_token[place] = token;
    p.token_route[int64_t(token) * kTopK + lane] = is_local ? place : -1;
  }
}

}  // namespace msl
