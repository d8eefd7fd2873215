// The tiled projection: many tokens. Bound by the tensor cores from a few hundred tokens, by the weights'
// bytes below.
//
// A CTA tile is kTokens (128 or 256) tokens x kRows weight rows; tokens stand on M, weights on N. Two consumer
// warpgroups own half of the tokens each and all rows: wgmma m64n(kRows)k16, the widest instruction, which
// re-reads the least shared memory. A persistent grid walks (split, tile) items; tiles are ordered so that the
// CTAs at work at one time share few token tiles and few row tiles in L2
// (dense_grid.cuh).
//
// kRows is a multiple of 64, whole m-tiles of the packed layout, or 144: qkv_gate's 2304 rows are 16 tiles of 144,
// which 132 SMs divide well where 9 of 256 or 12 of 192 leave a wave half empty. Such a tile's runs of rows in three
// m-tiles are multiples of 8 rows, the swizzle's period, and contiguous: three bulk copies put them one after the other.
//
// A cluster of kCM = 2 CTAs takes two token tiles of one row tile; each loads half of the weights and
// multicasts it to both. It is for a few token tiles, where L2 traffic bounds (heuristics.h); the mainloop of a
// full grid runs at the tensor cores' rate without it.
//
// Pipeline: a ring of stages of one k tile each: tokens 16 KB by TMA (rows past T arrive as zeros), weights
// kR x 8 KB by bulk copies. One producer thread; its warpgroup gives its registers to the consumers (setmaxnreg).
// A stage's `empty` barrier counts the consumer warps of every CTA of the cluster, because its producer writes
// to all of them. The first ring-full of weights is issued before the wait on the predecessor.
//
// Output: L2 takes all CTAs' tiles at some 18 bytes a clock and SM, so writing one takes 3500 (BF16) to 7500
// (FP32) clocks, beside the 16 to 131 thousand of its mainloop (k of 1024 to 8192). Two forms:
//   direct (either type): from registers, FP32 in full 32-byte sectors, BF16 after a 4 x 4 transposition in each
//     quad (64 contiguous bytes a quad); leaves shared memory to the ring;
//   staged (kStaged; BF16): through a swizzled staging of 64 KB and tensor stores, which drain while the warpgroup
//     goes on with its next tile; for many tiles a CTA.
//
// Shared memory: the ring and the staging; at 256 rows 4 stages of 48 KB, or 3 and the staging. One CTA an SM.
#pragma once
#include "../common/cluster.cuh"
#include "../common/wgmma.cuh"
#include "dense_grid.cuh"

namespace msl {

template <int kRows_, int kCM_, bool kStaged_ = false, int kTokens_ = 128>
struct TiledConfig {
  static constexpr int kRows = kRows_, kCM = kCM_, kTokens = kTokens_;
  static constexpr bool kStaged = kStaged_, kWhole = kRows % kTileRows == 0;
  static constexpr int kMmas = kTokens / 128;  // of 64 tokens, a warpgroup
  static constexpr int kTokenBytes = kTokens * kTileK * 2, kWeightBytes = kRows * kTileK * 2;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kStagingBytes = kStaged ? kTokens * kRows * 2 : 0;
  static constexpr int kFit = (226 * 1024 - kStagingBytes) / kStageBytes;
  static constexpr int kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kThreads = 384;
  static constexpr size_t kShared = size_t(kStages) * kStageBytes + kStagingBytes + (2 * kStages + 1) * 8;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0 && (kWhole || kCM == 1) && (kMmas == 1 || !kStaged));
};

