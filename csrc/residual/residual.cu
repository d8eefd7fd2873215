// Launchers of the residual boundaries: which kernel for how many tokens.
#include <algorithm>

#include "../include/ops.h"
#include "boundary.cuh"
#include "boundary_stream.cuh"

namespace msl {
namespace {
// Up to this many tokens a cluster of 8 CTAs takes one (latency); from the second figure on tokens stream
// through persistent CTAs (bandwidth); between them a cluster of two CTAs takes one.
constexpr int kClusterTokens = 16;
constexpr int kStreamTokens = 256;
}  // namespace

int attn_boundary(const AttnBoundaryParams& p, const Launch& l) {
  if (p.tokens >= kStreamTokens)
    return launch(boundary_stream_kernel<AttnBoundaryParams>, dim3(std::min(p.tokens, l.sm_count)), dim3(kStreamThreads),
                  kStreamSharedBytes, l, p);
  if (p.tokens <= kClusterTokens)
    return launch(attn_boundary_kernel<8, 256>, dim3(8 * p.tokens), dim3(256), 0, l, p);
  return launch(attn_boundary_kernel<2, 512>, dim3(2 * p.tokens), dim3(512), 0, l, p);
}

int ffn_boundary(const FfnBoundaryParams& p, const Launch& l) {
  const bool whole = !p.branch_f32 && p.columns == kHidden;
  if (whole && p.tokens >= kStreamTokens)
    return launch(boundary_stream_kernel<FfnBoundaryParams>, dim3(std::min(p.tokens, l.sm_count)), dim3(kStreamThreads),
                  kStreamSharedBytes, l, p);
  if (p.tokens <= kClusterTokens)
    return launch(ffn_boundary_kernel<8, 256>, dim3(8 * p.tokens), dim3(256), 0, l, p);
  return launch(ffn_boundary_kernel<2, 512>, dim3(2 * p.tokens), dim3(512), 0, l, p);
}

int prepare_residual() {
  if (int e = prepare_kernel(attn_boundary_kernel<8, 256>, 0)) return e;
  if (int e = prepare_kernel(attn_boundary_kernel<2, 512>, 0)) return e;
  if (int e = prepare_kernel(ffn_boundary_kernel<8, 256>, 0)) return e;
  if (int e = prepare_kernel(ffn_boundary_kernel<2, 512>, 0)) return e;
  if (int e = prepare_kernel(boundary_stream_kernel<AttnBoundaryParams>, kStreamSharedBytes)) return e;
  return prepare_kernel(boundary_stream_kernel<FfnBoundaryParams>, kStreamSharedBytes);
}
}  // namespace msl
