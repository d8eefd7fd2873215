// Flash attention over the gathered FP16 tiles.
//
// A CTA owns one query tile of one KV head: 24 tokens x 8 query heads = 192 rows, row = 8 * token +
// head, so that the heads of a group share every K and V tile and the causal and window edges are
// narrow; with splits it owns one contiguous share of the tile's keys. Three consumer warpgroups take
// 64 rows (8 tokens) each, and one producer thread streams K and V tiles of 128 keys as bulk copies
// of their ready-made swizzled images through a ring of kStages (32 KiB each). Shared memory: the
// ring, Q (8 KiB a warpgroup), the gate's rows (55 KiB), tile headers, barriers: about 210 KiB, one CTA
// a multiprocessor.
//
// A warpgroup issues S = Q K^T of the next tile, then O += P V of the current one, and runs the
// softmax of the next tile while the second product is under way; the warpgroups take turns at
// issuing, so that the tensor cores always have one's products while the others exponentiate. With a
// head dimension of 64 a tile costs as many cycles of exponentials (16 a clock) as of products, so
// the softmax is what is kept short:
//   * The running maximum is only a stabiliser, so it need not be the maximum. A tile's weights
//     p = 2^(s c - m) use the m at hand ("fast"); when a sum shows that one could exceed FP16, weights,
//     sums and O are scaled down by a power of two afterwards. No maximum is taken, and O is not
//     touched, in all but a few tiles. That needs s c - m < 120, so that p is finite in FP32; the key
//     norms in the tile's header and the row's query norm bound s (Cauchy-Schwarz).
//   * Where that bound does not hold, on the first tile, and on tiles that a mask crosses, the scores
//     are masked and m is raised to their maximum first.
// All of it is decided per warp (2 tokens x 8 heads) from the request's own data. A warp may not wait for
// wgmma within what it decides alone: all warps of a warpgroup have to wait by the same instruction, and a
// vote of the warpgroup instead costs 9% (its warps then begin each softmax together).
#pragma once
#include "../common/wgmma.cuh"
#include "attention_tiled_gather.cuh"

