// The few-token expert kernel (decode and verify: at most 32 tokens an expert): 64 weight rows a unit, two
// warpgroups that split K, half of an SM's shared memory and registers, so that the next kernel of the step
// becomes resident beside it and fills its own ring.
#include "expert_gemm.cuh"

namespace msl {
namespace expert {
using Config = GemmConfig<1, 2, 32, 104 * 1024, 32, 2, 1>;
int launch_few(const GemmArgs& a, const Launch& l) { return launch_config<Config>(a, l); }
int prepare_few() { return prepare_config<Config>(); }
}  // namespace expert
}  // namespace msl
