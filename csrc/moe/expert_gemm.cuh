// The grouped expert GEMM: out[token, row] = sum_k weight[expert][row, k] * x[token, k] for tokens sorted by
// expert, weights on the M side of wgmma (from registers, dequantised there), tokens on the N side (from
// shared memory), FP32 accumulation.
//
// A CTA is persistent and walks units u = blockIdx.x, + gridDim.x, ...; a unit is (expert, chunk of at most
// kMaxN of its tokens, block of 64 * kRowGroups weight rows, K split). Experts come in order of falling token
// counts, an expert's row blocks are neighbours (its tokens and, with several chunks, its weights stay in L2).
// The producer warp's lane 0 fills a ring of slots: per stage 1, 2 or 4 k tiles of weights (1-D bulk copies,
// contiguous) and of tokens (TMA, 128-byte swizzle; 8-row boxes up to 32 tokens, 64-row boxes above). The first
// ring-full of weights is requested before pdl_wait(); the expert lists are read before it too, which the
// pooler's late trigger allows. Consumer warpgroups load their share of a tile (one 16-byte and one 2-byte
// load a thread), expand it to BF16 fragments in one of two register sets and issue four wgmmas; the next
// tile is loaded and expanded while those run. The unit's width N is the narrowest that holds its tokens, so
// that few tokens waste nothing. Rows past the expert's tokens are garbage columns, never stored.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/wgmma.cuh"
#include "expert_gemm_common.cuh"
#include "nvfp4_dequant.cuh"

