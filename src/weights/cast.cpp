#include "src/weights/cast.h"

#include "semitone/core/dtype.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/real.h>
#include <ATen/ops/view_as_real.h>

namespace semitone::weights {
namespace {

// e4m3fn has no infinity. LibTorch 2.11 casts what is larger to NaN, 2.15 to the largest number.
constexpr double kRoundsToLargestE4m3fn = 464;

// Of real numbers in a floating-point dtype. Operators on fp8 exist for few dtypes, those on fp64
// for all.
bool overflows(const at::Tensor& value, c10::ScalarType dtype) {
  const at::Tensor before = value.to(at::kDouble);
  if (dtype == at::kFloat8_e4m3fn) {
    const at::Tensor finite = at::isfinite(before);
    return finite.logical_and(before.abs().gt(kRoundsToLargestE4m3fn)).any().item<bool>();
  }
  const at::Tensor after = value.to(dtype).to(at::kDouble);
  return at::isfinite(before).logical_and(at::isfinite(after).logical_not()).any().item<bool>();
}

// Of integers or bools in an integer dtype or bool.
bool changes(const at::Tensor& value, c10::ScalarType dtype) {
  const at::Tensor before = value.to(at::kLong);
  if (!at::equal(before, value.to(dtype).to(at::kLong))) return true;
  // The numbers above int64's are negative here.
  const bool wraps = (value.scalar_type() == at::kUInt64) != (dtype == at::kUInt64);
  return wraps && before.lt(0).any().item<bool>();
}

// Of floating-point numbers in an integer dtype or bool.
bool is_no_integer(const at::Tensor& value, c10::ScalarType dtype) {
  constexpr double kBelowInt64 = 9e18;
  const at::Tensor number = value.to(at::kDouble);
  // NaN is not below it either.
  if (!number.abs().lt(kBelowInt64).all().item<bool>()) return true;
  const at::Tensor integer = number.to(at::kLong);
  return !at::equal(integer.to(at::kDouble), number) || changes(integer, dtype);
}

}  // namespace

std::optional<std::string_view> lost_in_cast(const at::Tensor& given, c10::ScalarType dtype) {
  at::Tensor value = given.detach();
  if (value.scalar_type() == dtype || value.numel() == 0) return std::nullopt;
  if (value.is_complex() && c10::isComplexType(dtype)) {
    value = at::view_as_real(value.resolve_conj());
  } else if (value.is_complex()) {
    if (at::imag(value.to(at::kComplexDouble)).ne(0).any().item<bool>()) return "imaginary parts";
    value = at::real(value);
  }
  if (c10::isComplexType(dtype)) dtype = c10::toRealValueType(dtype);
  if (c10::isFloatingType(dtype)) {
    // The common case of 16-bit files: searching takes several times as long as the cast.
    const auto from = value.scalar_type();
    const bool is_wider = (dtype == at::kFloat && is_16bit(from)) ||
                          (dtype == at::kDouble && (is_16bit(from) || from == at::kFloat));
    if (is_wider) return std::nullopt;
    return overflows(value, dtype) ? std::optional<std::string_view>("larger ones") : std::nullopt;
  }
  const bool lost = value.is_floating_point() ? is_no_integer(value, dtype) : changes(value, dtype);
  return lost ? std::optional<std::string_view>("others") : std::nullopt;
}

}  // namespace semitone::weights
