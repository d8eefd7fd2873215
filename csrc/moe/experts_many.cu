// The expert kernels of wgmma. Tall blocks (four consumer warpgroups, 256 weight rows a unit): as many warps as registers
// allow, because what limits them is expanding the weights and waiting for short products. `Wide` (BF16 weights): two
// warpgroups with most of the registers, 128 rows x up to 256 tokens, so that each byte of weights serves as many tokens
// as can be (tall blocks take 1.17 to 1.4 times as long from 2048 tokens on). All give the same bits.
#include "expert_gemm.cuh"

namespace msl {
namespace expert {
using Tall32 = GemmConfig<4, 32>;
using Tall64 = GemmConfig<4, 64>;
using Tall128 = GemmConfig<4, 128>;
using Wide = GemmConfig<2, 256>;

// Tokens of a step up to which the tall kernel of 64 serves it. An expert with more takes several units, which expand its
// weights again: with 511 routes on 15 experts, the fullest of 168 (prefill-200), a step takes 327 us so and 323 with
// chunks of 128. Experts of up to 64 tokens are 1 to 4% faster in chunks of 64.
constexpr int kTall64Tokens = 128;

// A box for each width that an expert of the step can have.
template <class C, int kKind>
static int boxes_of(const ExpertGemmParams& p, TokenBox (&boxes)[kTokenMaps]) {
  const int most = p.max_routes_per_expert < C::kMaxN ? p.max_routes_per_expert : C::kMaxN;
  int n = 0;
  for (int tokens = 1; tokens <= most; tokens = C::width(tokens) + 1) {
    const int width = C::width(tokens);
    boxes[n++] = {C::token_map(width), static_cast<uint32_t>(width), static_cast<uint32_t>(C::stage_tiles(width, kKind))};
  }
  return n;
}
int token_boxes(Shape shape, const ExpertGemmParams& p, TokenBox (&boxes)[kTokenMaps]) {
  if (shape == Shape::kWide) return boxes_of<Wide, 1>(p, boxes);
  if (p.max_routes_per_expert <= Tall32::kMaxN) return boxes_of<Tall32, 0>(p, boxes);
  return p.max_routes_per_expert <= kTall64Tokens ? boxes_of<Tall64, 0>(p, boxes) : boxes_of<Tall128, 0>(p, boxes);
}
int launch_tall(const GemmArgs& a, const Launch& l) {
  const int tokens = a.p.max_routes_per_expert;
  if (tokens <= Tall32::kMaxN) return launch_config<Tall32, 0>(a, l);
  return tokens <= kTall64Tokens ? launch_config<Tall64, 0>(a, l) : launch_config<Tall128, 0>(a, l);
}
int launch_wide(const GemmArgs& a, const Launch& l) {
  return launch_config<Wide, 1>(a, l);
}
int prepare_many() {
  int error = prepare_config<Tall32, 0>();
  if (!error) error = prepare_config<Tall64, 0>();
  if (!error) error = prepare_config<Tall128, 0>();
  if (!error) error = prepare_config<Wide, 1>();
  return error;
}
}  // namespace expert
}  // namespace msl
