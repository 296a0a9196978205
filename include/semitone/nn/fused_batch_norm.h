#pragma once

#include "semitone/core/keep_fp32.h"

#include <torch/arg.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>

namespace semitone::nn {

/// Options of FusedBatchNorm: those of torch::nn::BatchNorm, and relu.
struct FusedBatchNormOptions {
  FusedBatchNormOptions(
      std::int64_t num_features)  // NOLINT(google-explicit-constructor): as LibTorch's
      : num_features_(num_features) {}

  /// C of an input (N, C, …).
  TORCH_ARG(std::int64_t, num_features);
  /// Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// Weight of the new batch in the running statistics. std::nullopt: the running statistics are
  /// the mean over all batches so far.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Whether the layer has a weight and a bias.
  TORCH_ARG(bool, affine) = true;
  /// Whether the layer has running statistics. Without them, evaluation uses the batch's
  /// statistics.
  TORCH_ARG(bool, track_running_stats) = true;
  /// Whether a ReLU is applied to the result.
  TORCH_ARG(bool, relu) = false;
};

/// Batch normalisation, optionally with the addition of a residual and a ReLU. The forward is two
/// passes over the input (statistics, result), and so is the backward. apex.contrib's groupbn does
/// the same on a GPU.
///
///     nn::FusedBatchNorm norm(nn::FusedBatchNormOptions(64).relu(true));
///     auto y = norm(x);             // relu(batch_norm(x))
///     auto z = norm(x, shortcut);   // relu(batch_norm(x) + shortcut)
///
/// The input (N, C, …) has at least two dimensions, is fp16, bf16, fp32 or fp64, and may have any
/// strides. The result has its shape, dtype and memory format (channels last is preserved). Sums
/// are accumulated in fp32 for at most 256 terms at a time, and these partial sums are added in
/// fp64 (for an fp64 input everything is fp64). Each element is rounded once. Parameters and
/// running statistics stay in fp32 for 16-bit inputs (semitone::KeepFp32). Results do not depend on
/// the number of threads. The backward pass computes again where the ReLU stopped an element; with
/// a residual it reads that from the result, and writes the gradient of the residual once.
///
/// Parameters and buffers have the names of torch::nn::BatchNorm1d, 2d and 3d, so each class loads
/// what the other saved. In evaluation the layer computes torch::nn::BatchNorm, followed by the
/// addition and the ReLU. For statistics over several processes use parallel::SyncBatchNorm.
class FusedBatchNormImpl
    : public torch::nn::NormImplBase<2, FusedBatchNormImpl, FusedBatchNormOptions>,
      public KeepFp32 {
 public:
  explicit FusedBatchNormImpl(const FusedBatchNormOptions& options_);

  /// @param input     (N, num_features, …)
  /// @param residual  undefined, or of the input's shape: added before the ReLU
  /// Error for an unsupported dtype or shape, and in training for an input with one value per
  /// channel.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  void pretty_print(std::ostream& stream) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  void _check_input_dim(const at::Tensor& input) override;
};
TORCH_MODULE(FusedBatchNorm);

}  // namespace semitone::nn
