// The expert kernels' family: what prepare_moe() calls, and the configurations behind w13 and w2.
#pragma once
#include <cuda.h>

#include "../include/params.h"

namespace msl {
int prepare_experts();  // opt-in shared memory, first touch, the tensor-map encoder; once per device

namespace expert {
// Which kernel serves a launch. The choice (experts.cu) follows from the parameters alone.
enum class Shape : int {
  kFew = 1,   // at most 8 tokens an expert: 64 weight rows a unit, mma
  kWide = 2,  // BF16 weights: 128 rows x up to 256 tokens
  kTall = 3,  // NVFP4: 256 rows x up to 32, 64 or 128 tokens
};

constexpr int kTokenMaps = 12;  // that a configuration needs at most: one for each width

// What a kernel gets by value.
struct GemmArgs {
  ExpertGemmParams p;
  int32_t blocks;  // 64-row tiles of an expert's matrix
  CUtensorMap tokens[kTokenMaps];  // x as (64 columns, rows, 64 groups of columns); boxes 64 x width x (k tiles of a stage)
};

int launch_few(const ExpertGemmParams&, const Launch&);
int launch_wide(const GemmArgs&, const Launch&);
int launch_tall(const GemmArgs&, const Launch&);
struct TokenBox {
  int map;  // of GemmArgs::tokens
  uint32_t rows, k_tiles;
};
int token_boxes(Shape, const ExpertGemmParams&, TokenBox (&boxes)[kTokenMaps]);  // how many
int prepare_few();
int prepare_many();
int prepare_pack();
int run_expert_gemm(const ExpertGemmParams&, const Launch&, Shape);
}  // namespace expert
}  // namespace msl
