// The grouped expert GEMM: out[token, row] = sum_k weight[expert][row, k] * x[token, k] for tokens sorted by
// expert, weights on the M side of wgmma (from registers, dequantised there), tokens on the N side (from
// shared memory), FP32 accumulation.
//
// A CTA is persistent and walks items: units (expert, chunk of at most kMaxN of its tokens, block of kRowGroups 64-row
// tiles, K split), or parts of them, as expert_walk.cuh shares them out. Experts come in order of falling token counts,
// an expert's blocks are neighbours (its tokens and, with several chunks, its weights stay in L2). Items may have half or
// a quarter of the row tiles (the other warpgroups rest) or a part of K (the sums come from one CTA and go to another).
//
// Ring: slots of 1, 2 or 4 k tiles of weights (1-D bulk copies, contiguous) and of tokens (one tensor copy as wide as the
// item, 128-byte swizzle), filled by two threads, one for the weights and one for the tokens. The weights' thread runs
// ahead of pdl_wait() as far as the ring goes; the expert lists are read before it too, which the pooler's late trigger
// allows.
//
// Consumer warpgroups own a row tile each. They load their share of a tile (one 16-byte and one 2-byte load a
// thread), expand it to BF16 fragments in one of two register sets and issue four wgmmas; the next half tile is
// expanded while two of those run. The item's width N is the narrowest that holds its tokens, so that few tokens waste
// nothing. Rows past the expert's tokens are garbage columns, never stored.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "expert_gemm_common.cuh"
#include "expert_gemm_config.cuh"
#include "expert_walk.cuh"
#include "expert_wgmma.cuh"
#include "nvfp4_dequant.cuh"

