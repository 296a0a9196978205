#pragma once

#include "src/kernels/exponents.h"

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

namespace semitone::report {

// Whether the division by a number changes nothing but exponents.
bool is_power_of_two(double number);

// The counts of the values divided by a power of two. What would be below fp32's smallest subnormal
// number becomes 0, as it does in fp32.
kernels::ExponentCounts divided(const kernels::ExponentCounts& counts, double power_of_two);

// The counts of the values of a tensor divided by a scale: in fp32, if it is not a power of two, and
// in fp64 for such tensors. A scale that is not a positive number counts as 1.
kernels::ExponentCounts divided_counts(const at::Tensor& tensor, double scale);

// An element of a sample's list "tensors".
nlohmann::ordered_json describe_counts(std::string_view what, const std::string& name,
                                       at::ScalarType dtype, const kernels::ExponentCounts& counts);

}  // namespace semitone::report
