// wgmma m64nNk16 of BF16, FP32 accumulation, A from registers, B K-major in shared memory, D += A B, for every N the
// expert kernels use (a multiple of 8). D and A fragments: common/wgmma.cuh.
#pragma once
#include "../common/ptx.cuh"

namespace msl {
namespace expert {

template <int N>
__device__ __forceinline__ void wgmma_add(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);

// The registers of D as text and as operands, 8 columns (4 registers) a step.
#define MSL_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MSL_T1 "%0, %1, %2, %3"
#define MSL_O1 MSL_D(0)
#define MSL_T2 MSL_T1 ", %4, %5, %6, %7"
#define MSL_O2 MSL_O1, MSL_D(4)
#define MSL_T3 MSL_T2 ", %8, %9, %10, %11"
#define MSL_O3 MSL_O2, MSL_D(8)
#define MSL_T4 MSL_T3 ", %12, %13, %14, %15"
#define MSL_O4 MSL_O3, MSL_D(12)
#define MSL_T5 MSL_T4 ", %16, %17, %18, %19"
#define MSL_O5 MSL_O4, MSL_D(16)
#define MSL_T6 MSL_T5 ", %20, %21, %22, %23"
#define MSL_O6 MSL_O5, MSL_D(20)
#define MSL_T7 MSL_T6 ", %24, %25, %26, %27"
#define MSL_O7 MSL_O6, MSL_D(24)
#define MSL_T8 MSL_T7 ", %28, %29, %30, %31"
#define MSL_O8 MSL_O7, MSL_D(28)
#define MSL_T9 MSL_T8 ", %32, %33, %34, %35"
#define MSL_O9 MSL_O8, MSL_D(32)
#define MSL_T10 MSL_T9 ", %36, %37, %38, %39"
#define MSL_O10 MSL_O9, MSL_D(36)
#define MSL_T11 MSL_T10 ", %40, %41, %42, %43"
#define MSL_O11 MSL_O10, MSL_D(40)
#define MSL_T12 MSL_T11 ", %44, %45, %46, %47"
#define MSL_O12 MSL_O11, MSL_D(44)
#define MSL_T13 MSL_T12 ", %48, %49, %50, %51"
#define MSL_O13 MSL_O12, MSL_D(48)
#define MSL_T14 MSL_T13 ", %52, %53, %54, %55"
#define MSL_O14 MSL_O13, MSL_D(52)
#define MSL_T15 MSL_T14 ", %56, %57, %58, %59"
#define MSL_O15 MSL_O14, MSL_D(56)
#define MSL_T16 MSL_T15 ", %60, %61, %62, %63"
#define MSL_O16 MSL_O15, MSL_D(60)
#define MSL_T17 MSL_T16 ", %64, %65, %66, %67"
#define MSL_O17 MSL_O16, MSL_D(64)
#define MSL_T18 MSL_T17 ", %68, %69, %70, %71"
#define MSL_O18 MSL_O17, MSL_D(68)
#define MSL_T19 MSL_T18 ", %72, %73, %74, %75"
#define MSL_O19 MSL_O18, MSL_D(72)
#define MSL_T20 MSL_T19 ", %76, %77, %78, %79"
#define MSL_O20 MSL_O19, MSL_D(76)
#define MSL_T21 MSL_T20 ", %80, %81, %82, %83"
#define MSL_O21 MSL_O20, MSL_D(80)
#define MSL_T22 MSL_T21 ", %84, %85, %86, %87"
#define MSL_O22 MSL_O21, MSL_D(84)
#define MSL_T23 MSL_T22 ", %88, %89, %90, %91"
#define MSL_O23 MSL_O22, MSL_D(88)
#define MSL_T24 MSL_T23 ", %92, %93, %94, %95"
#define MSL_O24 MSL_O23, MSL_D(92)
#define MSL_T25 MSL_T24 ", %96, %97, %98, %99"
#define MSL_O25 MSL_O24, MSL_D(96)
#define MSL_T26 MSL_T25 ", %100, %101, %102, %103"
#define MSL_O26 MSL_O25, MSL_D(100)
#define MSL_T27 MSL_T26 ", %104, %105, %106, %107"
#define MSL_O27 MSL_O26, MSL_D(104)
#define MSL_T28 MSL_T27 ", %108, %109, %110, %111"
#define MSL_O28 MSL_O27, MSL_D(108)
#define MSL_T29 MSL_T28 ", %112, %113, %114, %115"
#define MSL_O29 MSL_O28, MSL_D(112)
#define MSL_T30 MSL_T29 ", %116, %117, %118, %119"
#define MSL_O30 MSL_O29, MSL_D(116)
#define MSL_T31 MSL_T30 ", %120, %121, %122, %123"
#define MSL_O31 MSL_O30, MSL_D(120)
#define MSL_T32 MSL_T31 ", %124, %125, %126, %127"
#define MSL_O32 MSL_O31, MSL_D(124)

#define MSL_WGMMA(N, columns, a0, a1, a2, a3, b0)                                                               \
  template <> __device__ __forceinline__ void wgmma_add<N>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, 1, 0;\n wgmma.mma_async.sync.aligned.m64n" #N                \
                 "k16.f32.bf16.bf16 {" MSL_T##columns "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0          \
                 ", p, 1, 1, 0;\n}\n"                                                                            \
                 : MSL_O##columns : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }
MSL_WGMMA(8, 1, 4, 5, 6, 7, 8)
MSL_WGMMA(16, 2, 8, 9, 10, 11, 12)
MSL_WGMMA(24, 3, 12, 13, 14, 15, 16)
MSL_WGMMA(32, 4, 16, 17, 18, 19, 20)
MSL_WGMMA(40, 5, 20, 21, 22, 23, 24)
MSL_WGMMA(48, 6, 24, 25, 26, 27, 28)
MSL_WGMMA(56, 7, 28, 29, 30, 31, 32)
MSL_WGMMA(64, 8, 32, 33, 34, 35, 36)
MSL_WGMMA(80, 10, 40, 41, 42, 43, 44)
MSL_WGMMA(96, 12, 48, 49, 50, 51, 52)
MSL_WGMMA(112, 14, 56, 57, 58, 59, 60)
MSL_WGMMA(128, 16, 64, 65, 66, 67, 68)
MSL_WGMMA(160, 20, 80, 81, 82, 83, 84)
MSL_WGMMA(192, 24, 96, 97, 98, 99, 100)
MSL_WGMMA(224, 28, 112, 113, 114, 115, 116)
MSL_WGMMA(256, 32, 128, 129, 130, 131, 132)
#undef MSL_WGMMA
#undef MSL_D

// X(N) for every one of them.
#define MSL_WIDTHS(X) \
  X(8) X(16) X(24) X(32) X(40) X(48) X(56) X(64) X(80) X(96) X(112) X(128) X(160) X(192) X(224) X(256)

}  // namespace expert
}  // namespace msl
