#pragma once

#include "semitone/comm/group.h"
#include "semitone/core/keep_fp32.h"

#include <torch/arg.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>

namespace semitone::parallel {

/// Options of SyncBatchNorm.
struct SyncBatchNormOptions {
  SyncBatchNormOptions(
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
  TORCH_ARG(bool, fuse_relu) = false;
  /// Whose batches count as one. Default: this process alone.
  TORCH_ARG(comm::Group, group);
};

/// Batch normalisation with the mean and variance of the batches of all ranks together: what
/// torch.nn.SyncBatchNorm and apex.parallel.SyncBatchNorm do, on the CPU too.
///
///     auto group = comm::init();
///     parallel::SyncBatchNorm norm(parallel::SyncBatchNormOptions(64).group(group));
///     parallel::SyncBatchNorm per_node(parallel::SyncBatchNormOptions(64).group(group.split(8)));
///
/// For a model that has torch::nn::BatchNorm layers, see convert_sync_batchnorm.
///
/// Input (N, C, …), at least 2-D, fp16, bf16, fp32 or fp64, in any layout; the result has its
/// shape, dtype and layout (channels last stays so). N may differ between the ranks and may be 0:
/// every value counts once. A rank without rows takes part all the same, and its parameters'
/// gradients are zeros. Statistics are computed in fp32 at least and merged in fp64, so parameters
/// and running statistics stay in fp32 for 16-bit inputs (semitone::KeepFp32).
///
/// In training, each forward is one all_gather of 2 C + 1 numbers, each backward one all_reduce of
/// 2 C: every rank has to run the layer equally often and in the same order, and back-propagate
/// through it if one does. The gradients of weight and bias are those of this rank's rows:
/// DistributedDataParallel adds them up. In evaluation (but not without running statistics)
/// it is torch::nn::BatchNorm, and with a group of one nn::FusedBatchNorm: nothing is sent.
///
/// With more than one rank the backward pass cannot be differentiated again.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<2, SyncBatchNormImpl, SyncBatchNormOptions>,
      public KeepFp32 {
 public:
  explicit SyncBatchNormImpl(const SyncBatchNormOptions& options_);

  /// @param input     (N, num_features, …)
  /// @param residual  undefined, or of the input's shape: added before the ReLU
  ///
  /// Error, before anything is sent, for an input of another kind or shape; and on every rank if
  /// the whole batch has one value a channel, which has no variance (checked on the CPU only:
  /// elsewhere the check would wait for the device). CommError if a rank is lost.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  void pretty_print(std::ostream& stream) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  void _check_input_dim(const at::Tensor& input) override;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every torch::nn::BatchNorm1d, 2d and 3d in a module, itself included, use the statistics
/// of the group's batches together, as SyncBatchNorm does; and SyncBatchNorm layers, those of this
/// group.
///
///     Net model;                                              // any module, with any members
///     torch::optim::SGD optimizer(model->parameters(), 0.1);  // before or after
///     parallel::convert_sync_batchnorm(*model, group);
///
/// The layers stay what and where they are: members of type torch::nn::BatchNorm2d, entries of a
/// Sequential, parameters, buffers, training flags, names and saved states are the same afterwards.
/// So there is nothing to convert back for saving or evaluation. The layers' tensors are marked,
/// and LibTorch's batch_norm operator, in training, treats marked tensors otherwise. The marks live
/// as long as the tensors: to(), torch::load and the casts of amp::initialize keep them, clone()
/// makes layers without. Inside an amp::Autocast region all works as with torch::nn::BatchNorm.
///
/// A group of one process takes the marks away.
///
/// One difference to SyncBatchNorm is LibTorch's own: BatchNorm refuses, before the operator is
/// reached, a rank whose share has exactly one value a channel.
///
/// @return  how many layers; one that is in several places counts once
std::size_t convert_sync_batchnorm(torch::nn::Module& module, const comm::Group& group);

}  // namespace semitone::parallel
