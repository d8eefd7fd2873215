// The few-token expert GEMM (steps of up to 8 tokens): the same product and layout as expert_gemm.cuh where an
// expert has so few tokens that its weights' bytes decide.
//
// A CTA of 8 warps walks a contiguous run of units (expert, chunk of at most 8 tokens, K split, 64 weight rows), so
// that it changes expert rarely and all CTAs get the same work, to one unit. Warp w owns the w-th eighth of the
// unit's K: its tiles are contiguous in memory and come through a ring of its own, one bulk copy and one mbarrier
// a tile, which the warp refills itself. No producer, and no barrier of the CTA inside a unit: a warp that is late
// holds up nobody. The products are mma.m16n8k16 (at N = 8 a wgmma's register reads and fences cost as much as the
// dequantisation). The chunk's token rows (the warp's eighth of K) stay in shared memory beside the ring, padded
// by 16 bytes for ldmatrix, and are loaded again only when the chunk or the split changes. At the end of a unit
// the eight partial sums meet in shared memory; four warps, by turns, add them in order and store.
//
// Rings are filled before pdl_wait(): the expert lists may be read before it, since the pooler triggers late. A ring
// has as many slots as the largest chunk's tokens leave room for. How much shared memory a CTA takes decides who
// shares an SM (experts_few.cu): two CTAs of one launch on one SM while another has none would take twice the time.
#pragma once
#include "../common/launch.cuh"
#include "expert_gemm_common.cuh"
#include "nvfp4_dequant.cuh"

namespace msl {
namespace expert {

constexpr int kFewTokens = 8;  // of a unit
constexpr int kFewWarps = 8;
constexpr int kFewThreads = 32 * kFewWarps;
constexpr int kFewMaxSlots = 8;
constexpr int kFewReduceBytes = kFewWarps * kTileRows * kFewTokens * 4;

struct FewArgs {
  ExpertGemmParams p;
  int32_t warp_bytes;  // shared memory of a warp: tokens and ring, a multiple of 128
};

__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}
template <class T>
__device__ __forceinline__ T* shared_pointer(uint32_t address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The units of the pass: (expert, chunk of at most 8 of its tokens, K split, 64 weight rows), the last varying
// fastest. One expert a lane.
struct FewUnits {
  int low, count;              // this lane's expert: first row of x and out, rows
  int first, end;              // its units
  int total, most;             // units; the most tokens of a unit
  int block_bits, split_bits;  // units of a chunk: 2^block_bits row blocks, 2^split_bits K splits

  __device__ __forceinline__ explicit FewUnits(const ExpertGemmParams& p) {
    const int lane = threadIdx.x & 31;
    low = __ldcg(p.expert_offsets + lane) - p.route_begin;
    int high = __ldcg(p.expert_offsets + lane + 1) - p.route_begin;
    low = min(max(low, 0), p.route_bound);
    high = min(max(high, 0), p.route_bound);
    count = high - low;
    most = min(__reduce_max_sync(~0u, count), kFewTokens);
    static_assert(kExpertDim / kTileRows == 64, "block_bits");
    block_bits = p.swiglu ? 7 : 6;
    split_bits = p.splits == 2 ? 1 : 0;
    const int mine = (count + kFewTokens - 1) / kFewTokens << (block_bits + split_bits);
    end = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end += before;
    }
    first = end - mine;
    total = __shfl_sync(~0u, end, 31);
  }
  // By a whole warp.
  __device__ __forceinline__ Unit at(int u) const {
    Unit unit;
    unit.expert = __ffs(__ballot_sync(~0u, u >= first && u < end)) - 1;
    const int chunk = (u - __shfl_sync(~0u, first, unit.expert)) >> (block_bits + split_bits);
    unit.row = __shfl_sync(~0u, low, unit.expert) + chunk * kFewTokens;
    unit.tokens = min(__shfl_sync(~0u, count, unit.expert) - chunk * kFewTokens, kFewTokens);
    unit.split = (u >> block_bits) & ((1 << split_bits) - 1);
    unit.block = u & ((1 << block_bits) - 1);
    return unit;
  }
};

// acc[row group] += tile (64 rows x 64 k) x 8 tokens. Shared-memory addresses: the tile, and this lane's ldmatrix
// row of the tokens.
template <int kKind>
__device__ __forceinline__ void few_tile(uint32_t tile, uint32_t tokens, float (&acc)[4][4]) {
  const int lane = threadIdx.x & 31;
  uint32_t b[2][4];
  load_matrices(b[0], tokens);
  load_matrices(b[1], tokens + 64);
  Fragment<true> fragment[4];
  if constexpr (kKind == 0) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      fragment[q].codes = load_shared16(tile + q * 512 + lane * 16);
      fragment[q].scales = load_shared2(tile + kCodeBytes + q * 64 + lane * 2);
    }
  }
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      uint32_t w[2][4];
      if constexpr (kKind == 0) {
        fragment[q].expand(pair, w);
      } else {
#pragma unroll
        for (int s = 0; s < 2; s++) {
          const uint4 v = load_shared16(tile + (2 * pair + s) * 2048 + q * 512 + lane * 16);
          w[s][0] = v.x, w[s][1] = v.y, w[s][2] = v.z, w[s][3] = v.w;
        }
      }
      mma_bf16(acc[q], w[0], b[pair][0], b[pair][1]);
      mma_bf16(acc[q], w[1], b[pair][2], b[pair][3]);
    }
  }
}

