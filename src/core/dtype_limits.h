#pragma once

#include <c10/core/ScalarType.h>

namespace semitone {

// The range and precision of a floating-point format. All values are exact in fp64.
struct DtypeLimits {
  double max;            // largest finite value: 65504 for fp16
  double min_normal;     // smallest positive normal value: 2^-14 for fp16
  double min_subnormal;  // smallest positive value: 2^-24 for fp16
  double epsilon;        // distance from 1 to the next value: 2^-10 for fp16
  int mantissa_bits;     // explicit bits of the significand: 10 for fp16
};

// Returns the limits of fp64, fp32, fp16, bf16, fp8 e4m3fn or e5m2. Error for any other dtype.
DtypeLimits dtype_limits(c10::ScalarType dtype);

}  // namespace semitone
