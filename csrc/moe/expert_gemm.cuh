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
#include <cuda_bf16.h>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/wgmma.cuh"
#include "../include/model.h"
#include "expert_gemm_config.cuh"
#include "experts.h"
#include "nvfp4_dequant.cuh"

namespace msl {
namespace expert {

// The experts with routes in this pass, by falling count.
struct Lists {
  int expert[kLocalExperts];
  int row[kLocalExperts];         // first row of x and out
  int count[kLocalExperts];
  int prefix[kLocalExperts + 1];  // units before the i-th
  int total;                      // units
  int slot_bytes;
  int slots;
};

struct Unit {
  int expert, row, tokens, width, block, split;
};

template <class C>
struct Shared {
  uint64_t full[C::kMaxSlots];
  uint64_t empty[C::kMaxSlots];
  Lists lists;
};

// By one warp: window of the pass, ranks by count, units. Lists are read past L1 (written by a kernel of
// this step).
template <class C, int kKind>
__device__ __forceinline__ void build_lists(Lists& lists, const ExpertGemmParams& p, int units_per_chunk) {
  const int lane = threadIdx.x & 31;
  int low = __ldcg(p.expert_offsets + lane) - p.route_begin;
  int high = __ldcg(p.expert_offsets + lane + 1) - p.route_begin;
  low = min(max(low, 0), p.route_bound);
  high = min(max(high, 0), p.route_bound);
  const int count = high - low;
  int rank = 0, before = 0;
  const int units = (count + C::kMaxN - 1) / C::kMaxN * units_per_chunk;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int other = __shfl_sync(~0u, count, i), other_units = __shfl_sync(~0u, units, i);
    if (other > count || (other == count && i < lane)) rank++, before += other_units;
  }
  lists.expert[rank] = lane;
  lists.row[rank] = low;
  lists.count[rank] = count;
  lists.prefix[rank] = before;
  if (rank == 31) lists.prefix[32] = lists.total = before + units;
  if (rank == 0) {
    int bytes = 0;  // the widest stage that this pass needs
    const int widest = tile_width(min(max(count, 1), C::kMaxN));
    constexpr int kWidths[8] = {8, 16, 32, 64, 96, 128, 192, 256};
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (kWidths[i] <= widest) bytes = max(bytes, stage_bytes(kWidths[i], kKind, C::kRowGroups));
    lists.slot_bytes = bytes;
    lists.slots = min(C::kRingBytes / bytes, C::kMaxSlots);
  }
}

// Unit u; `i` is the caller's place in the list, which only moves forward.
template <class C>
__device__ __forceinline__ Unit decode_unit(const Lists& lists, int u, int& i, const GemmArgs& a) {
  while (u >= lists.prefix[i + 1]) i++;
  const int per_chunk = a.blocks * a.p.splits;
  const int local = u - lists.prefix[i];
  const int chunk = local / per_chunk, rest = local - chunk * per_chunk;
  Unit unit;
  unit.expert = lists.expert[i];
  unit.row = lists.row[i] + chunk * C::kMaxN;
  unit.tokens = min(lists.count[i] - chunk * C::kMaxN, C::kMaxN);
  unit.width = tile_width(unit.tokens);
  unit.block = rest / a.p.splits;
  unit.split = rest - unit.block * a.p.splits;
  return unit;
}

// --- producer ------------------------------------------------------------------------------------

// Walks the stages of the CTA's units.
template <class C, int kKind>
struct StageCursor {
  const GemmArgs& a;
  const Lists& lists;
  int u, i = 0, k = 0, k_end = 0, tiles = 1;
  Unit unit;
  bool valid;
  __device__ __forceinline__ StageCursor(const GemmArgs& args, const Lists& l) : a(args), lists(l), u(blockIdx.x) { open(); }
  __device__ __forceinline__ void open() {
    valid = u < lists.total;
    if (!valid) return;
    unit = decode_unit<C>(lists, u, i, a);
    const int k_tiles = kExpertDim / kTileK / a.p.splits;
    k = unit.split * k_tiles;
    k_end = k + k_tiles;
    tiles = stage_tiles(unit.width, kKind);
  }
  __device__ __forceinline__ void next() {
    k += tiles;
    if (k == k_end) u += gridDim.x, open();
  }
  __device__ __forceinline__ int token_boxes() const {
    return unit.width <= 32 ? (unit.tokens + 7) / 8 : (unit.tokens + 63) / 64;
  }
  __device__ __forceinline__ uint32_t bytes() const {
    return tiles * (C::kRowGroups * tile_bytes(kKind) + token_boxes() * (unit.width <= 32 ? 1024 : 8192));
  }
  __device__ __forceinline__ void load_weights(uint8_t* slot, uint64_t* bar) const {
    constexpr int kBytes = tile_bytes(kKind);
    const uint64_t policy = lists.count[i] > C::kMaxN ? kEvictNormal : kEvictFirst;
    const int64_t tile = (int64_t(unit.expert) * a.blocks + unit.block) * C::kRowGroups * (kExpertDim / kTileK) + k;
    const uint8_t* src = static_cast<const uint8_t*>(a.p.weight) + tile * kBytes;
    uint8_t* dst = slot + tiles * stage_rows(unit.width) * 128;
#pragma unroll
    for (int r = 0; r < C::kRowGroups; r++)
      bulk_load(dst + r * tiles * kBytes, src + int64_t(r) * (kExpertDim / kTileK) * kBytes, tiles * kBytes, bar, policy);
  }
  __device__ __forceinline__ void load_tokens(uint8_t* slot, uint64_t* bar) const {
    const int boxes = token_boxes();
    if (unit.width <= 32) {  // [box of 8 rows][k tile][1 KB]
      for (int b = 0; b < boxes; b++) tma_load_3d(slot + b * tiles * 1024, &a.tokens8, 0, unit.row + 8 * b, k, bar);
    } else {  // [k tile][rows]
      for (int t = 0; t < tiles; t++)
        for (int b = 0; b < boxes; b++)
          tma_load_2d(slot + t * stage_rows(unit.width) * 128 + b * 8192, &a.tokens64, (k + t) * 64, unit.row + 64 * b, bar);
    }
  }
  static __device__ __forceinline__ void tma_load_3d(void* dst, const CUtensorMap* map, int x, int y, int z, uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}],"
        " [%2], %6;" ::"r"(smem_u32(dst)), "l"(map), "r"(smem_u32(bar)), "r"(x), "r"(y), "r"(z), "l"(kEvictNormal) : "memory");
  }
};

