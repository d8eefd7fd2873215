// Launchers of the dense projections (ops.h: qkv_gate, o, pooler, unpooler) and of their packing.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma of any multiple of 8 columns
#include "../common/launch.cuh"
#include "../include/model.h"
#include "../include/ops.h"
#include "heuristics.h"
#include "pack.cuh"
#include "skinny.cuh"
#include "tensor_map.h"
#include "tiled.cuh"
#include "wide.cuh"

namespace msl {
namespace {

constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);

bool valid(const DenseParams& p) {
  return p.tokens >= 0 && p.rows > 0 && p.rows % kTileRows == 0 && p.k > 0 && p.k % kTileK == 0 && p.splits >= 1 &&
         p.splits <= p.k / kTileK && p.x_stride % 8 == 0 && p.out_stride >= p.rows && p.out_stride % 8 == 0;
}

template <class C>
int launch_skinny(const DenseParams& p, const Launch& l, int late_trigger) {
  if (p.rows % (C::kMT * kTileRows)) return kInvalid;
  CUtensorMap map;
  if (int e = bf16_rows_map(&map, p.x, p.k, p.tokens, p.x_stride, C::kN)) return e;
  const SkinnyArgs a{static_cast<const uint8_t*>(p.weight), p.out, p.tokens, p.rows, p.k / kTileK, p.splits,
                     p.out_stride, p.splits == 1 && !p.out_f32, late_trigger, p.ready,
                     static_cast<uint32_t>(p.ready_at)};
  const dim3 grid(p.rows / (C::kMT * kTileRows) * p.splits, (p.tokens + C::kN - 1) / C::kN);
  return launch(skinny_kernel<C>, grid, dim3(C::kThreads), C::kShared, l, map, a);
}

template <class C>
int launch_tiled(const DenseParams& p, const Launch& l, int late_trigger) {
  if (p.rows % C::kRows || p.ready_at != 1) return kInvalid;
  if (!C::kWhole && p.splits == 1 && !p.out_f32) return kInvalid;
  CUtensorMap map;
  if (int e = bf16_rows_map(&map, p.x, p.k, p.tokens, p.x_stride, C::kTokens)) return e;
  CUtensorMap out_map = map;
  if (C::kStaged) {
    if (p.splits > 1 || p.out_f32) return kInvalid;
    if (int e = bf16_rows_map(&out_map, p.out, p.rows, p.tokens, p.out_stride, 64)) return e;
  }
  const int token_clusters = (p.tokens + C::kTokens * C::kCM - 1) / (C::kTokens * C::kCM);
  const int row_tiles = p.rows / C::kRows;
  const GridArgs a{static_cast<const uint8_t*>(p.weight), p.out, p.tokens, p.out_stride, p.k / kTileK, p.splits,
                   token_clusters, row_tiles, 16 / C::kCM, p.splits == 1 && !p.out_f32, late_trigger, p.ready};
  const int64_t items = int64_t(p.splits) * token_clusters * row_tiles;
  const int clusters = static_cast<int>(std::min<int64_t>(items, l.sm_count / C::kCM));
  return launch(tiled_kernel<C>, dim3(clusters * C::kCM), dim3(C::kThreads), C::kShared, l, map, out_map, a);
}

template <class C>
int launch_wide(const DenseParams& p, const Launch& l, int late_trigger) {
  if (p.rows % C::kRows || p.ready_at != 1) return kInvalid;
  CUtensorMap map;
  if (int e = bf16_rows_map(&map, p.x, p.k, p.tokens, p.x_stride, C::kN)) return e;
  const int token_tiles = (p.tokens + C::kN - 1) / C::kN, row_tiles = p.rows / C::kRows;
  const GridArgs a{static_cast<const uint8_t*>(p.weight), p.out, p.tokens, p.out_stride, p.k / kTileK, p.splits,
                   token_tiles, row_tiles, kGroupTokens / C::kN, p.splits == 1 && !p.out_f32, late_trigger, p.ready};
  const int64_t items = int64_t(p.splits) * token_tiles * row_tiles;
  const int ctas = static_cast<int>(std::min<int64_t>(items, l.sm_count));
  return launch(wide_kernel<C>, dim3(ctas), dim3(C::kThreads), C::kShared, l, map, a);
}

// Calls f(config) for the instance of a shape; the list is that of kTiledShapes.
template <class F>
int with_tiled(const TiledShape& s, F f) {
  if (s.staged) return f(TiledConfig<256, 1, true>{});
  if (s.tokens == 256) return f(TiledConfig<144, 1, false, 256>{});
  switch (s.rows * 10 + s.cm) {
    case 641: return f(TiledConfig<64, 1>{});
    case 1281: return f(TiledConfig<128, 1>{});
    case 1441: return f(TiledConfig<144, 1>{});
    case 1921: return f(TiledConfig<192, 1>{});
    case 2561: return f(TiledConfig<256, 1>{});
    case 1282: return f(TiledConfig<128, 2>{});
    case 2562: return f(TiledConfig<256, 2>{});
  }
  return kInvalid;
}

// Calls f(config) for the instance of a tile; the list is that of kWideTiles.
template <class F>
int with_wide(int rows, int tokens, F f) {
  switch (rows * 1000 + tokens) {
    case 128096: return f(WideConfig<1, 96>{});
    case 128104: return f(WideConfig<1, 104>{});
    case 128128: return f(WideConfig<1, 128>{});
    case 128152: return f(WideConfig<1, 152>{});
    case 128176: return f(WideConfig<1, 176>{});
    case 128192: return f(WideConfig<1, 192>{});
    case 128208: return f(WideConfig<1, 208>{});
    case 128232: return f(WideConfig<1, 232>{});
    case 256136: return f(WideConfig<2, 136>{});
    case 256144: return f(WideConfig<2, 144>{});
    case 256160: return f(WideConfig<2, 160>{});
    case 256184: return f(WideConfig<2, 184>{});
  }
  return kInvalid;
}

template <class F>
int with_skinny(int tile_n, F f) {
  switch (tile_n) {
    case 8: return f(SkinnyConfig<8, 1, 12, 12>{});
    case 16: return f(SkinnyConfig<16, 1, 11, 11>{});
    case 32: return f(SkinnyConfig<32, 1, 8, 8>{});
    case 64: return f(SkinnyConfig<64, 1, 6, 6>{});
    case 96: return f(SkinnyConfig<96, 1, 5, 5>{});
    case 128: return f(SkinnyConfig<128, 1, 4, 4>{});
  }
  return kInvalid;
}

template <class Kernel, class C>
int prepare(Kernel* kernel, C) {
  return prepare_kernel(kernel, C::kShared);
}

int dense(const DenseParams& p, const Launch& l, int late_trigger) {
  if (!valid(p)) return kInvalid;
  if (p.tokens == 0) return 0;
  if (p.tile_rows != 0)
    return with_wide(p.tile_rows, p.tile_n, [&](auto c) { return launch_wide<decltype(c)>(p, l, late_trigger); });
  if (p.tile_n != 0)
    return with_skinny(p.tile_n, [&](auto c) { return launch_skinny<decltype(c)>(p, l, late_trigger); });
  return with_tiled(choose_tiled(p.tokens, p.rows, p.k / kTileK, p.splits, p.splits > 1 || p.out_f32, l.sm_count),
                    [&](auto c) { return launch_tiled<decltype(c)>(p, l, late_trigger); });
}

}  // namespace

