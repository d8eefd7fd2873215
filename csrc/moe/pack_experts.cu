// pack_experts: one matrix of the checkpoint, all experts, into the tiles of nvfp4_layout.h. One CTA of 128
// threads makes one tile: each thread gathers its two rows' 16 weights of its scale block (8 bytes of codes
// and one scale a row, or 32 bytes of BF16) and writes its words at their places. Loading time only, so no
// pipeline: reads are 8 or 32 bytes a thread, the four lanes of a row together, and L2 joins the tiles that
// share a row.
#include <cuda_bf16.h>

#include "../common/launch.cuh"
#include "../include/model.h"
#include "../include/ops.h"
#include "experts.h"
#include "nvfp4_layout.h"

namespace msl {
namespace expert {
namespace {

// Codes of one row's block (16 nibbles, low first) with the scale's sign and zero folded in.
__device__ uint64_t fold_scale(uint64_t codes, uint8_t scale) {
  if ((scale & 0x7F) == 0) return 0;
  return scale & 0x80 ? codes ^ 0x8888888888888888ull : codes;
}

// grid: (k / 64, rows / 64, experts)
__global__ void __launch_bounds__(kThreads) pack_nvfp4_kernel(PackExpertsParams p) {
  const int kt = blockIdx.x, mt = blockIdx.y, e = blockIdx.z, t = threadIdx.x;
  const int w = t >> 5, g = (t & 31) >> 2, c = t & 3;
  uint64_t codes[2];
  uint8_t scale[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t row = int64_t(e) * p.rows + source_row(mt, w, g, half, p.swiglu != 0, p.rows);
    const int64_t block = row * (p.k / 16) + kt * 4 + c;
    const uint8_t raw = static_cast<const uint8_t*>(p.block_scale)[block];
    codes[half] = fold_scale(static_cast<const uint64_t*>(p.codes)[block], raw);
    if ((raw & 0x7F) == 0x7F) {  // NaN: reported, and harmless here
      codes[half] = 0;
      atomicMax(p.bad_scale, block < 0x7FFFFFFE ? static_cast<int>(block) + 1 : 0x7FFFFFFF);
    }
    scale[half] = (raw & 0x7F) == 0x7F ? recode_scale(0) : recode_scale(raw & 0x7F);
  }
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < 4; s++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {  // row g or g + 8
        const uint32_t code = static_cast<uint32_t>(codes[half] >> (4 * (4 * s + j))) & 15;
        constexpr int kTargets[4] = {6, 7, 8, 15};
#pragma unroll
        for (int b = 0; b < 4; b++) {
          const BitPlace at = code_bit(s & 1, half + 2 * (j >> 1), j & 1, kTargets[b]);
          words[(s & ~1) + at.word] |= ((code >> b) & 1u) << at.bit;
        }
      }
    }
  }
  const int64_t tile = (int64_t(e) * (p.rows / 64) + mt) * (p.k / 64) + kt;
  uint8_t* out = static_cast<uint8_t*>(p.dst) + tile * kNvfp4TileBytes;
  reinterpret_cast<uint4*>(out)[t] = make_uint4(words[0], words[1], words[2], words[3]);
  reinterpret_cast<uchar2*>(out + kCodeBytes)[t] = make_uchar2(scale[0], scale[1]);
}

__global__ void __launch_bounds__(kThreads) pack_bf16_kernel(PackExpertsParams p) {
  const int kt = blockIdx.x, mt = blockIdx.y, e = blockIdx.z, t = threadIdx.x;
  const int w = t >> 5, g = (t & 31) >> 2, c = t & 3;
  uint2 rows[2][4];  // 16 weights of a row: j 0..3 of step s in rows[half][s]
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t row = int64_t(e) * p.rows + source_row(mt, w, g, half, p.swiglu != 0, p.rows);
    const uint2* src = reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.codes) + row * p.k + kt * 64 + c * 16);
#pragma unroll
    for (int s = 0; s < 4; s++) rows[half][s] = src[s];
  }
  const int64_t tile = (int64_t(e) * (p.rows / 64) + mt) * (p.k / 64) + kt;
  uint4* out = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.dst) + tile * kBf16TileBytes);
#pragma unroll
  for (int s = 0; s < 4; s++) out[s * kThreads + t] = make_uint4(rows[0][s].x, rows[1][s].x, rows[0][s].y, rows[1][s].y);
}

// The epilogue's FP32 scales: [experts][2] (gate, up) for w13, [experts] for w2.
__global__ void pack_global_scale_kernel(PackExpertsParams p) {
  const int per = p.swiglu ? 2 : 1;
  for (int i = threadIdx.x; i < p.experts * per; i += blockDim.x) {
    const int e = i / per, part = i % per;
    float value = 1.0f;
    if (p.global_scale) value = p.global_scale[e * p.scales_per_expert + (p.scales_per_expert > 1 ? part : 0)];
    p.scale[i] = p.weight_kind == 0 ? value * kScaleCorrection : value;
  }
}

}  // namespace
}  // namespace expert

int pack_experts(const PackExpertsParams& p, const Launch& stream_of) {
  Launch l = stream_of;
  l.dependent = 0;  // loading: plain stream order
  if (p.experts == 0) return 0;
  const dim3 grid(p.k / 64, p.rows / 64, p.experts);
  const int error = p.weight_kind == 0 ? launch(expert::pack_nvfp4_kernel, grid, dim3(expert::kThreads), 0, l, p)
                                       : launch(expert::pack_bf16_kernel, grid, dim3(expert::kThreads), 0, l, p);
  if (error) return error;
  return launch(expert::pack_global_scale_kernel, dim3(1), dim3(64), 0, l, p);
}

int expert::prepare_pack() {
  int error = prepare_kernel(pack_nvfp4_kernel, 0);
  if (!error) error = prepare_kernel(pack_bf16_kernel, 0);
  if (!error) error = prepare_kernel(pack_global_scale_kernel, 0);
  return error;
}
}  // namespace msl
