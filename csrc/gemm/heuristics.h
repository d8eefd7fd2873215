// Which instance of the projection kernels a launch takes. Splits and tile_n come from the host's plan
// (they fix the shape of the output); this picks what does not show outside.
#pragma once
#include <algorithm>
#include <cstdint>

namespace msl {

// A tiled instance: 64 * r weight rows a tile; clusters of cm (weights shared) or cn (tokens shared) CTAs.
struct TiledShape {
  int r, cm, cn;
};
constexpr TiledShape kTiledShapes[] = {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {1, 1, 2}, {2, 1, 2},
                                       {4, 1, 2}, {1, 2, 1}, {2, 2, 1}, {3, 2, 1}, {4, 2, 1}};

// Clocks of a launch: waves x (steps x the slower of tensor cores and L2, and the epilogue).
inline double tiled_clocks(const TiledShape& s, int tokens, int rows, int steps, int splits, int sm_count) {
  const int token_tiles = (tokens + 127) / 128;
  if (rows % (64 * s.r * s.cn) != 0 || (s.cm > 1 && token_tiles < s.cm)) return 1e30;
  const int64_t clusters = int64_t(splits) * ((token_tiles + s.cm - 1) / s.cm) * (rows / (64 * s.r * s.cn));
  const int slots = sm_count / (s.cm * s.cn);
  const int64_t waves = (clusters + slots - 1) / slots;
  const double active = std::min<double>(1.0, double(clusters) / slots);
  const double tensor = 256.0 * s.r, bytes = 16384.0 / s.cn + 8192.0 * s.r / s.cm;
  return double(waves) * (double(steps) / splits * std::max(tensor, bytes * active / 34.0) + 1500.0 + 400.0 * s.r);
}

inline TiledShape choose_tiled(int tokens, int rows, int steps, int splits, int sm_count) {
  TiledShape best = kTiledShapes[0];
  double least = 1e30;
  for (const TiledShape& s : kTiledShapes) {
    const double c = tiled_clocks(s, tokens, rows, steps, splits, sm_count);
    if (c < least) least = c, best = s;
  }
  return best;
}

}  // namespace msl
