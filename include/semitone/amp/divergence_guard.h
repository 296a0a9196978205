#pragma once

#include "semitone/core/error.h"
#include "semitone/scaling/step.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <string>

namespace semitone::amp {

/// Options of DivergenceGuard.
struct DivergenceGuardOptions {
  using Agree = std::function<void(at::Tensor& loss)>;
  using Rollback = std::function<void(const DivergedError& error)>;

  /// Number of consecutive skipped steps that counts as divergence; 0: none does. Default 100.
  TORCH_ARG(std::int64_t, max_consecutive_skips) = 100;
  /// A loss above this many times the running mean is a spike, if that mean is above 0. Above 1; 0:
  /// none is. Default 0.
  TORCH_ARG(double, max_loss_ratio) = 0;
  /// A loss that is this many standard deviations above the running mean is a spike. At least 0; 0:
  /// none is. Default 0.
  TORCH_ARG(double, max_z_score) = 0;
  /// Number of consecutive spikes that counts as divergence, at least 1. One bad batch is then not
  /// enough. Default 5.
  TORCH_ARG(std::int64_t, max_consecutive_spikes) = 5;
  /// Number of losses before the first that can be a spike, at least 2. Default 100.
  TORCH_ARG(std::int64_t, warmup_steps) = 100;
  /// Share of the running mean and variance that a loss leaves, in [0, 1). The first losses count
  /// equally. Default 0.98: about the last 50 losses.
  TORCH_ARG(double, decay) = 0.98;
  /// Averages the loss over the ranks of a data-parallel training: a NaN on one rank is then one on
  /// all, and all ranks come to the same result. Gets one fp64 element on the loss's device. Every
  /// rank calls it in every observe(). Default: none, for one process.
  ///
  ///     .agree([&](at::Tensor& loss) { group.all_reduce(loss, comm::ReduceOp::mean); })
  TORCH_ARG(Agree, agree);
  /// Called with the error instead of throwing it, for example to load the last checkpoint with
  /// checkpoint::Checkpoint::resume(). Its exceptions propagate. Default: none.
  TORCH_ARG(Rollback, rollback);
  /// Number of calls of rollback after which the error is thrown, at least 1. Default 3.
  TORCH_ARG(std::int64_t, max_rollbacks) = 3;
};

/// Finds out that a training has diverged, before it computes for nothing for days:
///
///     amp::DivergenceGuard guard(amp::DivergenceGuardOptions().max_loss_ratio(3));
///     for (auto& batch : loader) {
///       …
///       mixed.scale_loss(loss, optimizer).backward();
///       guard.observe(loss, mixed.step(optimizer));
///     }
///
/// A training has diverged if
/// - the loss of a step that was not skipped is inf or NaN. The weights are then probably NaN, too.
///   (With a loss scale such a step is skipped.)
/// - too many consecutive steps were skipped,
/// - or too many consecutive losses were spikes, if max_loss_ratio or max_z_score is set. Spikes do
///   not change the running mean and variance; nor do skipped steps.
///
/// observe() then throws DivergedError, which says what was seen and what to try, or calls
/// DivergenceGuardOptions::rollback.
///
/// LossScaleOptions::max_consecutive_skips counts skips too, for each loss, and names the parameter
/// that overflowed first. It cannot see what happens without a loss scale, as in bf16.
///
/// Copyable. Use it from one thread at a time.
class DivergenceGuard {
 public:
  enum class Observed : std::uint8_t { normal, skipped, spike, rolled_back };

  /// Error for options out of range.
  explicit DivergenceGuard(const DivergenceGuardOptions& options = {});

  /// Observes a step. DivergedError as above. Reads the loss, which waits for its device. Error if
  /// the loss is not one floating-point element.
  /// @param loss  the unscaled loss of this step
  /// @param step  what MixedPrecision::step, GradScaler::step or CapturedStep::run returned;
  ///              Step::stepped for an optimizer without them
  /// @return  rolled_back if DivergenceGuardOptions::rollback was called
  Observed observe(const at::Tensor& loss, const StepResult& step);

  /// Returns the running mean of the losses; NaN before the first.
  double mean_loss() const;
  /// Returns the number of calls of DivergenceGuardOptions::rollback.
  std::int64_t rollbacks() const { return rollbacks_; }

  /// Saves and loads what has been observed: counts, running mean and variance. The number of
  /// rollbacks is not part of it, so that a rollback that loads a checkpoint does not reset the
  /// number. FileError, with nothing changed, if the archive does not fit.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct State {
    std::int64_t steps = 0;
    std::int64_t skips = 0;   // consecutive
    std::int64_t spikes = 0;  // consecutive
    std::int64_t losses = 0;  // in the mean
    double mean = 0;
    double variance = 0;
  };

  double agreed(const at::Tensor& loss) const;
  // The largest loss that is no spike; infinity if there is no limit yet.
  double limit() const;
  void add(double loss);
  // The parts of an error's message.
  struct Finding {
    std::string expected;
    std::string got;
    std::string remedy;
  };
  Observed diverged(const Finding& finding);
  Finding too_many_skips() const;
  Finding not_finite(double loss) const;
  Finding too_many_spikes(double loss) const;

  DivergenceGuardOptions options_;
  State state_;
  std::int64_t rollbacks_ = 0;
};

}  // namespace semitone::amp
