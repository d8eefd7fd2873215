// attention, verify: tiles of up to 8 query tokens of a request (attention_verify_parts.cuh has the work on a chunk).
//
// A CTA (split, request, tile of tokens) walks its keys in chunks of 64, in two roles that meet at the barriers of a ring
// of FP16 tiles [K head 0, K head 1, V head 0, V head 1][64 keys][64]:
//   loading      8 warps bring rows to a raw ring three chunks ahead, whatever the other role does, and turn a chunk into
//                halves when its place in the ring of tiles is free. The fence that lets wgmma see them is the readers':
//                it is a memory barrier too, and these warps have loads under way.
//   multiplying  2 warpgroups, one KV head each: S by wgmma m64n64k16, queries from registers; softmax on registers; O by
//                wgmma m64n64k16, probabilities from registers. The warpgroups take turns at the tensor cores: in its turn
//                one issues S of a chunk and O of the chunk before, and then has the softmax while the other multiplies
//                (up to 4% with 64 requests of 8k, nothing with 16).
// The partial goes to memory straight from the accumulators.
//
// On an H200 the loading role alone takes 0.53 us a chunk and SM, as decode does, the multiplying role alone 0.73: it
// binds. Its products and its exponentials (16 a clock) are 512 clocks each, 0.3 us; without exponentials it takes 0.5.
// Sizes: rings of 3 x 16 KB and 4 x 32 KB; 72 registers a loading thread and 184 a multiplying one: one CTA a SM.
#pragma once
#include "attention_verify_parts.cuh"

namespace msl {

struct VerifyConfig {
  static constexpr int kTokens = kSplitTokens;
  static constexpr int kConsumers = 256, kProducers = 256, kThreads = kConsumers + kProducers;
  static constexpr int kUnit = kVerifyChunk;
  static constexpr int kRaw = 3, kDepth = 4;                 // chunks of the two rings
  static constexpr int kRawAt = kDepth * kVerifyChunkBytes;
  static constexpr int kIds = kRawAt + kRaw * kVerifyRawBytes;
  static constexpr int kMaskSlots = 16;                      // chunks whose key masks are kept
  static constexpr int kMasks = kIds + kRaw * kVerifyChunk * 4;
  static constexpr int kBarriers = kMasks + kMaskSlots * 8;  // full, empty
  static constexpr int kSharedBytes = kBarriers + 2 * kDepth * 8;
  static_assert(kRaw + kDepth < kMaskSlots);
};

__device__ __forceinline__ void verify_load(const AttentionParams& p, const SplitRange& range, int request, int chunks,
                                            char* shared, uint64_t* full, uint64_t* empty) {
  using C = VerifyConfig;
  const VerifyLoader<C::kRaw, C::kMaskSlots> loader(p, range, request, threadIdx.x - C::kConsumers, shared + C::kRawAt,
                                                    shared + C::kIds, shared + C::kMasks);
  const int fresh = max(0, range.old_end - range.begin) / kVerifyChunk;  // the first chunk with keys of this step
  int first_ids[C::kRaw];
#pragma unroll
  for (int i = 0; i < C::kRaw; i++) first_ids[i] = loader.first_id(i);
#pragma unroll
  for (int i = 0; i < C::kRaw; i++) {
    loader.fetch_id(i + C::kRaw, i);
    if (i == fresh) pdl_wait();
    if (i < chunks) loader.issue(i, i, first_ids[i]);
    cp_async_commit();
  }
  int stage = 0, slot = 0;
  uint32_t phase = 1;  // an empty ring: the first pass does not wait
#pragma unroll 1
  for (int i = 0; i < chunks; i++) {
    cp_async_wait<C::kRaw - 1>();
    __syncwarp();  // the warp's page ids have landed too
    uint4 x[4];
    loader.take(stage, x);
    const int next = i + C::kRaw;
    if (next == fresh) pdl_wait();
    if (next < chunks) loader.issue(next, stage, loader.ids[stage * kVerifyChunk]);
    __syncwarp();
    loader.fetch_id(next + C::kRaw, stage);
    cp_async_commit();
    mbar_wait(&empty[slot], phase);
    loader.put(shared + slot * kVerifyChunkBytes, x);
    __syncwarp();
    if (loader.lane == 0) mbar_arrive(&full[slot]);
    stage = stage == C::kRaw - 1 ? 0 : stage + 1;
    if (++slot == C::kDepth) slot = 0, phase ^= 1;
  }
}

__device__ __forceinline__ void verify_multiply(const AttentionParams& p, const SplitRange& range, int split, int chunks,
                                                char* shared, uint64_t* full, uint64_t* empty) {
  using C = VerifyConfig;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, c = lane & 3;
  const int kv_head = warp >> 2, pair = warp & 3;
  VerifyRows rows;
  rows.start(p, range, pair, p.softmax_scale * __ldcg(p.k_scale) * kLog2e);
  pdl_wait();
  uint32_t q[4][4];  // A fragments of the 4 k16 steps
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int token = 2 * pair + r;
    const bool live = token < range.tokens;
    const int64_t row = static_cast<int64_t>(range.first_token + (live ? token : 0)) * kQHeads + kv_head * kGroup + g;
    const uint32_t* src = reinterpret_cast<const uint32_t*>(static_cast<const __half*>(p.q) + row * kHeadDim);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      q[s][r] = live ? __ldcg(src + 8 * s + c) : 0;
      q[s][2 + r] = live ? __ldcg(src + 8 * s + 4 + c) : 0;
    }
  }

  float s[32];
  uint32_t prob[4][4];
  const uint64_t k_desc = desc_sw128(shared + kv_head * kVerifyTileBytes);
  const auto tiles = [&](int slot) { return k_desc + slot * (kVerifyChunkBytes / 16); };
  const auto wait_full = [&](int slot, uint32_t phase) {
    mbar_wait(&full[slot], phase);
    fence_proxy_async();  // for the writers (see above)
  };
  const auto take_turn = [&] { named_barrier(1 + kv_head, C::kConsumers); };
  const auto pass_turn = [&](bool last) {
    if (!last || kv_head == 0) named_arrive(2 - kv_head, C::kConsumers);
  };
  const auto scores = [&](int slot) {
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int st = 0; st < 4; st++) wgmma_rs<kVerifyChunk, true>(s, q[st], tiles(slot) + 2 * st, st > 0);
    wgmma_commit();
  };
  const auto values = [&](int slot) { verify_values(rows.o, prob, tiles(slot) + 2 * kVerifyTileBytes / 16); };
  const auto softmax = [&](int i) {
    const uint2 seen = *reinterpret_cast<const uint2*>(shared + C::kMasks + (i & (C::kMaskSlots - 1)) * 8);
    rows.softmax(s, prob, range.begin + i * kVerifyChunk, seen, c);
  };

  int slot = 0;
  uint32_t phase = 0;
  if (kv_head == 1) named_arrive(1, C::kConsumers);  // the first turn is the other's
  wait_full(0, 0);
  take_turn();
  scores(0);
  pass_turn(chunks == 1);
  wgmma_wait<0>();
  wgmma_fence_operand(s);
  softmax(0);
