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

/// RMS normalisation in one pass over memory forward and one backward. It computes at::rms_norm.
///
///     y = x / sqrt(mean of x^2 + eps) * weight
///
/// @param input             fp16, bf16, fp32 or fp64; (…, normalized_shape), with any number of
///                          rows, including 0
/// @param normalized_shape  at least one dimension
/// @param weight            undefined, or of normalized_shape: fp16, bf16 or fp32 for any input,
///                          fp64 for an fp64 input. Its gradient has its dtype.
/// @param eps               added to the mean square. std::nullopt: the machine epsilon of the
///                          compute dtype, 2^-23 for fp32, fp16 and bf16 inputs, 2^-52 for fp64, as
///                          in at::rms_norm
/// @return  a contiguous tensor of the input's shape and dtype
///
/// Dtypes, devices, rounding and gradients are those of fused_layer_norm. Error for other shapes
/// and dtypes.
at::Tensor fused_rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                          const at::Tensor& weight = {}, std::optional<double> eps = std::nullopt);

/// Options of FusedRMSNorm.
struct FusedRMSNormOptions {
  FusedRMSNormOptions(std::vector<std::int64_t> normalized_shape)  // NOLINT: as LibTorch's
      : normalized_shape_(std::move(normalized_shape)) {}

  /// Sizes of the input's last dimensions.
  TORCH_ARG(std::vector<std::int64_t>, normalized_shape);
  /// Added to the mean square. std::nullopt: the default of fused_rms_norm.
  TORCH_ARG(std::optional<double>, eps);
  /// Whether the layer has a weight.
  TORCH_ARG(bool, elementwise_affine) = true;
};

/// torch.nn.RMSNorm, which LibTorch lacks in C++, implemented by fused_rms_norm. Its parameter is
/// `weight`.
///
///     nn::FusedRMSNorm norm(nn::FusedRMSNormOptions({1024}).eps(1e-6));
class FusedRMSNormImpl : public torch::nn::Cloneable<FusedRMSNormImpl> {
 public:
  explicit FusedRMSNormImpl(FusedRMSNormOptions options_);

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  /// Sets weight to 1.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  FusedRMSNormOptions options;
  at::Tensor weight;  ///< undefined without elementwise_affine
};
TORCH_MODULE(FusedRMSNorm);

}  // namespace semitone::nn
