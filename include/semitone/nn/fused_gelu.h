#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace semitone::nn {

/// The Gaussian error linear unit: what at::gelu computes.
///
///     "none":  x * P, P the probability that a standard normal variable is below x
///     "tanh":  x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
///
/// @param input        fp16, bf16, fp32 or fp64, of any shape, possibly empty
/// @param approximate  "none" or "tanh"
/// @return  a tensor of the input's shape and dtype, and of its strides if it has no gaps
///
/// fp32, fp16 and bf16 are computed in fp32 and rounded once: by vector code on the CPU, and by one
/// of Semitone's kernels on CUDA devices of compute capability 8.0 or newer. In fp32 on the CPU the
/// relative error is at most 5e-6 down to -10 ("tanh": 1.3e-5), whereas at::gelu has lost all
/// digits below -5.5; docs/fused_layers.md has a table of the errors. fp64 and other devices use
/// ATen operators. Nothing is saved when gradients are disabled. Gradients can be differentiated
/// again, through ATen operators.
///
/// Error for other dtypes and values of approximate.
at::Tensor fused_gelu(const at::Tensor& input, std::string_view approximate = "none");

/// fused_gelu(input + bias) in one pass, without rounding input + bias. The backward pass also
/// computes the gradient of the bias.
///
/// @param input  (…, N): a product without its bias
/// @param bias   (N): fp16, bf16 or fp32 for any input, fp64 for an fp64 input. Its gradient has
///               its dtype. The gradient is accumulated in fp32 for at most 256 terms at a time,
///               and these partial sums are added in fp64. It does not depend on the number of
///               threads.
at::Tensor fused_bias_gelu(const at::Tensor& input, const at::Tensor& bias,
                           std::string_view approximate = "none");

}  // namespace semitone::nn
