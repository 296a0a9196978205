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

/// Options of FusedBatchNorm: those of torch::nn::BatchNorm, and the ReLU.
struct FusedBatchNormOptions {
  FusedBatchNormOptions(
      std::int64_t num_features)  // NOLINT(google-explicit-constructor): as LibTorch's
      : num_features_(num_features) {}

  /// C of an input (N, C, …).
  TORCH_ARG(std::int64_t, num_features);
  /// Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// Share of the new batch in the running statistics; nothing: the mean over all batches so far.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Whether there are a weight and a bias.
  TORCH_ARG(bool, affine) = true;
  /// Whether there are running statistics; without, evaluation uses the batch's as well.
  TORCH_ARG(bool, track_running_stats) = true;
  /// Whether the result goes through a ReLU.
  TORCH_ARG(bool, relu) = false;
};

/// Batch normalisation, and with it the addition of a residual and a ReLU, in two passes over the
/// input forward (statistics, result) and two backward: what apex.contrib's groupbn does on a GPU.
///
///     nn::FusedBatchNorm norm(nn::FusedBatchNormOptions(64).relu(true));
///     auto y = norm(x);             // relu(batch_norm(x))
///     auto z = norm(x, shortcut);   // relu(batch_norm(x) + shortcut)
///
/// Input (N, C, …), at least 2-D, fp16, bf16, fp32 or fp64, in any layout; the result has its
/// shape, dtype and layout (channels last stays so). Sums are formed in fp32 by 256 terms and in
/// fp64 from there, whatever the input's dtype, and every element is rounded once; parameters and
/// running statistics stay in fp32 for 16-bit inputs (semitone::KeepFp32). Results do not depend on
/// the number of threads.
///
/// Parameters, buffers and their names are those of torch::nn::BatchNorm1d, 2d and 3d: what one
/// saved, the other loads. In evaluation it is torch::nn::BatchNorm, with the addition and the ReLU
/// after it. For the statistics of several processes together: parallel::SyncBatchNorm.
class FusedBatchNormImpl
    : public torch::nn::NormImplBase<2, FusedBatchNormImpl, FusedBatchNormOptions>,
      public KeepFp32 {
 public:
  explicit FusedBatchNormImpl(const FusedBatchNormOptions& options_);

  /// @param input     (N, num_features, …)
  /// @param residual  undefined, or of the input's shape: added before the ReLU
  /// Error for an input of another kind or shape, and in training for one value a channel.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  void pretty_print(std::ostream& stream) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  void _check_input_dim(const at::Tensor& input) override;
};
TORCH_MODULE(FusedBatchNorm);

}  // namespace semitone::nn
