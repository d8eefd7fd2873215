// The attention family's entry points (include/ops.h). The kernels are in the .cuh files beside this.
#include "attention.h"

#include "attention_split.cuh"
#include "attention_tiled.h"
#include "out_norm_gate.cuh"
#include "qk_norm_rope_append.cuh"

namespace msl {

int qk_norm_rope_append(const QkNormRopeAppendParams& p, const Launch& l) { return launch_qk_norm_rope_append(p, l); }

int attention(const AttentionParams& p, const Launch& l) {
  if (p.tokens <= 0 || p.requests <= 0) return 0;
  if (p.tiled) return attention_tiled(p, l);
  return launch_attention_split(p, l);
}

int out_norm_gate(const OutNormGateParams& p, const Launch& l) { return launch_out_norm_gate(p, l); }

int prepare_attention() {
  int e = prepare_kernel(qk_norm_rope_append_kernel, 0);
  if (!e) e = prepare_attention_split();
  if (!e) e = prepare_out_norm_gate();
  if (!e) e = prepare_attention_tiled();
  return e;
}

}  // namespace msl
