// Launchers of the residual boundaries: which kernel for how many tokens.
#include <algorithm>

#include "../include/ops.h"
#include "boundary.cuh"
#include "boundary_stream.cuh"

namespace msl {
namespace {
// CTAs that share a token: 8 of 256 threads, 4 of 512, 2 of 512, while tokens are few and latency counts; from
// the stream figures on tokens stream through persistent CTAs. Measured on an H200 in a chain of dependent launches.
constexpr int kAttn8Tokens = 6, kFfn8Tokens = 4, kBoundary4Tokens = 16;
constexpr int kAttnStreamTokens = 160, kFfnStreamTokens = 96;

template <class Params>
int boundary_stream(const Params& p, const Launch& l) {
  return launch(boundary_stream_kernel<Params>, dim3(std::min(p.tokens, l.sm_count)), dim3(kStreamThreads),
                kStreamSharedBytes, l, p);
}
}  // namespace

int attn_boundary(const AttnBoundaryParams& p, const Launch& l) {
  if (p.tokens <= kAttn8Tokens)
    return launch(attn_boundary_kernel<8, 256>, dim3(8 * p.tokens), dim3(256), 0, l, p);
  if (p.tokens <= kBoundary4Tokens)
    return launch(attn_boundary_kernel<4, 512>, dim3(4 * p.tokens), dim3(512), 0, l, p);
  if (p.tokens < kAttnStreamTokens)
    return launch(attn_boundary_kernel<2, 512>, dim3(2 * p.tokens), dim3(512), 0, l, p);
  return boundary_stream(p, l);
}

int ffn_boundary(const FfnBoundaryParams& p, const Launch& l) {
  if (p.tokens <= kFfn8Tokens)
    return launch(ffn_boundary_kernel<8, 256>, dim3(8 * p.tokens), dim3(256), 0, l, p);
  if (p.tokens <= kBoundary4Tokens)
    return launch(ffn_boundary_kernel<4, 512>, dim3(4 * p.tokens), dim3(512), 0, l, p);
  // The stream kernel reads whole BF16 rows; splits and slices stay with the cluster kernel.
  if (p.tokens < kFfnStreamTokens || p.branch_f32 || p.columns != kHidden)
    return launch(ffn_boundary_kernel<2, 512>, dim3(2 * p.tokens), dim3(512), 0, l, p);
  return boundary_stream(p, l);
}

int prepare_residual() {
  if (int e = prepare_kernel(attn_boundary_kernel<8, 256>, 0)) return e;
  if (int e = prepare_kernel(attn_boundary_kernel<4, 512>, 0)) return e;
  if (int e = prepare_kernel(attn_boundary_kernel<2, 512>, 0)) return e;
  if (int e = prepare_kernel(ffn_boundary_kernel<8, 256>, 0)) return e;
  if (int e = prepare_kernel(ffn_boundary_kernel<4, 512>, 0)) return e;
  if (int e = prepare_kernel(ffn_boundary_kernel<2, 512>, 0)) return e;
  if (int e = prepare_kernel(boundary_stream_kernel<AttnBoundaryParams>, kStreamSharedBytes)) return e;
  return prepare_kernel(boundary_stream_kernel<FfnBoundaryParams>, kStreamSharedBytes);
}
}  // namespace msl
