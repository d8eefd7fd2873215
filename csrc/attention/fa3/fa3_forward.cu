// FlashAttention-3's forward kernels for this model: E4M3 queries and cache, heads of 64, 8 query heads
// a KV head packed into the rows of a tile (192 rows: 24 tokens), 160 keys a tile, keys gathered by
// cp.async from pages of any size. Causal (full layers) and windowed (sliding layers), each unsplit and
// split over keys: four kernels. A CTA owns an SM: one warpgroup loads and transposes V, three multiply;
// CTAs take tiles from a counter until the metadata's tiles are done.
//
// FlashAttention-3's own launcher ends the process on a CUDA error and sets function attributes on every
// call; this one does neither.
#include "fa3_kernels.h"

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"

#include "flash.h"
#include "tile_size.h"
#include "tile_scheduler.hpp"
#include "flash_fwd_kernel_sm90.h"
#include "mainloop_fwd_sm90_tma_gmma_ws.hpp"
#include "epilogue_fwd.hpp"

namespace msl {
namespace fa3 {
namespace {

using namespace cute;

constexpr int kHeadDim = 64;
using Element = cutlass::float_e4m3_t;
using ElementOut = cutlass::bfloat16_t;

template <bool Local, bool Split>
struct Forward {
  static constexpr bool kCausal = !Local, kSoftcap = false, kVarlen = true, kGather = true, kAppend = false, kQv = false,
                        kPackHeads = true, kVColumnMajor = false;
  static constexpr auto kTile =
      tile_size_fwd_sm90(kHeadDim, kHeadDim, kCausal, Local, sizeof(Element), kVColumnMajor, kGather, kSoftcap);
  static constexpr int kM = std::get<0>(kTile), kN = std::get<1>(kTile), kStages = 2;
  static_assert(kM == kTileQueries && kN == kTileKeys, "the plan and the metadata count tiles of this size");
  using Tile = Shape<Int<kM>, Int<kN>, Int<kHeadDim>>;
  using TilePv = Shape<Int<kM>, Int<kHeadDim>, Int<kN>>;
  using Cluster = Shape<_1, _1, _1>;
  using Mainloop =
      flash::CollectiveMainloopFwdSm90<kStages, Cluster, Tile, kHeadDim, Element, float, cutlass::arch::Sm90, kCausal, Local,
                                       kSoftcap, kVarlen, kGather, kAppend, kQv, std::get<2>(kTile), std::get<3>(kTile),
                                       kPackHeads, Split, kVColumnMajor>;
  using Epilogue = flash::CollectiveEpilogueFwd<TilePv, Cluster, ElementOut, cutlass::arch::Sm90, Mainloop::NumMmaThreads,
                                                kVarlen, kPackHeads, Split, /*transposed V*/ true>;
  // Longest tiles first; requests sorted by length except in windowed attention, as FlashAttention-3 does.
  using Scheduler =
      flash::VarlenDynamicPersistentTileScheduler<kM, kN, Mainloop::NumMmaThreads, Mainloop::NumProducerThreads, Split,
                                                  kPackHeads, /*warp-specialised*/ true, /*longest first*/ true,
                                                  /*sorted*/ !Local, /*prepared*/ true>;
  using Kernel = flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<Mainloop, Epilogue, Scheduler>>;

  static int prepare() { return load_kernel(cutlass::device_kernel<Kernel>, Kernel::SharedStorageSize); }

