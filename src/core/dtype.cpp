#include "semitone/core/dtype.h"

#include "semitone/core/error.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <utility>

namespace semitone {

using c10::ScalarType;

DtypeLimits dtype_limits(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return {std::numeric_limits<double>::max(), 0x1p-1022, 0x1p-1074, 0x1p-52, 52};
    case ScalarType::Float:
      return {0x1.fffffep127, 0x1p-126, 0x1p-149, 0x1p-23, 23};
    case ScalarType::Half:
      return {65504.0, 0x1p-14, 0x1p-24, 0x1p-10, 10};
    case ScalarType::BFloat16:
      return {0x1.fep127, 0x1p-126, 0x1p-133, 0x1p-7, 7};
    case ScalarType::Float8_e4m3fn:
      return {448.0, 0x1p-6, 0x1p-9, 0x1p-3, 3};
    case ScalarType::Float8_e5m2:
      return {57344.0, 0x1p-14, 0x1p-16, 0x1p-2, 2};
    default:
      throw Error("core.dtype", "a floating-point dtype", dtype_name(dtype));
  }
}

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
