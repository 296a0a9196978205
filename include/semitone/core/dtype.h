#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace semitone {

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
