// The router's weights as router_tiled.cuh and router_cluster.cuh read them, made by pack_router when weights are loaded.
//
// W (1 + n) in FP16, hi + lo, times a power of two for each expert that puts its largest value between 2^13 and 2^14.
//   images  [128 k tiles of 64 columns][2 halves of 128 experts][hi, lo] of [128 experts][64] FP16, 128-byte-swizzled;
//           in a group of 16 columns, position 2 c + e (e < 2) holds column 4 c + e, position 8 + 2 c + e column 4 c + 2 + e;
//   scale   FP32 [256]: what a sum of products is multiplied by to give the logit.
#pragma once
#include <cstdint>

#include "../include/model.h"

namespace msl {

constexpr int kRouterTileK = 64;
constexpr int kRouterTilesK = kHidden / kRouterTileK;
constexpr int kRouterImageBytes = 2 * 128 * kRouterTileK * 2;  // hi, lo
constexpr int64_t kRouterScaleOffset = int64_t(kRouterTilesK) * 2 * kRouterImageBytes;
constexpr float kRouterTokenScale = 256.0f;  // of A: |s' q| <= sqrt(8192), so below 2^15

}  // namespace msl
