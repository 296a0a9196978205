#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

// Values as a format of fewer bits holds them. Called within a QuietScope.
namespace semitone::report {

struct RoundedValues {
  at::Tensor values;  // fp32
  std::int64_t numel = 0;
  std::int64_t non_zero = 0;   // elements before rounding
  std::int64_t underflow = 0;  // of them, those that are 0 now
  std::int64_t overflow = 0;   // finite elements that the format does not hold
};

// Returns the values rounded to a format. With an amax they are multiplied by (largest value of the
// format / amax) before, and divided by it after.
//
// @param values  fp32
// @param amax    fp8: the value that becomes the format's largest one; 0: not scaled
RoundedValues rounded(const at::Tensor& values, c10::ScalarType format, double amax = 0);

bool is_fp8(c10::ScalarType format);

}  // namespace semitone::report
