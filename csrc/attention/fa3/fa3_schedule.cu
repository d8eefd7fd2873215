// FlashAttention-3's scheduler metadata: one CTA (one for every 992 requests) counts each request's tiles,
// chooses its splits so that all SMs get work, and sorts the requests by length.
#include "fa3_kernels.h"

// The kernel and its launcher are one upstream source.
#include "flash_prepare_scheduler.cu"

namespace msl {
namespace fa3 {
namespace {

template <int Warps>
int load() {
  cudaFuncAttributes attributes;
  cudaError_t e = cudaFuncGetAttributes(
      &attributes, reinterpret_cast<const void*>(flash::prepare_varlen_num_blocks_kernel<Warps, false>));
  if (e == cudaSuccess)
    e = cudaFuncGetAttributes(&attributes,
                              reinterpret_cast<const void*>(flash::prepare_varlen_num_blocks_kernel<Warps, true>));
  return static_cast<int>(e);
}

}  // namespace

int prepare_schedule() {
  for (int (*each)() : {load<1>, load<2>, load<4>, load<8>, load<16>, load<32>})
    if (const int e = each()) return e;
  return 0;
}

int schedule(const Flash_fwd_params& p, cudaStream_t stream) {
  // An error left by an earlier call would be taken for this launch's.
  cudaGetLastError();
  Flash_fwd_params copy = p;
  prepare_varlen_num_blocks(copy, stream, /*packed heads*/ true, kTileQueries, kTileKeys, /*dependent*/ false);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fa3
}  // namespace msl
