#include "src/report/rounded_values.h"

#include "src/core/dtype_limits.h"

#include <torch/types.h>

#include <algorithm>

namespace semitone::report {
namespace {

// The value that defines a scale may exceed the largest one after its multiplication in fp32.
constexpr double kAboveRounding = 1 + 1e-6;

std::int64_t count(const at::Tensor& condition) {
  return condition.sum().item<std::int64_t>();
}

}  // namespace

bool is_fp8(c10::ScalarType format) {
  return format == c10::ScalarType::Float8_e4m3fn || format == c10::ScalarType::Float8_e5m2;
}

RoundedValues rounded(const at::Tensor& values, c10::ScalarType format, double amax) {
  const double max = dtype_limits(format).max;
  // A scale that fp32 holds.
  const double scale = amax > 0 ? std::min(max / amax, dtype_limits(at::kFloat).max) : 1;
  const at::Tensor scaled = scale == 1 ? values : values * scale;
  RoundedValues result;
  // A conversion to e4m3fn makes NaN of what it cannot hold, one to the other formats inf.
  const at::Tensor held = is_fp8(format) ? scaled.clamp(-max, max) : scaled;
  const at::Tensor converted = held.to(format).to(at::kFloat);
  result.numel = values.numel();
  result.non_zero = count(values.ne(0));
  result.underflow = count(values.ne(0).logical_and(converted.eq(0)));
  result.overflow =
      is_fp8(format) ? count(scaled.abs().gt(max * kAboveRounding).logical_and(scaled.isfinite()))
                     : count(converted.isinf().logical_and(scaled.isfinite()));
  result.values = scale == 1 ? converted : converted / scale;
  // An inf that was there stays: as a mask's, it hides a key.
  if (is_fp8(format)) result.values = at::where(values.isinf(), values, result.values);
  return result;
}

}  // namespace semitone::report
