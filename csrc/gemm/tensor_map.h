// The tensor map of a row-major BF16 or FP32 matrix read in boxes of 128 swizzled bytes (64 or 32 columns) x `box_rows`
// rows; rows past the end arrive as zeros. Encoding is host arithmetic: no driver call reaches the device.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace msl {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder; looked up on the first call (prepare_dense makes it), null without a driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult status;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &status) !=
            cudaSuccess ||
        status != cudaDriverEntryPointSuccess)
      f = nullptr;
    return reinterpret_cast<EncodeTiled>(f);
  }();
  return found;
}

// `type` of `bytes` each; the stride in elements.
inline int rows_map(CUtensorMap* map, CUtensorMapDataType type, int bytes, const void* base, int64_t columns, int64_t rows,
                    int64_t stride, int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return static_cast<int>(cudaErrorInitializationError);
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult r =
      encode(map, type, 2, const_cast<void*>(base), dims, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<int>(r);  // CUresult and cudaError_t share their codes: a lost context says so
}
inline int bf16_rows_map(CUtensorMap* map, const void* base, int64_t columns, int64_t rows, int64_t stride,
                         int box_rows) {
  return rows_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, columns, rows, stride, box_rows);
}
inline int f32_rows_map(CUtensorMap* map, const void* base, int64_t columns, int64_t rows, int64_t stride, int box_rows) {
  return rows_map(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, base, columns, rows, stride, box_rows);
}

}  // namespace msl
