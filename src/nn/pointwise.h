#pragma once

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// at::relu and at::relu_ of what has a kernel (kernels::has_pointwise_kernel; Error otherwise). The
// gradient is computed from the result, and can be differentiated again.
at::Tensor relu(const at::Tensor& input);
at::Tensor relu_(const at::Tensor& input);

// a + b, of one shape and dtype, and a += b. a has a kernel (Error otherwise).
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
at::Tensor add_(const at::Tensor& a, const at::Tensor& b);

}  // namespace semitone::nn