int qkv_gate(const DenseParams& p, const Launch& l) { return dense(p, l, 0); }
int o(const DenseParams& p, const Launch& l) { return dense(p, l, 0); }
// Triggers after its own wait: every later kernel may then read what the kernels before the pooler wrote.
int pooler(const DenseParams& p, const Launch& l) { return dense(p, l, 1); }
int unpooler(const DenseParams& p, const Launch& l) { return dense(p, l, 0); }

int pack_dense(const PackDenseParams& p, const Launch& l) {
  if (p.rows < 0 || p.rows % kTileRows || p.k <= 0 || p.k % kTileK) return kInvalid;
  const int64_t chunks = int64_t(p.rows) * p.k / 8;
  const dim3 grid(static_cast<unsigned>((chunks + kPackThreads - 1) / kPackThreads));
  return launch(pack_dense_kernel, grid, dim3(kPackThreads), 0, l, static_cast<const uint4*>(p.src),
                static_cast<uint8_t*>(p.dst), chunks, p.k);
}

int prepare_dense() {
  if (!encode_tiled()) return static_cast<int>(cudaErrorInitializationError);
  for (int n : {8, 16, 32, 64, 96, 128})
    if (int e = with_skinny(n, [](auto c) { return prepare(skinny_kernel<decltype(c)>, c); })) return e;
  for (const WideTile& t : kWideTiles)
    if (int e = with_wide(t.rows, t.tokens, [](auto c) { return prepare(wide_kernel<decltype(c)>, c); })) return e;
  for (const TiledShape& s : kTiledShapes)
    if (int e = with_tiled(s, [](auto c) { return prepare(tiled_kernel<decltype(c)>, c); })) return e;
  return prepare_kernel(pack_dense_kernel, 0);
}

}  // namespace msl
