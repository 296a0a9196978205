#pragma once

// Internal interface: other rooms include this header.

#include "src/kernels/max_pool.h"

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// at::max_pool2d of an input (N, C, H, W), with windows of at most kernels::kMaxPoolWindow elements
// (Error otherwise). Saves the input and one byte per element of the result. The gradient can be
// differentiated again, through LibTorch's operators.
at::Tensor max_pool2d(const at::Tensor& input, const kernels::MaxPool& pool);

}  // namespace semitone::nn
