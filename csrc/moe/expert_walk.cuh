// Who does what in the many-token expert kernel: the units of the pass shared out to the CTAs.
//
// A unit is (expert, chunk of its tokens, block of kRowGroups row tiles) over all of K. Two ways to share them out:
//
//   In waves: CTA b takes units b, b + gridDim.x, ...; the last wave's units are cut into halves or quarters of
//   their row tiles where that fills it.
//
//   In equal runs (`carry`, where there are at least as many units as CTAs): CTA b takes the b-th part of all k steps,
//   so that all end together. Where a run ends inside a unit, the CTA does that unit's beginning first of all its
//   work and hands the FP32 sums on through memory; the next CTA, whose run begins there, goes on from them, last of
//   all its work. So nobody waits, and the sums are taken in the order of K whoever takes them: a token's bits do not
//   depend on where units are cut.
#pragma once
#include "expert_gemm_common.cuh"

namespace msl {
namespace expert {

struct Position {  // in the order of all k steps: a unit and a step of it
  int unit, step;
};

template <class C>
struct Shared {
  uint64_t full[C::kMaxSlots];
  uint64_t empty[C::kMaxSlots];
  Lists lists;       // a unit: kRowGroups row tiles
  int whole;         // units that are items; those after them are cut into 2^cut items each
  int cut;
  int mine;          // items of this CTA
  int carry;         // in equal runs: this CTA's is run[0] to run[1]
  Position run[2];
  int place;         // its place in the list of experts
  int slot_bytes, slots;
};

// Full waves of whole units, then a last one of as small items as fill it.
template <class C>
__device__ __forceinline__ void cut_last_wave(Shared<C>& s) {
  const int rest = s.lists.total % static_cast<int>(gridDim.x);
  s.whole = s.lists.total - rest;
  s.cut = 0;
  while ((2 << s.cut) <= C::kRowGroups && (rest << (s.cut + 1)) <= static_cast<int>(gridDim.x)) s.cut++;
  const int grid = static_cast<int>(gridDim.x), items = s.whole + (rest << s.cut);
  s.mine = (items + grid - 1 - static_cast<int>(blockIdx.x)) / grid;
}

// This CTA's run, by a warp, an expert a lane. False: in waves.
template <class C>
__device__ __forceinline__ bool cut_runs(Shared<C>& s, const GemmArgs& a) {
  const int lane = threadIdx.x & 31, grid = static_cast<int>(gridDim.x);
  if (!a.p.carry || a.p.splits > 1 || a.p.carry_words < grid * C::kConsumers * (C::kMaxN / 2)) return false;
  if (s.lists.total < grid) return false;
  const int count = s.lists.count[lane], chunks = (count + C::kMaxN - 1) / C::kMaxN;
  int full, last, block, mine, end, total;
  for (bool weighted = true;; weighted = false) {
    // Of a chunk of kMaxN tokens, of the last one, of a block's chunks, of all blocks.
    full = C::kSteps * (weighted ? C::step_cost(C::kMaxN) : 1);
    last = C::kSteps * (weighted ? C::step_cost(C::width(max(count - (chunks - 1) * C::kMaxN, 1))) : 1);
    block = count == 0 ? 0 : (chunks - 1) * full + last;
    mine = block * (a.blocks / C::kRowGroups);
    end = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end += before;
    }
    total = __shfl_sync(~0u, end, 31);
    // No run may lie inside a unit.
    if (!weighted || total / grid >= __reduce_max_sync(~0u, count == 0 ? 0 : chunks > 1 ? full : last)) break;
  }
#pragma unroll
  for (int side = 0; side < 2; side++) {
    const int at = total * (static_cast<int>(blockIdx.x) + side) / grid;
    int rest = at - (end - mine);
    if (rest >= 0 && rest < mine) {
      const int blocks = rest / block;
      rest -= blocks * block;
      const int chunk = min(rest / full, chunks - 1), unit = s.lists.prefix[lane] + blocks * chunks + chunk;
      s.run[side] = {unit, (rest - chunk * full) * C::kSteps / (chunk == chunks - 1 ? last : full)};
      if (side == 0) s.place = lane;
    }
    if (at == total && lane == 0) s.run[side] = {s.lists.total, 0};
  }
  __syncwarp();
  return true;
}

template <class C>
__device__ __forceinline__ void divide(Shared<C>& s, const GemmArgs& a) {
  int carry = 0;
  if constexpr (C::kCarry) carry = cut_runs<C>(s, a);
  if ((threadIdx.x & 31) != 0) return;
  s.carry = carry;
  if (carry) s.mine = s.run[1].unit - s.run[0].unit + (s.run[1].step > 0);
  else cut_last_wave<C>(s);
}

// Slots for the widest stage that this pass needs.
template <class C, int kKind>
__device__ __forceinline__ void size_ring(Shared<C>& s) {
  const int most = min(s.lists.count[0], C::kMaxN);
  int bytes = 0;
  constexpr int kSteps[4] = {32, 64, 128, C::kMaxN};  // stage_tiles changes only between these
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int tokens = min(kSteps[i], max(most, 1));
    const int tiles = C::stage_tiles(tokens, kKind);
    bytes = max(bytes, tiles * (token_rows(C::width(tokens)) * 128 + C::kRowGroups * tile_bytes(kKind)));
  }
  bytes = (bytes + 1023) / 1024 * 1024;
  s.slot_bytes = bytes;
  s.slots = min(C::kRingBytes / bytes, C::kMaxSlots);
}

