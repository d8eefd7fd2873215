// Shapes of the tiled attention that depend on the plan alone: tiles, splits and the layout of the
// scratch. Host arithmetic, also read by the kernels (plain numbers).
//
// Scratch, in order:
//   images    [B][2 KV heads][key_tiles] of {K [128 keys][64], V [128 keys][64]} FP16, each 16384 bytes
//             in the 128-byte-swizzled order that wgmma reads, so that a plain bulk copy brings a tile;
//   headers   [B][key_tiles] of TileHeader;
//   partials  splits > 1: FP32 [T][16][splits][64] and [T][16][splits][2].
#pragma once
#include <cstdint>

#include "../include/model.h"
#include "../include/params.h"

namespace msl {
namespace tiled {

constexpr int kKeys = 128;                          // keys of a tile
constexpr int kTileBytes = kKeys * kHeadDim * 2;    // K or V of one tile and KV head, FP16
constexpr int kImageBytes = 2 * kTileBytes;
constexpr int kWarpgroups = 3;                      // consumers: 64 rows each
constexpr int kRows = 64 * kWarpgroups;             // (token, head) rows of a query tile
constexpr int kTokens = kRows / kGroup;             // 24 tokens x 8 heads of one KV head
constexpr int kMaxSplits = 16;
constexpr int kSms = 132;                           // what the split count aims to fill (H100, H200)

// What the gather kernel says about a key tile.
struct alignas(16) TileHeader {
  uint32_t visible[4];  // bit k: key k of the tile exists (inside the length, page id in range)
  float max_norm[2];    // per KV head: the largest Euclidean norm of a key, in cache units
  uint32_t all_visible; // 1: all 128 bits are set
  uint32_t unused;
};
static_assert(sizeof(TileHeader) == 32, "the kernel copies it whole");

struct Plan {
  int64_t header_offset, acc_offset, lse_offset, bytes;
  int32_t key_tiles;    // stride of a request, in tiles
  int32_t query_tiles;  // bound on the query tiles of the step
  int32_t splits;
};

inline int64_t align256(int64_t n) { return (n + 255) / 256 * 256; }

// Splits by a rough count of tile times: each wave of work items costs its key tiles and three more
// for start and end; joining costs a launch and the partials' traffic.
inline int choose_splits(int64_t items, int64_t key_tiles, int64_t tokens) {
  int best = 1;
  double best_cost = 1e30;
  for (int s = 1; s <= kMaxSplits && (s == 1 || key_tiles >= 2 * s); s++) {
    double waves = double((items * s + kSms - 1) / kSms);
    double cost = waves * (double(key_tiles) / s + 3.0) + (s > 1 ? 2.0 + double(tokens) * s * 0.0018 : 0.0);
    if (cost < best_cost * 0.97) best = s, best_cost = cost;
  }
  return best;
}

inline bool make_plan(const AttentionParams& p, Plan* plan) {
  if (p.tokens < 0 || p.requests < 0 || p.table_width < 0 || p.max_q_len < 0 || p.window < 0 || p.page_log2 < 0 ||
      p.page_log2 > 8)
    return false;
  int64_t keys = int64_t(p.table_width) << p.page_log2;
  if (p.window > 0 && keys > int64_t(p.window) + p.max_q_len) keys = int64_t(p.window) + p.max_q_len;
  int64_t key_tiles = (keys + kKeys - 1) / kKeys;
  if (key_tiles > (1 << 20)) return false;
  int64_t query_tiles = int64_t(p.tokens) / kTokens + p.requests;
  if (query_tiles > p.tokens) query_tiles = p.tokens;
  int64_t seen = p.window > 0 ? (int64_t(p.window) + kKeys - 1) / kKeys + 1 : key_tiles;  // by one query tile
  if (seen > key_tiles) seen = key_tiles;
  plan->key_tiles = int32_t(key_tiles);
  plan->query_tiles = int32_t(query_tiles);
  plan->splits = choose_splits(query_tiles * kKvHeads, seen, p.tokens);
  plan->header_offset = int64_t(p.requests) * kKvHeads * key_tiles * kImageBytes;
  plan->acc_offset = align256(plan->header_offset + int64_t(p.requests) * key_tiles * int64_t(sizeof(TileHeader)));
  int64_t rows = plan->splits > 1 ? int64_t(p.tokens) * kQHeads * plan->splits : 0;
  plan->lse_offset = align256(plan->acc_offset + rows * kHeadDim * 4);
  plan->bytes = align256(plan->lse_offset + rows * 2 * 4);
  return true;
}

}  // namespace tiled
}  // namespace msl
