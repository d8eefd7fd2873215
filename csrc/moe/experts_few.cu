// The few-token expert kernel: chunks of 8 tokens, meant for steps of up to 8.
#include "expert_gemm_few.cuh"

namespace msl {
namespace expert {
namespace {

// Who shares an SM. With one token there are few units: one CTA of w13 an SM, which a second would not fit beside, and
// w2's CTA beside it, filling its rings while w13 runs. With more tokens two CTAs an SM: 16 warps stream better, and
// the successor's CTA takes the place of the one that ends first. BF16 tiles want all of an SM.
struct Footprint {
  int shared, ctas;
};
constexpr int kWhole = 222 * 1024;
Footprint footprint(const ExpertGemmParams& p) {
  if (p.weight_kind != 0) return {kWhole, 1};
  if (p.max_routes_per_expert > 1) return {112 * 1024, 2};
  return {(p.swiglu ? 126 : 98) * 1024, 1};
}

template <int kKind>
int launch_kind(const ExpertGemmParams& p, const Launch& l) {
  const Footprint s = footprint(p);
  FewArgs a{};
  a.p = p;
  a.warp_bytes = (s.shared - kFewReduceBytes) / kFewWarps / 128 * 128;
  return launch(expert_few_kernel<kKind>, dim3(s.ctas * l.sm_count), dim3(kFewThreads), s.shared, l, a);
}

// All of an SM's memory as shared memory that can be: with what one kernel needs, its successor's CTAs, which need
// another split, would wait until the SM is empty.
template <int kKind>
int prepare_kind() {
  const int error = prepare_kernel(expert_few_kernel<kKind>, kWhole);
  if (error) return error;
  return static_cast<int>(cudaFuncSetAttribute(expert_few_kernel<kKind>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                               cudaSharedmemCarveoutMaxShared));
}
}  // namespace

int launch_few(const ExpertGemmParams& p, const Launch& l) {
  if (p.splits != 1 && p.splits != 2) return static_cast<int>(cudaErrorInvalidValue);
  return p.weight_kind == 0 ? launch_kind<0>(p, l) : launch_kind<1>(p, l);
}
int prepare_few() {
  const int error = prepare_kind<0>();
  return error ? error : prepare_kind<1>();
}
}  // namespace expert
}  // namespace msl
