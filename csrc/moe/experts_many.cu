// The many-token expert kernel (prefill): 128 weight rows x up to 256 tokens a unit, the two consumer
// warpgroups take 64 rows each and most of the registers.
#include "expert_gemm.cuh"

namespace msl {
namespace expert {
using Config = GemmConfig<2, 1, 256, 222 * 1024, 128, 1, 1>;
int launch_many(const GemmArgs& a, const Launch& l) { return launch_config<Config>(a, l); }
int prepare_many() { return prepare_config<Config>(); }
}  // namespace expert
}  // namespace msl