#pragma unroll 1
  for (int i = 1; i < chunks; i++) {
    const int before = slot;
    if (++slot == C::kDepth) slot = 0, phase ^= 1;
    wait_full(slot, phase);
    take_turn();
    scores(slot);
    values(before);
    pass_turn(i == chunks - 1);
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    wgmma_fence_operand(rows.o);
    if (lane == 0) mbar_arrive(&empty[before]);
    softmax(i);
  }
  values(slot);
  wgmma_wait<0>();
  wgmma_fence_operand(rows.o);
  rows.write(p, range, split, kv_head, pair, g, c);
}

__global__ void __launch_bounds__(VerifyConfig::kThreads, 1) attention_verify_kernel(const __grid_constant__
                                                                                      AttentionParams p) {
  using C = VerifyConfig;
  extern __shared__ __align__(1024) char shared_verify[];
  pdl_launch();
  const int split = blockIdx.x, request = blockIdx.y, tile = blockIdx.z;
  const SplitRange range = split_range<C::kTokens, C::kUnit>(p, request, tile, split);
  if (write_empty(p, range, request, tile, split)) return;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared_verify + C::kBarriers);
  uint64_t* empty = full + C::kDepth;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kDepth; s++) {
      mbar_init(&full[s], C::kProducers / 32);
      mbar_init(&empty[s], C::kConsumers / 32);
    }
    mbar_init_fence();
  }
  __syncthreads();
  const int chunks = (range.end - range.begin + kVerifyChunk - 1) / kVerifyChunk;
  if (threadIdx.x >= C::kConsumers) {
    setmaxnreg_dec<72>();
    verify_load(p, range, request, chunks, shared_verify, full, empty);
  } else {
    setmaxnreg_inc<184>();
    verify_multiply(p, range, split, chunks, shared_verify, full, empty);
  }
}

inline int launch_attention_verify(const AttentionParams& p, const Launch& l) {
  const int tiles = (p.max_q_len + VerifyConfig::kTokens - 1) / VerifyConfig::kTokens;
  return launch(attention_verify_kernel, dim3(p.splits, p.requests, tiles), dim3(VerifyConfig::kThreads),
                VerifyConfig::kSharedBytes, l, p);
}

}  // namespace msl
