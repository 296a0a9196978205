#pragma once

#include "semitone/core/error.h"
#include "semitone/scaling/step.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <limits>
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
  /// enough. inspect() also counts a loss that is inf or NaN as a spike. Default 5.
  TORCH_ARG(std::int64_t, max_consecutive_spikes) = 5;
  /// Number of losses before the first that can be a spike, at least 2. Default 100.
  TORCH_ARG(std::int64_t, warmup_steps) = 100;
  /// Share of the running mean and variance that a loss leaves, in [0, 1). The first losses count
  /// equally. Default 0.98: about the last 50 losses.
  TORCH_ARG(double, decay) = 0.98;
  /// Averages the loss over the ranks of a data-parallel training: a NaN on one rank is then one on
  /// all, and all ranks come to the same result. Gets one fp64 element on the loss's device. All
  /// ranks call it, in each inspect() and in each observe() that gets a loss. Default: none, for
  /// one process.
  ///
  ///     .agree([&](at::Tensor& loss) { group.all_reduce(loss, comm::ReduceOp::mean); })
  TORCH_ARG(Agree, agree);
  /// Called with the error instead of throwing it, for example to load the last checkpoint with
  /// checkpoint::Checkpoint::resume(). If inspect() is called between backward and step, it first has
  /// to drop the gradients with MixedPrecision::zero_grad(). Observe the step of a GradScaler after
  /// its update(): a checkpoint loads a scaler between two iterations. Its exceptions propagate.
  /// Default: none.
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
/// - or too many consecutive losses were spikes, if max_loss_ratio or max_z_score is set. The
///   running mean and variance do not include spikes, nor losses that observe() gets with a skipped
///   step.
///
/// The guard then throws DivergedError, which says what was seen and what to try, or calls
/// DivergenceGuardOptions::rollback.
///
/// A single spike has no effect by itself: the guard returns it, and the loop decides. A loop that
/// inspects the loss before the step can leave out the batch:
///
///     using Observed = amp::DivergenceGuard::Observed;
///     …
///       if (guard.inspect(loss) != Observed::normal) continue;  // no step with this batch
///       mixed.scale_loss(loss, optimizer).backward();
///       guard.observe(mixed.step(optimizer));
///
/// Or the loop can take the step, and lower the loss scale for the next one.
/// MixedPrecision::back_off_loss_scale describes when that helps:
///
///     if (guard.observe(loss, mixed.step(optimizer)) == Observed::spike)
///       mixed.back_off_loss_scale();
///
/// LossScaleOptions::max_consecutive_skips counts skips too, for each loss, and names the parameter
/// that overflowed first. It sees nothing in plain training (bf16 at O1 and O3, fp32), where no step
/// is skipped.
///
/// Copyable. Use it from one thread at a time.
class DivergenceGuard {
 public:
  /// The outcome of a batch or a step.
  enum class Observed : std::uint8_t {
    normal,
    skipped,     ///< the step was skipped, since a gradient was inf or NaN
    spike,       ///< the loss is a spike; for inspect(), also if it is inf or NaN
    rolled_back  ///< the training had diverged, and DivergenceGuardOptions::rollback was called
  };

  /// Error for options out of range.
  explicit DivergenceGuard(const DivergenceGuardOptions& options = {});

  /// Inspects the loss of a batch before the optimizer's step. Returns normal if the loop should
  /// train on the batch. After spike and rolled_back the loop should take no step and continue with
  /// the next batch. After spike, the weights, the optimizer's state and the loss scale are then
  /// unchanged. The changes that forward has made remain: to random generators, to the magnitudes
  /// that fp8's scales depend on, and to the running statistics of batch norm, in which a NaN
  /// stays.
  ///
  /// After max_consecutive_spikes it throws DivergedError or rolls back. A training whose loss
  /// stays at a higher level, or whose weights are NaN, therefore ends instead of leaving out all
  /// later batches.
  ///
  /// Call it once for each batch, either before backward or between backward and the step. Before
  /// backward, a batch that is left out costs no backward pass. Between backward and the step, drop
  /// the gradients of a batch that is left out: with MixedPrecision::zero_grad(), or without
  /// MixedPrecision with the optimizer's zero_grad(), and after GradScaler::unscale_ also with
  /// scaler.update(scaler.get_scale()), which ends the step and leaves the scale as it is. Call it
  /// there
  /// - with gradient accumulation: inspect the mean loss of all micro-batches, which
  ///   amp::accumulate() returns. If the last micro-batch alone were left out, ranks would step on
  ///   gradients that were never reduced;
  /// - with DistributedDataParallelOptions::find_unused_parameters, which may send the gradients of
  ///   unused parameters before backward;
  /// - on a GPU, if speed matters. inspect() waits for the loss. Before backward, the GPU would be
  ///   idle until the host has launched the backward pass.
  ///
  /// In a data-parallel training DivergenceGuardOptions::agree must be set. Otherwise ranks would
  /// leave out different batches, and wait for each other. A CapturedStep computes the loss and
  /// takes the step in one call, so it cannot leave out a batch: use observe(loss, step) with it.
  ///
  /// Reads the loss, which waits for its device. Error if the loss is not one floating-point
  /// element.
  /// @param loss  the unscaled loss
  Observed inspect(const at::Tensor& loss);

  /// Observes the step whose loss was inspected, and counts skipped steps. DivergedError as above.
  /// Error if inspect() was never called. If a device decides the step, observe() waits for the
  /// outcome. The call may also come later, after the next backward.
  /// @param step  what MixedPrecision::step or GradScaler::step returned
  /// @return  normal, skipped or rolled_back
  Observed observe(const StepResult& step);

  /// Observes a step and its loss, which was not inspected. DivergedError as above. Reads the loss,
  /// which waits for its device. Error if the loss is not one floating-point element.
  /// @param loss  the unscaled loss of this step
  /// @param step  what MixedPrecision::step, GradScaler::step or CapturedStep::run returned;
  ///              Step::stepped for an optimizer without them
  Observed observe(const at::Tensor& loss, const StepResult& step);

  /// Sets the number of the next step in messages, for a training that continues at another step
  /// after a rollback, or that has trained without a guard before. Error for a number below 1.
  /// Without it, steps are counted from 1, by the calls of inspect() and of observe() with a loss.
  void set_step(std::int64_t step);

  /// Returns the running mean of the losses; NaN before the first.
  double mean_loss() const;
  /// Returns the last loss. With DivergenceGuardOptions::agree it is the mean over the ranks. NaN
  /// before the first.
  double last_loss() const { return last_loss_; }
  /// Returns the number of spikes since the last loss that was not a spike. While it is above 0,
  /// save no checkpoint to roll back to.
  std::int64_t consecutive_spikes() const { return state_.spikes; }
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

  // Reads the loss of the next step.
  void read(const at::Tensor& loss);
  // The largest loss that is no spike; infinity if there is no limit yet.
  double limit() const;
  // Adds the last loss to the mean, or counts a spike.
  Observed classify();
  void add(double loss);
  // Calls the rollback, or throws the error.
  Observed diverged(const std::string& expected, const std::string& got, const std::string& remedy);
  Observed too_many_skips();
  Observed not_finite();
  Observed too_many_spikes();

  DivergenceGuardOptions options_;
  State state_;
  double last_loss_ = std::numeric_limits<double>::quiet_NaN();
  std::int64_t rollbacks_ = 0;
};

}  // namespace semitone::amp
