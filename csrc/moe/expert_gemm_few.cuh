// The few-token expert GEMM (decode and verify): the same product, layout and unit walk as expert_gemm.cuh, for
// experts with at most some tens of tokens, where the weights' bytes decide and a warp must never wait long.
//
// A CTA of 8 consumer warps and a producer warp owns a unit of 64 weight rows. The ring's stages are 4 k tiles
// (9216 bytes of NVFP4 by one bulk copy, and the tokens' columns of those 256 k by TMA). Warp (h, q) multiplies
// the 32 rows of half h by the stage's k tile q with mma.m16n8k16 (at N = 8 a wgmma's register reads and fences
// cost as much as the dequantisation), so warps share nothing but the stage barriers; its two 16-row groups give
// it independent work and share the tokens' fragments; the next stage's codes are loaded before the current
// products are issued. The four k slices of a half meet in shared memory at the end of the unit. With up to 8
// tokens an expert the CTA keeps to half of an SM (shared memory and registers), so that the next kernel of the
// step becomes resident and fills its ring beside this one. Token rows are stored as 1, 2, 4 or 8 lines of 128
// bytes a k tile (then boxes of 8), as many as the expert's tokens ask for: at one token an expert the copy
// engine moves 6% more than the weights, not 44%.
#pragma once
#include "../common/launch.cuh"
#include "expert_gemm_common.cuh"
#include "nvfp4_dequant.cuh"

