#pragma once

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// tensor.to(dtype), recorded by autograd, whose gradient has the tensor's dtype: by a kernel of ours
// where that pays, large fp32 and 16-bit tensors on the CPU, else LibTorch's.
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);

// tensor.to(dtype).to(kFloat) of an fp32 tensor, recorded by autograd: what the 16-bit dtype holds of
// it. Its gradient is rounded likewise, as it is on its way through the two conversions. Large
// tensors on the CPU take one pass over memory in place of two.
at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace semitone::nn
