// Shapes of the tiled attention that depend on the plan alone: tiles, splits and the layout of the
// scratch. Host arithmetic, also read by the kernels (plain numbers).
//
// Scratch, in order:
//   images    [B][2 KV heads][key_tiles] of {K [128 keys][64], V [128 keys][64]} FP16, each 16384 bytes
//             in the 128-byte-swizzled order that wgmma reads, so that a plain bulk copy brings a tile;
//   headers   [B][key_tiles] of TileHeader;
//   partials  splits > 1: FP32 [rows][16][splits][64] and [rows][16][splits][2], 24 rows a query tile that is split.
#pragma once
#include <cstdint>
#include <initializer_list>

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

constexpr int kParts = 4;                           // of a key tile, 32 keys each: a gathering CTA's
constexpr int kPartKeys = kKeys / kParts;

// What the gather kernel says about a key tile, part by part.
struct alignas(16) TileHeader {
  uint32_t visible[kParts];            // bit k: key k of the part exists (inside the length, page id in range)
  float max_norm[kKvHeads][kParts];    // the largest Euclidean norm of a key, in cache units
};
static_assert(sizeof(TileHeader) == 48, "the kernel copies it whole");

struct Plan {
  int64_t header_offset, acc_offset, lse_offset, bytes;
  int32_t key_tiles;    // stride of a request, in tiles
  int32_t query_tiles;  // bound on the query tiles of the step
  int32_t whole;        // the first tiles, whose keys are not split
  int32_t splits;       // of the other tiles' keys
};

inline int64_t align256(int64_t n) { return (n + 255) / 256 * 256; }

// Whole tiles and splits by a rough count of tile times: each wave of work items costs its key tiles and three more
// for start and end; joining costs a launch and the partials' traffic. Either all tiles are split, or those which would
// not fill the last wave.
// `likely`: how many query tiles a step like this has, where the bound counts a broken tile for every request.
inline void choose_splits(Plan* plan, int64_t likely, int64_t seen) {
  const int64_t items = likely * kKvHeads;
  plan->whole = 0, plan->splits = 1;
  double best = 1e30;
  for (int64_t waves : {int64_t(0), items / kSms}) {
    const int64_t rest = items - waves * kSms;
    for (int s = waves > 0 ? 2 : 1; s <= kMaxSplits && (s == 1 || seen >= 2 * s); s++) {
      const double cost = double(waves) * (double(seen) + 3.0) +
                          double((rest * s + kSms - 1) / kSms) * (double(seen) / s + 3.0) +
                          (s > 1 ? 2.0 + double(rest * kTokens / kKvHeads) * s * 0.0018 : 0.0);
      if (rest > 0 && cost < best * 0.97) plan->whole = int32_t(waves * kSms / kKvHeads), plan->splits = s, best = cost;
    }
  }
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
  int64_t likely = (2 * int64_t(p.tokens) + int64_t(kTokens) * (p.requests - 1) + 2 * kTokens - 1) / (2 * kTokens);
  choose_splits(plan, likely < query_tiles ? likely : query_tiles, seen);
  plan->header_offset = int64_t(p.requests) * kKvHeads * key_tiles * kImageBytes;
  plan->acc_offset = align256(plan->header_offset + int64_t(p.requests) * key_tiles * int64_t(sizeof(TileHeader)));
  int64_t rows = plan->splits > 1 ? (query_tiles - plan->whole) * kTokens * kQHeads * plan->splits : 0;
  plan->lse_offset = align256(plan->acc_offset + rows * kHeadDim * 4);
  plan->bytes = align256(plan->lse_offset + rows * 2 * 4);
  return true;
}

}  // namespace tiled
}  // namespace msl