namespace msl {
namespace tiled {

constexpr int kStages = 4;
constexpr int kWaitGroup = 10;  // of 16 groups of exponentials: where O's product is waited for
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr float kFastBound = 120.f;    // fast tiles: log2 of any weight is below this
constexpr float kUnseen = -1e30f;      // m of a row that has seen no key: weights 2^(-inf - m) are then 0
constexpr float kSumBound = 32768.f;   // a thread's sum of weights that FP16 surely holds

// What a work item is; the same in every thread of the CTA.
struct Item {
  int request, kv_head;
  int split, splits;          // this one, of how many
  int part_row;               // row of the first token's partials, with splits
  int queries, length;        // of the request
  int token0, tokens;         // first token of the tile in the step; valid tokens, 1..24
  int position0;              // of the first token
  int first_key;              // position of key 0 of tile 0 in the scratch
  int tile_begin, tile_end;   // key tiles of this split
};

constexpr int kGateStride = kHeadDim + 8;  // floats: eight heads' rows meet no bank conflict

struct Shared {
  uint8_t ring[kStages][kImageBytes];        // K, V
  uint8_t q[kWarpgroups][64 * kHeadDim * 2];
  TileHeader header[kStages];
  float gate[kRows][kGateStride];
  float q_norm[kRows], alpha[kRows];
  Item item;
  float k_scale, v_scale;
  uint64_t k_full[kStages], v_full[kStages], empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // the ring is aligned to 1024 by hand

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ void arrive_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// out_norm_gate's arithmetic: the factor of a head's norm from its sum of squares, and a gated value.
__device__ __forceinline__ float head_norm(float square) { return rsqrtf(square * (1.0f / kHeadDim) + kRmsEps); }
__device__ __forceinline__ float gated(float x, float gate) { return __fdividef(x, 1.0f + __expf(-gate)); }
// Columns of a token's gate, the projection's splits added in order.
template <class Vector>
__device__ __forceinline__ Vector gate_at(const AttentionParams& p, int64_t token, int column) {
  const float* src = p.gate + token * kQkvRows + column;
  Vector sum = __ldcg(reinterpret_cast<const Vector*>(src));
  for (int s = 1; s < p.gate_splits; s++) {
    const Vector v = __ldcg(reinterpret_cast<const Vector*>(src + s * static_cast<int64_t>(p.gate_tokens) * kQkvRows));
    sum.x += v.x, sum.y += v.y;
    if constexpr (sizeof(Vector) == 16) sum.z += v.z, sum.w += v.w;
  }
  return sum;
}

// A thread's two rows: m in log2 units, l this thread's share of the sum of weights.
struct Rows {
  float m[2], l[2];
};

// Before a tile whose scores may outgrow the m at hand, or which a mask crosses: masked scores become -inf, m the maximum
// so far, l is scaled to it, and `alpha` are the factors by which O must be. low and high: first and last visible column
// of the first row; the second row's are one further.
template <bool kMask>
__device__ __forceinline__ void raise_maximum(float (&s)[64], Rows& row, float (&alpha)[2], float c, int low, int high,
                                              const TileHeader* header) {
  if (kMask) {
    const int column = 2 * (threadIdx.x & 3);
    const uint32_t* visible = header->visible;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      uint32_t bits = visible[j >> 2] >> (8 * (j & 3) + column);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int k = 8 * j + column + (e & 1);
        bool seen = k >= low + (e >> 1) && k <= high + (e >> 1) && ((bits >> (e & 1)) & 1);
        s[4 * j + e] = seen ? s[4 * j + e] : -INFINITY;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float largest = s[2 * r];
#pragma unroll
    for (int j = 0; j < 16; j++) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    const float m = fmaxf(fmaxf(row.m[r], kUnseen), quad_max(largest) * c);
    alpha[r] = ex2(row.m[r] - m);
    row.m[r] = m;
    row.l[r] *= alpha[r];
  }
}

// The FP16 A operand of P V from the accumulator layout of S: they agree. Group j: columns 8 j .. 8 j + 7.
__device__ __forceinline__ void pack_group(const float (&s)[64], uint32_t (&w)[8][4], int j) {
#pragma unroll
  for (int r = 0; r < 2; r++)
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[j >> 1][2 * (j & 1) + r]) : "f"(s[4 * j + 2 * r + 1]), "f"(s[4 * j + 2 * r]));
}
__device__ __forceinline__ void pack_weights(const float (&s)[64], uint32_t (&w)[8][4]) {
#pragma unroll
  for (int j = 0; j < 16; j++) pack_group(s, w, j);
}

// Weights by the m at hand, packed as the A operand of the next P V, whose registers are free once
// `products_done` (wait for the current P V) has run. Returns whether O must be multiplied by alpha (the
// same in a whole warp).
// Sums and conversions run one group of four behind the exponentials.
template <class Done>
__device__ __forceinline__ bool softmax(float (&s)[64], uint32_t (&weights)[8][4], Rows& row, float (&alpha)[2],
                                             float c, Done products_done) {
  float sum[2] = {0.f, 0.f};
  const float base[2] = {-row.m[0], -row.m[1]};
#pragma unroll
  for (int j = 0; j <= 16; j++) {
    if (j < 16) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = s[4 * j + e];
        x = fmaf(x, c, base[e >> 1]);
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
      }
    }
    if (j == kWaitGroup) {
      products_done();
#pragma unroll
      for (int k = 0; k < kWaitGroup - 1; k++) pack_group(s, weights, k);
    }
    if (j > 0) {
#pragma unroll
      for (int e = 0; e < 4; e++) asm volatile("add.f32 %0, %0, %1;" : "+f"(sum[e >> 1]) : "f"(s[4 * j - 4 + e]));
      if (j >= kWaitGroup) pack_group(s, weights, j - 1);
    }
  }
  const bool rescale = __any_sync(~0u, fmaxf(sum[0], sum[1]) > kSumBound);
  row.l[0] += sum[0];
  row.l[1] += sum[1];
  if (rescale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float largest = 1.f;
#pragma unroll
      for (int j = 0; j < 16; j++) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      int exponent = static_cast<int>(__float_as_uint(quad_max(largest)) >> 23) - 127;
      alpha[r] = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
      row.m[r] += static_cast<float>(exponent);
      row.l[r] *= alpha[r];
#pragma unroll
      for (int j = 0; j < 16; j++) s[4 * j + 2 * r] *= alpha[r], s[4 * j + 2 * r + 1] *= alpha[r];
    }
    pack_weights(s, weights);
  }
  return rescale;
}

