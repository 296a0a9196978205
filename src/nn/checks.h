#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

// What functions of this room ask of their arguments.
namespace semitone::nn {

// Error unless it is a dense floating-point tensor.
void check_input(std::string_view where, const at::Tensor& input);

// Error unless it is undefined, or of that shape, on the input's device and of a floating dtype not
// wider than what the input is computed in: fp64 for an fp64 input, else fp32.
void check_values(std::string_view where, std::string_view name, const at::Tensor& values,
                  const at::Tensor& input, at::IntArrayRef shape);

}  // namespace semitone::nn
