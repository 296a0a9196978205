#pragma once

#include "semitone/parallel/comm_hook.h"

#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace semitone::parallel {

/// Options of QuantizedAllReduceHook.
struct QuantizedAllReduceOptions {
  /// Number of consecutive elements with a common scale, 1 to 65536. Each scale is sent in 4 bytes.
  TORCH_ARG(std::int64_t, block_size) = 256;
  /// Adds what rounding lost in a step to the gradients of the next step.
  TORCH_ARG(bool, use_error_feedback) = true;
};

/// Averages gradients in 8 bits: about a quarter of the traffic of fp32.
///
///     const auto hook = std::make_shared<parallel::QuantizedAllReduceHook>(model->parameters());
///     parallel::DistributedDataParallel ddp(
///         model, group, parallel::DistributedDataParallelOptions().comm_hook(hook));
///
/// A block of elements becomes integers from -127 to 127 and an fp32 scale, its largest absolute
/// value / 127. Rounding is to the nearest, ties to even. (The scale per block is that of Dettmers
/// et al. 2022, arXiv:2110.02861, with linear steps.) Each rank gets one part of the bucket from
/// all ranks, averages it in fp32, rounds the mean in the same way, and sends it to all. A mean
/// therefore differs from the exact one by at most half a step of each of the two roundings. Every
/// rank keeps both errors, of its gradients and of the means of its part, and adds them in the next
/// step (error feedback with two stages: Tang et al. 2021, arXiv:2102.02888).
///
/// A gradient with an inf or NaN on any rank makes all gradients of its bucket NaN on all ranks. A
/// loss scaler then skips the step on all of them. The errors of all buckets then stay as they were
/// before this step.
///
/// Errors are fp32, or fp64 for gradients in fp64, and in the unit of the scaled loss: see
/// set_loss_scale. They are held twice.
///
/// The second message of a bucket is sent when the next bucket is full, so that both overlap with
/// backward, and all ranks send in the same order. An object serves one DistributedDataParallel.
class QuantizedAllReduceHook final : public CommHook {
 public:
  /// @param parameters  of the model, at least those that are trained, in the same order on all
  /// ranks. reduce() throws Error for another one, and for complex ones
  explicit QuantizedAllReduceHook(const std::vector<at::Tensor>& parameters,
                                  const QuantizedAllReduceOptions& options = {});
  ~QuantizedAllReduceHook() override;

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override;

  /// As PowerSGDHook::set_loss_scale.
  void set_loss_scale(double scale);

  /// Saves and loads the errors and the loss scale, which differ between ranks:
  /// checkpoint.add("hook", *hook) saves those of each rank. The errors of means belong to a rank's
  /// part of a bucket. They are dropped if the next run has other buckets, or another order of
  /// gradients (DistributedDataParallel::set_gradient_order). load() throws FileError if the
  /// parameters have other shapes, and then changes nothing.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  /// Loads the states of all ranks of a run that had a different number of them. Each rank gets the
  /// mean of the ranks' errors, to which the errors of the means are added. Checkpoint::resume calls
  /// it.
  void load_resharded(std::span<torch::serialize::InputArchive> saved);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::parallel
