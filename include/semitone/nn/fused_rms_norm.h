#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

namespace semitone::nn {

/// RMS normalisation in one pass over memory each way: what at::rms_norm computes.
///
///     y = x / sqrt(mean of x^2 + eps) * weight
///
/// @param input             fp16, bf16, fp32 or fp64; (…, normalized_shape), any number of rows, none
///                          too
/// @param normalized_shape  at least one dimension
/// @param weight            undefined, or of normalized_shape: fp16, bf16 or fp32 whatever the input,
///                          fp64 with an fp64 one. Its gradient has its dtype.
/// @param eps               nothing: the distance from 1 to the next number of the dtype that is
///                          computed in, 2^-23 for fp32, fp16 and bf16, 2^-52 for fp64
///                          (at::rms_norm's rule)
/// @return  the input's shape and dtype, contiguous
///
/// Computed as fused_layer_norm is. Error for other shapes and dtypes.
at::Tensor fused_rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                          const at::Tensor& weight = {}, std::optional<double> eps = std::nullopt);

/// Options of FusedRMSNorm.
struct FusedRMSNormOptions {
  FusedRMSNormOptions(std::vector<std::int64_t> normalized_shape)  // NOLINT: as LibTorch's
      : normalized_shape_(std::move(normalized_shape)) {}

  /// Of the input's last dimensions.
  TORCH_ARG(std::vector<std::int64_t>, normalized_shape);
  /// Added to the mean square; nothing: see fused_rms_norm.
  TORCH_ARG(std::optional<double>, eps);
  /// Whether there is a weight.
  TORCH_ARG(bool, elementwise_affine) = true;
};

/// torch.nn.RMSNorm, which LibTorch lacks in C++, by fused_rms_norm. Its one parameter is `weight`.
///
///     nn::FusedRMSNorm norm(nn::FusedRMSNormOptions({1024}).eps(1e-6));
class FusedRMSNormImpl : public torch::nn::Cloneable<FusedRMSNormImpl> {
 public:
  explicit FusedRMSNormImpl(FusedRMSNormOptions options_);

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  /// weight 1.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  FusedRMSNormOptions options;
  at::Tensor weight;  ///< undefined without elementwise_affine
};
TORCH_MODULE(FusedRMSNorm);

}  // namespace semitone::nn