// The queries of the step's tile number `index`.
__device__ __forceinline__ bool find_queries(const AttentionParams& p, int index, Item& item) {
  // Backward: the last tiles of a request see the most keys and start first.
  int begin = 0, queries = 0, length = 0, who = 0;
  item.request = find_tile(p.requests, true, index, who, [&](int b) {
    begin = p.cu_seqlens_q[b], queries = p.cu_seqlens_q[b + 1] - begin, length = p.cache_seqlens[b];
    return (max(0, queries) + kTokens - 1) / kTokens;
  });
  if (item.request < 0) return false;
  begin = __shfl_sync(~0u, begin, who), queries = __shfl_sync(~0u, queries, who), length = __shfl_sync(~0u, length, who);
  item.queries = queries, item.length = length;
  const int tile = (queries + kTokens - 1) / kTokens - 1 - index;
  item.token0 = begin + tile * kTokens;
  item.tokens = min(kTokens, queries - tile * kTokens);
  item.position0 = length - queries + tile * kTokens;
  return true;
}

__device__ __forceinline__ bool find_item(const AttentionParams& p, const Plan& plan, Item& item) {
  int index = blockIdx.x;
  item.kv_head = index % kKvHeads;
  index /= kKvHeads;
  item.split = 0, item.splits = 1, item.part_row = 0;
  if (index >= plan.whole) {
    index -= plan.whole;
    item.split = index % plan.splits, item.splits = plan.splits;
    index /= plan.splits;
    item.part_row = index * kTokens;
    index += plan.whole;
  }
  if (!find_queries(p, index, item)) return false;
  KeyRange range = key_range(p, plan.key_tiles, item.queries, item.length);
  item.first_key = range.first;
  int low = p.window > 0 ? max(0, item.position0 - p.window + 1 - range.first) : 0;
  int high = min(item.position0 + item.tokens - 1 - range.first, range.count - 1);
  int t0 = low / kKeys, n = high >= low ? high / kKeys + 1 - t0 : 0;
  // Tiles that a mask crosses take up to twice as long: one more is shared out at such an end.
  const int lead = p.window > 0, shared_out = n + 1 + lead;
  item.tile_begin = t0 + min(n, max(0, shared_out * item.split / item.splits - lead));
  item.tile_end = t0 + min(n, max(0, shared_out * (item.split + 1) / item.splits - lead));
  return true;
}

