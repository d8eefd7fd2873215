// Which instance of the projection kernels a launch takes. The host's plan says which kernel, its splits (they fix the
// shape of the output) and the tile of the skinny and the wide one (src/backend/cuda/tiles.rs); the tiled kernel's is
// picked here.
//
// Measured on an H200, weights cold, microseconds a launch in a row of dependent launches of one projection, with
// the splits named; skinny up to 128 tokens, tiled above. In brackets cuBLAS with BF16 output: of the same run above
// 128 tokens, of an earlier run of the same day below.
//
//   tokens                 1            16           64           128          256          512
//   qkv_gate  (7; 4, 2)    9.5 (15.2)   10.3 (14.9)  11.8 (16.3)  13.6 (18.9)  22.7 (22.6)  36.8 (31.2)
//   o         (1)          5.3 (6.9)    5.6 (6.9)    6.4 (7.2)    8.2 (8.9)    12.2 (11.0)  17.5 (16.1)
//   pooler    (4; 2, 2)    16.9 (22.1)  18.0 (22.5)  19.6 (24.6)  21.6 (28.1)  30.6 (30.8)  51.6 (46.0)
//   unpooler  (2; 1, 1)    17.1 (19.5)  18.0 (19.9)  19.5 (21.4)  21.0 (22.6)  30.3 (28.3)  48.3 (46.4)
//   its slice (8)          3.3 (7.7)
//
//   The four in a chain: 130 MB at one token 33.5 us (3.9 TB/s), 189 MB at 16 / 32 / 64 / 128 tokens 49 / 51 / 54 /
//   63 us. 8192 tokens, medians of three runs in turn with cuBLAS's: o 213 (217), unpooler 827 (840), pooler 788
//   (803), qkv_gate 408 (382, another run), at 2048 tokens 102 (97). One projection's best run differs from its median
//   by up to 10%: the power limit sets the clock (1.3 to 1.6 GHz). The mainloop takes 1028 clocks a step of 1024.
//
// What did not help: clusters sharing the skinny kernel's token tiles; two m-tiles a CTA; a token ring shallower
// than the weights' (tokens queue behind weights in the copy engine, so they want the same depth); other orders
// of k; twice the splits; clusters of two for full grids; in the whole layer, rings of 64 KB (2% slower) to 96 KB
// (1% either way), and weights past the ring brought to L2 before the wait.
#pragma once
#include <algorithm>
#include <cstdint>

namespace msl {

// The wide kernel's instances; those of tiles.rs.
struct WideTile {
  int rows, tokens;
};
constexpr WideTile kWideTiles[] = {{128, 96},  {128, 104}, {128, 128}, {128, 152}, {128, 176}, {128, 192},
                                   {128, 208}, {128, 232}, {256, 136}, {256, 144}, {256, 160}, {256, 184}};
// Token tiles of this many tokens are walked together.
constexpr int kGroupTokens = 2048;

// A tiled instance: tiles of `tokens` x `rows`; clusters of cm CTAs that share weights.
struct TiledShape {
  int rows, tokens, cm;
  bool staged;
};
constexpr TiledShape kTiledShapes[] = {{64, 128, 1, false},  {128, 128, 1, false}, {144, 128, 1, false}, {144, 256, 1, false},
                                       {192, 128, 1, false}, {256, 128, 1, false}, {128, 128, 2, false}, {256, 128, 2, false},
                                       {256, 128, 1, true}};

// Clocks of a launch of the direct form: waves x (steps of the mainloop, the first loads, the output). A step
// runs at the tensor cores' rate (256 clocks for 64 rows x 128 tokens) or as a stage arrives (some 49 bytes a clock and SM).
// A pair of CTAs that shares weights gains 3% when the grid is a few token tiles, and loses as much in a full one.
inline double tiled_clocks(const TiledShape& s, int tokens, int rows, int steps, int splits, bool f32, int sm_count) {
  const int token_tiles = (tokens + s.tokens - 1) / s.tokens;
  if (rows % s.rows != 0 || (s.rows % 64 != 0 && !f32)) return 1e30;
  if (s.cm > 1 && (token_tiles % s.cm != 0 || token_tiles > 4)) return 1e30;
  const int64_t clusters = int64_t(splits) * (token_tiles / s.cm) * (rows / s.rows);
  const int64_t waves = (clusters + sm_count / s.cm - 1) / (sm_count / s.cm);
  const double area = s.rows * s.tokens / 8192.0;
  const double step = std::max(256.0 * area, 128.0 * (s.tokens + s.rows) / 49) * (s.cm > 1 ? 0.97 : 1.0);
  return double(waves) * (double(steps) / splits * step + 600.0 + area * (f32 ? 1900.0 : 900.0));
}

// steps: k tiles of a whole row, times plane products. The staged form is for BF16 and at least three tiles a CTA
// (o at 8192 tokens: 213 us, direct 227).
inline TiledShape choose_tiled(int tokens, int rows, int steps, int splits, bool f32, int sm_count) {
  TiledShape best = kTiledShapes[0];
  double least = 1e30;
  for (const TiledShape& s : kTiledShapes) {
    if (s.staged) continue;
    const double c = tiled_clocks(s, tokens, rows, steps, splits, f32, sm_count);
    if (c < least) least = c, best = s;
  }
  const int64_t tiles = int64_t((tokens + 127) / 128) * (rows / 256);
  if (!f32 && best.rows == 256 && tiles >= int64_t(3) * sm_count) return {256, 128, 1, true};
  return best;
}

}  // namespace msl
