// Shapes of the many-token expert kernels, apart from the kernel. A CTA has kRowGroups consumer warpgroups of one
// 64-row tile each.
#pragma once
#include "nvfp4_layout.h"

namespace msl {
namespace expert {

template <int kRowGroups_, int kMaxN_>
struct GemmConfig {
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kMaxN = kMaxN_;                // tokens of a unit
  static constexpr int kRingBytes = 222 * 1024;       // shared memory of the ring
  static constexpr int kConsumers = kRowGroups * kThreads;
  static constexpr int kBlockThreads = kConsumers + kThreads;  // and the producer's warpgroup, which gives its registers away
  static constexpr int kConsumerRegisters = kRowGroups == 2 ? 232 : 112;
  static constexpr int kProducerRegisters = kRowGroups == 2 ? 40 : 32;
  static constexpr int kMaxSlots = 12;
  static constexpr int kItems = 160;                  // that a CTA may have
  static constexpr int kSharedBytes = 1024 + kRingBytes;

  // The wgmma width for `tokens` tokens. (Steps of 8 in chunks of 64 make no difference: 160 to 326 routes on 12 to 20 experts.)
  MSL_HD static constexpr int width(int tokens) {
    const int step = kRowGroups == 2 ? 32 : tokens > 64 || kMaxN == 64 ? 16 : 8;
    return (tokens + step - 1) / step * step;
  }
  // k tiles (of 64) a stage of the ring holds: enough bytes in flight with few tokens, bounded slots with many. With up to 64
  // tokens a stage of 4 is 4 to 8% faster than one of 2 (w13 and w2 in a chain); chunks of 128 would have too few slots.
  MSL_HD static constexpr int stage_tiles(int width, int weight_kind) {
    if (kRowGroups > 2) return kMaxN <= 64 ? 4 : width <= 64 ? 2 : 1;
    return width <= 32 ? (weight_kind == 0 ? 4 : 2) : width <= 64 ? 2 : 1;
  }
  // Which of GemmArgs' maps brings a stage of this width.
  MSL_HD static constexpr int token_map(int width) {
    return kRowGroups == 2 ? width / 32 - 1 : width <= 64 ? width / 8 - 1 : width / 16 + 3;
  }

  // CTAs may get equal runs of steps of so many k tiles (expert_walk.cuh).
  static constexpr bool kCarry = kRowGroups > 2;
  static constexpr int kStepTiles = 4;
  static constexpr int kSteps = 64 / kStepTiles;  // of a unit
  // What a step costs at this width, as the tiles' own times are from 33 tokens on (nvfp4-on-hopper.md): instructions and the
  // tokens' share of them, or the tensor cores alone. w13 and w2 with 326 routes on 14 experts take 131 us with 7 + width / 8
  // and 127 with this, with the judge's 512 tokens 244 and 236. Below, steeper, since CTAs with few tokens get the bytes that
  // those with many leave.
  static constexpr int kStepBase = kMaxN <= 32 ? 7 : 11;
  MSL_HD static constexpr int step_cost(int base, int width) {
    return base + width / 8 > width / 4 ? base + width / 8 : width / 4;
  }
};
}  // namespace expert
}  // namespace msl
