// What the units that compile FlashAttention-3's own templates offer to fa3.cu: its kernels behind plain
// functions that return a cudaError_t as int. `prepare_*` loads the kernels and sets their attributes
// once; the others only launch. `Flash_fwd_params` is FlashAttention-3's struct of everything.
//
// These units are slow to compile, so they include nothing of this project but this header.
#pragma once
#include <cuda_runtime.h>

struct Flash_fwd_params;

namespace msl {
namespace fa3 {

// Queries and keys of a tile, in every kernel compiled here (fa3_forward.cu checks it).
constexpr int kTileQueries = 192, kTileKeys = 160;
// Bounds on splits for which there is a combine kernel: 16, 32 and 64.
constexpr int kMaxSplits = 64;

int prepare_forward();
// Attention of E4M3 queries over the paged E4M3 cache: p.is_causal or p.is_local, p.num_splits 1 (output
// BF16) or more (FP32 partials for requests with several splits).
int forward(const Flash_fwd_params& p, cudaStream_t stream, bool dependent);

int prepare_combine();
// Joins the partials of requests with several splits, and zeroes the tile counter.
int combine(const Flash_fwd_params& p, cudaStream_t stream, bool dependent);

int prepare_schedule();
// Fills the scheduler metadata from the lengths on the device, and zeroes the tile counter.
int schedule(const Flash_fwd_params& p, cudaStream_t stream);

template <class Params>
inline int launch_kernel(void (*kernel)(Params), dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                         bool dependent, const Params& params) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = dependent ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  return static_cast<int>(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

template <class Params>
inline int load_kernel(void (*kernel)(Params), int shared_bytes) {
  cudaFuncAttributes attributes;
  cudaError_t e = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared_bytes);
  return static_cast<int>(e);
}

}  // namespace fa3
}  // namespace msl
