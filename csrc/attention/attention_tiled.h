// The prefill form of the operation `attention` (AttentionParams::tiled == 1): many queries a request.
// A gather kernel copies the visible pages into FP16 tiles once a call, a wgmma kernel runs over them,
// and, where few queries leave multiprocessors idle, keys are split and a third kernel joins the parts.
#pragma once
#include <cstdint>

#include "../include/params.h"

namespace msl {

int prepare_attention_tiled();
int attention_tiled(const AttentionParams&, const Launch&);

// What AttentionParams::kv_scratch must hold, from the fields that a plan knows (tokens, requests,
// table_width, page_log2, window, max_q_len); no pointer is read. -1: fields out of range.
int64_t attention_tiled_scratch_bytes(const AttentionParams&);

}  // namespace msl
