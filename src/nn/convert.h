#pragma once

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// tensor.to(dtype), recorded by autograd, whose gradient has the tensor's dtype: by a kernel of ours
// where that pays, large fp32 and 16-bit tensors on the CPU, else LibTorch's.
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace semitone::nn
