// The expert kernels' family: what prepare_moe() calls, and the configurations behind w13 and w2.
#pragma once
#include <cuda.h>

#include "../include/params.h"

namespace msl {
int prepare_experts();  // opt-in shared memory, first touch, the tensor-map encoder; once per device

namespace expert {
// Which kernel serves a launch. The choice (experts.cu) follows from the parameters alone.
enum class Shape : int {
  kFew = 1,   // one or two experts' worth of tokens: 64 weight rows a unit, mma, small shared memory
  kMany = 2,  // prefill: 128 rows x up to 256 tokens
};

// What a kernel gets by value.
struct GemmArgs {
  ExpertGemmParams p;
  int32_t blocks;         // row blocks of an expert's matrix
  CUtensorMap few[4];     // the few-token kernel's: x as below, boxes of 64 x 1, 2, 4, 8 x 4 k tiles
  CUtensorMap tokens8;    // x as (64 columns, rows, 64 groups of columns); box 64 x 8 x (k tiles of a stage)
  CUtensorMap tokens64;   // x as (4096 columns, rows); box 64 x 64
};

int launch_few(const GemmArgs&, const Launch&);
int launch_many(const GemmArgs&, const Launch&);
int prepare_few();
int prepare_many();
int prepare_pack();
int run_expert_gemm(const ExpertGemmParams&, const Launch&, Shape);
}  // namespace expert
}  // namespace msl