__global__ void __launch_bounds__(kThreads, 1) attention_tiled_kernel(const AttentionParams p, const Plan plan) {
  extern __shared__ uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + ((1024 - (smem_u32(raw) & 1023)) & 1023));
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int group = warp >> 2;  // 0..kWarpgroups - 1: consumers; then the producer
  const float k_scale = *p.k_scale, v_scale_at_start = *p.v_scale;  // the caller's, as the lengths are
  Item item;
  const bool some = find_item(p, plan, item);
  if (!some) {
    pdl_wait();
    return;
  }
  const int active = (item.tokens + 7) / 8;  // warpgroups with a token
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mbar_init(&shared.k_full[i], 1);
      mbar_init(&shared.v_full[i], 1);
      mbar_init(&shared.empty[i], 4 * active);
    }
    mbar_init_fence();
    shared.item = item;
    shared.k_scale = k_scale, shared.v_scale = v_scale_at_start;
  }
  __syncthreads();
  pdl_wait();
  pdl_launch();  // not before: join_kernel reads the gate, which is then complete
  const int tiles = item.tile_end - item.tile_begin;

  if (group == kWarpgroups) {
    setmaxnreg_dec<kWarpgroups == 3 ? 32 : 24>();
    if (warp == 4 * kWarpgroups && lane == 0) {
      const uint8_t* images = static_cast<const uint8_t*>(p.kv_scratch);
      const TileHeader* headers = reinterpret_cast<const TileHeader*>(images + plan.header_offset) +
                                  static_cast<int64_t>(item.request) * plan.key_tiles + item.tile_begin;
      images += ((static_cast<int64_t>(item.request) * kKvHeads + item.kv_head) * plan.key_tiles + item.tile_begin) *
                kImageBytes;
      for (int i = 0; i < tiles; i++) {
        const int stage = i % kStages;
        mbar_wait(&shared.empty[stage], ((i / kStages) & 1) ^ 1);
        mbar_expect_tx(&shared.k_full[stage], kTileBytes + sizeof(TileHeader));
        bulk_load(shared.ring[stage], images, kTileBytes, &shared.k_full[stage], kEvictNormal);
        bulk_load(&shared.header[stage], headers + i, sizeof(TileHeader), &shared.k_full[stage], kEvictNormal);
        mbar_expect_tx(&shared.v_full[stage], kTileBytes);
        bulk_load(shared.ring[stage] + kTileBytes, images + kTileBytes, kTileBytes, &shared.v_full[stage], kEvictNormal);
        images += kImageBytes;
      }
    }
    return;
  }

  setmaxnreg_inc<kWarpgroups == 3 ? 160 : 240>();
  if (group >= active) return;
  const float c = p.softmax_scale * shared.k_scale * 1.4426950408889634f;
  uint4 query[4];  // rows 8 * token + head of this warpgroup's 8 tokens; tokens past the end are zeros
  {
    const uint4* q = reinterpret_cast<const uint4*>(static_cast<const __half*>(p.q) +
                                                    static_cast<int64_t>(item.token0 + 8 * group) * kQSize +
                                                    item.kv_head * kGroup * kHeadDim);
    const int thread = threadIdx.x & 127, chunk = thread & 7;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = (thread >> 3) + 16 * i, token = r >> 3;
      query[i] = 8 * group + token < item.tokens ? __ldcg(q + token * (kQSize / 8) + (r & 7) * 8 + chunk) : make_uint4(0, 0, 0, 0);
    }
  }

  // The gate's rows, long before they are wanted (not by bulk copies: so many of 256 bytes hold up the key tiles').
  if (item.splits == 1 && p.gate_splits == 1) {
    const int thread = threadIdx.x & 127, chunk = thread & 15;
    const float* src = p.gate + static_cast<int64_t>(item.token0 + 8 * group) * kQkvRows + item.kv_head * kGroup * kHeadDim +
                       (thread >> 4) * kHeadDim + 4 * chunk;
    float* dst = &shared.gate[64 * group + (thread >> 4)][4 * chunk];
#pragma unroll
    for (int token = 0; token < 8; token++)
      if (8 * group + token < item.tokens) cp_async16(dst + token * kGroup * kGateStride, src + token * kQkvRows);
  }

  // Q into the swizzled tile.
  {
    const int thread = threadIdx.x & 127, chunk = thread & 7;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = (thread >> 3) + 16 * i;
      const uint4 v = query[i];
      *reinterpret_cast<uint4*>(shared.q[group] + r * 128 + ((chunk ^ (r & 7)) << 4)) = v;
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      float square = 0.f;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        float2 f = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
        square = fmaf(f.x, f.x, fmaf(f.y, f.y, square));
      }
