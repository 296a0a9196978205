#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include <ostream>

namespace semitone::nn {

/// Layer normalisation in one pass over memory forward and one backward. It computes
/// at::layer_norm, and its backward reads gradient and input once.
///
///     y = (x - mean) / sqrt(variance + eps) * weight + bias
///
/// mean and the biased variance are computed per row. A row consists of the last dimensions, which
/// normalized_shape gives.
///
/// @param input             fp16, bf16, fp32 or fp64; (…, normalized_shape), with any number of
///                          rows, including 0
/// @param normalized_shape  at least one dimension
/// @param weight, bias      undefined, or of normalized_shape: fp16, bf16 or fp32 for any input,
///                          fp64 for an fp64 input. Their gradients have their dtypes.
/// @return  a contiguous tensor of the input's shape and dtype
///
/// fp32, fp16 and bf16 are computed in fp32 and rounded once: by vector code on the CPU, and by one
/// of Semitone's kernels on CUDA devices of compute capability 8.0 or newer. Gradients of weight
/// and bias are accumulated in fp32 for at most 256 terms at a time, and these partial sums are
/// added in fp64. fp64 and other devices use ATen operators. Results do not depend on the number of
/// threads. Nothing is saved when gradients are disabled. Gradients can be differentiated again,
/// through ATen operators.
///
/// Error for other shapes and dtypes.
at::Tensor fused_layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                            const at::Tensor& weight = {}, const at::Tensor& bias = {},
                            double eps = 1e-5);

/// LibTorch's options: normalized_shape, eps (1e-5), elementwise_affine (true).
using FusedLayerNormOptions = torch::nn::LayerNormOptions;

/// torch::nn::LayerNorm implemented by fused_layer_norm. Parameters have the same names, shapes and
/// initial values, so that each class loads what the other saved.
///
///     nn::FusedLayerNorm norm(nn::FusedLayerNormOptions({1024}).eps(1e-12));
class FusedLayerNormImpl : public torch::nn::Cloneable<FusedLayerNormImpl> {
 public:
  explicit FusedLayerNormImpl(FusedLayerNormOptions options_);

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  /// Sets weight to 1 and bias to 0.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  FusedLayerNormOptions options;
  at::Tensor weight;  ///< undefined without elementwise_affine
  at::Tensor bias;    ///< undefined without elementwise_affine
};
TORCH_MODULE(FusedLayerNorm);

}  // namespace semitone::nn
