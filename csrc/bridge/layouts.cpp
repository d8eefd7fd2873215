// Sizes and offsets of params.h as this compiler has them; src/backend/cuda/params.rs is tested against it.
#include <sstream>

#include "bridge/bridge.h"

#define BEGIN(Struct) text << #Struct " " << sizeof(Struct) << "\n"
#define FIELD(Struct, field) \
  text << #Struct "." #field " " << offsetof(Struct, field) << " " << sizeof(Struct::field) << "\n"

namespace msl::bridge {
rust::String layouts() {
  std::ostringstream text;
  BEGIN(Launch);
  FIELD(Launch, stream); FIELD(Launch, sm_count); FIELD(Launch, dependent);
  BEGIN(DenseParams);
  FIELD(DenseParams, weight); FIELD(DenseParams, x); FIELD(DenseParams, out); FIELD(DenseParams, tokens);
  FIELD(DenseParams, rows); FIELD(DenseParams, k); FIELD(DenseParams, x_stride); FIELD(DenseParams, out_stride);
  FIELD(DenseParams, splits); FIELD(DenseParams, out_f32); FIELD(DenseParams, tile_n); FIELD(DenseParams, tile_rows);
  FIELD(DenseParams, ready); FIELD(DenseParams, ready_at);
  BEGIN(QkNormRopeAppendParams);
  FIELD(QkNormRopeAppendParams, qkv); FIELD(QkNormRopeAppendParams, positions);
  FIELD(QkNormRopeAppendParams, cache_loc); FIELD(QkNormRopeAppendParams, k_scale);
  FIELD(QkNormRopeAppendParams, v_scale); FIELD(QkNormRopeAppendParams, inv_freq);
  FIELD(QkNormRopeAppendParams, k_cache); FIELD(QkNormRopeAppendParams, v_cache); FIELD(QkNormRopeAppendParams, q);
  FIELD(QkNormRopeAppendParams, gate); FIELD(QkNormRopeAppendParams, cache_rows);
  FIELD(QkNormRopeAppendParams, tokens); FIELD(QkNormRopeAppendParams, splits);
  FIELD(QkNormRopeAppendParams, e4m3_query); FIELD(QkNormRopeAppendParams, skip_slot_zero);
  BEGIN(AttentionParams);
  FIELD(AttentionParams, q); FIELD(AttentionParams, k_cache); FIELD(AttentionParams, v_cache);
  FIELD(AttentionParams, page_table); FIELD(AttentionParams, cache_seqlens); FIELD(AttentionParams, cu_seqlens_q);
  FIELD(AttentionParams, k_scale); FIELD(AttentionParams, v_scale); FIELD(AttentionParams, acc);
  FIELD(AttentionParams, lse); FIELD(AttentionParams, gate); FIELD(AttentionParams, out);
  FIELD(AttentionParams, attn_core); FIELD(AttentionParams, kv_scratch);
  FIELD(AttentionParams, kv_scratch_bytes); FIELD(AttentionParams, pages); FIELD(AttentionParams, table_stride);
  FIELD(AttentionParams, table_width); FIELD(AttentionParams, page_log2); FIELD(AttentionParams, tokens);
  FIELD(AttentionParams, requests); FIELD(AttentionParams, max_q_len); FIELD(AttentionParams, window);
  FIELD(AttentionParams, splits); FIELD(AttentionParams, tiled); FIELD(AttentionParams, gate_splits);
  FIELD(AttentionParams, gate_tokens); FIELD(AttentionParams, softmax_scale);
  BEGIN(Fa3AttentionParams);
  FIELD(Fa3AttentionParams, q_half); FIELD(Fa3AttentionParams, q); FIELD(Fa3AttentionParams, k_cache);
  FIELD(Fa3AttentionParams, v_cache); FIELD(Fa3AttentionParams, page_table); FIELD(Fa3AttentionParams, cache_seqlens);
  FIELD(Fa3AttentionParams, cu_seqlens_q); FIELD(Fa3AttentionParams, k_scale); FIELD(Fa3AttentionParams, v_scale);
  FIELD(Fa3AttentionParams, out); FIELD(Fa3AttentionParams, lse); FIELD(Fa3AttentionParams, acc);
  FIELD(Fa3AttentionParams, acc_lse); FIELD(Fa3AttentionParams, metadata); FIELD(Fa3AttentionParams, pages);
  FIELD(Fa3AttentionParams, table_stride); FIELD(Fa3AttentionParams, table_width); FIELD(Fa3AttentionParams, page_log2);
  FIELD(Fa3AttentionParams, tokens); FIELD(Fa3AttentionParams, requests); FIELD(Fa3AttentionParams, max_q_len);
  FIELD(Fa3AttentionParams, window); FIELD(Fa3AttentionParams, splits); FIELD(Fa3AttentionParams, softmax_scale);
  BEGIN(OutNormGateParams);
  FIELD(OutNormGateParams, acc); FIELD(OutNormGateParams, lse); FIELD(OutNormGateParams, joined);
  FIELD(OutNormGateParams, gate); FIELD(OutNormGateParams, v_scale); FIELD(OutNormGateParams, out);
  FIELD(OutNormGateParams, attn_core); FIELD(OutNormGateParams, tokens); FIELD(OutNormGateParams, splits);
  BEGIN(AttnBoundaryParams);
  FIELD(AttnBoundaryParams, stream); FIELD(AttnBoundaryParams, branch); FIELD(AttnBoundaryParams, alpha);
  FIELD(AttnBoundaryParams, beta); FIELD(AttnBoundaryParams, norm_weight); FIELD(AttnBoundaryParams, stream_out);
  FIELD(AttnBoundaryParams, ffn_input); FIELD(AttnBoundaryParams, factor); FIELD(AttnBoundaryParams, tokens);
  FIELD(AttnBoundaryParams, planes);
  BEGIN(RouterParams);
  FIELD(RouterParams, weight); FIELD(RouterParams, ffn_input); FIELD(RouterParams, logits);
  FIELD(RouterParams, tokens); FIELD(RouterParams, splits);
  FIELD(RouterParams, ready);
  BEGIN(RouterTiledParams);
  FIELD(RouterTiledParams, weight); FIELD(RouterTiledParams, stream); FIELD(RouterTiledParams, factor);
  FIELD(RouterTiledParams, logits); FIELD(RouterTiledParams, tokens); FIELD(RouterTiledParams, splits);
  FIELD(RouterTiledParams, ready);
  BEGIN(RouterTopkParams);
  FIELD(RouterTopkParams, logits); FIELD(RouterTopkParams, bias); FIELD(RouterTopkParams, local_start);
  FIELD(RouterTopkParams, topk_ids); FIELD(RouterTopkParams, topk_scores); FIELD(RouterTopkParams, router_logits);
  FIELD(RouterTopkParams, expert_offsets); FIELD(RouterTopkParams, route_token);
  FIELD(RouterTopkParams, token_route); FIELD(RouterTopkParams, token_masks); FIELD(RouterTopkParams, counters);
  FIELD(RouterTopkParams, num_tokens_non_padded); FIELD(RouterTopkParams, tokens); FIELD(RouterTopkParams, splits);
  FIELD(RouterTopkParams, behind);
  BEGIN(BoundaryRouterParams);
  FIELD(BoundaryRouterParams, stream); FIELD(BoundaryRouterParams, branch); FIELD(BoundaryRouterParams, alpha);
  FIELD(BoundaryRouterParams, beta); FIELD(BoundaryRouterParams, norm_weight); FIELD(BoundaryRouterParams, weight);
  FIELD(BoundaryRouterParams, logits); FIELD(BoundaryRouterParams, sums); FIELD(BoundaryRouterParams, stream_out);
  FIELD(BoundaryRouterParams, ffn_input); FIELD(BoundaryRouterParams, splits); FIELD(BoundaryRouterParams, ready);
  BEGIN(PreExpertNormParams);
  FIELD(PreExpertNormParams, pooled); FIELD(PreExpertNormParams, norm_weight);
  FIELD(PreExpertNormParams, token_route); FIELD(PreExpertNormParams, x); FIELD(PreExpertNormParams, expert_input);
  FIELD(PreExpertNormParams, ready);
  FIELD(PreExpertNormParams, tokens); FIELD(PreExpertNormParams, splits); FIELD(PreExpertNormParams, route_begin);
  FIELD(PreExpertNormParams, route_bound);
  BEGIN(ExpertGemmParams);
  FIELD(ExpertGemmParams, weight); FIELD(ExpertGemmParams, scale); FIELD(ExpertGemmParams, x);
  FIELD(ExpertGemmParams, out); FIELD(ExpertGemmParams, expert_offsets); FIELD(ExpertGemmParams, carry);
  FIELD(ExpertGemmParams, carry_flags); FIELD(ExpertGemmParams, swiglu);
  FIELD(ExpertGemmParams, weight_kind); FIELD(ExpertGemmParams, splits); FIELD(ExpertGemmParams, few);
  FIELD(ExpertGemmParams, route_begin); FIELD(ExpertGemmParams, route_bound);
  FIELD(ExpertGemmParams, max_routes_per_expert); FIELD(ExpertGemmParams, carry_words);
  BEGIN(CombineParams);
  FIELD(CombineParams, y); FIELD(CombineParams, norm_weight); FIELD(CombineParams, topk_scores);
  FIELD(CombineParams, token_route); FIELD(CombineParams, expert_offsets); FIELD(CombineParams, accumulate);
  FIELD(CombineParams, moe_mix); FIELD(CombineParams, y_f32); FIELD(CombineParams, tokens); FIELD(CombineParams, splits);
  FIELD(CombineParams, route_begin); FIELD(CombineParams, route_bound);
  BEGIN(FfnBoundaryParams);
  FIELD(FfnBoundaryParams, stream); FIELD(FfnBoundaryParams, branch); FIELD(FfnBoundaryParams, alpha);
  FIELD(FfnBoundaryParams, beta); FIELD(FfnBoundaryParams, post_norm_weight);
  FIELD(FfnBoundaryParams, next_norm_weight); FIELD(FfnBoundaryParams, stream_out); FIELD(FfnBoundaryParams, hidden);
  FIELD(FfnBoundaryParams, ffn_out); FIELD(FfnBoundaryParams, tokens); FIELD(FfnBoundaryParams, splits);
  FIELD(FfnBoundaryParams, branch_f32); FIELD(FfnBoundaryParams, column_begin); FIELD(FfnBoundaryParams, columns);
  FIELD(FfnBoundaryParams, slice);
  BEGIN(SliceSumParams);
  FIELD(SliceSumParams, parts); FIELD(SliceSumParams, out); FIELD(SliceSumParams, tokens);
  FIELD(SliceSumParams, splits); FIELD(SliceSumParams, columns);
  BEGIN(PackDenseParams);
  FIELD(PackDenseParams, src); FIELD(PackDenseParams, dst); FIELD(PackDenseParams, rows); FIELD(PackDenseParams, k);
  BEGIN(PackRouterParams);
  FIELD(PackRouterParams, src); FIELD(PackRouterParams, norm_weight); FIELD(PackRouterParams, dst);
  BEGIN(PackExpertsParams);
  FIELD(PackExpertsParams, codes); FIELD(PackExpertsParams, block_scale); FIELD(PackExpertsParams, global_scale);
  FIELD(PackExpertsParams, dst); FIELD(PackExpertsParams, scale); FIELD(PackExpertsParams, bad_scale);
  FIELD(PackExpertsParams, experts); FIELD(PackExpertsParams, rows); FIELD(PackExpertsParams, k);
  FIELD(PackExpertsParams, swiglu); FIELD(PackExpertsParams, weight_kind);
  FIELD(PackExpertsParams, scales_per_expert);
  BEGIN(PeerParams);
  FIELD(PeerParams, data); FIELD(PeerParams, inboxes); FIELD(PeerParams, calls); FIELD(PeerParams, lost);
  FIELD(PeerParams, timeout_ns); FIELD(PeerParams, elements); FIELD(PeerParams, capacity); FIELD(PeerParams, rank);
  FIELD(PeerParams, ranks);
  return text.str();
}
}  // namespace msl::bridge