// Two CTAs an SM: this one's and its neighbour's or its successor's.
template <int kKind>
__global__ void __launch_bounds__(kFewThreads, 2) expert_few_kernel(const __grid_constant__ FewArgs a) {
  constexpr int kBytes = tile_bytes(kKind);
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t barriers[kFewWarps][kFewMaxSlots];
  pdl_launch();
  const ExpertGemmParams& p = a.p;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const FewUnits units(p);
  const int total = units.total, grid = static_cast<int>(gridDim.x);
  const int first = static_cast<int>(blockIdx.x) * total / grid, end = (static_cast<int>(blockIdx.x) + 1) * total / grid;
  if (first == end) {
    pdl_wait();
    return;
  }
  // The warp's share of K: `tiles` tiles of a unit, and its memory: token rows, then the ring.
  const int tiles = (kExpertDim / kTileK / kFewWarps) >> units.split_bits;
  const int pitch = tiles * 128 + 16;
  const int token_bytes = (units.most * pitch + 127) / 128 * 128;
  // Addresses, not pointers: derived from a pointer they would be made anew at every use.
  uint32_t rows, full;
  asm volatile("mov.u32 %0, %1;" : "=r"(rows) : "r"(smem_u32(memory) + kFewReduceBytes + warp * a.warp_bytes));
  asm volatile("mov.u32 %0, %1;" : "=r"(full) : "r"(smem_u32(barriers[warp])));
  const uint32_t ring = rows + token_bytes;
  const int slots = min((a.warp_bytes - token_bytes) / kBytes, kFewMaxSlots);

  // The tiles to copy, ahead of those that are multiplied.
  int next_unit = first, next_tile = 0;
  const uint8_t* source;
  uint64_t policy;
  auto open_source = [&]() {
    const Unit unit = units.at(next_unit);
    const int64_t row_block = (int64_t(unit.expert) << units.block_bits) + unit.block;
    const int64_t tile = row_block * (kExpertDim / kTileK) + (unit.split * kFewWarps + warp) * tiles;
    source = static_cast<const uint8_t*>(p.weight) + tile * kBytes;
    policy = unit.tokens == kFewTokens ? kEvictNormal : kEvictFirst;  // another chunk may read them again
  };
  auto copy_next = [&](int slot) {
    if (lane == 0) {
      uint64_t* bar = shared_pointer<uint64_t>(full + slot * 8);
      mbar_expect_tx(bar, kBytes);
      bulk_load(shared_pointer<void>(ring + slot * kBytes), source, kBytes, bar, policy);
    }
    source += kBytes;
    if (++next_tile == tiles) {
      next_tile = 0;
      if (++next_unit < end) open_source();
    }
  };
  if (lane < slots) mbar_init(shared_pointer<uint64_t>(full + lane * 8), 1);
  mbar_init_fence();
  __syncwarp();
  open_source();
  for (int slot = 0; slot < slots && next_unit < end; slot++) copy_next(slot);

  Unit unit = units.at(first);
  float scale[2];
  auto load_scales = [&]() {
    scale[0] = p.scale[p.swiglu ? 2 * unit.expert : unit.expert];
    scale[1] = p.swiglu ? p.scale[2 * unit.expert + 1] : 0.0f;
  };
  auto load_tokens = [&]() {
    const int column = (unit.split * kFewWarps + warp) * tiles * kTileK;
    const __nv_bfloat16* src = static_cast<const __nv_bfloat16*>(p.x) + int64_t(unit.row) * kExpertDim + column;
    for (int row = 0; row < unit.tokens; row++)
      for (int chunk = lane; chunk < tiles * 8; chunk += 32)  // of 16 bytes
        cp_async16(shared_pointer<void>(rows + row * pitch + chunk * 16), src + int64_t(row) * kExpertDim + chunk * 8);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  };
  load_scales();
  pdl_wait();
  load_tokens();

  int slot = 0;
  uint32_t phase = 0;
  for (int u = first;;) {
    // Rows past the chunk's tokens repeat the last one: garbage columns, never stored.
    uint32_t tokens = rows + min(lane & 7, unit.tokens - 1) * pitch + (lane >> 3) * 16;
    float acc[4][4] = {};
#pragma unroll 1
    for (int t = 0; t < tiles; t++, tokens += 128) {
      mbar_wait(shared_pointer<uint64_t>(full + slot * 8), phase);
      few_tile<kKind>(ring + slot * kBytes, tokens, acc);
      __syncwarp();
      if (next_unit < end) copy_next(slot);
      if (++slot == slots) slot = 0, phase ^= 1;
    }
    float4* const sums = reinterpret_cast<float4*>(memory) + lane;  // [warp][row group][lane]
    if (u > first) __syncthreads();                                 // the last unit's have been read
#pragma unroll
    for (int q = 0; q < 4; q++) sums[(warp * 4 + q) * 32] = make_float4(acc[q][0], acc[q][1], acc[q][2], acc[q][3]);
    __syncthreads();
    if (((warp >> 2) ^ (u - first)) % (kFewWarps / 4) == 0) {
      const int q = warp & 3;
      float sum[4] = {};
#pragma unroll
      for (int w = 0; w < kFewWarps; w++) {
        const float4 v = sums[(w * 4 + q) * 32];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
      store_rows<8>(p, unit, unit.block, q, sum, scale[0], scale[1]);
    }
    if (++u == end) return;
    const int row = unit.row, split = unit.split;
    unit = units.at(u);
    if (unit.row != row || unit.split != split) {
      load_scales();
      load_tokens();
    }
  }
}

}  // namespace expert
}  // namespace msl