template <class C, int kKind>
__device__ __forceinline__ void produce(const GemmArgs& a, Shared<C>& s, uint8_t* ring) {
  const int slots = s.lists.slots, slot_bytes = s.lists.slot_bytes;
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

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}
// Transposes an 8 x 8 matrix of 16-bit values held by a warp (lane 4 g + c: row g, columns 2c, 2c + 1).
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Scales, SwiGLU and stores of one warpgroup's 64 rows x `tokens`.
template <int N>
__device__ __forceinline__ void store_tile(const ExpertGemmParams& p, const Unit& unit, int m_tile, const float (&acc)[N / 2]) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  if (p.swiglu) {
    const float gate_scale = p.scale[unit.expert * 2], up_scale = p.scale[unit.expert * 2 + 1];
    // Positions 8 warp .. + 8 of the tile's 32 in the experts' k order; token g after the transpose.
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + int64_t(unit.row + g) * kExpertDim + m_tile * 32 + warp * 8 + c * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float v0 = swiglu(acc[4 * j] * gate_scale, acc[4 * j + 2] * up_scale);
      const float v1 = swiglu(acc[4 * j + 1] * gate_scale, acc[4 * j + 3] * up_scale);
      const uint32_t packed = transpose_8x8(pack_bf16(v0, v1));
      if (8 * j + g < unit.tokens) *reinterpret_cast<uint32_t*>(out + int64_t(8 * j) * kExpertDim) = packed;
    }
  } else {
    const float scale = p.scale[unit.expert];
    const int64_t at = int64_t(unit.row + 2 * c) * kExpertDim + m_tile * 64 + warp * 16 + g * 2;
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + at;
    float* out_f32 = static_cast<float*>(p.out) + int64_t(unit.split) * p.route_bound * kExpertDim + at;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
      for (int b = 0; b < 2; b++) {
        if (8 * j + 2 * c + b >= unit.tokens) continue;
        const float v0 = acc[4 * j + b] * scale, v1 = acc[4 * j + 2 + b] * scale;
        const int64_t row = int64_t(8 * j + b) * kExpertDim;
        if (p.splits > 1) *reinterpret_cast<float2*>(out_f32 + row) = make_float2(v0, v1);
        else *reinterpret_cast<uint32_t*>(out + row) = pack_bf16(v0, v1);
      }
    }
  }
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
  store_tile<N>(a.p, unit, unit.block * C::kRowGroups + row_group, acc);
}

template <class C, int kKind>
__device__ __forceinline__ void consume(const GemmArgs& a, Shared<C>& s, uint8_t* ring_base, float* reduce) {
  pdl_wait();
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const int row_group = group / C::kSplitGroups, split_group = group % C::kSplitGroups;
  Ring ring{ring_base, s.lists.slots, s.lists.slot_bytes, 0, 0};
  bool first = true;
  int i = 0;
  for (int u = blockIdx.x; u < s.lists.total; u += static_cast<int>(gridDim.x), first = false) {
    const Unit unit = decode_unit<C>(s.lists, u, i, a);
    const bool last = u + static_cast<int>(gridDim.x) >= s.lists.total;
#define MSL_WIDTH(N)                                                                                           \
  case N:                                                                                                      \
    if constexpr (N <= C::kMaxN) consume_unit<C, kKind, N>(a, s, ring, reduce, unit, row_group, split_group, first, last); \
    break;
    switch (unit.width) {
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
    build_lists<C, kKind>(s.lists, a.p, a.blocks * a.p.splits);
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
