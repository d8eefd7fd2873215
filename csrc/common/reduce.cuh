// Sums across a warp, a block and a cluster, in an order that depends on nothing but the launch shape:
// the same inputs give the same bits. No float atomics anywhere.
#pragma once
#include "cluster.cuh"

namespace msl {

// Butterfly: every lane ends with the same sum.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, mask);
  return v;
}

// N sums over the warp (N a power of two up to 32) in about N shuffles: each step halves the values a
// lane carries. Lane l returns the sum of v[l * N / 32]; the tree of additions is warp_sum's.
template <int N, int kMask = 16>
__device__ __forceinline__ float warp_sum_transposed(const float (&v)[N]) {
  if constexpr (N == 1) {
    float sum = v[0];
#pragma unroll
    for (int mask = kMask; mask > 0; mask >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    return sum;
  } else {
    const bool upper = threadIdx.x & kMask;
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float send = upper ? v[i] : v[i + N / 2];
      half[i] = (upper ? v[i + N / 2] : v[i]) + __shfl_xor_sync(0xFFFFFFFFu, send, kMask);
    }
    return warp_sum_transposed<N / 2, kMask / 2>(half);
  }
}

// Block sum, given to every thread. `scratch` holds kThreads / 32 floats and is not reused before
// another __syncthreads() has passed: callers alternate between two of them.
template <int kThreads>
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  constexpr int kWarps = kThreads / 32;
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  const int lane = threadIdx.x & 31;
  return warp_sum(lane < kWarps ? scratch[lane] : 0.0f);
}

// Four sums at once over the kCtas * kThreads threads of a cluster, kRounds times a kernel. A round is one
// block reduction and one 16-byte message from each CTA to each: no cluster barrier on the way.
// With kCtas == 1 it is a plain block reduction.
//   begin()   before pdl_wait(), by every thread of every CTA;
//   ready()   by every thread, between begin() and the first sum(): the other CTAs have begun;
//   sum(r, v) by every thread, r = 0, 1, ... kRounds - 1 in this order.
// A CTA leaves only after every message sent to it has arrived (sum waits for them), provided that all
// CTAs of the cluster run the same rounds.
template <int kCtas, int kThreads, int kRounds>
struct ClusterSum {
  static constexpr int kWarps = kThreads / 32;
  float4 warp[kRounds][kWarps];
  float4 cta[kRounds][kCtas];
  uint64_t bar[kRounds];

  __device__ __forceinline__ void begin() {
    if constexpr (kCtas > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int r = 0; r < kRounds; r++) mbar_init(&bar[r], 1);
        mbar_init_fence();
#pragma unroll
        for (int r = 0; r < kRounds; r++) mbar_expect_tx(&bar[r], kCtas * 16);
      }
      __syncwarp();
      cluster_arrive();
    }
  }
  __device__ __forceinline__ void ready() {
    if constexpr (kCtas > 1) cluster_wait();
  }
  __device__ __forceinline__ float4 sum(int round, float4 v) {
    const int lane = threadIdx.x & 31;
    float part[4] = {v.x, v.y, v.z, v.w};
    const float s = warp_sum_transposed<4>(part);  // lane 8 i: value i
    if ((lane & 7) == 0) reinterpret_cast<float*>(&warp[round][threadIdx.x >> 5])[lane >> 3] = s;
    __syncthreads();
    if constexpr (kCtas == 1) {
      if constexpr (kWarps <= 8) {
        return add(warp[round]);
      } else {  // shorter than a chain of 16 or 32 additions
        const float4 w = lane < kWarps ? warp[round][lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float all[4] = {w.x, w.y, w.z, w.w};
        const float t = warp_sum_transposed<4>(all);
        return make_float4(__shfl_sync(0xFFFFFFFFu, t, 0), __shfl_sync(0xFFFFFFFFu, t, 8),
                           __shfl_sync(0xFFFFFFFFu, t, 16), __shfl_sync(0xFFFFFFFFu, t, 24));
      }
    }
    if (threadIdx.x < kCtas)
      store_remote(cluster_map(&cta[round][cluster_rank()], threadIdx.x), add(warp[round]),
                   cluster_map(&bar[round], threadIdx.x));
    mbar_wait(&bar[round], 0);
    return add(cta[round]);
  }

 private:
  template <int N>
  static __device__ __forceinline__ float4 add(const float4 (&v)[N]) {
    float4 s = v[0];
#pragma unroll
    for (int i = 1; i < N; i++) s = make_float4(s.x + v[i].x, s.y + v[i].y, s.z + v[i].z, s.w + v[i].w);
    return s;
  }
};

}  // namespace msl
