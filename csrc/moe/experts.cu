// w13 (with SwiGLU) and w2: the entry points, the choice among the expert kernels, and the tensor maps of
// their tokens.
#include <cuda.h>
#include <cuda_runtime.h>

#include "../gemm/tensor_map.h"
#include "../include/model.h"
#include "../include/ops.h"
#include "expert_gemm_config.cuh"
#include "experts.h"

namespace msl {
namespace expert {
namespace {

int encode(CUtensorMap* map, const void* base, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box) {
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult r = encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), dims, strides, box,
                                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<int>(r);  // the codes of cudaError_t
}

// From the parameters alone: a plan's launches never change shape.
Shape choose(const ExpertGemmParams& p) {
  if (p.few) return Shape::kFew;
  return p.weight_kind == 0 ? Shape::kTall : Shape::kWide;
}

}  // namespace

int run_expert_gemm(const ExpertGemmParams& p, const Launch& l, Shape shape) {
  if (p.route_bound == 0) return 0;
  if (shape == Shape::kFew) return launch_few(p, l);
  if (!encode_tiled()) return static_cast<int>(cudaErrorInitializationError);
  GemmArgs a{};
  a.p = p;
  const cuuint64_t dims[3] = {64, static_cast<cuuint64_t>(p.route_bound), kExpertDim / 64}, strides[2] = {kExpertDim * 2, 128};
  TokenBox boxes[kTokenMaps];
  for (int n = token_boxes(shape, p, boxes); n > 0; n--) {
    const TokenBox& b = boxes[n - 1];
    const cuuint32_t box[3] = {64, b.rows, b.k_tiles};
    if (const int error = encode(&a.tokens[b.map], p.x, dims, strides, box)) return error;
  }
  a.blocks = (p.swiglu ? 2 * kExpertDim : kExpertDim) / 64;
  return shape == Shape::kTall ? launch_tall(a, l) : launch_wide(a, l);
}

}  // namespace expert

int w13(const ExpertGemmParams& p, const Launch& l) {
  if (!p.swiglu || p.splits != 1) return static_cast<int>(cudaErrorInvalidValue);  // SwiGLU needs whole sums
  return expert::run_expert_gemm(p, l, expert::choose(p));
}
int w2(const ExpertGemmParams& p, const Launch& l) {
  if (p.swiglu) return static_cast<int>(cudaErrorInvalidValue);
  return expert::run_expert_gemm(p, l, expert::choose(p));
}

int prepare_experts() {
  if (!encode_tiled()) return static_cast<int>(cudaErrorSymbolNotFound);
  int error = expert::prepare_pack();
  if (!error) error = expert::prepare_few();
  if (!error) error = expert::prepare_many();
  return error;
}
}  // namespace msl
