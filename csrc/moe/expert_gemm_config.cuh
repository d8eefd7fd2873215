// Tile shapes of the expert kernels, apart from the kernel. A CTA has kRowGroups x kSplitGroups consumer
// warpgroups: warpgroup (r, s) owns the r-th 64-row tile of the CTA's row block and every kSplitGroups-th k
// tile, beginning with the s-th; the partial sums of a row tile are added through shared memory.
#pragma once
#include "nvfp4_layout.h"

namespace msl {
namespace expert {

template <int kRowGroups_, int kSplitGroups_, int kMaxN_, int kRingBytes_, int kProducerThreads_, int kMinBlocks_,
          int kGridPerSm_>
struct GemmConfig {
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kSplitGroups = kSplitGroups_;
  static constexpr int kMaxN = kMaxN_;                // tokens of a unit
  static constexpr int kRingBytes = kRingBytes_;      // shared memory of the ring
  static constexpr int kGroups = kRowGroups * kSplitGroups;
  static constexpr int kConsumers = kGroups * kThreads;
  static constexpr int kProducerThreads = kProducerThreads_;
  static constexpr int kBlockThreads = kConsumers + kProducerThreads;
  static constexpr int kBlockRows = 64 * kRowGroups;
  static constexpr int kMinBlocks = kMinBlocks_;      // caps the registers: room for the successor's CTA, or not
  static constexpr int kGridPerSm = kGridPerSm_;
  static constexpr int kMaxSlots = 12;
  // Partial sums waiting to be added: [row group][split group - 1][value][thread].
  static constexpr int kReduceBytes = kRowGroups * (kSplitGroups - 1) * kThreads * (kMaxN / 2) * 4;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kReduceBytes;
};

// The wgmma width for `tokens` tokens: 8, 16, 32, 64, 96, 128, 192 or 256.
MSL_HD constexpr int tile_width(int tokens) {
  return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : tokens <= 96 ? 96
       : tokens <= 128 ? 128 : tokens <= 192 ? 192 : 256;
}
// k tiles (of 64) a stage of the ring holds: enough bytes in flight with few tokens, bounded slots with many.
MSL_HD constexpr int stage_tiles(int width, int weight_kind) {
  return width <= 32 ? (weight_kind == 0 ? 4 : 2) : width <= 64 ? 2 : 1;
}
// Token rows a stage has room for: boxes of 8 rows up to width 32, of 64 rows above.
MSL_HD constexpr int stage_rows(int width) { return width <= 32 ? width : (width + 63) / 64 * 64; }
// Bytes of a slot: the tokens first (swizzle atoms want 1024-byte alignment), then kRowGroups weight tiles.
MSL_HD constexpr int stage_bytes(int width, int weight_kind, int row_groups) {
  return (stage_tiles(width, weight_kind) * (stage_rows(width) * 128 + row_groups * tile_bytes(weight_kind)) + 1023) / 1024 * 1024;
}

}  // namespace expert
}  // namespace msl
