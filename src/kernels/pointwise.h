#pragma once

#include <ATen/core/Tensor.h>

// relu and addition of 16-bit tensors at the speed of memory. LibTorch 2.11 goes through fp32 for
// them, and reaches half the speed of a copy.
namespace semitone::kernels {

// Whether the functions below have a kernel for a tensor: on the CPU, fp32, fp16 or bf16, without
// gaps in memory. All other tensors use the reference.
bool has_pointwise_kernel(const at::Tensor& input);

// As at::relu: 0 where the input is negative; NaNs and -0 stay (on Arm at::relu makes 0 of -0). The
// result has the input's strides if the input has no gaps.
at::Tensor relu(const at::Tensor& input);
// The same in the input's memory.
void relu_(const at::Tensor& input);
// The gradient of relu's input, in its dtype and with its result's strides: grad where the result
// is positive or NaN, else 0.
at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result);

// a + b, of one shape and dtype, computed in fp32 (fp64 for fp64) and rounded once. The result has
// a's strides if a has no gaps.
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
// The same in a's memory.
void add_(const at::Tensor& a, const at::Tensor& b);

namespace ref {
// The reference implementations, composed of ATen operators.
at::Tensor relu(const at::Tensor& input);
at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result);
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
}  // namespace ref

}  // namespace semitone::kernels
