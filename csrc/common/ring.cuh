// A ring of stages in shared memory, each with a barrier `full` that copies complete and a barrier `empty` that consumers
// arrive on: where a thread stands in it.
#pragma once
#include "ptx.cuh"

namespace msl {

template <int kStages>
struct RingPlace {
  uint32_t phase = 0;  // the parity that `full` of this stage is waited for with, and `empty` the other
  int stage = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// By one thread, before the block's barrier. `consumers`: arrivals that empty a stage.
template <int kStages>
__device__ __forceinline__ void ring_init(uint64_t* full, uint64_t* empty, int consumers) {
  for (int s = 0; s < kStages; s++) {
    mbar_init(&full[s], 1);
    mbar_init(&empty[s], consumers);
  }
  mbar_init_fence();
}

}  // namespace msl
