#pragma once

#include "semitone/amp/loss_scale.h"

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <string>

namespace semitone::amp {

/// Where non-finite gradients were found.
struct Overflow {
  /// The non-finite parameter nearest the loss. Backward runs from the loss to the input and inf
  /// spreads with it, so this is the one that went wrong first: the last of the non-finite ones in
  /// the model's order. Empty where nobody looked, or where it was on another rank.
  std::string parameter;
  std::int64_t parameters = 0;  ///< how many parameters have an inf or NaN in their gradient
};

/// One loss scale in use: the rule, its state, and the count of what was skipped. GradScaler holds
/// one, MixedPrecision one per loss. Lives on the host; a copy is a snapshot.
class LossScaler {
 public:
  /// @param loss_id  number for events and messages
  /// Error if the options contradict each other: see initial_loss_scale.
  explicit LossScaler(const LossScaleOptions& options = {}, std::int64_t loss_id = 0);

  /// What losses are multiplied by.
  double scale() const { return state_.scale; }
  /// What gradients are multiplied by: 1/scale in fp64, rounded to fp32, as torch does it.
  float inverse() const { return static_cast<float>(1.0 / state_.scale); }
  /// loss * scale, recorded by autograd, in fp32 or fp64: fp16 holds nothing above 65504. Error for
  /// a loss that is not floating-point.
  at::Tensor scaled(const at::Tensor& loss) const;
  /// loss * scale likewise, by a scale in the device's memory, of one fp32 element: for a step that
  /// is captured.
  static at::Tensor scaled(const at::Tensor& loss, const at::Tensor& scale);

  /// An optimizer step of this iteration is skipped: counts it and tells listeners
  /// (events::StepSkipped). Before update().
  void note_skip(const Overflow& overflow);

  /// Where this loss overflowed in a step that is skipped, and counted, because of another one too:
  /// for the DivergedError. Before update().
  void note_overflow(const Overflow& overflow);

  /// The iteration is over: moves the scale (next_loss_scale) and tells listeners
  /// (events::LossScaleUpdated). DivergedError after max_consecutive_skips iterations in a row with
  /// found_inf; the object stays usable.
  void update(bool found_inf);

  /// Replaces the scale, rounded to scale_dtype; Error unless positive and finite. Counters stay.
  void set_scale(double scale);

  const LossScaleOptions& options() const { return options_; }
  /// Replaces the rule. Scale and counters stay; a counter that the new rule's limits would never
  /// let fire again is set back to one before its limit. Error as in the constructor.
  void set_options(const LossScaleOptions& options);
  const LossScaleState& state() const { return state_; }
  std::int64_t skipped_steps() const { return skipped_; }
  std::int64_t consecutive_skips() const { return consecutive_; }

  /// Whether it is worth searching for the names of non-finite parameters at this skip: somebody
  /// listens, or this is the first of a run that may end in a DivergedError. The search reads one
  /// flag per parameter from the device.
  bool wants_names() const;

  /// Rule, state and counters. load() is a FileError, and changes nothing, if the archive lacks one
  /// or holds nonsense; its counters are fitted to their limits as in set_options().
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  void fit_counters();

  LossScaleOptions options_;
  std::int64_t loss_id_;
  LossScaleState state_;
  std::int64_t skipped_ = 0;
  std::int64_t consecutive_ = 0;
  Overflow first_of_run_;  // of the current run of skips
};

}  // namespace semitone::amp
