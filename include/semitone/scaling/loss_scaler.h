#pragma once

#include "semitone/scaling/detail/loss_scale_state.h"
#include "semitone/scaling/detail/overflow.h"
#include "semitone/scaling/loss_scale.h"

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <cstdint>

namespace semitone::amp {

/// A loss scale with its options, its state, and the counters of skipped steps. GradScaler has one
/// LossScaler, and MixedPrecision has one for each loss. All values are in host memory. A copy is a
/// snapshot.
class LossScaler {
 public:
  /// @param loss_id  index in events and messages
  /// Error if the options contradict each other: see detail::initial_loss_scale.
  explicit LossScaler(const LossScaleOptions& options = {}, std::int64_t loss_id = 0);

  /// The factor for losses.
  double scale() const { return state_.scale; }
  /// The factor for gradients: 1/scale in fp64, rounded to fp32, as in torch.
  float inverse() const { return static_cast<float>(1.0 / state_.scale); }
  /// Returns loss * scale, recorded by autograd, in fp32 or fp64, since fp16 ends at 65504. Error
  /// for a loss that is not floating-point.
  at::Tensor scaled(const at::Tensor& loss) const;
  /// Returns loss * scale for a captured step. The scale is in the device's memory: one fp32
  /// element.
  static at::Tensor scaled(const at::Tensor& loss, const at::Tensor& scale);

  /// Counts a skipped optimizer step and notifies listeners (events::StepSkipped). Call it before
  /// update().
  void note_skip(const detail::Overflow& overflow);

  /// Records where this loss overflowed, for the DivergedError, without counting a skipped step.
  /// Use it if several losses overflow in the same step: note_skip() of one of their scalers has
  /// already counted the step. Call it before update().
  void note_overflow(const detail::Overflow& overflow);

  /// Ends an iteration: updates the scale (detail::next_loss_scale) and notifies listeners
  /// (events::LossScaleUpdated). DivergedError after max_consecutive_skips consecutive iterations
  /// with found_inf; the object stays usable.
  void update(bool found_inf);

  /// Lowers a dynamic scale without an overflow: multiplies it by backoff_factor at once, whatever
  /// hysteresis is set, and restarts growth_interval. Other counters stay. Notifies listeners.
  /// Returns whether the scale has changed: false for a constant scale, and at its lower bound.
  bool back_off();

  /// Sets the scale, rounded to scale_dtype. Error unless it is positive and finite. Counters stay.
  void set_scale(double scale);

  const LossScaleOptions& options() const { return options_; }
  /// Replaces the options. Scale and counters stay. Exception: a counter at or beyond its new limit
  /// could never have an effect again, so it is set to one below the limit. Error as in the
  /// constructor.
  void set_options(const LossScaleOptions& options);
  const detail::LossScaleState& state() const { return state_; }
  std::int64_t skipped_steps() const { return skipped_; }
  std::int64_t consecutive_skips() const { return consecutive_; }

  /// Returns whether a skip should search for the names of the parameters with non-finite
  /// gradients. True if there is a listener, and at the first of consecutive skips that may end in
  /// a DivergedError. The search reads one flag per parameter from the device.
  bool wants_names() const;

  /// Saves and loads options, state and counters. load() throws FileError, and changes nothing, if
  /// the archive lacks a value or holds an invalid one. Loaded counters are adjusted to their
  /// limits as in set_options().
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  void fit_counters();

  LossScaleOptions options_;
  std::int64_t loss_id_;
  detail::LossScaleState state_;
  std::int64_t skipped_ = 0;
  std::int64_t consecutive_ = 0;
  detail::Overflow first_of_run_;  // of the current run of skips
};

}  // namespace semitone::amp
