// Weights that the next segment begins with, brought to the L2 cache while a collective waits for other GPUs.
//
// The kernel stands in the stream right before the collective. Its warps only ask: each lane issues bulk
// prefetches of 16 KB and leaves, so the kernel is over in a microsecond, the collective starts behind it, and
// the copies run on beside the collective. It asks after its own wait, not before: earlier, the prefetches
// would take the memory's rate from the kernel before, which is still streaming.
//
// A span is `runs` runs of `run_bytes` at a stride: the beginning of what each CTA of the next kernel reads, rather
// than all of what some of them read, so that all finish early together. One warp an SM; nothing is written.
#pragma once
#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace msl {

constexpr int kPrefetchChunk = 16384;

__device__ __forceinline__ void prefetch_span(const PrefetchSpan& span) {
  const int per_run = (span.run_bytes + kPrefetchChunk - 1) / kPrefetchChunk;
  for (int i = blockIdx.x + gridDim.x * threadIdx.x; i < span.runs * per_run; i += gridDim.x * blockDim.x) {
    const int run = i / per_run, offset = (i % per_run) * kPrefetchChunk;
    bulk_prefetch(static_cast<const uint8_t*>(span.data) + run * span.stride + offset,
                  min(kPrefetchChunk, span.run_bytes - offset));
  }
}

__global__ void __launch_bounds__(32) prefetch_kernel(const PrefetchParams p) {
  pdl_launch();
  pdl_wait();
  prefetch_span(p.first);
  prefetch_span(p.second);
}

}  // namespace msl
