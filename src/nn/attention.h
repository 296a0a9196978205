#pragma once

// Internal interface: other rooms include this header.

#include "src/kernels/attention.h"

#include <ATen/core/Tensor.h>

namespace semitone::nn {

// at::scaled_dot_product_attention for tensors with a kernel:
// kernels::has_attention_kernel (Error otherwise), and a mask that needs no gradient (Error if it
// does). Saves its arguments, its result and two fp32 numbers for each query of a head. The gradient
// can be differentiated again, through LibTorch's operators.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const kernels::Attention& settings);

}  // namespace semitone::nn
