#pragma once

#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"

#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>

// The tolerances between two computations of the same value, as relative errors. They follow from
// the dtype and the number of terms, and are never invented in a test.
namespace semitone::test {

// A value that was rounded to the dtype so many times, each time by half a unit at most, and is
// otherwise exact.
inline double rounding_tolerance(c10::ScalarType dtype, int times = 1) {
  return times * dtype_limits(dtype).epsilon / 2;
}

inline bool is_16_bits(c10::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

// One operation, or a few. fp32: 1e-6, eight units of the last place; fp64: as many of its own. 16
// bits: computed in fp32 and rounded to the dtype, two times on each side.
inline double pointwise_tolerance(c10::ScalarType dtype) {
  constexpr double kFp32 = 1e-6;
  if (is_16_bits(dtype)) return rounding_tolerance(dtype, 4);
  return std::ldexp(kFp32,
                    dtype_limits(at::kFloat).mantissa_bits - dtype_limits(dtype).mantissa_bits);
}

// A sum of n terms in any order: rounding errors grow with the square root of n. 16-bit numbers are
// added up in fp32, and rounded as above.
inline double reduction_tolerance(c10::ScalarType dtype, std::int64_t terms) {
  const double grows = std::sqrt(static_cast<double>(terms));
  if (is_16_bits(dtype))
    return pointwise_tolerance(dtype) + pointwise_tolerance(at::kFloat) * grows;
  return pointwise_tolerance(dtype) * grows;
}

}  // namespace semitone::test
