// The expert kernels of wgmma. `Tall` (decode, verify, short prefill): four consumer warpgroups, 256 weight rows a unit x up
// to 64 tokens; as many warps as registers allow, because expanding the weights is what limits it. `Wide` (prefill, and
// BF16 weights): two warpgroups with most of the registers, 128 rows x up to 256 tokens, so that each expanded weight
// serves as many tokens as can be.
#include "expert_gemm.cuh"

namespace msl {
namespace expert {
using Wide = GemmConfig<2, 256>;
using Tall = GemmConfig<4, 64>;
using TallFew = GemmConfig<4, 32>;  // the same for finer widths

int box_tiles(Shape shape, int weight_kind) {
  return shape == Shape::kTall ? Tall::stage_tiles(8, weight_kind) : Wide::stage_tiles(8, weight_kind);
}
int launch_tall(const GemmArgs& a, const Launch& l) {
  return a.p.max_routes_per_expert <= TallFew::kMaxN ? launch_config<TallFew, 0>(a, l) : launch_config<Tall, 0>(a, l);
}
int launch_wide(const GemmArgs& a, const Launch& l) {
  return a.p.weight_kind == 0 ? launch_config<Wide, 0>(a, l) : launch_config<Wide, 1>(a, l);
}
int prepare_many() {
  int error = prepare_config<TallFew, 0>();
  if (!error) error = prepare_config<Tall, 0>();
  if (!error) error = prepare_config<Wide, 0>();
  if (!error) error = prepare_config<Wide, 1>();
  return error;
}
}  // namespace expert
}  // namespace msl
