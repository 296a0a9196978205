#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/comm_hook.h"

#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <vector>

namespace semitone::parallel {

/// Options of PostLocalSGDHook, with the defaults of torch's PostLocalSGDState.
struct PostLocalSGDOptions {
  /// Number of backward passes whose gradients are averaged over all ranks, from 0. In torch it has
  /// no default.
  TORCH_ARG(std::int64_t, start_localSGD_iter) = 0;
  /// Averages gradients over the subgroup afterwards. Otherwise each rank keeps its own.
  TORCH_ARG(bool, post_local_gradient_allreduce) = true;
};

/// Post-local SGD (Lin, Stich, Patel and Jaggi 2018, arXiv:1808.07217): gradients are averaged over
/// all ranks in the first steps, and then only over a subgroup, such as the ranks of a machine,
/// while PeriodicModelAverager averages the weights of all ranks every few steps. torch:
/// post_localSGD_hook.
///
///     const auto hook = std::make_shared<parallel::PostLocalSGDHook>(
///         group.split(4), parallel::PostLocalSGDOptions().start_localSGD_iter(100));
///     parallel::DistributedDataParallel ddp(
///         model, group, parallel::DistributedDataParallelOptions().comm_hook(hook));
///     parallel::PeriodicModelAverager averager(group, 4, 100);
///     …
///     optimizer.step();
///     averager.average_parameters(model->parameters());
///
/// The models of the subgroups differ between two averages. With a loss scaler each subgroup
/// therefore skips its own steps, and its scale is its own. With broadcast_buffers, buffers still
/// become rank 0's in each forward.
class PostLocalSGDHook final : public CommHook {
 public:
  /// @param subgroup  this rank's part of the group of DistributedDataParallel: group.split(n)
  explicit PostLocalSGDHook(comm::Group subgroup, const PostLocalSGDOptions& options = {});

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override;

  /// Saves and loads the number of backward passes.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  const comm::Group subgroup_;
  const PostLocalSGDOptions options_;
  std::int64_t iter_ = 0;
};

/// Averages the parameters of all ranks every few steps. torch: PeriodicModelAverager.
class PeriodicModelAverager {
 public:
  /// @param period  number of steps between two averages, from 1
  /// @param warmup_steps  number of steps before the first average, from 0: start_localSGD_iter of
  /// the hook
  PeriodicModelAverager(comm::Group group, std::int64_t period, std::int64_t warmup_steps = 0);

  /// Call after each step, on all ranks. The call number s, from 0, averages if s is at least
  /// warmup_steps and s - warmup_steps is a multiple of the period. The others return at once.
  /// Returns whether this call averaged.
  ///
  /// Averages all parameters that require a gradient. (torch's averages those whose gradient is
  /// defined, which may differ between ranks. After a step with master weights none is.) Means have
  /// each parameter's dtype. After amp::initialize with 16-bit weights, average inside
  /// mixed.fp32_weights(model), so that the fp32 masters are averaged, and not only their 16-bit
  /// roundings.
  bool average_parameters(const std::vector<at::Tensor>& parameters);

  /// The number of calls.
  std::int64_t step() const { return step_; }

  /// Saves and loads the number of calls.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  const comm::Group group_;
  const std::int64_t period_;
  const std::int64_t warmup_steps_;
  std::int64_t step_ = 0;
};

}  // namespace semitone::parallel