#pragma unroll
      for (int d = 1; d < 8; d *= 2) square += __shfl_xor_sync(~0u, square, d);
      if (chunk == 0) shared.q_norm[64 * group + r] = sqrtf(square) * 1.0001f;
    }
    fence_proxy_async();
    named_barrier(4 + group, 128);
  }

  // This warp's rows: row g of 8 belongs to token 2 (warp % 4), row g + 8 to the next one.
  const int position = item.position0 + 8 * group + 2 * (warp & 3);
  const int row0 = 64 * group + 16 * (warp & 3) + (lane >> 2);
  const float reach[2] = {shared.q_norm[row0] * fabsf(c), shared.q_norm[row0 + 8] * fabsf(c)};
  const int full_low = p.window > 0 ? position + 1 - p.window + 1 : INT_MIN;  // tiles whose key 0 is in
  const int full_high = position - (kKeys - 1);                              // low..high need no mask

  float s[64], o[32];
  uint32_t weights[8][4];
  Rows row{{-INFINITY, -INFINITY}, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.f;
  const uint64_t q_desc = desc_sw128(shared.q[group]);

  auto products_s = [&](int stage) {
    const uint64_t k = desc_sw128(shared.ring[stage]);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_ss<kKeys, true>(s, q_desc + 2 * i, k + 2 * i, i > 0);
    wgmma_commit();
  };
  auto products_o = [&](int stage) {
    const uint64_t v = desc_sw128(shared.ring[stage] + kTileBytes);
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      wgmma_rs<kHeadDim, true, true>(o, weights[i], v + 128 * i, 1);
    }
    wgmma_commit();
  };
  // Whether tile i (in `stage`) is seen whole by all of a warp's rows, and whether besides no score of it can outgrow the m
  // at hand by much. The four lanes of a row look at one part of the tile each: `full` is of the lane's part alone.
  struct Way { bool full, fast; };
  auto way = [&](int i, int stage) {
    const TileHeader* header = &shared.header[stage];
    const int key0 = item.first_key + (item.tile_begin + i) * kKeys;
    const bool full = key0 >= full_low && key0 <= full_high && header->visible[lane & 3] == ~0u;
    const float norm = header->max_norm[item.kv_head][lane & 3];
    const bool near = fmaf(reach[0], norm, -row.m[0]) < kFastBound && fmaf(reach[1], norm, -row.m[1]) < kFastBound;
    return Way{full, bool(__all_sync(~0u, full && near))};
  };
  // Softmax of tile i (in `stage`): S becomes packed weights; the product that reads the earlier ones is waited for by
  // `products_done` on the way, outside of all branches, since all warps of a warpgroup must wait by the same
  // instruction; O is rescaled where needed.
  auto weigh = [&](int i, int stage, Way way, auto products_done) {
    float alpha[2];
    if (!way.fast) {
      const TileHeader* header = &shared.header[stage];
      const int key0 = item.first_key + (item.tile_begin + i) * kKeys;
      const int low = p.window > 0 ? position - p.window + 1 - key0 : -1;
      if (__all_sync(~0u, way.full)) raise_maximum<false>(s, row, alpha, c, 0, 0, header);
      else raise_maximum<true>(s, row, alpha, c, low, position - key0, header);
      if ((lane & 3) == 0) shared.alpha[row0] = alpha[0], shared.alpha[row0 + 8] = alpha[1];  // registers are short
    }
    const bool rescale = softmax(s, weights, row, alpha, c, products_done);
    if (!way.fast) {
      __syncwarp();
      const float factor[2] = {shared.alpha[row0], shared.alpha[row0 + 8]};
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 32; j++) o[j] *= factor[(j >> 1) & 1];
    }
    if (rescale) {
#pragma unroll
      for (int j = 0; j < 32; j++) o[j] *= alpha[(j >> 1) & 1];
    }
  };
  auto take_turn = [&] {
    if (active > 1) named_barrier(1 + group, 256);
  };
  auto pass_turn = [&](bool last) {
    if (active > 1 && !(last && group == active - 1))
      arrive_barrier(1 + (group + 1 == active ? 0 : group + 1), 256);
  };

  if (tiles > 0) {
    if (active > 1 && group == active - 1) arrive_barrier(1, 256);
    take_turn();
    mbar_wait(&shared.k_full[0], 0);
    products_s(0);
    if (tiles > 1) mbar_wait(&shared.k_full[1], 0);
    pass_turn(tiles == 1);
    const Way first = way(0, 0);
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    weigh(0, 0, first, [] {});
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int i = 1; i < tiles; i++) {
      const int before = stage, phase_before = phase;
      if (++stage == kStages) stage = 0, phase ^= 1;
      take_turn();
      products_s(stage);  // its tile is known to be there
      mbar_wait(&shared.v_full[before], phase_before);
      products_o(before);
      pass_turn(i == tiles - 1);
      const Way here = way(i, stage);
      wgmma_wait<1>();
      wgmma_fence_operand(s);
      weigh(i, stage, here, [&] {
        if (i + 1 < tiles) mbar_wait(&shared.k_full[stage + 1 == kStages ? 0 : stage + 1], stage + 1 == kStages ? phase ^ 1 : phase);
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        if (lane == 0) mbar_arrive(&shared.empty[before]);
      });
    }
    mbar_wait(&shared.v_full[stage], phase);
    products_o(stage);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
  }

  // Rows of a warp: tokens 2 (warp % 4) and the next; head g = lane / 4; columns 8 j + 2 (lane % 4).
  const Item& done = shared.item;  // read again: registers are short in the loop
  const int column = 2 * (lane & 3), head = lane >> 2, pair = 2 * (warp & 3);
  if (done.splits > 1) {
    auto* scratch = static_cast<uint8_t*>(p.kv_scratch);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = 8 * group + pair + r;
      const float l = quad_sum(row.l[r]);
      if (token >= done.tokens) continue;
      const int64_t head_row = static_cast<int64_t>(done.part_row + token) * kQHeads + done.kv_head * kGroup + head;
      const int64_t part = head_row * done.splits + done.split;
      float* out = reinterpret_cast<float*>(scratch + plan.acc_offset) + part * kHeadDim;
#pragma unroll
      for (int j = 0; j < 8; j++)
        *reinterpret_cast<float2*>(out + 8 * j + column) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      if (column == 0)
        *reinterpret_cast<float2*>(reinterpret_cast<float*>(scratch + plan.lse_offset) + 2 * part) = make_float2(row.m[r], l);
    }
    return;
  }
  const float v_scale = shared.v_scale;
  const bool staged = p.gate_splits == 1;
  if (staged) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    named_barrier(4 + group, 128);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int token = 8 * group + pair + r;
    const float l = quad_sum(row.l[r]);
    if (token >= done.tokens) continue;  // the same in a whole warp
    const float factor = l == 0.f ? 0.f : v_scale / l;
    const int64_t step_token = done.token0 + token;
    const int from = (done.kv_head * kGroup + head) * kHeadDim + column;
    float square = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float &x = o[4 * j + 2 * r], &y = o[4 * j + 2 * r + 1];
      x *= factor, y *= factor;
      square = fmaf(x, x, fmaf(y, y, square));
      if (p.attn_core != nullptr)
        *reinterpret_cast<float2*>(p.attn_core + step_token * kQSize + from + 8 * j) = make_float2(x, y);
    }
    const float norm = head_norm(quad_sum(square));
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + step_token * kQSize + from;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float2 g = staged ? *reinterpret_cast<const float2*>(&shared.gate[token * kGroup + head][8 * j + column])
                              : gate_at<float2>(p, step_token, from + 8 * j);
      *reinterpret_cast<__nv_bfloat162*>(out + 8 * j) =
          __floats2bfloat162_rn(gated(o[4 * j + 2 * r] * norm, g.x), gated(o[4 * j + 2 * r + 1] * norm, g.y));
    }
  }
}

