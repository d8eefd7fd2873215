// Who does what in the many-token expert kernel: the units of the pass shared out to the CTAs.
//
// A unit is (expert, chunk of its tokens, block of kRowGroups row tiles) over all of K. Two ways to share them out:
//
//   In waves: CTA b takes units b, b + gridDim.x, ...; the last wave's units are cut into halves or quarters of
//   their row tiles where that fills it.
//
//   Waves, then equal runs (`carry`, where there are at least as many units as CTAs): whole chunks of kMaxN tokens cost
//   the same and go in full waves, in which neighbouring CTAs share an expert's tokens and weights in L2. Of all k
//   steps of what is left, less than a wave of whole chunks and all narrower ones, CTA b takes the b-th part by cost, so
//   that all end together. Where such a run ends inside a unit, the CTA does that unit's beginning first of all its
//   work and hands the FP32 sums on through memory; the next CTA, whose run begins there, goes on from them, last of
//   all its work. So nobody waits, and the sums are taken in the order of K whoever takes them: a token's bits do not
//   depend on where units are cut.
#pragma once
#include "expert_gemm_common.cuh"

namespace msl {
namespace expert {

struct Position {  // in the order of all k steps that runs share: a unit, counted among theirs, and a step of it
  int unit, step;
};

template <class C>
struct Shared {
  uint64_t full[C::kMaxSlots];
  uint64_t empty[C::kMaxSlots];
  uint64_t given;    // all consumers have stored their sums for the next CTA
  Lists lists;       // a unit: kRowGroups row tiles
  int whole;         // units that are items; those after them are cut into 2^cut items each
  int cut;
  int mine;          // items of this CTA
  int carry;         // waves of whole chunks, then this CTA's run from run[0] to run[1]
  int waves;
  Position run[2];
  int wholes_before[kLocalExperts];  // units of whole chunks of the experts before
  int shared_before[kLocalExperts];  // units that runs share, of the experts before
  int in_waves[kLocalExperts];       // the expert's units that go in waves: its first
  uint4 items[C::kItems];
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

// Sum over the lanes before this one, and over all.
__device__ __forceinline__ int sum_before(int mine, int& total) {
  int end = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(~0u, end, d);
    if ((threadIdx.x & 31) >= d) end += before;
  }
  total = __shfl_sync(~0u, end, 31);
  return end - mine;
}

// Waves and this CTA's run, by a warp, an expert a lane. False: in waves only.
template <class C>
__device__ __forceinline__ bool cut_runs(Shared<C>& s, const GemmArgs& a) {
  const int lane = threadIdx.x & 31, grid = static_cast<int>(gridDim.x);
  if (!a.p.carry || a.p.splits > 1 || a.p.carry_words < grid * C::kConsumers * (C::kMaxN / 2)) return false;
  if (s.lists.total < grid) return false;
  const int count = s.lists.count[lane], blocks = a.blocks / C::kRowGroups, over = count % C::kMaxN;
  const int wholes = count / C::kMaxN * blocks, narrow = over > 0 ? blocks : 0;  // units
  int all_wholes;
  const int wholes_before = sum_before(wholes, all_wholes);
  int waves = all_wholes / grid;
  int full, last, left, mine, begin, total;  // costs of a whole and of a narrow unit; wholes left, cost of all that is left
  for (int base = C::kStepBase;;) {
    const bool even = base > 64;
    full = C::kSteps * (even ? 1 : C::step_cost(base, C::kMaxN));
    last = C::kSteps * (even ? 1 : C::step_cost(base, C::width(max(over, 1))));
    left = wholes - min(max(waves * grid - wholes_before, 0), wholes);
    mine = left * full + narrow * last;
    begin = sum_before(mine, total);
    // No run may lie inside a unit: a wave less, or tokens that count for less, at last for nothing.
    if (even || total / grid >= __reduce_max_sync(~0u, left > 0 ? full : narrow > 0 ? last : 0)) break;
    if (waves > 0) waves--;
    else base += base / 4;
  }
  if (waves + total / grid / __reduce_min_sync(~0u, narrow > 0 ? last : full) > C::kItems - 3) return false;
  int units;
  const int before = sum_before(left + narrow, units);
#pragma unroll
  for (int side = 0; side < 2; side++) {
    const int at = static_cast<int>(int64_t(total) * (static_cast<int>(blockIdx.x) + side) / grid);
    const int rest = at - begin, more = rest - left * full;
    if (rest >= 0 && rest < mine)
      s.run[side] = more < 0 ? Position{before + rest / full, rest % full * C::kSteps / full}
                             : Position{before + left + more / last, more % last * C::kSteps / last};
    if (at == total && lane == 0) s.run[side] = {units, 0};
  }
  s.wholes_before[lane] = wholes_before;
  s.shared_before[lane] = before;
  s.in_waves[lane] = wholes - left;
  if (lane == 0) s.waves = waves;
  __syncwarp();
  return true;
}

template <class C>
__device__ __forceinline__ void divide(Shared<C>& s, const GemmArgs& a) {
  int carry = 0;
  if constexpr (C::kCarry) carry = cut_runs<C>(s, a);
  if ((threadIdx.x & 31) != 0) return;
  s.carry = carry;
  if (carry) s.mine = s.waves + s.run[1].unit - s.run[0].unit + (s.run[1].step > 0);
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
    bytes = max(bytes, tiles * (C::width(tokens) * 128 + C::kRowGroups * tile_bytes(kKind)));
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
  bool shared;        // its expert has more chunks, which read the same weights
};

// All of the CTA's items, by a warp, an item a lane: a walker would take some 1600 clocks of divisions and dependent loads
// for each. The walkers read them by plain loads: where two ways to share out meet, the compiler takes all that the
// main loops carry for different in each lane, and moves it to a uniform register before every copy and every wgmma (15
// to 20% slower).
template <class C>
__device__ __forceinline__ void list_items(Shared<C>& s, const GemmArgs& a) {
#pragma unroll 1
  for (int n = threadIdx.x & 31; n < s.mine; n += 32) {
    int u, part = 0, cut = 0, begin = 0, end = C::kSteps;
    int i = 0;  // its place in the list of experts
    if (C::kCarry && s.carry) {
      // The beginning of the last unit, the waves, the units between, what is left of the first.
      const Position first = s.run[0], last = s.run[1];
      const int head = last.step > 0, wave = n - head;
      const bool in_wave = wave >= 0 && wave < s.waves;
      if (in_wave) u = static_cast<int>(blockIdx.x) + wave * static_cast<int>(gridDim.x);
      else u = head && n == 0 ? last.unit : n == s.mine - 1 ? first.unit : first.unit + wave - s.waves + 1;
      if (head && n == 0) end = last.step;
      else if (n == s.mine - 1) begin = first.step;
      const int* before = in_wave ? s.wholes_before : s.shared_before;
#pragma unroll
      for (int e = 1; e < kLocalExperts; e++) i += u >= before[e];
      u += s.lists.prefix[i] - before[i] + (in_wave ? 0 : s.in_waves[i]);
    } else {
      u = static_cast<int>(blockIdx.x) + n * static_cast<int>(gridDim.x);
      if (u >= s.whole) {
        cut = s.cut;
        const int j = u - s.whole;
        u = s.whole + (j >> cut);
        part = j & ((1 << cut) - 1);
      }
#pragma unroll
      for (int e = 1; e < kLocalExperts; e++) i += u >= s.lists.prefix[e];
    }
    const Unit unit = decode_unit<C::kMaxN>(s.lists, u, i, a.blocks / C::kRowGroups, a.p.splits);
    const int height = C::kRowGroups >> cut, all = kExpertDim / kTileK / a.p.splits;
    const int k_tiles = C::kCarry && s.carry ? (end - begin) * C::kStepTiles : all;
    s.items[n] = make_uint4(unit.row, unit.expert | unit.tokens << 8 | (unit.block * C::kRowGroups + part * height) << 20,
                            (unit.split * all + begin * C::kStepTiles) | k_tiles << 8 | height << 16 | unit.split << 20,
                            (begin > 0 ? 1 : 0) | (end < C::kSteps ? 2 : 0) | (s.lists.count[i] > C::kMaxN ? 4 : 0));
  }
}
template <class C>
__device__ __forceinline__ Item item_at(const Shared<C>& s, int n) {
  const uint4 w = s.items[n];
  Item item;
  item.row = w.x;
  item.expert = w.y & 255, item.tokens = w.y >> 8 & 4095, item.block = w.y >> 20;
  item.k = w.z & 255, item.k_tiles = w.z >> 8 & 255, item.height = w.z >> 16 & 15, item.split = w.z >> 20;
  item.resumes = w.w & 1, item.hands_over = w.w & 2, item.shared = w.w & 4;
  return item;
}

// A warpgroup's sums, to the CTA after this one and from the one before. The consumers only store theirs and go on; a warp
// that has nothing else to do waits until all have, and then for memory, before it sets the word that says so. The
// taker's tokens' thread waits for that word before it brings the item's first stage, and clears it: were it the
// consumers that spin, their main loops would suffer as above (Tall of 128 tokens: 10%).
template <class C>
__device__ __forceinline__ float4* carried(const ExpertGemmParams& p, int cta, int row_group) {
  return reinterpret_cast<float4*>(p.carry) + (cta * C::kRowGroups + row_group) * (C::kMaxN / 8) * kThreads + (threadIdx.x & 127);
}
template <class C, int N>
__device__ __forceinline__ void give_sums(const ExpertGemmParams& p, Shared<C>& s, int row_group, const float (&acc)[N / 2]) {
  float4* to = carried<C>(p, blockIdx.x, row_group);
#pragma unroll
  for (int j = 0; j < N / 8; j++) __stcg(to + j * kThreads, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbar_arrive(&s.given);
}
template <class C>
__device__ __forceinline__ void announce_sums(const ExpertGemmParams& p, Shared<C>& s) {
  mbar_wait(&s.given, 0);
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.carry_flags + blockIdx.x) : "memory");
}
template <class C>
__device__ __forceinline__ void await_sums(const ExpertGemmParams& p) {
  uint32_t* given = p.carry_flags + blockIdx.x - 1;
  uint32_t there;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(there) : "l"(given) : "memory");
  } while (!there);
  asm volatile("st.relaxed.gpu.global.b32 [%0], 0;" ::"l"(given) : "memory");
}
// acc = 0, or the sums of the CTA before, once the item's first stage is there.
template <class C, int N>
__device__ __forceinline__ void begin_sums(const ExpertGemmParams& p, int row_group, bool resumes, float (&acc)[N / 2]) {
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
