// FlashAttention-3 as the engine of `attention`: fills its parameters and launches. Four launches at most:
// the metadata where the caller brings none, the queries' bytes, the forward kernel, and, where requests
// may be split over keys, the combine kernel.
//
// fa3_queries: a thread owns 8 elements of q: 16 bytes in, 8 out. The values are E4M3 already (rounded from
// FP32 by qk_norm_rope_append), so nothing is rounded here. It also sets the tile counter to zero, which
// the forward kernel counts up, and zeroes the output of rows that no request has (padding of the step).
#include <cuda_fp8.h>

#include <cstring>

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "fa3_kernels.h"
#include "flash.h"
#include "include/fa3.h"
#include "include/model.h"

namespace msl {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;
static_assert(sizeof(uint4) == kPerThread * 2 && sizeof(uint2) == kPerThread);

__global__ void __launch_bounds__(kThreads) fa3_queries_kernel(const __grid_constant__ Fa3AttentionParams p,
                                                                int32_t* tile_counter) {
  pdl_launch();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t rows = __ldcg(p.cu_seqlens_q + p.requests);
  pdl_wait();
  if (at == 0) *tile_counter = 0;
  if (at >= static_cast<int64_t>(p.tokens) * (kQSize / kPerThread)) return;
  const uint4 half = __ldcg(static_cast<const uint4*>(p.q_half) + at);
  const auto pair = [](uint32_t h2) -> uint32_t {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(h2));
    return r;
  };
  static_cast<uint2*>(p.q)[at] = make_uint2(pair(half.x) | pair(half.y) << 16, pair(half.z) | pair(half.w) << 16);
  if (at / (kQSize / kPerThread) >= rows) static_cast<uint4*>(p.out)[at] = make_uint4(0, 0, 0, 0);
}

// What the metadata's words are: [splits | tiles | order of the requests (not windowed) | heads in L2], each
// of the requests rounded up to 4, then the tile counter.
struct Metadata {
  int32_t *splits, *tiles, *order, *heads, *counter;
  Metadata(int32_t* words, int requests, bool local) {
    const int rounded = (requests + 3) / 4 * 4;
    splits = words;
    tiles = words + rounded;
    order = local ? nullptr : words + 2 * rounded;
    heads = words + (local ? 2 : 3) * rounded;
    counter = heads + rounded;
  }
};

// Windowed attention only where a request can be longer than the window: what it sees is the same.
bool is_local(const Fa3AttentionParams& p) {
  return p.window > 0 && (static_cast<int64_t>(p.table_width) << p.page_log2) > p.window;
}

bool valid(const Fa3AttentionParams& p) {
  return p.tokens > 0 && p.requests > 0 && p.max_q_len > 0 && p.table_width > 0 && p.page_log2 >= 0 && p.page_log2 <= 8 &&
         p.splits >= 1 && p.splits <= fa3::kMaxSplits && p.pages <= INT32_MAX &&
         (static_cast<int64_t>(p.table_width) << p.page_log2) <= (1 << 24);
}

Flash_fwd_params fill(const Fa3AttentionParams& p, const Launch& l) {
  Flash_fwd_params f;
  std::memset(static_cast<void*>(&f), 0, sizeof f);
  f.q_ptr = p.q;
  f.q_row_stride = f.o_row_stride = kQSize;
  f.q_head_stride = f.o_head_stride = kHeadDim;
  f.k_ptr = const_cast<void*>(p.k_cache);
  f.v_ptr = const_cast<void*>(p.v_cache);
  f.k_batch_stride = f.v_batch_stride = static_cast<int64_t>(kKvSize) << p.page_log2;
  f.k_row_stride = f.v_row_stride = kKvSize;
  f.k_head_stride = f.v_head_stride = kHeadDim;
  f.v_dim_stride = 1;
  f.o_ptr = p.out;
  f.softmax_lse_ptr = p.lse;
  f.h = kQHeads;
  f.h_k = kKvHeads;
  f.b = f.b_k = p.requests;
  f.seqlen_q = p.max_q_len;
  f.total_q = p.tokens;
  f.seqlen_k = p.table_width << p.page_log2;
  f.d = f.dv = f.d_rounded = f.dv_rounded = kHeadDim;
  f.cu_seqlens_q = const_cast<int32_t*>(p.cu_seqlens_q);
  f.seqused_k = const_cast<int32_t*>(p.cache_seqlens);
  f.page_table = const_cast<int32_t*>(p.page_table);
  f.page_table_batch_stride = p.table_stride;
  f.page_size = 1 << p.page_log2;
  f.num_pages = static_cast<int>(p.pages);
  // One scale for all requests and heads, read on the device. Queries are not scaled: unit RMS.
  f.k_descale_ptr = const_cast<float*>(p.k_scale);
  f.v_descale_ptr = const_cast<float*>(p.v_scale);
  f.scale_softmax = p.softmax_scale;
  f.is_e4m3 = true;
  f.is_local = is_local(p);
  f.is_causal = !f.is_local;
  f.window_size_left = f.is_local ? p.window - 1 : f.seqlen_k - 1;
  f.pack_gqa = true;
  f.arch = 90;
  f.num_sm = l.sm_count;
  f.num_splits = p.splits;
  f.varlen_sort_batches = !f.is_local;
  f.head_swizzle = true;
  const Metadata m(p.metadata, p.requests, f.is_local);
  f.num_splits_dynamic_ptr = m.splits;
  f.num_m_blocks_ptr = m.tiles;
  f.varlen_batch_idx_ptr = m.order;
  f.num_nheads_in_l2_ptr = m.heads;
  f.tile_count_semaphore = m.counter;
  if (p.splits > 1) {  // partials [splits][heads][tokens]
    f.oaccum_ptr = p.acc;
    f.oaccum_row_stride = kHeadDim;
    f.oaccum_head_stride = static_cast<int64_t>(p.tokens) * kHeadDim;
    f.oaccum_split_stride = f.oaccum_head_stride * kQHeads;
    f.softmax_lseaccum_ptr = p.acc_lse;
    f.lseaccum_head_stride = p.tokens;
    f.lseaccum_split_stride = static_cast<int64_t>(p.tokens) * kQHeads;
  }
  return f;
}

}  // namespace

int fa3_schedule(const Fa3AttentionParams& p, const Launch& l) {
  if (p.tokens == 0 || p.requests == 0) return 0;
  if (!valid(p)) return static_cast<int>(cudaErrorInvalidValue);
  return fa3::schedule(fill(p, l), static_cast<cudaStream_t>(l.stream));
}

int fa3_attention(const Fa3AttentionParams& p, const Launch& l) {
  if (p.tokens == 0 || p.requests == 0) return 0;
  if (!valid(p)) return static_cast<int>(cudaErrorInvalidValue);
  const Flash_fwd_params f = fill(p, l);
  const auto stream = static_cast<cudaStream_t>(l.stream);
  const int64_t threads = static_cast<int64_t>(p.tokens) * (kQSize / kPerThread);
  int e = launch(fa3_queries_kernel, dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), dim3(kThreads), 0, l, p,
                 f.tile_count_semaphore);
  if (!e) e = fa3::forward(f, stream, l.dependent);
  if (!e && p.splits > 1) e = fa3::combine(f, stream, l.dependent);
  return e;
}

int prepare_fa3() {
  int e = prepare_kernel(fa3_queries_kernel, 0);
  if (!e) e = fa3::prepare_forward();
  if (!e) e = fa3::prepare_combine();
  if (!e) e = fa3::prepare_schedule();
  return e;
}

}  // namespace msl
