#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// tensor.to(dtype), recorded by autograd, with a gradient in the tensor's dtype. Uses Semitone's
// kernel where it is faster, for large fp32 and 16-bit tensors on the CPU, otherwise LibTorch's.
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);

// tensor.to(dtype).to(kFloat) of an fp32 tensor, recorded by autograd: the fp32 tensor rounded to
// the 16-bit dtype. Its gradient is rounded too, as on its way through the two conversions. Large
// tensors on the CPU need one pass over memory instead of two.
at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace semitone::nn
