// From packed tiles to wgmma A fragments in registers. `Fragment<kNvfp4>` is one thread's share of a 64 x 64
// tile: `load` brings it from shared memory, `expand` makes the BF16 operand of two of its four k16 steps.
#pragma once
#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#include "nvfp4_layout.h"

namespace msl {
namespace expert {

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t rotate_right(uint32_t x, int n) { return __funnelshift_r(x, x, n); }

// The words of an even step and of the next odd one -> their fragments. scale0, scale1: BF16 pairs of row g's
// and row g + 8's block scale, times 2^118.
__device__ __forceinline__ void expand_steps(uint32_t even, uint32_t odd, uint32_t scale0, uint32_t scale1,
                                             uint32_t (&a_even)[4], uint32_t (&a_odd)[4]) {
  a_even[0] = mul_bf16x2(even & kCodeMask, scale0);
  a_even[1] = mul_bf16x2(rotate_right(even, 4) & kCodeMask, scale1);
  a_even[2] = mul_bf16x2((even << 6) & kCodeMask, scale0);
  a_odd[0] = mul_bf16x2(odd & kCodeMask, scale0);
  a_odd[1] = mul_bf16x2(rotate_right(odd, 4) & kCodeMask, scale1);
  a_odd[2] = mul_bf16x2((odd << 6) & kCodeMask, scale0);
  const uint32_t moved = rotate_right(odd, 32 - kMergeShift);
  uint32_t merged;  // the bits of `even` under the mask, of `moved` elsewhere: one LOP3 (the compiler makes two)
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(merged) : "r"(even), "r"(moved), "n"(kLeftoverMask));
  a_even[3] = mul_bf16x2((merged << 2) & kCodeMask, scale1);
  a_odd[3] = mul_bf16x2(rotate_right(merged, 8) & kCodeMask, scale1);
}

template <bool kNvfp4> struct Fragment;

template <> struct Fragment<true> {
  uint4 codes;
  uint32_t scales;  // two bytes: row g, row g + 8
  __device__ __forceinline__ void load(const uint8_t* tile, int thread) {
    codes = *reinterpret_cast<const uint4*>(tile + thread * 16);
    scales = *reinterpret_cast<const uint16_t*>(tile + kCodeBytes + thread * 2);
  }
  // Steps 2 pair and 2 pair + 1.
  __device__ __forceinline__ void expand(int pair, uint32_t (&a)[2][4]) const {
    const uint32_t s0 = __byte_perm(scales, 0, 0x4040) * 16u + 0x70007000u;
    const uint32_t s1 = __byte_perm(scales, 0, 0x4141) * 16u + 0x70007000u;
    if (pair == 0) expand_steps(codes.x, codes.y, s0, s1, a[0], a[1]);
    else expand_steps(codes.z, codes.w, s0, s1, a[0], a[1]);
  }
};

template <> struct Fragment<false> {
  const uint8_t* mine;
  __device__ __forceinline__ void load(const uint8_t* tile, int thread) { mine = tile + thread * 16; }
  __device__ __forceinline__ void expand(int pair, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const uint4 v = *reinterpret_cast<const uint4*>(mine + (2 * pair + s) * 2048);
      a[s][0] = v.x, a[s][1] = v.y, a[s][2] = v.z, a[s][3] = v.w;
    }
  }
};

}  // namespace expert
}  // namespace msl
