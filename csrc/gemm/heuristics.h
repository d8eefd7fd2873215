// Which instance of the projection kernels a launch takes. Splits and tile_n come from the host's plan
// (they fix the shape of the output); this picks what does not show outside.
#pragma once
#include <algorithm>
#include <cstdint>

namespace msl {

// A tiled instance: 64 * r weight rows a tile; clusters of cm CTAs that share weights.
struct TiledShape {
  int r, cm;
  bool staged;
};
constexpr TiledShape kTiledShapes[] = {{1, 1, false}, {2, 1, false}, {3, 1, false}, {4, 1, false},
                                       {2, 2, false}, {4, 2, false}, {4, 1, true}};

// Clocks of a launch of the direct form: waves x (steps of the mainloop, the first loads, the output). A step
// runs at the tensor cores' rate (256 clocks for 64 rows) or as a stage arrives (some 49 bytes a clock and SM).
// A pair of CTAs that shares weights gains 3% when the grid is a few token tiles, and loses as much in a full one.
inline double tiled_clocks(const TiledShape& s, int tokens, int rows, int steps, int splits, bool f32, int sm_count) {
  const int token_tiles = (tokens + 127) / 128;
  if (rows % (64 * s.r) != 0) return 1e30;
  if (s.cm > 1 && (token_tiles % s.cm != 0 || token_tiles > 4)) return 1e30;
  const int64_t clusters = int64_t(splits) * (token_tiles / s.cm) * (rows / (64 * s.r));
  const int64_t waves = (clusters + sm_count / s.cm - 1) / (sm_count / s.cm);
  const double step = std::max(256.0 * s.r, (16384.0 + 8192.0 * s.r) / 49) * (s.cm > 1 ? 0.97 : 1.0);
  return double(waves) * (double(steps) / splits * step + 600.0 + s.r * (f32 ? 1900.0 : 900.0));
}

// steps: k tiles of a whole row, times plane products.
inline TiledShape choose_tiled(int tokens, int rows, int steps, int splits, bool f32, int sm_count) {
  TiledShape best = kTiledShapes[0];
  double least = 1e30;
  for (const TiledShape& s : kTiledShapes) {
    if (s.staged) continue;
    const double c = tiled_clocks(s, tokens, rows, steps, splits, f32, sm_count);
    if (c < least) least = c, best = s;
  }
  return best;
}

}  // namespace msl
