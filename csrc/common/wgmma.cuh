// wgmma m64nNk16, FP32 accumulation, by the number of columns: CuTe's instruction atoms behind arrays.
// D: the accumulator fragment of one thread, N / 2 floats: for column tile j (8 columns), warp w of the
// warpgroup, lane = 4 g + c: d[4 j + 0, 1] = (row 16 w + g, cols 8 j + 2 c, + 1), d[4 j + 2, 3] = row + 8.
// A from registers: 4 words a k16 step: (row g, k 2c..), (row g + 8, k 2c..), (row g, k 2c + 8..), (row g + 8, k 2c + 8..).
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>

#include "ptx.cuh"

namespace msl {
namespace detail {
using cute::SM90::GMMA::Major;
template <int N, bool kHalf, Major kMajorB> struct Atom;
#define MSL_ATOM(N)                                                                          \
  template <Major B> struct Atom<N, false, B> {                                              \
    using SS = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<Major::K, B>;                \
    using RS = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<Major::K, B>;                \
  };                                                                                         \
  template <Major B> struct Atom<N, true, B> {                                               \
    using SS = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<Major::K, B>;                  \
    using RS = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<Major::K, B>;                  \
  };
MSL_ATOM(8) MSL_ATOM(16) MSL_ATOM(32) MSL_ATOM(64) MSL_ATOM(96) MSL_ATOM(128) MSL_ATOM(192) MSL_ATOM(256)
#ifdef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
MSL_ATOM(104) MSL_ATOM(136) MSL_ATOM(144) MSL_ATOM(152) MSL_ATOM(160) MSL_ATOM(176) MSL_ATOM(184) MSL_ATOM(208)
MSL_ATOM(232)
#endif
#undef MSL_ATOM
template <class A, size_t... I>
__device__ __forceinline__ void ss(uint64_t a, uint64_t b, float* d, int scale, std::index_sequence<I...>) {
  A::fma(a, b, d[I]..., static_cast<cute::SM90::GMMA::ScaleOut>(scale));
}
template <class A, size_t... I>
__device__ __forceinline__ void rs(const uint32_t* a, uint64_t b, float* d, int scale, std::index_sequence<I...>) {
  A::fma(a[0], a[1], a[2], a[3], b, d[I]..., static_cast<cute::SM90::GMMA::ScaleOut>(scale));
}
}  // namespace detail

// kMnMajorB: B's rows are k and its columns contiguous (V in attention); else B is K-major.
// accumulate == 0: D = A B; 1: D += A B.
template <int N, bool kHalf = false, bool kMnMajorB = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  using A = typename detail::Atom<N, kHalf, kMnMajorB ? detail::Major::MN : detail::Major::K>::SS;
  detail::ss<A>(a, b, d, accumulate, std::make_index_sequence<N / 2>{});
}
template <int N, bool kHalf = false, bool kMnMajorB = false>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  using A = typename detail::Atom<N, kHalf, kMnMajorB ? detail::Major::MN : detail::Major::K>::RS;
  detail::rs<A>(a, b, d, accumulate, std::make_index_sequence<N / 2>{});
}
}  // namespace msl
