#pragma once

#include "semitone/core/dtype.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace semitone::weights {

// Which values of a tensor a dtype does not have, in words, or nothing: finite values that would
// become infinite (or NaN, where the dtype has no infinity), imaginary parts, and for integers and
// bools every value that would change. Rounding to a floating-point dtype is no loss.
std::optional<std::string_view> lost_in_cast(const at::Tensor& value, c10::ScalarType dtype);

// The value in the dtype; an Exception that names the tensor if the dtype does not have its values.
// @param what  the tensor, for the message: "'weight'"
template <typename Exception>
at::Tensor checked_cast(const at::Tensor& value, c10::ScalarType dtype, std::string_view component,
                        const std::string& what) {
  if (const auto lost = lost_in_cast(value, dtype)) {
    throw Exception(component, "values of " + what + " in the range of " + dtype_name(dtype), *lost,
                    "use a dtype that has them");
  }
  return value.detach().to(dtype);
}

}  // namespace semitone::weights
