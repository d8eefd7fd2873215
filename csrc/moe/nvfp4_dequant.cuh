// From packed tiles to wgmma A fragments in registers. `Fragment<kNvfp4>` is one thread's share of a 64 x 64
// tile: `load` brings it from shared memory, `expand` makes the BF16 operand of two of its four k16 steps.
#pragma once
#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#include "nvfp4_layout.h"

namespace msl {
namespace expert {

// Both halves of a times one half of s: SASS names the half in the multiplication, so no register holds it twice.
__device__ __forceinline__ uint32_t mul_low(uint32_t a, uint32_t s) {
  uint32_t d;
  asm("{\n .reg .b16 l, h;\n .reg .b32 b;\n mov.b32 {l, h}, %2;\n mov.b32 b, {l, l};\n mul.rn.bf16x2 %0, %1, b;\n}\n"
      : "=r"(d) : "r"(a), "r"(s));
  return d;
}
__device__ __forceinline__ uint32_t mul_high(uint32_t a, uint32_t s) {
  uint32_t d;
  asm("{\n .reg .b16 l, h;\n .reg .b32 b;\n mov.b32 {l, h}, %2;\n mov.b32 b, {h, h};\n mul.rn.bf16x2 %0, %1, b;\n}\n"
      : "=r"(d) : "r"(a), "r"(s));
  return d;
}
__device__ __forceinline__ uint32_t rotate_right(uint32_t x, int n) { return __funnelshift_r(x, x, n); }

// The words of an even step and of the next odd one -> their fragments. scales: row g's block scale as BF16, times 2^118,
// in the low half, row g + 8's in the high one.
__device__ __forceinline__ void expand_steps(uint32_t even, uint32_t odd, uint32_t scales, uint32_t (&a_even)[4],
                                             uint32_t (&a_odd)[4]) {
  a_even[0] = mul_low(even & kCodeMask, scales);
  a_even[1] = mul_high(rotate_right(even, 4) & kCodeMask, scales);
  a_even[2] = mul_low((even << 6) & kCodeMask, scales);
  a_odd[0] = mul_low(odd & kCodeMask, scales);
  a_odd[1] = mul_high(rotate_right(odd, 4) & kCodeMask, scales);
  a_odd[2] = mul_low((odd << 6) & kCodeMask, scales);
  const uint32_t moved = rotate_right(odd, 32 - kMergeShift);
  uint32_t merged;  // the bits of `even` under the mask, of `moved` elsewhere: one LOP3 (the compiler makes two)
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(merged) : "r"(even), "r"(moved), "n"(kLeftoverMask));
  a_even[3] = mul_high((merged << 2) & kCodeMask, scales);
  a_odd[3] = mul_high(rotate_right(merged, 8) & kCodeMask, scales);
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
    const uint32_t both = __byte_perm(scales, 0, 0x4140) * 16u + 0x70007000u;
    if (pair == 0) expand_steps(codes.x, codes.y, both, a[0], a[1]);
    else expand_steps(codes.z, codes.w, both, a[0], a[1]);
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
