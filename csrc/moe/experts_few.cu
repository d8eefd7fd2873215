// The few-token expert kernel: up to 8 tokens an expert it keeps to half of an SM; up to 32 it takes all of it.
#include "expert_gemm_few.cuh"

namespace msl {
namespace expert {
using Eight = FewConfig<8, 4, 100 * 1024, 2>;
using Wide = FewConfig<32, 4, 180 * 1024, 1>;

template <class C>
int launch_config(const GemmArgs& a, const Launch& l) {
  const int64_t chunks = int64_t(a.p.route_bound) < kLocalExperts ? a.p.route_bound : kLocalExperts + a.p.route_bound / C::kMaxN;
  const int64_t most = chunks * a.blocks * a.p.splits;
  const dim3 grid(static_cast<unsigned>(most < l.sm_count ? most : l.sm_count));
  if (a.p.weight_kind == 0) return launch(expert_few_kernel<C, 0>, grid, dim3(C::kBlockThreads), C::kSharedBytes, l, a);
  return launch(expert_few_kernel<C, 1>, grid, dim3(C::kBlockThreads), C::kSharedBytes, l, a);
}

int launch_few(const GemmArgs& a, const Launch& l) {
  return a.p.max_routes_per_expert <= 8 ? launch_config<Eight>(a, l) : launch_config<Wide>(a, l);
}
int prepare_few() {
  int error = prepare_kernel(expert_few_kernel<Eight, 0>, Eight::kSharedBytes);
  if (!error) error = prepare_kernel(expert_few_kernel<Eight, 1>, Eight::kSharedBytes);
  if (!error) error = prepare_kernel(expert_few_kernel<Wide, 0>, Wide::kSharedBytes);
  if (!error) error = prepare_kernel(expert_few_kernel<Wide, 1>, Wide::kSharedBytes);
  return error;
}
}  // namespace expert
}  // namespace msl
