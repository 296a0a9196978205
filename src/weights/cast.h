#pragma once

#include "semitone/core/dtype.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace semitone::weights {

// Whether a cast makes a finite value infinite, or NaN where the dtype has no infinity.
bool overflows(const at::Tensor& value, c10::ScalarType dtype);

// The value in the dtype; an Exception that names the tensor if it overflows there.
template <typename Exception>
at::Tensor cast_without_overflow(const at::Tensor& value, c10::ScalarType dtype,
                                 std::string_view component, const std::string& name) {
  if (overflows(value, dtype)) {
    throw Exception(component, "values of '" + name + "' in the range of " + dtype_name(dtype),
                    "larger ones", "use a dtype of a wider range");
  }
  return value.detach().to(dtype);
}

}  // namespace semitone::weights