// Joins the splits of a head in their order; then out_norm_gate's work. A CTA owns one token of a tile that is split,
// 16 threads a head, four columns each.
constexpr int kJoinThreads = 256;
constexpr int kJoinSplits = 4;  // whose loads are under way at once
static_assert(kJoinThreads == 16 * kQHeads);
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const AttentionParams p, const Plan plan) {
  pdl_launch();
  const int of_tile = blockIdx.x % kTokens, head = threadIdx.x >> 4, column = 4 * (threadIdx.x & 15);
  Item item;
  const float v_scale = *p.v_scale;
  const bool some = find_queries(p, plan.whole + blockIdx.x / kTokens, item) && of_tile < item.tokens;
  if (!some) {
    pdl_wait();
    return;
  }
  const int64_t token = item.token0 + of_tile, row = token * kQHeads + head;
  // Before the wait: the kernel that is waited for lets this one start when all of its CTAs are past their own wait.
  const float4 g = gate_at<float4>(p, token, head * kHeadDim + column);
  pdl_wait();
  const auto* scratch = static_cast<const uint8_t*>(p.kv_scratch);
  const int64_t part = (int64_t(blockIdx.x) * kQHeads + head) * plan.splits;
  const float* acc = reinterpret_cast<const float*>(scratch + plan.acc_offset) + part * kHeadDim + column;
  const float2* lse = reinterpret_cast<const float2*>(scratch + plan.lse_offset) + part;
  float m = -INFINITY, sum = 0.f;
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = 0; first < plan.splits; first += kJoinSplits) {
    float2 of[kJoinSplits];
    float4 a[kJoinSplits];
#pragma unroll
    for (int s = 0; s < kJoinSplits; s++) {
      of[s] = make_float2(-INFINITY, 0.f), a[s] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + s < plan.splits) {
        of[s] = __ldcg(lse + first + s);
        a[s] = __ldcg(reinterpret_cast<const float4*>(acc + (first + s) * kHeadDim));
      }
    }
    float most = m;
