#include "semitone/core/dtype.h"

#include "semitone/core/error.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

namespace semitone {

using c10::ScalarType;

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return c10::toString(dtype);
  }
}

ScalarType parse_dtype(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, ScalarType>, 11> kNames{{
      {"fp32", ScalarType::Float},
      {"float32", ScalarType::Float},
      {"float", ScalarType::Float},
      {"fp16", ScalarType::Half},
      {"float16", ScalarType::Half},
      {"half", ScalarType::Half},
      {"bf16", ScalarType::BFloat16},
      {"bfloat16", ScalarType::BFloat16},
      {"fp64", ScalarType::Double},
      {"float64", ScalarType::Double},
      {"double", ScalarType::Double},
  }};
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const auto& [known, dtype] : kNames) {
    if (lower == known) return dtype;
  }
  throw Error("core.dtype", "one of fp32, fp16, bf16, fp64", "'" + std::string(name) + "'");
}

}  // namespace semitone
