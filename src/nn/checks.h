#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

// Checks of arguments for the functions of this room.
namespace semitone::nn {

// Error unless it is a dense floating-point tensor.
void check_input(std::string_view component, const at::Tensor& input);

// Error unless the tensor is undefined, or of that shape, on the input's device and of a floating
// dtype that is not wider than the computation: fp64 for an fp64 input, else fp32.
void check_values(std::string_view component, std::string_view name, const at::Tensor& values,
                  const at::Tensor& input, at::IntArrayRef shape);

}  // namespace semitone::nn