#pragma unroll
    for (int s = 0; s < kJoinSplits; s++) most = fmaxf(most, of[s].y == 0.f ? -INFINITY : of[s].x);
    const float scale = sum == 0.f ? 0.f : ex2(m - most);
    sum *= scale, total.x *= scale, total.y *= scale, total.z *= scale, total.w *= scale;
    m = most;
#pragma unroll
    for (int s = 0; s < kJoinSplits; s++) {
      if (of[s].y == 0.f) continue;
      const float w = ex2(of[s].x - m);
      sum = fmaf(of[s].y, w, sum);
      total.x = fmaf(a[s].x, w, total.x), total.y = fmaf(a[s].y, w, total.y);
      total.z = fmaf(a[s].z, w, total.z), total.w = fmaf(a[s].w, w, total.w);
    }
  }
  const float factor = sum == 0.f ? 0.f : v_scale / sum;
  total = make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
  if (p.attn_core != nullptr) *reinterpret_cast<float4*>(p.attn_core + row * kHeadDim + column) = total;
  float square = fmaf(total.x, total.x, fmaf(total.y, total.y, fmaf(total.z, total.z, total.w * total.w)));
  const unsigned lanes = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) square += __shfl_xor_sync(lanes, square, d);
  const float norm = head_norm(square);
  const __nv_bfloat162 lo = __floats2bfloat162_rn(gated(total.x * norm, g.x), gated(total.y * norm, g.y));
  const __nv_bfloat162 hi = __floats2bfloat162_rn(gated(total.z * norm, g.z), gated(total.w * norm, g.w));
  *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + row * kHeadDim + column) =
      make_uint2(reinterpret_cast<const uint32_t&>(lo), reinterpret_cast<const uint32_t&>(hi));
}

}  // namespace tiled
}  // namespace msl