struct Item : Unit {  // `block`: the first row tile
  int height;         // row tiles
  int k, k_tiles;     // the first k tile, and how many
  bool resumes;       // from the previous CTA's sums
  bool hands_over;    // its sums to the next CTA
};

// The CTA's n-th item; `i`: the caller's place in the list of experts. One way through for both ways to share out: from
// two of them the compiler took all that the main loops carry for different in each lane, and moved it to a
// uniform register before every copy and every wgmma (15 to 20% slower).
template <class C>
__device__ __forceinline__ Item decode_item(const Shared<C>& s, int n, int& i, const GemmArgs& a) {
  int u, part = 0, cut = 0, begin = 0, end = C::kSteps;
  if (C::kCarry && s.carry) {
    // The beginning of the last unit, the units between, what is left of the first.
    const Position first = s.run[0], last = s.run[1];
    const int head = last.step > 0;
    u = head && n == 0 ? last.unit : n == s.mine - 1 ? first.unit : first.unit + n + 1 - head;
    if (head && n == 0) end = last.step;
    else if (n == s.mine - 1) begin = first.step;
    i = s.place;
  } else {
    u = static_cast<int>(blockIdx.x) + n * static_cast<int>(gridDim.x);
    if (u >= s.whole) {
      cut = s.cut;
      const int j = u - s.whole;
      u = s.whole + (j >> cut);
      part = j & ((1 << cut) - 1);
    }
  }
  Item item;
  static_cast<Unit&>(item) = decode_unit<C::kMaxN, C::kCarry>(s.lists, u, i, a.blocks / C::kRowGroups, a.p.splits);
  item.height = C::kRowGroups >> cut;
  item.block = item.block * C::kRowGroups + part * item.height;
  item.k_tiles = kExpertDim / kTileK / a.p.splits;
  item.k = item.split * item.k_tiles + begin * C::kStepTiles;
  if (C::kCarry && s.carry) item.k_tiles = (end - begin) * C::kStepTiles;
  item.resumes = begin > 0;
  item.hands_over = end < C::kSteps;
  return item;
}

// A warpgroup's sums, to the CTA after this one and from the one before: a flag a warp, set by the giver and cleared by
// the taker.
template <class C>
__device__ __forceinline__ float4* carried(const ExpertGemmParams& p, int cta, int row_group) {
  return reinterpret_cast<float4*>(p.carry) + (cta * C::kRowGroups + row_group) * (C::kMaxN / 8) * kThreads + (threadIdx.x & 127);
}
template <class C, int N>
__device__ __forceinline__ void give_sums(const ExpertGemmParams& p, int row_group, const float (&acc)[N / 2]) {
  float4* to = carried<C>(p, blockIdx.x, row_group);
#pragma unroll
  for (int j = 0; j < N / 8; j++) __stcg(to + j * kThreads, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
  __syncwarp();
  if ((threadIdx.x & 31) == 0)
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(p.carry_flags + blockIdx.x), "r"(1u << (threadIdx.x >> 5)) : "memory");
}
// acc = 0, or the sums of the CTA before.
template <class C, int N>
__device__ __forceinline__ void begin_sums(const ExpertGemmParams& p, int row_group, bool resumes, float (&acc)[N / 2]) {
  if (resumes) {
    const uint32_t bit = 1u << (threadIdx.x >> 5);
    uint32_t* flags = p.carry_flags + blockIdx.x - 1;
    if ((threadIdx.x & 31) == 0) {
      uint32_t set;
      do {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(set) : "l"(flags) : "memory");
      } while (!(set & bit));
      asm volatile("red.relaxed.gpu.global.and.b32 [%0], %1;" ::"l"(flags), "r"(~bit) : "memory");
    }
    __syncwarp();
  }
  const float4* from = carried<C>(p, static_cast<int>(blockIdx.x) - 1, row_group);
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float* d = acc + 4 * j;
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    // Predicated, not a branch: sums that two paths define make the compiler serialise the wgmmas.
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(from + j * kThreads), "r"(int(resumes)) : "memory");
  }
}

}  // namespace expert
}  // namespace msl