namespace msl {
namespace expert {

template <int kMaxN_, int kSlices_, int kRingBytes_, int kMinBlocks_>
struct FewConfig {
  static constexpr int kMaxN = kMaxN_;
  static constexpr int kRingBytes = kRingBytes_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kSlices = kSlices_;      // k tiles of a stage, one a warp of each half
  static constexpr int kWarps = 2 * kSlices;    // consumers
  static constexpr int kBlockThreads = 32 * kWarps + 32;
  static constexpr int kMaxSlots = 16;
  static constexpr int kReduceBytes = (kSlices - 1) * kThreads * (kMaxN / 2) * 4;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kReduceBytes;
};

// Lines of 128 bytes that `tokens` tokens take in a k tile: 1, 2, 4, 8, then multiples of 8.
MSL_HD constexpr int token_lines(int tokens) {
  return tokens <= 1 ? 1 : tokens <= 2 ? 2 : tokens <= 4 ? 4 : (tokens + 7) / 8 * 8;
}

template <class C>
struct FewShared {
  uint64_t full[C::kMaxSlots];
  uint64_t empty[C::kMaxSlots];
  Lists lists;
  int slot_bytes, slots;
};

__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void mma_bf16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The CTA's stages in order, for the producer: stage n belongs to its unit n / per_unit. n rises by one from 0.
template <class C, int kKind>
struct FewLoader {
  const GemmArgs& a;
  const Lists& lists;
  int per_unit_log2, i = 0;
  struct Stage { Unit unit; int k; };
  Stage current;
  __device__ __forceinline__ FewLoader(const GemmArgs& args, const Lists& l, int log2) : a(args), lists(l), per_unit_log2(log2) {}
  __device__ __forceinline__ const Stage& at(int n) {
    const int within = n & ((1 << per_unit_log2) - 1);
    if (within == 0)
      current.unit = decode_unit<C::kMaxN>(lists, blockIdx.x + (n >> per_unit_log2) * static_cast<int>(gridDim.x), i, a.blocks, a.p.splits);
    current.k = ((current.unit.split << per_unit_log2) + within) * C::kSlices;
    return current;
  }
  __device__ __forceinline__ void weights(const Stage& s, uint8_t* slot, uint64_t* bar) const {
    constexpr int kBytes = tile_bytes(kKind);
    const int lines = token_lines(s.unit.tokens);
    mbar_expect_tx(bar, C::kSlices * (kBytes + lines * 128));
    const int64_t tile = (int64_t(s.unit.expert) * a.blocks + s.unit.block) * (kExpertDim / kTileK) + s.k;
    bulk_load(slot + C::kSlices * lines * 128, static_cast<const uint8_t*>(a.p.weight) + tile * kBytes, C::kSlices * kBytes, bar,
              lists.count[i] > C::kMaxN ? kEvictNormal : kEvictFirst);
  }
  __device__ __forceinline__ void tokens(const Stage& s, uint8_t* slot, uint64_t* bar) const {
    const int lines = token_lines(s.unit.tokens);
    const CUtensorMap* map = &a.few[lines == 1 ? 0 : lines == 2 ? 1 : lines == 4 ? 2 : 3];
    for (int b = 0; b < lines; b += 8) tma_load_3d(slot + b * C::kSlices * 128, map, 0, s.unit.row + b, s.k, bar);
  }
};

// A consumer's place in the ring.
struct FewRing {
  uint8_t* base;
  int slots, slot_bytes, slot;
  uint32_t phase;
  __device__ __forceinline__ uint8_t* at() const { return base + slot * slot_bytes; }
  __device__ __forceinline__ void advance() {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

// `lines` token lines a k tile: line (tile, token) is tile * lines + token below 8 tokens, and
// (box * kSlices + tile) * 8 + token with boxes of 8; 16-byte chunk c of a line sits at c ^ (line & 7). Rows past the
// tokens repeat the last line: garbage columns.
template <class C, int kKind, int N>
__device__ __forceinline__ void few_unit(const GemmArgs& a, FewShared<C>& s, FewRing& ring, float* reduce, const Unit& unit, int stages,
                                         bool first, bool last) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int half = warp & 1, slice = warp >> 1;
  const int lines = token_lines(unit.tokens);
  const int weights_at = C::kSlices * lines * 128 + slice * tile_bytes(kKind);
  // Lane l of ldmatrix names row l % 8 of matrix l / 8: positions 8 (l / 8) .. of the pair's 32.
  const uint32_t line = slice * min(lines, 8) + min(lane & 7, lines - 1);
  const uint32_t chunk0 = line * 128 + (((lane >> 3) ^ (line & 7)) << 4), chunk1 = chunk0 ^ 64;
  float acc[2][N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) acc[0][i] = acc[1][i] = 0.0f;
  Fragment<kKind == 0> fragment[2];
  auto fetch = [&]() {
    mbar_wait(&s.full[ring.slot], ring.phase);
    const uint8_t* tile = ring.at() + weights_at;
#pragma unroll
    for (int r = 0; r < 2; r++) fragment[r].load(tile, (2 * half + r) * 32 + lane);
  };
  fetch();
#pragma unroll 1
  for (int stage = 0; stage < stages; stage++) {
    const uint32_t tokens = smem_u32(ring.at());
    uint64_t* empty = &s.empty[ring.slot];
    uint32_t b[2][4];
    load_matrices(b[0], tokens + chunk0);
    load_matrices(b[1], tokens + chunk1);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      uint32_t w[2][2][4];  // [row group][step]
      fragment[0].expand(pair, w[0]);
      fragment[1].expand(pair, w[1]);
      if (pair == 1) {  // the codes are used up: the next stage's
        ring.advance();
        if (stage + 1 < stages) fetch();
      }
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        uint32_t more[4];
        if (n > 0) load_matrices(more, tokens + (pair ? chunk1 : chunk0) + n * (C::kSlices * 1024));
#pragma unroll
        for (int step = 0; step < 2; step++) {
          const uint32_t b0 = n > 0 ? more[2 * step] : b[pair][2 * step], b1 = n > 0 ? more[2 * step + 1] : b[pair][2 * step + 1];
          mma_bf16(&acc[0][4 * n], w[0][step], b0, b1);
          mma_bf16(&acc[1][4 * n], w[1][step], b0, b1);
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(empty);
  }
  // The slices' sums meet: barrier `ready` when they are written, `taken` when they have been read.
  const int ready = 1 + half, taken = 3 + half;
  float* mine = reduce + half * 64 + lane;
  if (slice > 0) {
    if (!first) named_barrier(taken, C::kSlices * 32);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      mine[((slice - 1) * (C::kMaxN / 2) + i) * kThreads] = acc[0][i];
      mine[((slice - 1) * (C::kMaxN / 2) + i) * kThreads + 32] = acc[1][i];
    }
    asm volatile("bar.arrive %0, %1;" ::"r"(ready), "r"(C::kSlices * 32) : "memory");
  } else {
    named_barrier(ready, C::kSlices * 32);
#pragma unroll
    for (int q = 0; q < C::kSlices - 1; q++) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        acc[0][i] += mine[(q * (C::kMaxN / 2) + i) * kThreads];
        acc[1][i] += mine[(q * (C::kMaxN / 2) + i) * kThreads + 32];
      }
    }
    if (!last) asm volatile("bar.arrive %0, %1;" ::"r"(taken), "r"(C::kSlices * 32) : "memory");
    store_rows<N>(a.p, unit, unit.block, 2 * half, acc[0]);
    store_rows<N>(a.p, unit, unit.block, 2 * half + 1, acc[1]);
  }
}

template <class C, int kKind>
__device__ __forceinline__ void few_produce(const GemmArgs& a, FewShared<C>& s, uint8_t* ring, int per_unit_log2, int total) {
  const int slots = s.slots, slot_bytes = s.slot_bytes, filled = min(slots, total);
  FewLoader<C, kKind> loader(a, s.lists, per_unit_log2), tokens(a, s.lists, per_unit_log2);
  for (int n = 0; n < filled; n++) loader.weights(loader.at(n), ring + n * slot_bytes, &s.full[n]);
  pdl_wait();
  for (int n = 0; n < filled; n++) tokens.tokens(tokens.at(n), ring + n * slot_bytes, &s.full[n]);
  int slot = 0;
  uint32_t phase = 0;
  for (int n = filled; n < total; n++) {
    const auto& stage = loader.at(n);
    mbar_wait(&s.empty[slot], phase);
    loader.weights(stage, ring + slot * slot_bytes, &s.full[slot]);
    loader.tokens(stage, ring + slot * slot_bytes, &s.full[slot]);
    if (++slot == slots) slot = 0, phase ^= 1;
  }
}

template <class C, int kKind>
__global__ void __launch_bounds__(C::kBlockThreads, C::kMinBlocks) expert_few_kernel(const __grid_constant__ GemmArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  pdl_launch();
  __shared__ FewShared<C> s;
  uint8_t* ring = memory + ((1024 - (smem_u32(memory) & 1023)) & 1023);
  float* reduce = reinterpret_cast<float*>(ring + C::kRingBytes);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  if (warp == 0) {
    build_lists<C::kMaxN>(s.lists, a.p, a.blocks * a.p.splits);
    __syncwarp();
    if (lane == 0) {
      const int lines = token_lines(min(max(s.lists.count[0], 1), C::kMaxN));
      s.slot_bytes = (C::kSlices * (tile_bytes(kKind) + lines * 128) + 1023) / 1024 * 1024;
      s.slots = min(C::kRingBytes / s.slot_bytes, C::kMaxSlots);
    }
  } else if (warp == 1 && lane == 0) {
    for (int i = 0; i < C::kMaxSlots; i++) {
      mbar_init(&s.full[i], 1);
      mbar_init(&s.empty[i], C::kWarps);
    }
    mbar_init_fence();
  } else if (warp == 2 && lane < 4) {
    tma_prefetch_descriptor(&a.few[lane]);
  }
  __syncthreads();
  const int per_unit_log2 = 31 - __clz(kExpertDim / kTileK / C::kSlices / a.p.splits);
  if (warp == C::kWarps) {
    const int grid = static_cast<int>(gridDim.x), units = max(s.lists.total - static_cast<int>(blockIdx.x) + grid - 1, 0) / grid;
    if (lane == 0) few_produce<C, kKind>(a, s, ring, per_unit_log2, units << per_unit_log2);
    else pdl_wait();
    return;
  }
  pdl_wait();
  FewRing place{ring, s.slots, s.slot_bytes, 0, 0};
  int i = 0;
  for (int u = blockIdx.x; u < s.lists.total; u += static_cast<int>(gridDim.x)) {
    const Unit unit = decode_unit<C::kMaxN>(s.lists, u, i, a.blocks, a.p.splits);
    const bool first = u == static_cast<int>(blockIdx.x), last = u + static_cast<int>(gridDim.x) >= s.lists.total;
    const int stages = 1 << per_unit_log2;
    if (C::kMaxN <= 8 || unit.tokens <= 8) few_unit<C, kKind, 8>(a, s, place, reduce, unit, stages, first, last);
    else if (unit.tokens <= 16) few_unit<C, kKind, (C::kMaxN > 16 ? 16 : C::kMaxN)>(a, s, place, reduce, unit, stages, first, last);
    else few_unit<C, kKind, C::kMaxN>(a, s, place, reduce, unit, stages, first, last);
  }
}

}  // namespace expert
}  // namespace msl