  static int launch(const Flash_fwd_params& p, cudaStream_t stream, bool dependent) {
    const auto k_stride = make_stride(p.k_row_stride, _1{}, p.k_head_stride, p.k_batch_stride);
    const auto v_stride = make_stride(p.v_row_stride, _1{}, p.v_head_stride, p.v_batch_stride);
    typename Mainloop::Arguments mainloop{
        static_cast<const Element*>(p.q_ptr),
        {p.total_q, p.d, p.h, 1},
        {p.q_row_stride, _1{}, p.q_head_stride, 0},
        static_cast<Element*>(p.k_ptr),
        {p.page_size, p.d, p.h_k, p.num_pages},
        k_stride,
        static_cast<Element*>(p.v_ptr),
        p.dv,
        v_stride,
        // No new keys, no second query part, no rotation: the cache holds this step's keys already.
        nullptr, {0, p.d, p.h_k, p.b}, {0, _1{}, 0, 0}, nullptr, {0, _1{}, 0, 0},
        nullptr, {0, _1{}, 0, 0},
        nullptr, {p.seqlen_k, 0}, {0, _1{}}, nullptr, {0, _1{}}, false,
        p.page_table,
        {p.b, p.seqlen_k / p.page_size},
        {p.page_table_batch_stride, _1{}},
        p.scale_softmax,
        p.q_descale_ptr, p.k_descale_ptr, p.v_descale_ptr,
        {p.q_descale_batch_stride, p.q_descale_head_stride},
        {p.k_descale_batch_stride, p.k_descale_head_stride},
        {p.v_descale_batch_stride, p.v_descale_head_stride},
        p.window_size_left, p.window_size_right, /*attention_chunk*/ 0, /*softcap*/ 0.0f, p.num_splits,
        /*kv_batch_idx*/ nullptr, p.cu_seqlens_q, nullptr, nullptr, nullptr, p.seqused_k, nullptr, nullptr};
    typename Epilogue::Arguments epilogue{
        static_cast<ElementOut*>(p.o_ptr),
        {p.total_q, p.dv, p.h, 1, p.num_splits},
        {p.o_row_stride, _1{}, p.o_head_stride, 0, 0},
        static_cast<float*>(p.oaccum_ptr),
        {p.oaccum_row_stride, _1{}, p.oaccum_head_stride, 0, p.oaccum_split_stride},
        static_cast<float*>(p.softmax_lse_ptr),
        {_1{}, p.total_q, 0, 0},
        static_cast<float*>(p.softmax_lseaccum_ptr),
        {_1{}, p.total_q, 0, static_cast<int64_t>(p.h) * p.total_q},
        p.h_k, p.cu_seqlens_q, nullptr};
    const int64_t rows = static_cast<int64_t>(p.seqlen_q) * (p.h / p.h_k);
    typename flash::TileSchedulerArguments scheduler{
        static_cast<int>((rows + kM - 1) / kM), p.h_k, p.b, p.num_splits, p.h / p.h_k, p.seqlen_q, p.seqlen_k, p.d, p.dv,
        sizeof(Element), p.tile_count_semaphore, p.cu_seqlens_q, nullptr, p.num_splits_dynamic_ptr, p.num_m_blocks_ptr,
        p.varlen_batch_idx_ptr, p.num_nheads_in_l2_ptr};
    const typename Kernel::Params params =
        Kernel::to_underlying_arguments({mainloop, epilogue, {0, p.num_sm}, scheduler});
    return launch_kernel(cutlass::device_kernel<Kernel>, Kernel::get_grid_shape(params), Kernel::MaxThreadsPerBlock,
                         Kernel::SharedStorageSize, stream, dependent, params);
  }
};

}  // namespace

int prepare_forward() {
  int e = Forward<false, false>::prepare();
  if (!e) e = Forward<false, true>::prepare();
  if (!e) e = Forward<true, false>::prepare();
  if (!e) e = Forward<true, true>::prepare();
  return e;
}

int forward(const Flash_fwd_params& p, cudaStream_t stream, bool dependent) {
  const bool split = p.num_splits > 1;
  if (p.is_local)
    return split ? Forward<true, true>::launch(p, stream, dependent) : Forward<true, false>::launch(p, stream, dependent);
  return split ? Forward<false, true>::launch(p, stream, dependent) : Forward<false, false>::launch(p, stream, dependent);
}

}  // namespace fa3
}  // namespace msl
