#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace semitone {

/// The range and precision of a floating-point format. All values are exact in fp64.
struct DtypeLimits {
  double max;            ///< largest finite value: 65504 for fp16
  double min_normal;     ///< smallest positive normal value: 2^-14 for fp16
  double min_subnormal;  ///< smallest positive value: 2^-24 for fp16
  double epsilon;        ///< distance from 1 to the next value: 2^-10 for fp16
  int mantissa_bits;     ///< explicit bits of the significand: 10 for fp16
};

/// Returns the limits of fp64, fp32, fp16, bf16, fp8 e4m3fn or e5m2. Error for any other dtype.
DtypeLimits dtype_limits(c10::ScalarType dtype);

/// Returns a dtype's name in Python: "float32", "bfloat16", "float16", "int64" …
std::string dtype_name(c10::ScalarType dtype);

/// Parses a floating dtype: fp32, float32, float, fp16, float16, half, bf16, bfloat16, fp64,
/// float64, double. Case does not matter. Error for anything else.
c10::ScalarType parse_dtype(std::string_view name);

/// Returns whether a dtype is fp16 or bf16, to which autocast and the opt levels cast.
constexpr bool is_16bit(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
}

}  // namespace semitone
