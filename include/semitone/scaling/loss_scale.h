#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>

/// The rule by which a loss scale changes, as a value and a pure function: no tensors, no device,
/// no side effects. GradScaler and MixedPrecision apply it. Tests compare it with the results of
/// PyTorch, Apex, Paddle and DeepSpeed.
namespace semitone::amp {

/// How overflowing steps are counted. The scale backs off when the count reaches
/// LossScaleOptions::hysteresis.
enum class OverflowCount {
  /// Consecutive overflows; a good step and a backoff reset the count. With hysteresis 2, every
  /// second overflow in a row backs off. Paddle's decr_every_n_nan_or_inf.
  run_then_restart,
  /// Consecutive overflows; only a good step resets the count. With hysteresis 2, the second
  /// overflow in a row and each later one backs off. Apex's update_scale_hysteresis; DeepSpeed with
  /// consecutive_hysteresis.
  run,
  /// Overflows since the scale last grew, consecutive or not. DeepSpeed's default.
  since_growth,
};

/// Parameters of the rule. The defaults are those of torch.amp.GradScaler, with a lower bound.
/// Without a bound, torch's scale can fall to 0, which makes all gradients NaN and silently ruins
/// the run.
///
/// Setters return the object, so that calls chain. Each is an Error for a value out of its range:
///
///     auto rule = LossScaleOptions().init_scale(1024).growth_interval(500).min_scale(1);
class LossScaleOptions {
 public:
  /// Presets: exactly what each system does by default. The eager paddle.amp.GradScaler has no
  /// bounds: paddle().min_scale(0).max_scale(INFINITY).
  static LossScaleOptions torch();      ///< torch.amp.GradScaler: no lower bound
  static LossScaleOptions apex();       ///< apex.amp "dynamic": at most 2^24, no lower bound, fp64
  static LossScaleOptions paddle();     ///< Paddle's static programs: at least 1
  static LossScaleOptions deepspeed();  ///< growth_interval 1000, hysteresis 2, at least 1, fp64
  /// A constant scale: 1 for bf16, or a number that is known to work.
  static LossScaleOptions fixed(double scale);

  /// Initial scale, above 0; clamped to max_scale. Default 65536.
  LossScaleOptions& init_scale(double value);
  /// Multiplies the scale after growth_interval consecutive good steps; at least 1. Default 2.
  LossScaleOptions& growth_factor(double value);
  /// Multiplies the scale at an overflow; in (0, 1). Default 0.5.
  LossScaleOptions& backoff_factor(double value);
  /// Number of consecutive good steps before the scale grows; 0: it never grows. Default 2000.
  LossScaleOptions& growth_interval(std::int64_t value);
  /// Number of good steps, at the start and after each overflow, that do not count towards
  /// growth_interval. Default 0; DeepSpeed uses 1.
  LossScaleOptions& growth_delay(std::int64_t value);
  /// Lower bound: a backoff gives max(min_scale, scale * backoff_factor). 0: no bound. Default
  /// 2^-24, the reciprocal of Apex's upper bound. With this bound a loss whose gradients overflow
  /// fp16 even unscaled can still be trained, and 1/scale stays finite.
  LossScaleOptions& min_scale(double value);
  /// Upper bound: growth gives min(max_scale, scale * growth_factor). If the product is not finite,
  /// the scale stays as it is, unless max_scale is infinite. Default: the largest fp32 number.
  LossScaleOptions& max_scale(double value);
  /// Number of overflows before the scale backs off, counted as overflow_count says; at least 1.
  /// Default 1: every overflow backs off.
  LossScaleOptions& hysteresis(std::int64_t value);
  /// How overflows are counted. Default: run.
  LossScaleOptions& overflow_count(OverflowCount value);
  /// False: the scale never changes. Steps with inf or NaN are still detected and skipped.
  /// Exception: MixedPrecision does not check the gradients of *plain training*, that is training
  /// with a constant scale of 1 and without master weights. Default true.
  LossScaleOptions& dynamic(bool value);
  /// Number of consecutive skipped steps after which a DivergedError is thrown. It names the first
  /// parameter with a non-finite gradient. 0: never. Default 0. No effect in plain training, which
  /// skips no steps; see dynamic.
  LossScaleOptions& max_consecutive_skips(std::int64_t value);
  /// The dtype that the scale is rounded to: fp32, as in torch, or fp64. Default fp32.
  LossScaleOptions& scale_dtype(c10::ScalarType value);

  /// Returns a scale rounded to scale_dtype.
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

}  // namespace semitone::amp
