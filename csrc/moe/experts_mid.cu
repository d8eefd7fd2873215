// The expert kernel for some tens of tokens an expert: 128 weight rows a unit share the tokens, four
// warpgroups (two row tiles, two halves of K) keep up with the memory.
#include "expert_gemm.cuh"

namespace msl {
namespace expert {
using Config = GemmConfig<2, 1, 256, 222 * 1024, 128, 1, 232, 1>;
int launch_mid(const GemmArgs& a, const Launch& l) { return launch_config<Config>(a, l); }
int prepare_mid() { return prepare_config<Config>(); }
}  // namespace expert
}  // namespace msl
