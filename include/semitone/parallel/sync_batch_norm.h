#pragma once

#include "semitone/comm/group.h"
#include "semitone/core/keep_fp32.h"
#include "semitone/nn/fused_batch_norm.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <ostream>
#include <utility>

namespace semitone::parallel {

/// Batch normalisation with the mean and variance over the batches of all ranks, as in
/// torch.nn.SyncBatchNorm and apex.parallel.SyncBatchNorm. It also runs on the CPU.
///
///     auto group = comm::init();
///     parallel::SyncBatchNorm norm(nn::FusedBatchNormOptions(64), group);
///     parallel::SyncBatchNorm per_node(nn::FusedBatchNormOptions(64), group.split(8));
///
/// For a model with torch::nn::BatchNorm layers, see convert_sync_batchnorm.
///
/// The input (N, C, …) has at least two dimensions, is fp16, bf16, fp32 or fp64, and may have any
/// strides. The result has its shape, dtype and memory format (channels last is preserved). N may
/// differ between the ranks and may be 0: all values have the same weight. A rank without rows
/// still takes part, and its parameters' gradients are zeros. Statistics are computed in fp32 or
/// wider and merged in fp64. Parameters and running statistics stay in fp32 for 16-bit inputs
/// (semitone::KeepFp32).
///
/// In training, each forward is one all_gather of 2 C + 1 numbers, and each backward one all_reduce
/// of 2 C. All ranks must run the layer equally often and in the same order. If one rank
/// back-propagates through it, all must. The gradients of weight and bias are those of this rank's
/// rows, and DistributedDataParallel combines them. In evaluation with running statistics the layer
/// computes torch::nn::BatchNorm, and in a group of one process nn::FusedBatchNorm. Nothing is sent
/// then. A layer without running statistics, track_running_stats(false), normalises the batches of
/// all ranks in evaluation too, so all ranks must run it there. (In torch each rank then normalises
/// its own batch.)
///
/// With more than one rank the backward pass cannot be differentiated again.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<2, SyncBatchNormImpl, nn::FusedBatchNormOptions>,
      public KeepFp32 {
 public:
  /// @param group  the ranks whose batches are normalised together. Default: this process only
  explicit SyncBatchNormImpl(const nn::FusedBatchNormOptions& options_, comm::Group group = {});

  /// @param input     (N, num_features, …)
  /// @param residual  undefined, or of the input's shape: added before the ReLU
  ///
  /// Error, before anything is sent, for an unsupported dtype or shape. Error on every rank if the
  /// whole batch has one value per channel, which has no variance. (This is checked on the CPU
  /// only: elsewhere the check would wait for the device.) CommError if a rank is lost.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  const comm::Group& group() const { return group_; }
  void set_group(comm::Group group) { group_ = std::move(group); }

  void pretty_print(std::ostream& stream) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  void _check_input_dim(const at::Tensor& input) override;

 private:
  comm::Group group_;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every torch::nn::BatchNorm1d, 2d and 3d and every nn::FusedBatchNorm in a module,
/// including the module itself, normalise over the group's batches, as SyncBatchNorm does.
/// SyncBatchNorm layers get this group.
///
///     Net model;                                              // any module, with any members
///     torch::optim::SGD optimizer(model->parameters(), 0.1);  // before or after
///     parallel::convert_sync_batchnorm(*model, group);
///
/// The layers are not replaced. Members of type torch::nn::BatchNorm2d, entries of a Sequential,
/// parameters, buffers, training flags, names and saved states stay the same, so nothing has to be
/// converted back for saving or evaluation. The layers' tensors are marked. LibTorch's batch_norm
/// operator, and FusedBatchNorm's forward, synchronise marked tensors in training. Layers without
/// running statistics, track_running_stats(false), communicate in evaluation too, as SyncBatchNorm
/// does. A mark lasts as long as its tensor: to(), torch::load and the casts of amp::initialize
/// keep it, whereas clone() makes layers without marks. Inside an amp::Autocast region the policy
/// casts their arguments as those of other BatchNorm layers, and the statistics are synchronised as
/// outside.
///
/// A group of one process removes the marks.
///
/// One difference from SyncBatchNorm remains. torch::nn::BatchNorm throws on a rank whose share has
/// exactly one value per channel, before it calls the operator.
///
/// @return  the number of converted layers; a layer that is in several places is counted once
std::size_t convert_sync_batchnorm(torch::nn::Module& module, const comm::Group& group);

}  // namespace semitone::parallel