namespace msl {
namespace expert {

template <class C>
struct Shared {
  uint64_t full[C::kMaxSlots];
  uint64_t empty[C::kMaxSlots];
  Lists lists;
  int slot_bytes, slots;
};

// Slots for the widest stage that this pass needs.
template <class C, int kKind>
__device__ __forceinline__ void size_ring(Shared<C>& s) {
  const int widest = tile_width(min(max(s.lists.count[0], 1), C::kMaxN));
  int bytes = 0;
  constexpr int kWidths[8] = {8, 16, 32, 64, 96, 128, 192, 256};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (kWidths[i] <= widest) bytes = max(bytes, stage_bytes(kWidths[i], kKind, C::kRowGroups));
  s.slot_bytes = bytes;
  s.slots = min(C::kRingBytes / bytes, C::kMaxSlots);
}

// --- producer ------------------------------------------------------------------------------------

// Walks the stages of the CTA's units.
template <class C, int kKind>
struct StageCursor {
  const GemmArgs& a;
  const Lists& lists;
  int u, i = 0, k = 0, k_end = 0, tiles = 1, width = 8;
  Unit unit;
  bool valid;
  __device__ __forceinline__ StageCursor(const GemmArgs& args, const Lists& l) : a(args), lists(l), u(blockIdx.x) { open(); }
  __device__ __forceinline__ void open() {
    valid = u < lists.total;
    if (!valid) return;
    unit = decode_unit<C::kMaxN>(lists, u, i, a.blocks, a.p.splits);
    width = tile_width(unit.tokens);
    const int k_tiles = kExpertDim / kTileK / a.p.splits;
    k = unit.split * k_tiles;
    k_end = k + k_tiles;
    tiles = stage_tiles(width, kKind);
  }
  __device__ __forceinline__ void next() {
    k += tiles;
    if (k == k_end) u += gridDim.x, open();
  }
  __device__ __forceinline__ int token_boxes() const {
    return width <= 32 ? (unit.tokens + 7) / 8 : (unit.tokens + 63) / 64;
  }
  __device__ __forceinline__ uint32_t bytes() const {
    return tiles * (C::kRowGroups * tile_bytes(kKind) + token_boxes() * (width <= 32 ? 1024 : 8192));
  }
  __device__ __forceinline__ void load_weights(uint8_t* slot, uint64_t* bar) const {
    constexpr int kBytes = tile_bytes(kKind);
    const uint64_t policy = lists.count[i] > C::kMaxN ? kEvictNormal : kEvictFirst;
    const int64_t tile = (int64_t(unit.expert) * a.blocks + unit.block) * C::kRowGroups * (kExpertDim / kTileK) + k;
    const uint8_t* src = static_cast<const uint8_t*>(a.p.weight) + tile * kBytes;
    uint8_t* dst = slot + tiles * stage_rows(width) * 128;
#pragma unroll
    for (int r = 0; r < C::kRowGroups; r++)
      bulk_load(dst + r * tiles * kBytes, src + int64_t(r) * (kExpertDim / kTileK) * kBytes, tiles * kBytes, bar, policy);
  }
  __device__ __forceinline__ void load_tokens(uint8_t* slot, uint64_t* bar) const {
    const int boxes = token_boxes();
    if (width <= 32) {  // [box of 8 rows][k tile][1 KB]
      for (int b = 0; b < boxes; b++) tma_load_3d(slot + b * tiles * 1024, &a.tokens8, 0, unit.row + 8 * b, k, bar);
    } else {  // [k tile][rows]
      for (int t = 0; t < tiles; t++)
        for (int b = 0; b < boxes; b++)
          tma_load_2d(slot + t * stage_rows(width) * 128 + b * 8192, &a.tokens64, (k + t) * 64, unit.row + 64 * b, bar);
    }
  }
};

template <class C, int kKind>
__device__ __forceinline__ void produce(const GemmArgs& a, Shared<C>& s, uint8_t* ring) {
  const int slots = s.slots, slot_bytes = s.slot_bytes;
  StageCursor<C, kKind> cursor(a, s.lists);
  int filled = 0;
  for (; filled < slots && cursor.valid; filled++, cursor.next()) {
    mbar_expect_tx(&s.full[filled], cursor.bytes());
    cursor.load_weights(ring + filled * slot_bytes, &s.full[filled]);
  }
  pdl_wait();
  StageCursor<C, kKind> tokens(a, s.lists);
  for (int i = 0; i < filled; i++, tokens.next()) tokens.load_tokens(ring + i * slot_bytes, &s.full[i]);
  int slot = 0;
  uint32_t phase = 0;
  for (; cursor.valid; cursor.next()) {
    mbar_wait(&s.empty[slot], phase);
    mbar_expect_tx(&s.full[slot], cursor.bytes());
    cursor.load_weights(ring + slot * slot_bytes, &s.full[slot]);
    cursor.load_tokens(ring + slot * slot_bytes, &s.full[slot]);
    if (++slot == slots) slot = 0, phase ^= 1;
  }
}

// --- consumers -----------------------------------------------------------------------------------

// A consumer's place in the ring.
struct Ring {
  uint8_t* base;
  int slots, slot_bytes, slot;
  uint32_t phase;
  __device__ __forceinline__ uint8_t* at() const { return base + slot * slot_bytes; }
  __device__ __forceinline__ void advance() {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

__device__ __forceinline__ uint64_t tokens_descriptor(const void* tile, int group_stride_bytes) {
  uint64_t d = (smem_u32(tile) & 0x3FFFF) >> 4;
  d |= uint64_t(1) << 16;
  d |= uint64_t(group_stride_bytes >> 4) << 32;  // between groups of 8 tokens
  d |= uint64_t(1) << 62;                        // 128-byte swizzle
  return d;
}

// Keeps the fragments' computation before the wgmma fence: a definition that slips between the wgmmas would
// make the compiler serialise them.
__device__ __forceinline__ void fence_fragments(uint32_t (&a)[2][4]) {
#pragma unroll
  for (int s = 0; s < 2; s++)
    asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
}

// acc = this warpgroup's share of the unit's product.
template <class C, int kKind, int N>
__device__ __forceinline__ void multiply(Shared<C>& s, Ring& ring, int row_group, int split_group, int k_tiles,
                                         float (&acc)[N / 2]) {
  constexpr int kTiles = stage_tiles(N, kKind);       // of a stage
  constexpr int kMine = kTiles / C::kSplitGroups;     // of these, this warpgroup's
  static_assert(kMine >= 1, "a stage has a k tile for every split group");
  constexpr int kBytes = tile_bytes(kKind);
  constexpr int kTileStep = N <= 32 ? 1024 : stage_rows(N) * 128;
  constexpr int kGroupStride = N <= 32 ? kTiles * 1024 : 1024;
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  const int stages = k_tiles / kTiles;
  Fragment<kKind == 0> fragment;
  uint32_t a[2][2][4];  // two pairs of k16 steps: one is expanded while the other is multiplied
  uint64_t tokens = 0;
  auto fetch = [&](int j) {
    const int tile = j * C::kSplitGroups + split_group;
    const uint8_t* slot = ring.at();
    fragment.load(slot + kTiles * stage_rows(N) * 128 + (row_group * kTiles + tile) * kBytes, thread);
    tokens = tokens_descriptor(slot + tile * kTileStep, kGroupStride);
  };
#pragma unroll
  for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
  wgmma_fence_operand(acc);
  int previous = -1;
  mbar_wait(&s.full[ring.slot], ring.phase);
  fetch(0);
#pragma unroll 1
  for (int t = 0; t < stages; t++) {
#pragma unroll
    for (int j = 0; j < kMine; j++) {
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        fragment.expand(pair, a[pair]);
        fence_fragments(a[pair]);
        wgmma_fence();
        wgmma_rs<N>(acc, a[pair][0], tokens + 4 * pair, 1);
        wgmma_rs<N>(acc, a[pair][1], tokens + 4 * pair + 2, 1);
        wgmma_commit();
        if (pair == 1) {  // the next tile's codes arrive while these products run
          if (j + 1 < kMine) {
            fetch(j + 1);
          } else {
            previous = ring.slot;
            ring.advance();
            if (t + 1 < stages) {
              mbar_wait(&s.full[ring.slot], ring.phase);
              fetch(0);
            }
          }
        }
        wgmma_wait<1>();  // all but this pair's products are done
        if (j == 0 && pair == 0 && t > 0 && lane == 0) mbar_arrive(&s.empty[previous]);
      }
    }
  }
  wgmma_wait<0>();
  wgmma_fence_operand(acc);
  if (lane == 0) mbar_arrive(&s.empty[previous]);
}

template <class C, int kKind, int N>
__device__ __forceinline__ void consume_unit(const GemmArgs& a, Shared<C>& s, Ring& ring, float* reduce, const Unit& unit,
                                             int row_group, int split_group, bool first, bool last) {
  float acc[N / 2];
  multiply<C, kKind, N>(s, ring, row_group, split_group, kExpertDim / kTileK / a.p.splits, acc);
  if constexpr (C::kSplitGroups > 1) {
    // The split groups' sums meet in shared memory: barrier `ready` when they are there, `taken` when the
    // first group has read them (waited for before the next unit's are written).
    const int thread = threadIdx.x & 127;
    const int ready = 1 + row_group, taken = 1 + C::kRowGroups + row_group;
    constexpr int kMeeting = C::kSplitGroups * kThreads;
    float* mine = reduce + row_group * (C::kSplitGroups - 1) * (C::kMaxN / 2) * kThreads + thread;
    if (split_group > 0) {
      if (!first) named_barrier(taken, kMeeting);
#pragma unroll
      for (int i = 0; i < N / 2; i++) mine[((split_group - 1) * (C::kMaxN / 2) + i) * kThreads] = acc[i];
      asm volatile("bar.arrive %0, %1;" ::"r"(ready), "r"(kMeeting) : "memory");
      return;
    }
    named_barrier(ready, kMeeting);
#pragma unroll
    for (int q = 1; q < C::kSplitGroups; q++) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) acc[i] += mine[((q - 1) * (C::kMaxN / 2) + i) * kThreads];
    }
    if (!last) asm volatile("bar.arrive %0, %1;" ::"r"(taken), "r"(kMeeting) : "memory");
  }
  store_rows<N>(a.p, unit, unit.block * C::kRowGroups + row_group, (threadIdx.x >> 5) & 3, acc);
}

template <class C, int kKind>
__device__ __forceinline__ void consume(const GemmArgs& a, Shared<C>& s, uint8_t* ring_base, float* reduce) {
  pdl_wait();
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const int row_group = group / C::kSplitGroups, split_group = group % C::kSplitGroups;
  Ring ring{ring_base, s.slots, s.slot_bytes, 0, 0};
  bool first = true;
  int i = 0;
  for (int u = blockIdx.x; u < s.lists.total; u += static_cast<int>(gridDim.x), first = false) {
    const Unit unit = decode_unit<C::kMaxN>(s.lists, u, i, a.blocks, a.p.splits);
    const bool last = u + static_cast<int>(gridDim.x) >= s.lists.total;
#define MSL_WIDTH(N)                                                                                           \
  case N:                                                                                                      \
    if constexpr (N <= C::kMaxN) consume_unit<C, kKind, N>(a, s, ring, reduce, unit, row_group, split_group, first, last); \
    break;
    switch (tile_width(unit.tokens)) {
      MSL_WIDTH(8) MSL_WIDTH(16) MSL_WIDTH(32) MSL_WIDTH(64) MSL_WIDTH(96) MSL_WIDTH(128) MSL_WIDTH(192) MSL_WIDTH(256)
    }
#undef MSL_WIDTH
  }
}

template <class C, int kKind>
__global__ void __launch_bounds__(C::kBlockThreads, C::kMinBlocks) expert_gemm_kernel(const __grid_constant__ GemmArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  pdl_launch();
  __shared__ Shared<C> s;
  uint8_t* ring = memory + ((1024 - (smem_u32(memory) & 1023)) & 1023);
  float* reduce = reinterpret_cast<float*>(ring + C::kRingBytes);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  if (warp == 0) {
    build_lists<C::kMaxN>(s.lists, a.p, a.blocks * a.p.splits);
    __syncwarp();
    if (threadIdx.x == 0) size_ring<C, kKind>(s);
  } else if (warp == 1 && (threadIdx.x & 31) == 0) {
    for (int i = 0; i < C::kMaxSlots; i++) {
      mbar_init(&s.full[i], 1);
      mbar_init(&s.empty[i], C::kGroups * 4);
    }
    mbar_init_fence();
    tma_prefetch_descriptor(&a.tokens8);
    tma_prefetch_descriptor(&a.tokens64);
  }
  __syncthreads();
  if (warp >= C::kConsumers / 32) {
    if constexpr (C::kProducerThreads == kThreads) setmaxnreg_dec<40>();
    if (threadIdx.x == C::kConsumers) produce<C, kKind>(a, s, ring);
    else pdl_wait();
  } else {
    if constexpr (C::kProducerThreads == kThreads) setmaxnreg_inc<232>();
    consume<C, kKind>(a, s, ring, reduce);
  }
}

// Host side of a configuration.
template <class C>
int launch_config(const GemmArgs& a, const Launch& l) {
  // As many CTAs as can be resident, and no more than there can be units.
  const int64_t chunks = int64_t(a.p.route_bound) < kLocalExperts ? a.p.route_bound : kLocalExperts + a.p.route_bound / C::kMaxN;
  const int64_t most = chunks * a.blocks * a.p.splits;
  const int64_t resident = int64_t(l.sm_count) * C::kGridPerSm;
  const dim3 grid(static_cast<unsigned>(most < resident ? most : resident));
  if (a.p.weight_kind == 0)
    return launch(expert_gemm_kernel<C, 0>, grid, dim3(C::kBlockThreads), C::kSharedBytes, l, a);
  return launch(expert_gemm_kernel<C, 1>, grid, dim3(C::kBlockThreads), C::kSharedBytes, l, a);
}
template <class C>
int prepare_config() {
  const int error = prepare_kernel(expert_gemm_kernel<C, 0>, C::kSharedBytes);
  return error ? error : prepare_kernel(expert_gemm_kernel<C, 1>, C::kSharedBytes);
}

}  // namespace expert
}  // namespace msl
