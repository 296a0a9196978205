#pragma once

#include <ATen/core/Tensor.h>

// relu and addition of 16-bit tensors at the speed of memory: LibTorch 2.11 goes through fp32 for
// them, and reaches half of what a copy does.
namespace semitone::kernels {

// Whether the functions below have a kernel for it: on the CPU, fp32, fp16 or bf16, without gaps in
// memory. The rest takes the definition's path.
bool has_pointwise_kernel(const at::Tensor& input);

// As at::relu: 0 where the input is negative; NaNs and -0 stay. Laid out like the input if that has
// no gaps.
at::Tensor relu(const at::Tensor& input);
// The same in the input's memory.
void relu_(const at::Tensor& input);
// The gradient of relu's input, in its dtype and laid out like its result: grad where the result is
// positive or NaN, else 0.
at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result);

// a + b, of one shape and dtype, computed in fp32 (fp64 if they are) and rounded once. Laid out like
// a if that has no gaps.
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
// The same in a's memory.
void add_(const at::Tensor& a, const at::Tensor& b);

namespace ref {
// The definitions, composed of ATen operators.
at::Tensor relu(const at::Tensor& input);
at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result);
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
}  // namespace ref

}  // namespace semitone::kernels
