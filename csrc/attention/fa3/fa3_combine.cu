// FlashAttention-3's combine kernels: 16 (token, head) rows of 64 a CTA, partials through a ring of four
// stages in shared memory. Requests of a single split were written by the forward kernel and are left
// alone. One kernel for each of the bounds 16, 32 and 64 on splits.
#include "fa3_kernels.h"

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/arch/arch.h"
#include "cutlass/device_kernel.h"

#include "flash.h"
#include "flash_fwd_combine_kernel.h"

namespace msl {
namespace fa3 {
namespace {

using namespace cute;

template <int kLogMaxSplits>
struct Combine {
  static constexpr int kRows = 16, kColumns = 64, kThreads = 256;
  using Kernel = flash::FlashAttnFwdCombine<Shape<Int<kRows>, Int<kColumns>>, kLogMaxSplits, kThreads, /*aligned by*/ 1,
                                            /*even K*/ false, /*varlen*/ true, cutlass::bfloat16_t, float, cutlass::arch::Sm90>;

  static int prepare() { return load_kernel(cutlass::device_kernel<Kernel>, Kernel::SharedStorageSize); }

  static int launch(const Flash_fwd_params& p, cudaStream_t stream, bool dependent) {
    typename Kernel::Arguments arguments{
        static_cast<const float*>(p.oaccum_ptr),
        {p.total_q, p.dv, p.num_splits, p.h, 1},
        {p.oaccum_row_stride, _1{}, p.oaccum_split_stride, p.oaccum_head_stride, 0},
        static_cast<float*>(p.softmax_lseaccum_ptr),
        {p.total_q, p.num_splits, p.h, 1},
        {_1{}, p.lseaccum_split_stride, p.lseaccum_head_stride, 0},
        static_cast<cutlass::bfloat16_t*>(p.o_ptr),
        {p.o_row_stride, _1{}, p.o_head_stride, 0},
        static_cast<float*>(p.softmax_lse_ptr),
        {_1{}, p.total_q, 0},
        p.cu_seqlens_q, nullptr, p.num_splits_dynamic_ptr, p.varlen_batch_idx_ptr, p.tile_count_semaphore};
    const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments);
    const dim3 grid((static_cast<unsigned>(p.seqlen_q) * p.h + kRows - 1) / kRows, 1, p.b);
    return launch_kernel(cutlass::device_kernel<Kernel>, grid, kThreads, Kernel::SharedStorageSize, stream, dependent,
                         params);
  }
};

}  // namespace

int prepare_combine() {
  int e = Combine<4>::prepare();
  if (!e) e = Combine<5>::prepare();
  if (!e) e = Combine<6>::prepare();
  return e;
}

int combine(const Flash_fwd_params& p, cudaStream_t stream, bool dependent) {
  static_assert(kMaxSplits == 1 << 6);
  if (p.num_splits <= 16) return Combine<4>::launch(p, stream, dependent);
  if (p.num_splits <= 32) return Combine<5>::launch(p, stream, dependent);
  if (p.num_splits <= kMaxSplits) return Combine<6>::launch(p, stream, dependent);
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace fa3
}  // namespace msl
