// What the expert kernels share: the lists of experts and units, and the epilogue.
#pragma once
#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#include "../include/model.h"
#include "expert_gemm_config.cuh"
#include "experts.h"

namespace msl {
namespace expert {

// The experts with routes in this pass, by falling count.
struct Lists {
  int expert[kLocalExperts];
  int row[kLocalExperts];         // first row of x and out
  int count[kLocalExperts];
  int prefix[kLocalExperts + 1];  // units before the i-th
  int total;                      // units
};

struct Unit {
  int expert, row, tokens, block, split;
};

// By one warp: window of the pass, ranks by count, units. Lists are read past L1 (written by a kernel of
// this step).
template <int kMaxN>
__device__ __forceinline__ void build_lists(Lists& lists, const ExpertGemmParams& p, int units_per_chunk) {
  const int lane = threadIdx.x & 31;
  int low = __ldcg(p.expert_offsets + lane) - p.route_begin;
  int high = __ldcg(p.expert_offsets + lane + 1) - p.route_begin;
  low = min(max(low, 0), p.route_bound);
  high = min(max(high, 0), p.route_bound);
  const int count = high - low;
  const int units = (count + kMaxN - 1) / kMaxN * units_per_chunk;
  int rank = 0, before = 0;
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
}

// Unit u, of the expert at place i of the list: (chunk of its tokens, row block of `blocks`, K split), the last varying
// fastest.
template <int kMaxN>
__device__ __forceinline__ Unit decode_unit(const Lists& lists, int u, int i, int blocks, int splits) {
  const int per_chunk = blocks * splits;
  const int local = u - lists.prefix[i];
  const int chunk = local / per_chunk, rest = local - chunk * per_chunk;
  Unit unit;
  unit.expert = lists.expert[i];
  unit.row = lists.row[i] + chunk * kMaxN;
  unit.tokens = min(lists.count[i] - chunk * kMaxN, kMaxN);
  unit.block = rest / splits;
  unit.split = rest - unit.block * splits;
  return unit;
}

__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Scales, SwiGLU and stores of 16 rows (group `warp` of tile m_tile) x the unit's tokens; acc as wgmma and mma
// leave it: [8 tokens][row g: 2c, 2c + 1; row g + 8: 2c, 2c + 1]. scale: the expert's, with SwiGLU the gate's.
template <int N>
__device__ __forceinline__ void store_rows(const ExpertGemmParams& p, const Unit& unit, int m_tile, int warp,
                                           const float (&acc)[N / 2], float scale, float up_scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  if (p.swiglu) {
    // Positions 8 warp .. + 8 of the tile's 32 in the experts' k order; token g after the transpose.
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + int64_t(unit.row + g) * kExpertDim + m_tile * 32 + warp * 8 + c * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float v0 = swiglu(acc[4 * j] * scale, acc[4 * j + 2] * up_scale);
      const float v1 = swiglu(acc[4 * j + 1] * scale, acc[4 * j + 3] * up_scale);
      const uint32_t packed = transpose_8x8(pack_bf16(v0, v1));
      if (8 * j + g < unit.tokens) *reinterpret_cast<uint32_t*>(out + int64_t(8 * j) * kExpertDim) = packed;
    }
  } else {
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
}  // namespace expert
}  // namespace msl