namespace msl {
namespace expert {

// --- producer ------------------------------------------------------------------------------------

// One lane of a whole warp. Told so, and not by `lane == 0`, the compiler knows that there is one, and leaves out the loop
// of an election around every copy (12 instead of 5 to 8 instructions each).
__device__ __forceinline__ bool elect() {
  uint32_t mine;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}\n" : "=r"(mine));
  return mine != 0;
}
__device__ __forceinline__ void wait_at(uint32_t bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void expect_at(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_load_at(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void tokens_3d(uint32_t dst, const CUtensorMap* map, int row, int k, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst), "l"(map), "r"(bar), "r"(0), "r"(row), "r"(k), "l"(kEvictNormal)
      : "memory");
}

// A walker's place in the ring; addresses are in shared memory.
template <class C>
struct Place {
  uint32_t full, empty;  // of slot 0
  uint32_t base, slot_bytes;
  int slots, slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ Place(Shared<C>& s, uint8_t* ring) {
    full = smem_u32(&s.full[0]);
    empty = smem_u32(&s.empty[0]);
    base = smem_u32(ring);
    slot_bytes = s.slot_bytes;
    slots = s.slots;
    // Kept in registers: the compiler would read a special register for them at every stage.
    asm volatile("" : "+r"(full), "+r"(empty), "+r"(base));
  }
  __device__ __forceinline__ void advance() {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

// Weights: by one thread of a warp of its own, which so runs ahead of pdl_wait() as far as the ring goes.
template <class C, int kKind>
__device__ __forceinline__ void produce_weights(const GemmArgs& a, Shared<C>& s, uint8_t* ring) {
  constexpr int kBytes = tile_bytes(kKind);
  constexpr int64_t kRowTile = int64_t(kExpertDim / kTileK) * kBytes;
  Place<C> at(s, ring);
  for (int n = 0; n < s.mine; n++) {
    const Item item = item_at<C>(s, n);
    const int width = C::width(item.tokens), tiles = C::stage_tiles(width, kKind);
    const uint32_t bytes = tiles * kBytes, total = item.height * bytes, offset = tiles * width * 128;
    const uint64_t policy = item.shared ? kEvictNormal : kEvictFirst;
    const uint8_t* src = static_cast<const uint8_t*>(a.p.weight) + (int64_t(item.expert) * a.blocks + item.block) * kRowTile +
                         item.k * kBytes;
#pragma unroll 1
    for (int stages = item.k_tiles / tiles; stages > 0; stages--, src += bytes) {
      wait_at(at.empty + at.slot * 8, at.phase ^ 1);  // an empty ring: the first pass does not wait
      const uint32_t bar = at.full + at.slot * 8;
      expect_at(bar, total);
      const uint32_t dst = at.base + at.slot * at.slot_bytes + offset;
#pragma unroll
      for (int r = 0; r < C::kRowGroups; r++)
        if (r < item.height) bulk_load_at(dst + r * bytes, src + r * kRowTile, bytes, bar, policy);
      at.advance();
    }
  }
}

// Tokens: by one thread of another warp, a copy a stage. Rows past the expert's are whoever's come next, or zero.
template <class C, int kKind>
__device__ __forceinline__ void produce_tokens(const GemmArgs& a, Shared<C>& s, uint8_t* ring) {
  Place<C> at(s, ring);
  for (int n = 0; n < s.mine; n++) {
    const Item item = item_at<C>(s, n);
    const int width = C::width(item.tokens), tiles = C::stage_tiles(width, kKind);
    const CUtensorMap* map = &a.tokens[C::token_map(width)];
    int k = item.k;
    if (C::kCarry && item.resumes) await_sums<C>(a.p);
#pragma unroll 1
    for (int stages = item.k_tiles / tiles; stages > 0; stages--, k += tiles) {
      wait_at(at.empty + at.slot * 8, at.phase ^ 1);
      const uint32_t bar = at.full + at.slot * 8;
      expect_at(bar, tiles * width * 128);
      tokens_3d(at.base + at.slot * at.slot_bytes, map, item.row, k, bar);
      at.advance();
    }
  }
}

// --- consumers -----------------------------------------------------------------------------------

// A warp has left a slot. (A __syncwarp() before it would say formally that all its lanes have read their codes;
// the compiler then serialises the wgmmas around it.)
__device__ __forceinline__ void release(uint32_t empty, int slot) {
  if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + slot * 8) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

// Keeps the fragments' computation before the wgmma fence: a definition that slips between the wgmmas would
// make the compiler serialise them.
__device__ __forceinline__ void fence_fragments(uint32_t (&a)[2][4]) {
#pragma unroll
  for (int s = 0; s < 2; s++)
    asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
}

// Every width that a configuration asks for is one that consume() has.
template <class C>
constexpr bool widths_are_there() {
#define MSL_WIDTH(N) || C::width(tokens) == N
  for (int tokens = 1; tokens <= C::kMaxN; tokens++)
    if (!(false MSL_WIDTHS(MSL_WIDTH))) return false;
#undef MSL_WIDTH
  return true;
}

// acc += this warpgroup's row tile x the item's tokens.
template <class C, int kKind, int N>
__device__ __forceinline__ void multiply(Place<C>& at, int row_group, int k_tiles, float (&acc)[N / 2]) {
  constexpr int kTiles = C::stage_tiles(N, kKind);  // of a stage
  constexpr int kBytes = tile_bytes(kKind);
  constexpr int kWeights = kTiles * N * 128;  // of a slot, before them the tokens
  constexpr int kTileStep = N * 128;
  // Descriptor of K-major tokens: 128-byte swizzle, groups of 8 tokens 1 KB apart.
  constexpr uint64_t kDescriptor = uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
  const int thread = threadIdx.x & 127;
  Fragment<kKind == 0> fragment;
  uint32_t weights = 0;  // of the stage: the row tile's
  uint64_t tokens = 0;   // of the stage; a tile's and a step's are constants away
  auto enter = [&]() {
    wait_at(at.full + at.slot * 8, at.phase);
    const uint32_t slot = at.base + at.slot * at.slot_bytes;
    weights = slot + row_group * kTiles * kBytes + kWeights;
    tokens = kDescriptor | slot >> 4;
  };
  auto fetch = [&](int tile) {
    if constexpr (kKind == 0) {
      fragment.codes = load_shared_16(weights + tile * kBytes + thread * 16);
      fragment.scales = load_shared_2(weights + tile * kBytes + thread * 2 + kCodeBytes);
    } else {
      fragment.mine = static_cast<const uint8_t*>(__cvta_shared_to_generic(weights + tile * kBytes + thread * 16));
    }
  };
  wgmma_fence_operand(acc);
  enter();
  fetch(0);
  // Two pairs of k16 steps: one is expanded while the other is multiplied. A turn ends with nothing in flight (config).
  uint32_t a[2][2][4];
#pragma unroll 1
  for (int left = k_tiles; left > 0; left -= C::kStepTiles) {
    constexpr int kPairs = 2 * C::kStepTiles, kStage = 2 * kTiles;  // of a turn, of a stage
    int slots[kPairs / kStage];
#pragma unroll
    for (int n = 0; n < kPairs; n++) {
      const int tile = n / 2 % kTiles, pair = n % 2;
      fragment.expand(pair, a[pair]);
      fence_fragments(a[pair]);
      wgmma_fence();
      wgmma_add<N>(acc, a[pair][0], tokens + (tile * kTileStep >> 4) + 4 * pair);
      wgmma_add<N>(acc, a[pair][1], tokens + (tile * kTileStep >> 4) + 4 * pair + 2);
      wgmma_commit();
      if (pair == 1) {  // the next tile's codes arrive while these products run
        if (tile + 1 < kTiles) {
          fetch(tile + 1);
        } else {
          slots[n / kStage] = at.slot;
          at.advance();
          if (n + 1 < kPairs || left > C::kStepTiles) {
            enter();
            fetch(0);
          }
        }
      }
      if (n + 1 < kPairs) wgmma_wait<1>();  // all but this pair's products are done
      if (n > 0 && n % kStage == 0) release(at.empty, slots[n / kStage - 1]);
    }
    wgmma_wait<0>();
    release(at.empty, slots[kPairs / kStage - 1]);
  }
  wgmma_fence_operand(acc);
}

template <class C, int kKind, int N>
__device__ __forceinline__ void consume_item(const GemmArgs& a, Shared<C>& s, Place<C>& at, const Item& item, int row_group) {
  if (row_group >= item.height) {  // no row tile of this item: only keeps up with the ring
#pragma unroll 1
    for (int t = item.k_tiles / C::stage_tiles(N, kKind); t > 0; t--) {
      wait_at(at.full + at.slot * 8, at.phase);
      release(at.empty, at.slot);
      at.advance();
    }
    return;
  }
  // Here, since they may come from far.
  const float* scales = a.p.scale + (a.p.swiglu ? 2 * item.expert : item.expert);
  const float scale = scales[0], up_scale = a.p.swiglu ? scales[1] : 0.0f;
  float acc[N / 2];
  if constexpr (C::kCarry) {
    wait_at(at.full + at.slot * 8, at.phase);
    begin_sums<C, N>(a.p, row_group, item.resumes, acc);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
  }
  multiply<C, kKind, N>(at, row_group, item.k_tiles, acc);
  if (C::kCarry && item.hands_over) give_sums<C, N>(a.p, s, row_group, acc);
  else store_rows<N>(a.p, item, item.block + row_group, (threadIdx.x >> 5) & 3, acc, scale, up_scale);
}

template <class C, int kKind>
__device__ __forceinline__ void consume(const GemmArgs& a, Shared<C>& s, uint8_t* ring) {
  static_assert(widths_are_there<C>());
  const int row_group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  Place<C> at(s, ring);
  for (int n = 0; n < s.mine; n++) {
    const Item item = item_at<C>(s, n);
#define MSL_WIDTH(N)                                                                                       \
  case N:                                                                                                  \
    if constexpr (N <= C::kMaxN && C::width(N) == N) consume_item<C, kKind, N>(a, s, at, item, row_group); \
    break;
    switch (C::width(item.tokens)) { MSL_WIDTHS(MSL_WIDTH) }
#undef MSL_WIDTH
  }
}

template <class C, int kKind>
__global__ void __launch_bounds__(C::kBlockThreads, 1) expert_gemm_kernel(const __grid_constant__ GemmArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  pdl_launch();
  __shared__ Shared<C> s;
  uint8_t* ring = memory + ((1024 - (smem_u32(memory) & 1023)) & 1023);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  if (warp == 0) {
    build_lists<C::kMaxN>(s.lists, a.p, a.blocks / C::kRowGroups * a.p.splits);
    __syncwarp();
    if (lane == 0) size_ring<C, kKind>(s);
    divide<C>(s, a);
    __syncwarp();
    list_items<C>(s, a);
  } else if (warp == 1 && lane == 0) {
    for (int i = 0; i < C::kMaxSlots; i++) {
      mbar_init(&s.full[i], 2);  // weights and tokens
      mbar_init(&s.empty[i], C::kConsumers / 32);
    }
    mbar_init(&s.given, C::kConsumers / 32);
    mbar_init_fence();
  } else if (warp == 2 && 8 * lane < min(a.p.max_routes_per_expert, C::kMaxN)) {
    tma_prefetch_descriptor(&a.tokens[C::token_map(C::width(8 * lane + 1))]);
  }
  __syncthreads();
  if (warp >= C::kConsumers / 32) {
    setmaxnreg_dec<C::kProducerRegisters>();
    if (warp == C::kConsumers / 32) {
      if (elect()) produce_weights<C, kKind>(a, s, ring);
    } else {
      pdl_wait();
      if (warp == C::kConsumers / 32 + 1 && elect()) produce_tokens<C, kKind>(a, s, ring);
      if constexpr (C::kCarry)
        if (warp == C::kConsumers / 32 + 2 && s.mine > 0 && item_at<C>(s, 0).hands_over && elect()) announce_sums<C>(a.p, s);
    }
  } else {
    setmaxnreg_inc<C::kConsumerRegisters>();
    pdl_wait();
    consume<C, kKind>(a, s, ring);
  }
}

// Host side of a configuration.
template <class C, int kKind>
int launch_config(const GemmArgs& a, const Launch& l) {
  // A CTA a multiprocessor, and no more than there can be items.
  const int64_t chunks = int64_t(a.p.route_bound) < kLocalExperts ? a.p.route_bound : kLocalExperts + a.p.route_bound / C::kMaxN;
  const int64_t most = chunks * a.blocks * a.p.splits;
  // More on few multiprocessors, where a CTA's list would not hold its items.
  const int64_t rounds = most / C::kRowGroups / (int64_t(l.sm_count) * (C::kItems - 2)) + 1;
  const int64_t ctas = rounds * l.sm_count;
  const dim3 grid(static_cast<unsigned>(most < ctas ? most : ctas));
  return launch(expert_gemm_kernel<C, kKind>, grid, dim3(C::kBlockThreads), C::kSharedBytes, l, a);
}
template <class C, int kKind>
int prepare_config() {
  return prepare_kernel(expert_gemm_kernel<C, kKind>, C::kSharedBytes);
}

}  // namespace expert
}  // namespace msl
