// Which instance of the projection kernels a launch takes. The host's plan says which kernel, its splits (they fix the
// shape of the output) and the tile of the skinny and the wide one (src/backend/cuda/tiles.rs); the tiled kernel's is
// picked here.
//
// Measured on an H200, weights cold, microseconds a launch in a row of dependent launches of one projection, with
// the splits named; skinny up to 128 tokens. In brackets cuBLAS with BF16 output, an earlier run of the same day.
//
//   tokens                 1            16           64           128
//   qkv_gate  (7)          9.5 (15.2)   10.3 (14.9)  11.8 (16.3)  13.6 (18.9)
//   o         (1)          5.3 (6.9)    5.6 (6.9)    6.4 (7.2)    8.2 (8.9)
//   pooler    (4)          16.9 (22.1)  18.0 (22.5)  19.6 (24.6)  21.6 (28.1)
//   unpooler  (2)          17.1 (19.5)  18.0 (19.9)  19.5 (21.4)  21.0 (22.6)
//   its slice (8)          3.3 (7.7)
//
//   Wide or tiled above, as tiles.rs chooses; w: the wide kernel. In brackets the tiled kernel alone (its best tile with
//   the splits chosen before), then cuBLAS; each after 30 ms of rest, without which the power limit costs up to a third.
//
//   tokens     160             200                    256                  300             384
//   qkv_gate   w 15.5 (21.1)   w 17.0 (20.1, 29.5)    19.3 (21.1, 20.4)    w 20.6 (33.3)   w 25.2 (26.7)
//   o          w 8.9 (10.5)    w 9.4 (9.6, 8.6)       9.3 (9.3, 9.5)       w 10.7 (14.1)   w 12.5 (14.3)
//   pooler     w 23.4 (37.8)   w 25.5 (28.2, 32.5)    28.7 (28.7, 31.0)    w 31.0 (46.6)   w 37.3 (45.8)
//   unpooler   w 26.5 (33.9)   w 26.3 (27.4, 23.2)    27.7 (27.7, 26.2)    w 30.4 (43.1)   w 36.6 (42.6)
//
//   tokens     512                   576                    1024                  2112
//   qkv_gate   33.2 (35.1, 30.1)     w 35.0 (37.7, 34.5)    55.0 (55.0, 51.8)     w 107.6 (135.0)
//   o          14.7 (14.7, 15.0)     w 17.1 (21.9, 16.9)    26.6 (26.6, 26.7)     w 57.7 (60.9)
//   pooler     49.2 (49.2, 46.3)     w 54.9 (85.2, 55.8)    90.1 (90.1, 88.3)     w 194.8 (255.2)
//   unpooler   46.0 (46.0, 46.1)     w 52.5 (77.7, 49.5)    89.3 (89.3, 92.5)     w 191.0 (220.0)
//
//   The skinny four in a chain: 130 MB at one token 33.5 us (3.9 TB/s), 189 MB at 16 / 32 / 64 / 128 tokens 49 / 51 /
//   54 / 63 us. 8192 tokens, medians of three runs in turn with cuBLAS's: o 213 (217), unpooler 827 (840), pooler 788
//   (803), qkv_gate 408 (382, another run), at 2048 tokens 102 (97). One projection's best run differs from its median
//   by up to 10%: the power limit sets the clock (1.3 to 1.6 GHz). The mainloop takes 1028 clocks a step of 1024.
//
// What did not help: clusters sharing the skinny kernel's token tiles; two m-tiles a CTA; a token ring shallower
// than the weights' (tokens queue behind weights in the copy engine, so they want the same depth); other orders
// of k; twice the splits; clusters of two for full grids; in the whole layer, rings of 64 KB (2% slower) to 96 KB
// (1% either way), and weights past the ring brought to L2 before the wait. Wide: pairs of CTAs that share the token
// tiles (within 2%), two CTAs an SM of 128 x 104 or 128 x 128 (5 to 30% slower).
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

// steps: k tiles of a whole row. The staged form is for BF16 and at least three tiles a CTA
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
