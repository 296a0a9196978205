#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include <ostream>

namespace semitone::nn {

/// Layer normalisation in one pass over memory each way: at::layer_norm, with a backward that reads
/// gradient and input once.
///
///     y = (x - mean) / sqrt(variance + eps) * weight + bias
///
/// mean and variance (biased) are those of each row: what the last dimensions, normalized_shape,
/// hold.
///
/// @param input             fp16, bf16, fp32 or fp64; (…, normalized_shape), any number of rows, none
///                          too
/// @param normalized_shape  at least one dimension
/// @param weight, bias      undefined, or of normalized_shape: fp16, bf16 or fp32 whatever the
///                          input, fp64 with an fp64 one. Their gradients have their dtypes.
/// @return  the input's shape and dtype, contiguous
///
/// fp32, fp16 and bf16 are computed in fp32 and rounded once, on the CPU by vector code, on CUDA
/// devices from compute capability 8.0 on by a kernel of ours; gradients of weight and bias are sums
/// of at most 256 terms in fp32 that go on in fp64. fp64 and other devices are composed of ATen
/// operators. Results do not depend on the number of threads. With
/// gradients switched off nothing is saved. Gradients can be differentiated again, by ATen operators.
///
/// Error for other shapes and dtypes.
at::Tensor fused_layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                            const at::Tensor& weight = {}, const at::Tensor& bias = {},
                            double eps = 1e-5);

/// LibTorch's: normalized_shape, eps (1e-5), elementwise_affine (true).
using FusedLayerNormOptions = torch::nn::LayerNormOptions;

/// torch::nn::LayerNorm by fused_layer_norm. Parameters have the same names, shapes and initial
/// values, so what torch::save wrote of one torch::load reads into the other.
///
///     nn::FusedLayerNorm norm(nn::FusedLayerNormOptions({1024}).eps(1e-12));
class FusedLayerNormImpl : public torch::nn::Cloneable<FusedLayerNormImpl> {
 public:
  explicit FusedLayerNormImpl(FusedLayerNormOptions options_);

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  /// weight 1, bias 0.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  FusedLayerNormOptions options;
  at::Tensor weight;  ///< undefined without elementwise_affine
  at::Tensor bias;    ///< undefined without elementwise_affine
};
TORCH_MODULE(FusedLayerNorm);

}  // namespace semitone::nn
