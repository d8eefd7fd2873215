// The released dimensions of a Muse Spark Open decoder layer on one GPU of TP8/EP8: the only ones the
// CUDA backend runs (src/config.rs checks them on the host).
#pragma once
namespace msl {
constexpr int kHidden = 8192;
constexpr int kHeadDim = 64;
constexpr int kQHeads = 16;
constexpr int kKvHeads = 2;
constexpr int kGroup = kQHeads / kKvHeads;
constexpr int kQSize = kQHeads * kHeadDim;    // 1024
constexpr int kKvSize = kKvHeads * kHeadDim;  // 128
constexpr int kQkvRows = 2 * kQSize + 2 * kKvSize;  // 2304: q, k, v, gate
constexpr int kExpertDim = 4096;              // the MoE block's width and each expert's intermediate size
constexpr int kExperts = 256;
constexpr int kLocalExperts = 32;
constexpr int kTopK = 8;
constexpr float kRouterMultiplier = 0.1767766952966369f;
constexpr float kRouteEps = 1e-15f;
constexpr float kRmsEps = 1e-5f;
constexpr float kPostNormEps = 1e-8f;
}  // namespace msl
