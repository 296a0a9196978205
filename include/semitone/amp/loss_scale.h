#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>

/// The rule by which a loss scale moves, as a value and a pure function: no tensors, no device, no
/// side effects. GradScaler and MixedPrecision apply it; tests run it against what PyTorch, Apex,
/// Paddle and DeepSpeed compute.
namespace semitone::amp {

/// How overflowing steps are counted before the scale backs off: LossScaleOptions::hysteresis of
/// them.
enum class OverflowCount {
  /// Overflows in a row; a good step forgets them, and so does a backoff: with hysteresis 2, every
  /// second overflow of a run backs off. Paddle's decr_every_n_nan_or_inf.
  run_then_restart,
  /// Overflows in a row; a good step forgets them: with hysteresis 2, a run backs off from its
  /// second overflow on, at every step. Apex's update_scale_hysteresis; DeepSpeed with
  /// consecutive_hysteresis.
  run,
  /// Overflows since the scale last grew, in a row or not. DeepSpeed's default.
  since_growth,
};

/// Parameters of the rule. The defaults are those of torch.amp.GradScaler, with a floor: torch's
/// scale can fall to 0, where all gradients are NaN and training is lost without a word.
///
/// Setters return the object, so that calls chain; each is an Error for a value out of its range:
///
///     auto rule = LossScaleOptions().init_scale(1024).growth_interval(500).min_scale(1);
class LossScaleOptions {
 public:
  /// The presets: what each system does by default, to the bit.
  static LossScaleOptions torch();      ///< torch.amp.GradScaler: no floor
  static LossScaleOptions apex();       ///< apex.amp "dynamic": at most 2^24, no floor, fp64
  static LossScaleOptions paddle();     ///< paddle.amp.GradScaler with the kernel's floor of 1
  static LossScaleOptions deepspeed();  ///< 2^16, window 1000, hysteresis 2, floor 1, fp64
  /// A scale that never moves: 1 for bf16, or a number that is known to work.
  static LossScaleOptions fixed(double scale);

  /// First scale, clamped to max_scale; above 0. Default 65536.
  LossScaleOptions& init_scale(double value);
  /// Multiplies the scale after growth_interval good steps in a row; at least 1. Default 2.
  LossScaleOptions& growth_factor(double value);
  /// Multiplies the scale at an overflow; in (0, 1). Default 0.5.
  LossScaleOptions& backoff_factor(double value);
  /// Good steps in a row between two growths; 0: never grows. Default 2000.
  LossScaleOptions& growth_interval(std::int64_t value);
  /// Good steps that do not count towards growth_interval, at the start and after each overflow.
  /// Default 0; 1 is DeepSpeed's way.
  LossScaleOptions& growth_delay(std::int64_t value);
  /// Floor: a backoff gives max(min_scale, scale * backoff_factor). 0: none. Default 2^-24, the
  /// mirror of Apex's ceiling: a loss so large that its gradients overflow fp16 even unscaled is
  /// still trained, and 1/scale stays finite.
  LossScaleOptions& min_scale(double value);
  /// Ceiling: a growth gives min(max_scale, scale * growth_factor). A product that is not finite is
  /// refused and the scale stays, unless max_scale is infinite. Default: the largest fp32.
  LossScaleOptions& max_scale(double value);
  /// Overflows until the scale backs off, counted as overflow_count says; at least 1. Default 1,
  /// at each.
  LossScaleOptions& hysteresis(std::int64_t value);
  /// Default: run.
  LossScaleOptions& overflow_count(OverflowCount value);
  /// False: the scale never moves. Steps with inf or NaN are still found and skipped; but
  /// MixedPrecision with a scale of 1 and without master weights, which is plain training, does not
  /// look for any. Default true.
  LossScaleOptions& dynamic(bool value);
  /// Stop with a DivergedError that names the first non-finite parameter after so many skipped
  /// steps in a row; 0: never. Default 0. Where no step is skipped, see dynamic, it does nothing.
  LossScaleOptions& max_consecutive_skips(std::int64_t value);
  /// What the scale is rounded to: fp32 as torch, or fp64. Default fp32.
  LossScaleOptions& scale_dtype(c10::ScalarType value);

  /// A scale as scale_dtype holds it.
  double rounded(double scale) const;

  double init_scale() const { return init_scale_; }
  double growth_factor() const { return growth_factor_; }
  double backoff_factor() const { return backoff_factor_; }
  std::int64_t growth_interval() const { return growth_interval_; }
  std::int64_t growth_delay() const { return growth_delay_; }
  double min_scale() const { return min_scale_; }
  double max_scale() const { return max_scale_; }
  std::int64_t hysteresis() const { return hysteresis_; }
  OverflowCount overflow_count() const { return overflow_count_; }
  bool dynamic() const { return dynamic_; }
  std::int64_t max_consecutive_skips() const { return max_consecutive_skips_; }
  c10::ScalarType scale_dtype() const { return scale_dtype_; }

 private:
  double init_scale_ = 65536.0;
  double growth_factor_ = 2.0;
  double backoff_factor_ = 0.5;
  std::int64_t growth_interval_ = 2000;
  std::int64_t growth_delay_ = 0;
  double min_scale_ = 0x1p-24;
  double max_scale_ = double{std::numeric_limits<float>::max()};
  std::int64_t hysteresis_ = 1;
  OverflowCount overflow_count_ = OverflowCount::run;
  bool dynamic_ = true;
  std::int64_t max_consecutive_skips_ = 0;
  c10::ScalarType scale_dtype_ = c10::ScalarType::Float;
};

/// Where a loss scale stands.
struct LossScaleState {
  double scale = 65536.0;
  /// Good steps since the last overflow or growth; it starts at -growth_delay. torch:
  /// _growth_tracker, Apex: unskipped, Paddle: good_steps.
  std::int64_t growth_tracker = 0;
  /// Overflows counted towards the next backoff. Apex: hysteresis - hysteresis_tracker, Paddle:
  /// bad_steps, DeepSpeed: hysteresis - cur_hysteresis, which stops at 1.
  std::int64_t overflows = 0;

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// The state before the first step. Error if the options contradict each other: a floor above the
/// ceiling, an init_scale that scale_dtype cannot hold.
LossScaleState initial_loss_scale(const LossScaleOptions& options);

/// The state after a step whose gradients were all finite, or not (found_inf). growth_interval, and
/// hysteresis with run_then_restart, are tested for equality: a counter beyond its limit does not
/// fire until it starts anew (torch, Paddle; LossScaler keeps its counters within their limits).
LossScaleState next_loss_scale(const LossScaleOptions& options, const LossScaleState& state,
                               bool found_inf);

}  // namespace semitone::amp
