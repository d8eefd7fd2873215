// The packed expert weights: the one layout that the few-token and the many-token kernels read, and the
// column order of their activations. Plain constexpr C++: the packing kernel, the device code and host
// tests use the same functions.
//
// A matrix of `rows` x 4096 weights is cut into tiles of 64 rows x 64 k, order [expert][m-tile][k / 64], so
// that a CTA walking k streams contiguous memory. A tile is the A operand of four wgmma m64k16 steps as the
// 128 threads of a warpgroup hold it in registers (warp w, lane 4 g + c; thread t = 32 w + 4 g + c):
//
//   NVFP4 tile, 2304 bytes: codes [128 threads][4 words], then scales [128 threads][2 bytes].
//   Word s holds the thread's 8 codes of step s, in the fragment's order a0 a1 a2 a3 (pairs):
//   a0 = (row g, j 0 1), a1 = (row g + 8, j 0 1), a2 = (row g, j 2 3), a3 = (row g + 8, j 2 3).
//   BF16 tile, 8192 bytes: [4 steps][128 threads][a0 a1 a2 a3].
//
// K order. The fragment's (step s, thread c, j) stands for the natural k = 16 c + 4 s + j of its group of 64:
// a thread's 16 codes of a row are then exactly one scale block, and its scales are two bytes. The tokens'
// columns are stored in the matching order ("the experts' k order"): position p of a group of 64 holds the
// natural column expert_k_natural(p).
//
// Row order. In each 16-row group of a tile, fragment rows g and g + 8 belong together: for w13 the gate and
// the up row of one intermediate column, for w2 two neighbouring output columns. SwiGLU stays in a thread.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define MSL_HD __host__ __device__
#else
#define MSL_HD
#endif

namespace msl {
namespace expert {

constexpr int kTileRows = 64;
constexpr int kTileK = 64;
constexpr int kThreads = 128;             // a warpgroup
constexpr int kCodeBytes = 2048;          // of a tile
constexpr int kNvfp4TileBytes = 2304;
constexpr int kBf16TileBytes = 8192;
MSL_HD constexpr int tile_bytes(int weight_kind) { return weight_kind == 0 ? kNvfp4TileBytes : kBf16TileBytes; }

// --- columns -------------------------------------------------------------------------------------
// Natural column of position p in a group of 64: p = 16 s + q with q = 2 c + (j & 1) + 8 (j >> 1).
MSL_HD constexpr int expert_k_natural(int p) {
  return (p & ~63) | ((((p & 15) & 7) >> 1) * 16 + ((p & 63) >> 4) * 4 + (p & 1) + 2 * ((p & 15) >> 3));
}
// Position of natural column k (the inverse).
MSL_HD constexpr int expert_k_position(int k) {
  return (k & ~63) | (((k & 15) >> 2) * 16 + ((k & 63) >> 4) * 2 + (k & 1) + 8 * ((k & 3) >> 1));
}

// --- rows ----------------------------------------------------------------------------------------
// Source row of fragment row (warp w, g, half) of m-tile `mt`; rows: the matrix's rows.
// w13 (swiglu): a tile yields 32 intermediate columns, positions 32 (mt & 1) + 8 w + g of group mt / 2 in the
// experts' k order, so that a warp's outputs are neighbours in memory; half 0 is the gate, half 1 the up row.
MSL_HD constexpr int source_row(int mt, int w, int g, int half, bool swiglu, int rows) {
  return swiglu ? expert_k_natural(64 * (mt >> 1) + 32 * (mt & 1) + 8 * w + g) + (half ? rows / 2 : 0)
                : 64 * mt + 16 * w + 2 * g + half;
}

// --- bits of a code word -------------------------------------------------------------------------
// A code s e e m is wanted at bits 15, 8, 7, 6 of a 16-bit half: as BF16 that is code * 2^-126 exactly (0.5 is
// a subnormal). a0, a1 and a2 of every word sit there after rotating the word right by 0, 4 and 26 (a left
// shift by 6), which leaves bits 4, 5, 13, 14 of each half unused. The leftovers of a word of an even step
// (in place) and of the next, odd one (rotated left by 2) together hold both words' a3: in that merged word
// the even step's a3 is found by rotating right by 30 (a left shift by 2), the odd one's by 8. So 16 codes
// take 16 shift and mask instructions (and 8 multiplies).
constexpr uint32_t kCodeMask = 0x81C081C0u;
constexpr uint32_t kLeftoverMask = 0x60306030u;
constexpr int kMergeShift = 2;

struct BitPlace { int word, bit; };
// Where bit `target` (15: sign, 8, 7, 6) of code (step parity, pair a0..a3, half of the pair) is stored: the
// word of the step pair (0: even step, 1: odd) and its bit.
MSL_HD constexpr BitPlace code_bit(int parity, int pair, int half, int target) {
  const int at = 16 * half + target;
  if (pair < 3) return {parity, (at + (pair == 0 ? 0 : pair == 1 ? 4 : 26)) & 31};
  const int merged = (at + (parity == 0 ? 30 : 8)) & 31;
  if ((kLeftoverMask >> merged) & 1) return {0, merged};
  return {1, (merged - kMergeShift) & 31};
}

// --- block scales --------------------------------------------------------------------------------
// E4M3 magnitude -> one byte e5m3 without subnormals, so that BF16 bits 0x7000 | byte << 4 are
// scale * 2^118. Zero has no such byte: the packing makes the block's codes zero instead. The sign goes
// into the codes. code * 2^-126 * scale * 2^118 = code * scale * 2^-8, and 2^8 belongs to the global scale.
constexpr float kScaleCorrection = 256.0f;
MSL_HD constexpr uint8_t recode_scale(uint8_t e4m3) {
  const int e = (e4m3 >> 3) & 15, m = e4m3 & 7;
  if (e > 0) return static_cast<uint8_t>(((14 + e) << 3) | m);
  if (m == 0) return 12 << 3;  // any value: its codes are zero
  return m == 1 ? 12 << 3 : m < 4 ? (13 << 3) | ((m & 1) << 2) : (14 << 3) | ((m & 3) << 1);
}

static_assert(expert_k_position(expert_k_natural(0)) == 0 && expert_k_position(expert_k_natural(37)) == 37 &&
              expert_k_natural(1) == 1 && expert_k_natural(2) == 16 && expert_k_natural(8) == 2, "column order");

}  // namespace expert
}  // namespace msl
