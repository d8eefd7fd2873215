// FlashAttention-3 as a second engine of `attention` (feature `fa3`): parameters and entry points, as params.h and
// ops.h have them for everything else.
#pragma once
#include "params.h"

namespace msl {

// fa3_attention: `attention` with E4M3 queries. Page ids are not checked: those of every 160-key block in which
// a token sees a key must be in range, and the bytes there finite. fa3_schedule: the scheduler metadata it runs
// by, from the lengths alone; it reads requests, bounds, lengths and `metadata`.
struct Fa3AttentionParams {
  const void* q_half;            // FP16 [T][16][64], E4M3 values
  void* q;                       // E4M3 [T][16][64], scratch
  const void* k_cache;           // E4M3 [pages][page_size][2][64]
  const void* v_cache;           // E4M3 [pages][page_size][2][64]
  const int32_t* page_table;     // [B], row stride table_stride
  const int32_t* cache_seqlens;  // [B], new tokens included
  const int32_t* cu_seqlens_q;   // [B + 1]
  const float* k_scale;          // [1]
  const float* v_scale;          // [1]
  void* out;                     // BF16 [T][16][64], v_scale applied; rows past the last request: zeros
  float* lse;                    // FP32 [16][T], scratch
  float* acc;                    // splits > 1: FP32 [splits][16][T][64], scratch
  float* acc_lse;                // splits > 1: FP32 [splits][16][T], scratch
  int32_t* metadata;             // [4 * (B rounded up to 4) + 1]
  int64_t pages;                 // pages in the pool
  int64_t table_stride;          // elements between rows of page_table
  int32_t table_width;           // valid columns of page_table
  int32_t page_log2;             // log2 of the page size, 0..8
  int32_t tokens;                // T
  int32_t requests;              // B
  int32_t max_q_len;             // bound on a request's query length
  int32_t window;                // 0: full
  int32_t splits;                // bound on splits a request, 1..64; the metadata's
  float softmax_scale;           // 5.4730064863875 / 8
};

int fa3_schedule(const Fa3AttentionParams&, const Launch&);
int fa3_attention(const Fa3AttentionParams&, const Launch&);
// Loads every kernel and sets its attributes, on the current device.
int prepare_fa3();

}  // namespace msl
