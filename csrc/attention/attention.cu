// The attention family's entry points (include/ops.h). The kernels are in the .cuh files beside this.
#include "attention.h"

#include "attention_decode.cuh"
#include "attention_tiled.h"
#include "attention_verify.cuh"
#include "attention_verify_few.cuh"
#include "out_norm_gate.cuh"
#include "qk_norm_rope_append.cuh"

namespace msl {

int qk_norm_rope_append(const QkNormRopeAppendParams& p, const Launch& l) { return launch_qk_norm_rope_append(p, l); }

int attention(const AttentionParams& p, const Launch& l) {
  if (p.tokens <= 0 || p.requests <= 0) return 0;
  if (p.tiled) return attention_tiled(p, l);
  if (p.splits < 1) return static_cast<int>(cudaErrorInvalidValue);
  if (p.max_q_len <= 1) return launch_attention_decode(p, l);
  // The most keys a split may hold, by the plan alone.
  int64_t keys = static_cast<int64_t>(p.table_width) << p.page_log2;
  if (p.window > 0 && keys > p.window + p.max_q_len) keys = p.window + p.max_q_len;
  return keys <= int64_t{96} * p.splits ? launch_attention_verify_few(p, l) : launch_attention_verify(p, l);
}

int append_attention(const QkNormRopeAppendParams& a, const AttentionParams& p, const Launch& l) {
  if (p.tokens <= 0 || p.requests <= 0) return 0;
  if (p.max_q_len > 1 || p.tiled || p.splits < 1) return static_cast<int>(cudaErrorInvalidValue);
  return launch_append_attention_decode(a, p, l);
}

int out_norm_gate(const OutNormGateParams& p, const Launch& l) { return launch_out_norm_gate(p, l); }

int prepare_attention() {
  int e = prepare_kernel(qk_norm_rope_append_kernel, 0);
  if (!e) e = prepare_kernel(append_rows_kernel, 0);
  if (!e) e = prepare_kernel(attention_decode_kernel<false>, DecodeConfig::kSharedBytes);
  if (!e) e = prepare_kernel(attention_decode_kernel<true>, DecodeConfig::kSharedBytes);
  if (!e) e = prepare_kernel(attention_verify_kernel, VerifyConfig::kSharedBytes);
  if (!e) e = prepare_kernel(attention_verify_few_kernel, VerifyFewConfig::kSharedBytes);
  if (!e) e = prepare_out_norm_gate();
  if (!e) e = prepare_attention_tiled();
  return e;
}

}  // namespace msl
