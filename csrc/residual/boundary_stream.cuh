// The residual boundaries for many tokens: a stream through device memory.
//
// A persistent CTA of 1024 threads owns every gridDim.x-th token; a thread owns columns 4 t .. 4 t + 3 and
// 4096 + 4 t .. of each, and holds their weights in registers for all of them (read per token, the 96-128 KB
// of FP32 weights would double the traffic of the L2). Shared memory is a ring of three tokens (stream 32 KB,
// branch 16 KB), filled by bulk copies two to three tokens ahead, so that some 100 KB an SM are always under
// way: 132 SMs need about 34 KB each to cover the latency at the full rate. Stores go straight from registers.
// Two block reductions a token, about 0.5 us, against the 3-4 us that a token's bytes take an SM.
#pragma once
#include <type_traits>

#include "boundary.cuh"

namespace msl {

constexpr int kStreamThreads = 1024;
constexpr int kStreamStages = 3;
struct StreamStage {
  float4 stream[2][kStreamThreads];
  uint2 branch[2][kStreamThreads];
};
constexpr size_t kStreamSharedBytes = kStreamStages * sizeof(StreamStage);

struct StreamRing {
  uint64_t full[kStreamStages];
  float sums[2][kStreamThreads / 32];
};

__device__ __forceinline__ void stream_fill(StreamRing& ring, StreamStage* stages, int stage, const float* stream,
                                            const void* branch, int64_t token) {
  mbar_expect_tx(&ring.full[stage], sizeof(StreamStage));
  bulk_load(stages[stage].stream, stream + token * kHidden, sizeof(StreamStage::stream), &ring.full[stage]);
  bulk_load(stages[stage].branch, static_cast<const __nv_bfloat16*>(branch) + token * kHidden,
            sizeof(StreamStage::branch), &ring.full[stage]);
}

// Both boundaries; `Params` says which.
template <class Params>
__global__ void __launch_bounds__(kStreamThreads, 1) boundary_stream_kernel(const Params p) {
  constexpr bool kFfn = std::is_same_v<Params, FfnBoundaryParams>;
  extern __shared__ __align__(128) uint8_t shared[];
  StreamStage* stages = reinterpret_cast<StreamStage*>(shared);
  __shared__ StreamRing ring;
  const int t = threadIdx.x;
  pdl_launch();
  if (t == 0) {
#pragma unroll
    for (int s = 0; s < kStreamStages; s++) mbar_init(&ring.full[s], 1);
    mbar_init_fence();
  }
  const float* next_weight;
  if constexpr (kFfn) next_weight = p.next_norm_weight; else next_weight = p.norm_weight;
  float4 alpha[2], beta[2], post[2], next[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = i * (kHidden / 2) + 4 * t;
    alpha[i] = *reinterpret_cast<const float4*>(p.alpha + column);
    beta[i] = *reinterpret_cast<const float4*>(p.beta + column);
    if constexpr (kFfn) post[i] = *reinterpret_cast<const float4*>(p.post_norm_weight + column);
    next[i] = next_weight != nullptr ? *reinterpret_cast<const float4*>(next_weight + column) : make_float4(0, 0, 0, 0);
  }
  __syncthreads();
  pdl_wait();
  if (t == 0) {
#pragma unroll
    for (int s = 0; s < kStreamStages; s++) {
      const int64_t token = blockIdx.x + int64_t(s) * gridDim.x;
      if (token < p.tokens) stream_fill(ring, stages, s, p.stream, p.branch, token);
    }
  }
  int stage = 0;
  uint32_t parity = 0;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int64_t row = token * kHidden;
    mbar_wait(&ring.full[stage], parity);
    float4 a[2], b[2];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = alpha[i] * stages[stage].stream[i][t];
      b[i] = floats(stages[stage].branch[i][t]);
      if constexpr (kFfn) {
        if (p.ffn_out != nullptr) *reinterpret_cast<float4*>(p.ffn_out + row + i * (kHidden / 2) + 4 * t) = b[i];
        b[i] = b[i] * post[i];
      }
      square += dot(b[i], b[i]);
    }
    // Past this reduction every thread has read the stage: it may be filled again.
    const float r = rsqrtf(block_sum<kStreamThreads>(square, ring.sums[0]) * (1.0f / kHidden) + kPostNormEps);
    if (t == 0) {
      const int64_t ahead = token + int64_t(kStreamStages) * gridDim.x;
      if (ahead < p.tokens) stream_fill(ring, stages, stage, p.stream, p.branch, ahead);
    }
    square = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = a[i] + beta[i] * scaled(b[i], r);
      *reinterpret_cast<float4*>(p.stream_out + row + i * (kHidden / 2) + 4 * t) = a[i];
      square += dot(a[i], a[i]);
    }
    const float q = rsqrtf(block_sum<kStreamThreads>(square, ring.sums[1]) * (1.0f / kHidden) + kRmsEps);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 h = scaled(a[i], q) * next[i];
      if constexpr (kFfn) {
        if (next_weight != nullptr)
          *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.hidden) + row + i * (kHidden / 2) + 4 * t) = bf16x4(h);
      } else {
        store_planes(p.ffn_input, token, p.planes, i * (kHidden / 2) + 4 * t, h);
      }
    }
    if constexpr (!kFfn) {
      if (p.factor != nullptr && t == 0) p.factor[token] = q;
    }
    if (++stage == kStreamStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace msl
