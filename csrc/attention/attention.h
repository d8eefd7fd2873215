// The attention family: what attention.cu offers to include/ops.h and how it divides the work.
//
// A step runs three launches: qk_norm_rope_append (adds the projection's splits, norms, rotates,
// quantises, appends), attention (split kernel for decode and verify, tiled kernel for prefill) and
// out_norm_gate (joins the splits, norms, gates). Decode runs the first two as one, append_attention,
// with the same bits; `q` is not written then.
#pragma once
#include "../include/model.h"
#include "../include/ops.h"
#include "../include/params.h"

namespace msl {

// The split kernel handles the queries of a request in tiles of 1 token (decode) or 8 (everything
// else); the plan's bound on the query length alone decides which.
constexpr int kSplitTokens = 8;

}  // namespace msl
