#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>

// Functions for which a device has an instruction of its own. Their results are off by a few units
// of the last place of fp32, and numbers below 2^-126 are 0. On a CPU they are off by as much, to
// one side or the other, so that tests see the largest error that a device's may have.
namespace semitone::kernels {

#ifndef __CUDA_ARCH__
// value (1 ± error). As for denormal results, a device's instruction has none.
inline float off_by(float value, float error) {
  const bool below = (std::bit_cast<std::uint32_t>(value) >> 3 & 1) != 0;
  const float off = value * (below ? 1 - error : 1 + error);
  return std::fabs(off) < 0x1p-126F ? 0 : off;
}
#endif

// 2^x, off by at most two units: 2^-22 of its size (CUDA's documentation of exp2f, which is this
// instruction).
__device__ inline float exp2_of(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return off_by(exp2f(x), 0x1p-22F);
#endif
}

// 1 / x, off by at most one unit: 2^-23 of its size. 0 for |x| >= 2^126.
__device__ inline float inverse_of(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return off_by(1 / x, 0x1p-23F);
#endif
}

// c0 + c1 x + c2 x^2 + ….
__device__ inline float polynomial(float /*x*/, float c) {
  return c;
}
template <typename... More>
__device__ float polynomial(float x, float c0, More... more) {
  return fmaf(polynomial(x, more...), x, c0);
}

}  // namespace semitone::kernels
