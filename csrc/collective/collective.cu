// Launchers of what stands around the collectives.
#include "../include/ops.h"
#include "slice_sum.cuh"

namespace msl {

int slice_sum(const SliceSumParams& p, const Launch& l) {
  const int blocks = (p.columns / 4 + kSliceThreads - 1) / kSliceThreads;
  return launch(slice_sum_kernel, dim3(blocks, p.tokens), dim3(kSliceThreads), 0, l, p);
}

int prepare_collective() { return prepare_kernel(slice_sum_kernel, 0); }
}  // namespace msl
