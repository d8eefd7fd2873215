// Launching a kernel with or without programmatic dependent launch.
//
// The project's rules for dependent launch (docs/scheduling.md has the reasons):
//   * every CTA of every kernel executes pdl_wait() before its first read of anything a predecessor
//     wrote and before its first write of anything at all (but gemm/skinny.cuh, the pooler, and moe/router_topk.cuh behind it);
//   * before pdl_wait() only weights (and other data no kernel of the step writes) are read;
//   * pdl_launch() stands at the top, so that the successor's CTAs become resident and start their own
//     weight loads as soon as there is room.
// With Launch::dependent == 0 the same kernels run with plain stream order: both instructions are then
// no-ops.
#pragma once
#include <cuda_runtime.h>

#include "../include/params.h"

namespace msl {

template <class... Formal, class... Actual>
inline int launch(void (*kernel)(Formal...), dim3 grid, dim3 block, size_t shared_bytes, const Launch& l,
                  Actual&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(l.stream);
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = l.dependent ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, static_cast<Formal>(args)...));
}

// Opt-in shared memory and a first touch (module load), outside any capture.
template <class Kernel>
inline int prepare_kernel(Kernel* kernel, size_t shared_bytes) {
  cudaFuncAttributes attributes;
  cudaError_t e = cudaFuncGetAttributes(&attributes, kernel);
  if (e == cudaSuccess && shared_bytes > 0)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  return static_cast<int>(e);
}

}  // namespace msl