template <class C>
__global__ void __cluster_dims__(C::kCM, 1, 1) __launch_bounds__(C::kThreads, 1)
    tiled_kernel(const __grid_constant__ CUtensorMap token_map, const __grid_constant__ CUtensorMap out_map,
                 const GridArgs a) {
  constexpr int kRows = C::kRows, kStages = C::kStages, kCluster = C::kCM;
  if (!a.late_trigger) pdl_launch();

  extern __shared__ __align__(1024) uint8_t ring[];
  uint8_t* staging = ring + kStages * C::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(staging + C::kStagingBytes);
  uint64_t* empty = full + kStages;
  uint64_t* ready = empty + kStages;
  auto tokens_of = [&](int stage) { return ring + stage * C::kStageBytes; };
  auto weights_of = [&](int stage) { return ring + stage * C::kStageBytes + C::kTokenBytes; };

  const int rank = kCluster == 1 ? 0 : cluster_rank();
  const int items = a.splits * a.token_tiles * a.row_tiles;
  const int first = blockIdx.x / kCluster, stride = gridDim.x / kCluster;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  auto work_of = [&](int item) {
    GridWork w = grid_work<C::kTokens * C::kCM, kRows>(a, item);
    w.token += rank * C::kTokens;
    return w;
  };
  auto load_weights = [&](const GridWork& w, int k, int stage) {
    mbar_expect_tx(&full[stage], C::kStageBytes);
    constexpr int kPart = kTileBytes / C::kCM;
    const int64_t next = int64_t(a.k_tiles) * kTileBytes;
    const uint8_t* src = a.weight + w.row / kTileRows * next + int64_t(k) * kTileBytes + rank * kPart;
    uint8_t* dst = weights_of(stage) + rank * kPart;
    if constexpr (C::kWhole) {
#pragma unroll
      for (int r = 0; r < kRows / kTileRows; r++, src += next, dst += kTileBytes) {
        if constexpr (C::kCM == 1)
          bulk_load(dst, src, kPart, &full[stage], kEvictNormal);
        else
          bulk_load_multicast(dst, src, kPart, &full[stage], (1 << C::kCM) - 1);
      }
    } else {
      for (int row = w.row % kTileRows, left = C::kWeightBytes; left > 0; row = 0, src += next) {
        const int bytes = min(kTileBytes - row * 128, left);
        bulk_load(dst, src + row * 128, bytes, &full[stage], kEvictNormal);
        dst += bytes, left -= bytes;
      }
    }
  };
  const bool is_producer = threadIdx.x == 0;
  int prefetched = 0;
  if (is_producer) {
    for (int s = 0; s < kStages; s++) {
      mbar_init(&full[s], 1);
      mbar_init(&empty[s], 8 * kCluster);
    }
    mbar_init(ready, 1);
    mbar_init_fence();
    tma_prefetch_descriptor(&token_map);
  }
  __syncwarp();
  if constexpr (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (is_producer && first < items) {
    const GridWork w = work_of(first);
    prefetched = min(kStages, w.k_end - w.k_begin);
    for (int i = 0; i < prefetched; i++) load_weights(w, w.k_begin + i, i);
  }
  if (a.ready == nullptr) pdl_wait();

  if (warp < 4) {
    setmaxnreg_dec<40>();
    if (a.late_trigger && warp == 1) await_ready(a, ready);
    if (is_producer) {
      if (a.ready != nullptr) {
        mbar_wait(ready, 0);
        fence_proxy_async_global();
      }
      int stage = 0;
      uint32_t phase = 1;  // an empty ring: the first pass does not wait
      for (int item = first; item < items; item += stride) {
        const GridWork w = work_of(item);
        for (int k = w.k_begin; k < w.k_end; k++) {
          if (prefetched > 0) {
            prefetched--;
          } else {
            mbar_wait(&empty[stage], phase);
            load_weights(w, k, stage);
          }
          tma_load_2d(tokens_of(stage), &token_map, k * kTileK, w.token, &full[stage]);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
      // The CTA stays until every consumer of the cluster has released its stages: then nobody writes to it
      // or arrives at its barriers any more.
      if constexpr (kCluster > 1)
        for (int s = 0; s < kStages; s++) {
          mbar_wait(&empty[stage], phase);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
    }
  } else {
    setmaxnreg_inc<232>();
    const int group = warp / 4 - 1, g = lane / 4, c = lane % 4;
    int stage = 0;
    uint32_t phase = 0;
    auto release = [&](int s) {
      if constexpr (kCluster == 1) {
        if (lane == 0) mbar_arrive(&empty[s]);
      } else {
        if (lane < kCluster) mbar_arrive_remote(&empty[s], lane);
      }
    };
    for (int item = first; item < items; item += stride) {
      const GridWork w = work_of(item);
      float acc[C::kMmas][kRows / 2];
#pragma unroll
      for (int m = 0; m < C::kMmas; m++)
#pragma unroll
        for (int i = 0; i < kRows / 2; i++) acc[m][i] = 0.f;
      int previous = 0;
      for (int k = w.k_begin; k < w.k_end; k++) {
        mbar_wait(&full[stage], phase);
        const uint64_t wd = desc_sw128(weights_of(stage));
#pragma unroll
        for (int m = 0; m < C::kMmas; m++) wgmma_fence_operand(acc[m]);
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < C::kMmas; m++) {
          const uint64_t td = desc_sw128(tokens_of(stage) + (group * C::kMmas + m) * kTileBytes);
#pragma unroll
          for (int kk = 0; kk < 4; kk++) wgmma_ss<kRows>(acc[m], td + 2 * kk, wd + 2 * kk, 1);
        }
        wgmma_commit();
#pragma unroll
        for (int m = 0; m < C::kMmas; m++) wgmma_fence_operand(acc[m]);
        wgmma_wait<1>();
        if (k > w.k_begin) release(previous);
        previous = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < C::kMmas; m++) wgmma_fence_operand(acc[m]);
      release(previous);

      // acc[m][4 j + 2 h + e]: token 64 m + 16 w + g + 8 h, weight row 8 j + 2 c + e.
      const int column = w.row;
      if constexpr (C::kStaged) {
        // This warpgroup's staging: blocks of 64 columns, each 64 tokens x 128 swizzled bytes. Lane l gives
        // stmatrix token l % 16 of columns 8 (j + l / 16).
        uint8_t* mine = staging + group * (C::kStagingBytes / 2);
        const bool issuer = threadIdx.x % 128 == 0;
        if (issuer) bulk_wait_read();
        named_barrier(1 + group, 128);
        const int r = 16 * (warp % 4) + lane % 16;
        uint8_t* p = mine + r * 128;
        const int chunk = (lane / 16) ^ (r & 7);
#pragma unroll
        for (int j = 0; j < kRows / 8; j += 2) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = pack_bf16(acc[0][4 * j + 2 * i], acc[0][4 * j + 2 * i + 1]);
          store_matrix_x4(p + (j / 8) * kTileBytes + ((chunk ^ (j % 8)) << 4), v);
        }
        fence_proxy_async();
        named_barrier(1 + group, 128);
        if (issuer) {
#pragma unroll
          for (int b = 0; b < kRows / 64; b++)
            tma_store_2d(&out_map, mine + b * kTileBytes, column + b * 64, w.token + 64 * group);
          bulk_commit();
        }
      } else {
#pragma unroll
        for (int mh = 0; mh < 2 * C::kMmas; mh++) {
          const int m = mh / 2, h = mh % 2;
          const int t = w.token + 64 * (group * C::kMmas + m) + 16 * (warp % 4) + g + 8 * h;
          const bool valid = t < a.tokens;
          if (!a.bf16) {
            float* out = static_cast<float*>(a.out) + (int64_t(w.split) * a.tokens + t) * a.out_stride + column + 2 * c;
#pragma unroll
            for (int j = 0; j < kRows / 8; j++)
              if (valid)
                *reinterpret_cast<float2*>(out + 8 * j) = make_float2(acc[m][4 * j + 2 * h], acc[m][4 * j + 2 * h + 1]);
          } else if constexpr (C::kWhole) {
            __nv_bfloat16* out = static_cast<__nv_bfloat16*>(a.out) + int64_t(t) * a.out_stride + column + 8 * c;
#pragma unroll
            for (int j = 0; j < kRows / 8; j += 4) {
              uint32_t v[4];
#pragma unroll
              for (int i = 0; i < 4; i++) v[i] = pack_bf16(acc[m][4 * (j + i) + 2 * h], acc[m][4 * (j + i) + 2 * h + 1]);
              transpose_quad(v);  // lane c: the eight columns of tile j + c
              if (valid) *reinterpret_cast<uint4*>(out + 8 * j) = make_uint4(v[0], v[1], v[2], v[3]);
            }
          }
        }
      }
    }
    if (C::kStaged && threadIdx.x % 128 == 0) bulk_wait();
  }
}

}  // namespace msl
