#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace semitone::nn {

/// The Gaussian error linear unit: what at::gelu computes.
///
///     "none":  x * P, P the probability that a standard normal variable is below x
///     "tanh":  x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
///
/// @param input        fp16, bf16, fp32 or fp64, of any shape, empty too
/// @param approximate  "none" or "tanh"
/// @return  the input's shape, dtype and, if it has no gaps, layout
///
/// fp32, fp16 and bf16 are computed in fp32 and rounded once, on the CPU by vector code, on CUDA
/// devices from compute capability 8.0 on by a kernel of ours. In fp32 both tails keep their relative
/// accuracy on the CPU to 5e-6 down to -10, where at::gelu has lost all digits below -5.5;
/// docs/fused_layers.md has the errors. fp64 and other devices are composed of ATen operators.
/// With gradients switched off nothing is saved. Gradients can be differentiated again, by ATen
/// operators.
///
/// Error for other dtypes and names.
at::Tensor fused_gelu(const at::Tensor& input, std::string_view approximate = "none");

/// fused_gelu(input + bias) in one pass, input + bias not rounded between; the backward pass takes
/// the gradient of the bias along.
///
/// @param input  (…, N): a product without its bias
/// @param bias   (N): fp16, bf16 or fp32 whatever the input, fp64 with an fp64 one. Its gradient, of
///               its dtype, is a sum of at most 256 terms in fp32 that goes on in fp64, and does not
///               depend on the number of threads.
at::Tensor fused_bias_gelu(const at::Tensor& input, const at::Tensor& bias,
                           std::string_view approximate = "none");

}  // namespace semitone::nn
