#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// at::relu and at::relu_, in Semitone's kernels if kernels::has_pointwise_kernel. The gradient is
// computed from the result, and can be differentiated again.
at::Tensor relu(const at::Tensor& input);
at::Tensor relu_(const at::Tensor& input);

// a + b, dense and of one shape and dtype (Error otherwise), and a += b, in the same kernels.
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
at::Tensor add_(const at::Tensor& a, const at::Tensor& b);

}  // namespace semitone::nn
