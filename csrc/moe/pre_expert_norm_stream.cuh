// pre_expert_norm for many tokens: the pooler's rows (one split) as a stream, in combine_stream.cuh's manner.
//
// A persistent CTA, two an SM, owns every gridDim.x-th token and looks up the routes of its next 64 tokens at once. One
// warp brings the FP32 rows (16 KB) of tokens with a route by bulk copies into a ring of six, so that up to 192 KB an SM
// are under way; 16 warps, 8 columns a thread, norm a row and store it once a route. The columns of a thread, and so the
// experts' k order and the arithmetic, are pre_expert_norm.cuh's.
#pragma once
#include "combine_stream.cuh"
#include "pre_expert_norm.cuh"

namespace msl {

constexpr int kPreNormStages = 6;
constexpr int kPreNormStreamCtas = 2;  // an SM
constexpr int kPreNormRowBytes = kExpertDim * 4;
constexpr size_t kPreNormSharedBytes = kPreNormStages * kPreNormRowBytes;
constexpr int kPreNormStreamThreads = kPreNormThreads + 32;

struct PreNormRing {
  float sums[2][kPreNormThreads / 32];
  uint32_t place[kRoutesAhead][kTopK];
  uint64_t full[kPreNormStages];
  uint64_t empty[kPreNormStages];
};

__global__ void __launch_bounds__(kPreNormStreamThreads, kPreNormStreamCtas)
    pre_expert_norm_stream_kernel(const PreExpertNormParams p) {
  extern __shared__ __align__(128) uint8_t rows[];  // [kPreNormStages][16 KB]
  __shared__ __align__(16) PreNormRing ring;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool copies = warp == kPreNormThreads / 32;
  pdl_launch();
  if (threadIdx.x == 0) ring_init<kPreNormStages>(ring.full, ring.empty, kPreNormThreads / 32);
  const int column = threadIdx.x / 8 * 64 + threadIdx.x % 8 * 2;
  float2 w[4] = {};
  if (!copies) {
#pragma unroll
    for (int c = 0; c < 4; c++) w[c] = *reinterpret_cast<const float2*>(p.norm_weight + column + 16 * c);
  }
  __syncthreads();
  pdl_wait();
  if (p.ready != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.ready = 0;

  RingPlace<kPreNormStages> at;
  int round = 0;
  for (int64_t first = blockIdx.x; first < p.tokens; first += int64_t(kRoutesAhead) * gridDim.x) {
    const int tokens = min(int64_t(kRoutesAhead), (p.tokens - first + gridDim.x - 1) / gridDim.x);
    look_up_routes(ring.place, p.token_route, first, tokens, p.route_begin);
    __syncthreads();
    for (int i = 0; i < tokens; i++) {
      const int64_t token = first + int64_t(i) * gridDim.x;
      const uint32_t place = lane < kTopK ? ring.place[i][lane] : 0xFFFFFFFFu;
      uint32_t slots = __ballot_sync(0xFFFFFFFFu, place < uint32_t(p.route_bound));
      if (slots == 0 && p.expert_input == nullptr) continue;
      if (copies) {
        if (lane == 0) {
          mbar_wait(&ring.empty[at.stage], at.phase ^ 1);
          mbar_expect_tx(&ring.full[at.stage], kPreNormRowBytes);
          bulk_load(rows + at.stage * kPreNormRowBytes, p.pooled + token * kExpertDim, kPreNormRowBytes,
                    &ring.full[at.stage]);
        }
        at.advance();
        continue;
      }
      mbar_wait(&ring.full[at.stage], at.phase);
      float2 x[4];
      float square = 0.0f;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        x[c] = *reinterpret_cast<const float2*>(rows + at.stage * kPreNormRowBytes + (column + 16 * c) * 4);
        square += x[c].x * x[c].x + x[c].y * x[c].y;
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(&ring.empty[at.stage]);
      at.advance();
      square = warp_sum(square);
      if (lane == 0) ring.sums[round][warp] = square;
      named_barrier(1, kPreNormThreads);
      square = warp_sum(lane < kPreNormThreads / 32 ? ring.sums[round][lane] : 0.0f);
      round ^= 1;
      const float r = rsqrtf(square * (1.0f / kExpertDim) + kRmsEps);
      const uint4 packed = normed_columns(p, token * kExpertDim + column, x, w, r);
      for (; slots != 0; slots &= slots - 1) {
        const int64_t to = __shfl_sync(0xFFFFFFFFu, place, __ffs(slots) - 1);
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.x) + to * kExpertDim + threadIdx.x * 8) = packed;
      }
    }
    __syncthreads();  // every place has been read
  }
}

}  // namespace msl
