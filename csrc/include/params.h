// One plain struct per operation: what the host hands to each launcher. Every field says its shape
// (row-major unless said otherwise), element type and stride. All pointers are device pointers and
// 16-byte aligned unless said otherwise. Mirrored field by field in src/backend/cuda/params.rs; a
// test compares sizes and offsets.
//
// Names: T tokens of the step, B requests, S splits, R local routes (token, local expert) sorted by
// expert and then by token. Model constants are in model.h.
#pragma once
#include <cstdint>

namespace msl {

// How an operation is launched; the same for all.
struct Launch {
  void* stream;          // cudaStream_t
  int32_t sm_count;      // multiprocessors of the device
  int32_t dependent;     // 1: programmatic dependent launch on this edge; 0: a plain edge
};

// Dense BF16 projection out[t, r] = sum_k x[t, k] * weight[r, k], FP32 accumulation.
// Operations qkv_gate, o, pooler, unpooler.
struct DenseParams {
  const void* weight;    // BF16, tiles [rows / 64][k / 64][64 x 64], see gemm/dense_tile.h; first row already applied
  const void* x;         // BF16 [T, k], row stride x_stride
  void* out;             // splits > 1 or out_f32: FP32 [splits][T][rows]; else BF16 [T][rows]
  int32_t tokens;        // T
  int32_t rows;          // weight rows, a multiple of 64
  int32_t k;             // a multiple of 64
  int32_t x_stride;      // elements, a multiple of 8
  int32_t out_stride;    // elements between tokens of out
  int32_t splits;        // K splits, each a contiguous run of k tiles of 64 (their numbers differ by one at most); consumers add them in order
  int32_t out_f32;       // 1: out is FP32 even with one split
  int32_t tile_n;        // tokens per tile: 8, 16, 32, 64, 96, 128 (skinny kernel), the wide kernel's (gemm/heuristics.h), or 0:
                         // the tiled kernel, which chooses its own
  int32_t tile_rows;     // weight rows per tile of the wide kernel; 0: the skinny or the tiled kernel
  const uint32_t* ready; // pooler: control block; x is there as soon as this is ready_at; null: x is there after the wait
  int32_t ready_at;      // 1; above it (boundary_topk) the skinny kernel alone
};

// qk_norm_rope_append: adds the splits of qkv_gate, RMS-norms q and k per head (eps 1e-5), rotates
// (interleaved RoPE, sliding layers), rounds q to the query precision, quantises k and v to E4M3
// (saturating) and appends them to the cache.
struct QkNormRopeAppendParams {
  const float* qkv;            // FP32 [splits][T][2304]: q (16 heads x 64), k (2 x 64), v (2 x 64), gate (1024)
  const int64_t* positions;    // [T]
  const int64_t* cache_loc;    // [T] flat cache rows; < 0: do not store
  const float* k_scale;        // [1]
  const float* v_scale;        // [1]
  const float* inv_freq;       // [32]; null: no RoPE (full-attention layers)
  void* k_cache;               // E4M3 [cache_rows][2][64]
  void* v_cache;               // E4M3 [cache_rows][2][64]
  void* q;                     // FP16 [T][16][64], unit RMS, NOT scaled by 5.473 or 1/8
  float* gate;                 // FP32 [T][1024]: the gate's splits added, before the sigmoid; null: its readers take them from qkv
  int64_t cache_rows;          // pages * page size; rows at or past it are not stored
  int32_t tokens;
  int32_t splits;
  int32_t e4m3_query;          // 1: q is rounded to E4M3 (and kept in FP16, exactly)
  int32_t skip_slot_zero;      // 1: rows with cache_loc 0 are not stored
};

// attention over the paged FP8 cache (the step's own entries are already in it). Token i of request b
// (cu_seqlens_q[b] <= i < cu_seqlens_q[b+1]) stands at position cache_seqlens[b] - cu_seqlens_q[b+1] + i
// and sees keys 0..=position (window > 0: only the last `window` of them, itself included).
struct AttentionParams {
  const void* q;                 // FP16 [T][16][64]
  const void* k_cache;           // E4M3 [pages][page_size][2][64]
  const void* v_cache;           // E4M3 [pages][page_size][2][64]
  const int32_t* page_table;     // [B], row stride table_stride; ids < 0 or >= pages are invisible keys
  const int32_t* cache_seqlens;  // [B], new tokens included
  const int32_t* cu_seqlens_q;   // [B + 1]
  const float* k_scale;          // [1]
  const float* v_scale;          // [1]
  // split kernel (decode, verify): FP32 partials, per token, head and split. `acc` is the unnormalised
  // sum of p * v (v_scale not applied), `lse` = (running max in log2 units, sum of p).
  float* acc;                    // FP32 [T][16][splits][64]
  float* lse;                    // FP32 [T][16][splits][2]; an empty split writes (-inf, 0), and zeros to acc
  // tiled kernel (prefill): the heads joined, v_scale applied, and out_norm_gate's work done on them
  const float* gate;             // qkv_gate's output from the gate's first column on, FP32 [gate_splits][T][2304]
  void* out;                     // BF16 [T][1024]
  float* attn_core;              // tap, FP32 [T][1024], before the norm; may be null
  void* kv_scratch;              // tiled kernel: FP16 copies of the visible pages; kv_scratch_bytes
  int64_t kv_scratch_bytes;
  int64_t pages;                 // pages in the pool
  int64_t table_stride;          // elements between rows of page_table
  int32_t table_width;           // valid columns of page_table
  int32_t page_log2;             // log2 of the page size, 0..8
  int32_t tokens;                // T
  int32_t requests;              // B
  int32_t max_q_len;             // bound on a request's query length
  int32_t window;                // 0: full
  int32_t splits;                // bound on splits a request (split kernel)
  int32_t tiled;                 // 0: split kernel, 1: tiled kernel
  int32_t gate_splits;           // K splits of qkv_gate
  int32_t gate_tokens;           // T of `gate`: the rows from a split to the next
  float softmax_scale;           // 5.4730064863875 / 8 (k_scale is applied on the device)
};

// out_norm_gate: joins the splits (or takes FlashAttention-3's output), RMS-norms each head (eps 1e-5),
// multiplies by sigmoid(gate). The tiled attention does it itself.
struct OutNormGateParams {
  const float* acc;        // as AttentionParams::acc; null: `joined` is read instead
  const float* lse;
  const void* joined;      // BF16 [T][1024]
  const float* gate;       // FP32 [T][1024]
  const float* v_scale;    // [1]
  void* out;               // BF16 [T][1024]
  float* attn_core;        // tap, FP32 [T][1024], before the norm; may be null
  int32_t tokens;
  int32_t splits;
};

// attn_boundary: stream_after_attn = alpha * stream + beta * rms(branch, 1e-8);
// ffn_input = rms(stream_after_attn, 1e-5) * (1 + pre_ffn_norm), as three BF16 planes whose sum is
// the FP32 value (the first plane alone is the BF16 rounding that the pooler reads), or the first plane alone.
struct AttnBoundaryParams {
  const float* stream;         // FP32 [T][8192]
  const void* branch;          // BF16 [T][8192] (attn_out)
  const float* alpha;          // FP32 [8192]
  const float* beta;           // FP32 [8192]
  const float* norm_weight;    // FP32 [8192], 1 + w
  float* stream_out;           // FP32 [T][8192]
  void* ffn_input;             // BF16 [T][planes][8192]
  float* factor;               // FP32 [T]: the second norm's factor, for router_tiled; may be null
  int32_t tokens;
  int32_t planes;              // 3, or 1
};

// router: partial logits h @ router^T from the FP32 rows, K split over CTAs (T <= 64): by FP32 FMA for the fewest
// tokens, else by tensor cores over BF16 planes made on the way. More tokens: router_tiled.
struct RouterParams {
  const float* weight;       // FP32 [256][8192]
  const void* ffn_input;     // BF16 [T][3][8192]
  float* logits;             // FP32 [splits][T][256]
  int32_t tokens;
  int32_t splits;            // 16
  uint32_t* ready;           // DenseParams::ready of the pooler, which need not wait for the routing: set to 1 as soon as
                             // the boundary is complete; null: it does wait
};

// router_tiled: partial logits of more tokens from the residual stream (moe/router_cluster.cuh with 8 splits to 128
// tokens, moe/router_tiled.cuh above); the norm's weight is in the packed weights, its factor comes from
// attn_boundary.
struct RouterTiledParams {
  const void* weight;        // moe/router_layout.h
  const float* stream;       // FP32 [T][8192]
  const float* factor;       // FP32 [T]
  float* logits;             // FP32 [splits][T][256]
  int32_t tokens;
  int32_t splits;            // 1 .. 128
  uint32_t* ready;           // as RouterParams::ready
};

// router_topk: adds the splits, scores = sigmoid(logit * 0.17677...), top 8 of scores + bias (lowest id
// first among equals), weights = score / (sum of the 8 scores + 1e-15); then, in one launch or two,
// expert_lists: the local routes sorted by (expert, token).
struct RouterTopkParams {
  const float* logits;         // FP32 [splits][T][256]
  const float* bias;           // FP32 [256]
  const int32_t* local_start;  // [1]; local expert of id e: (e - local_start) mod 256, local if < 32
  int32_t* topk_ids;           // [T][8], by descending biased score
  float* topk_scores;          // FP32 [T][8], normalised
  float* router_logits;        // tap, FP32 [T][256]; may be null
  int32_t* expert_offsets;     // [33] first sorted route of each local expert; [32] = R
  int32_t* route_token;        // [8 T] token of each sorted route
  int32_t* token_route;        // [T][8] sorted route of each (token, slot), or -1 where not local
  uint32_t* token_masks;       // scratch [ceil(T / 32)][32]: which of 32 tokens chose a local expert
  uint32_t* counters;          // control block: zero before and after every call; 16 words
  const int32_t* num_tokens_non_padded;  // [1] or null: tokens at or past it take no local route
  int32_t tokens;
  int32_t splits;
  int32_t behind;              // 1 (65 to 128 tokens): launched behind the pooler, not before it
};

// boundary_router, boundary_topk: attn_boundary and router of one token (moe/boundary_router.cuh).
struct BoundaryRouterParams {
  const float* stream;       // FP32 [8192]
  const void* branch;        // BF16 [8192]
  const float* alpha;        // FP32 [8192]
  const float* beta;         // FP32 [8192]
  const float* norm_weight;  // FP32 [8192], 1 + w
  const float* weight;       // FP32 [256][8192]
  float* logits;             // FP32 [splits][2][256]: of alpha s and of beta b
  float* sums;               // FP32 [splits][4]: (alpha s)^2, (alpha s)(beta b), (beta b)^2, b^2
  float* stream_out;         // FP32 [8192]
  void* ffn_input;           // BF16 [8192]
  int32_t splits;            // 16
  uint32_t* ready;           // as RouterParams::ready, by boundary_topk: each of its 8 CTAs that write ffn_input adds 1
};

// pre_expert_norm: x = rms(sum of the pooler's splits, 1e-5) * (1 + pre_expert_norm), BF16, written once
// for each local route of the token at its sorted place, columns in the experts' k order (moe/nvfp4_layout.h).
struct PreExpertNormParams {
  const float* pooled;           // FP32 [splits][T][4096]
  const float* norm_weight;      // FP32 [4096], 1 + w
  const int32_t* token_route;    // [T][8]
  void* x;                       // BF16 [route_bound][4096], row = sorted route - route_begin
  float* expert_input;           // tap, FP32 [T][4096] (natural column order); may be null
  uint32_t* ready;               // RouterParams::ready: set back to 0; may be null
  int32_t tokens;
  int32_t splits;
  int32_t route_begin;           // this pass handles sorted routes route_begin .. route_begin + route_bound
  int32_t route_bound;
};

// w13: inter[r] = silu(gate) * up, gate/up = (x[r] @ w13[e]^T) * global scales; and w2: y[r] = inter[r] @ w2[e]^T
// (the w2 global scale applied). r runs over sorted routes of this pass.
struct ExpertGemmParams {
  const void* weight;            // packed, moe/nvfp4_layout.h: NVFP4 tiles, or BF16 tiles
  const float* scale;            // w13: FP32 [32][2] (gate, up); w2: FP32 [32]; the packing's power of two included
  const void* x;                 // BF16 [route_bound][4096], experts' k order
  void* out;                     // w13: BF16 [route_bound][4096], experts' k order; w2: BF16 [route_bound][4096],
                                 // or FP32 [splits][route_bound][4096] with splits > 1
  const int32_t* expert_offsets; // [33]
  float* carry;                  // sums on their way from one CTA to the next (moe/expert_walk.cuh), or null
  uint32_t* carry_flags;         // control block: zero before and after every call; a word an SM
  int32_t swiglu;                // 1: w13, 0: w2
  int32_t weight_kind;           // 0: NVFP4, 1: BF16
  int32_t splits;                // K splits (w2 with few tokens: 2)
  int32_t few;                   // 1: few-token kernel (chunks of 8 tokens), 0: many-token kernel
  int32_t route_begin;
  int32_t route_bound;
  int32_t max_routes_per_expert; // bound: min(T, route_bound)
  int32_t carry_words;           // of `carry`
};

// combine: moe_mix[t] = sum over the token's local routes, by slot, of topk_scores * rms(y * (1 + w), 1e-8).
struct CombineParams {
  const void* y;                 // BF16 [route_bound][4096], or FP32 [splits][route_bound][4096] when y_f32
  const float* norm_weight;      // FP32 [4096], 1 + w
  const float* topk_scores;      // [T][8]
  const int32_t* token_route;    // [T][8]
  const int32_t* expert_offsets; // [33]; the last pass is the one that reaches their end
  float* accumulate;             // FP32 [T][4096] between passes; null with one pass
  void* moe_mix;                 // BF16 [T][4096], written by the last pass
  int32_t y_f32;
  int32_t tokens;
  int32_t splits;
  int32_t route_begin;
  int32_t route_bound;
};

// ffn_boundary: f = sum of the unpooler's splits (columns outside the slice are zero) * (1 + post_ffn_norm);
// stream = alpha * stream_after_attn + beta * rms(f, 1e-8); hidden = rms(stream, 1e-5) * (1 + next_pre_attn_norm).
struct FfnBoundaryParams {
  const float* stream;           // FP32 [T][8192] (stream_after_attn)
  const void* branch;            // FP32 [splits][T][columns] when branch_f32, else BF16 [T][columns]; gathered slices:
                                 // FP32 [columns / slice][T][slice], one split
  const float* alpha;            // FP32 [8192]
  const float* beta;             // FP32 [8192]
  const float* post_norm_weight; // FP32 [8192], 1 + w
  const float* next_norm_weight; // FP32 [8192], 1 + w; null: no hidden (last layer)
  float* stream_out;             // FP32 [T][8192]
  void* hidden;                  // BF16 [T][8192]
  float* ffn_out;                // tap, FP32 [T][8192], before post_ffn_norm; may be null
  int32_t tokens;
  int32_t splits;
  int32_t branch_f32;
  int32_t column_begin;          // first column of the slice
  int32_t columns;               // 8192, or 1024 with the sliced unpooler, or the gathered slices' together
  int32_t slice;                 // columns next to each other in a token's row: `columns`, or 1024 of gathered slices
};

// slice_sum: adds the splits of the sliced unpooler, in order: what the ranks gather.
struct SliceSumParams {
  const float* parts;            // FP32 [splits][T][columns]
  float* out;                    // FP32 [T][columns]
  int32_t tokens;
  int32_t splits;
  int32_t columns;               // a multiple of 4
};

// pack_dense: row-major BF16 [rows][k] -> 64 x 64 tiles (gemm/dense_tile.h).
struct PackDenseParams {
  const void* src;     // BF16 [rows][k]
  void* dst;           // rows * k BF16
  int32_t rows;
  int32_t k;
};

// pack_router: the router's weights times pre_ffn_norm's 1 + w -> two FP16 planes and scales (moe/router_layout.h).
struct PackRouterParams {
  const float* src;          // FP32 [256][8192]
  const float* norm_weight;  // FP32 [8192], 1 + w
  void* dst;
};

// pack_experts: one matrix of the checkpoint (all experts) -> packed tiles (moe/nvfp4_layout.h).
struct PackExpertsParams {
  const void* codes;       // NVFP4: U8 [experts][rows][k / 2], low nibble = even k; BF16: [experts][rows][k]
  const void* block_scale; // E4M3 [experts][rows][k / 16]; null for BF16
  const float* global_scale; // FP32 [experts][scales_per_expert]; null for BF16 (1)
  void* dst;
  float* scale;            // FP32 [experts][2] (swiglu) or [experts]
  int32_t* bad_scale;      // [1], set to 1 + flat index of a NaN block scale; zeroed by the caller
  int32_t experts;
  int32_t rows;            // 8192 (swiglu: gate 0..4095, up 4096..8191) or 4096
  int32_t k;
  int32_t swiglu;
  int32_t weight_kind;
  int32_t scales_per_expert; // 1 (broadcast) or 2 (gate, up)
};

}  // namespace msl
