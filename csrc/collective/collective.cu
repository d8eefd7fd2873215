// Launchers of what stands around the collectives.
#include "../include/ops.h"
#include "prefetch.cuh"
#include "slice_sum.cuh"

namespace msl {

int slice_sum(const SliceSumParams& p, const Launch& l) {
  const int blocks = (p.columns / 4 + kSliceThreads - 1) / kSliceThreads;
  return launch(slice_sum_kernel, dim3(blocks, p.tokens), dim3(kSliceThreads), 0, l, p);
}

int prefetch(const PrefetchParams& p, const Launch& l) {
  return launch(prefetch_kernel, dim3(l.sm_count), dim3(32), 0, l, p);
}

int prepare_collective() {
  if (int e = prepare_kernel(slice_sum_kernel, 0)) return e;
  return prepare_kernel(prefetch_kernel, 0);
}
}  // namespace msl
