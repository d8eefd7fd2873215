// The tiled (prefill) form of `attention`: launches. See attention_tiled_kernel.cuh.
#include "attention_tiled.h"

#include <climits>

#include "../common/launch.cuh"
#include "attention_tiled_kernel.cuh"

namespace msl {
using namespace tiled;

int64_t attention_tiled_scratch_bytes(const AttentionParams& p) {
  Plan plan;
  return make_plan(p, &plan) ? plan.bytes : -1;
}

int prepare_attention_tiled() {
  int e = prepare_kernel(gather_kernel, 0);
  if (e == 0) e = prepare_kernel(attention_tiled_kernel, kSharedBytes);
  if (e == 0) e = prepare_kernel(join_kernel, 0);
  return e;
}

int attention_tiled(const AttentionParams& p, const Launch& l) {
  Plan plan;
  if (!make_plan(p, &plan) || plan.bytes > p.kv_scratch_bytes) return cudaErrorInvalidValue;
  if (p.tokens == 0 || p.requests == 0) return 0;
  const int64_t units = static_cast<int64_t>(p.requests) * plan.key_tiles * kParts;
  const int64_t resident = static_cast<int64_t>(l.sm_count) * 8;
  const int split_tiles = plan.query_tiles - plan.whole, join_ctas = split_tiles * kTokens;
  int e = launch(gather_kernel, dim3(static_cast<unsigned>(units < resident ? units : resident)), dim3(kGatherThreads),
                 0, l, p, plan);
  if (e == 0)
    e = launch(attention_tiled_kernel, dim3((plan.whole + split_tiles * plan.splits) * kKvHeads), dim3(kThreads), kSharedBytes,
               l, p, plan);
  if (e == 0 && plan.splits > 1)
    e = launch(join_kernel, dim3(join_ctas), dim3(kJoinThreads), 0, l, p, plan);
  return e;
}

}  // namespace msl
