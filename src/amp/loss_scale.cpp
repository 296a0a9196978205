#include "semitone/amp/loss_scale.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace semitone::amp {
namespace {

void require(bool holds, const char* expected, double got) {
  if (!holds) throw Error("amp.loss_scale", expected, std::to_string(got));
}

double rounded(const LossScaleOptions& options, double value) {
  return options.scale_dtype() == c10::ScalarType::Float
             ? static_cast<double>(static_cast<float>(value))
             : value;
}

}  // namespace

LossScaleOptions LossScaleOptions::torch() {
  return LossScaleOptions().min_scale(0);
}

LossScaleOptions LossScaleOptions::apex() {
  return LossScaleOptions().min_scale(0).max_scale(0x1p24).scale_dtype(c10::ScalarType::Double);
}

LossScaleOptions LossScaleOptions::paddle() {
  return LossScaleOptions().min_scale(1).overflow_count(OverflowCount::run_then_restart);
}

LossScaleOptions LossScaleOptions::deepspeed() {
  return LossScaleOptions()
      .growth_interval(1000)
      .hysteresis(2)
      .overflow_count(OverflowCount::since_growth)
      .min_scale(1)
      .max_scale(std::numeric_limits<double>::infinity())
      .scale_dtype(c10::ScalarType::Double);
}

LossScaleOptions LossScaleOptions::fixed(double scale) {
  return LossScaleOptions().init_scale(scale).dynamic(false);
}

LossScaleOptions& LossScaleOptions::init_scale(double value) {
  require(value > 0 && std::isfinite(value), "a finite init_scale above 0", value);
  init_scale_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::growth_factor(double value) {
  require(value >= 1 && std::isfinite(value), "a growth_factor of at least 1", value);
  growth_factor_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::backoff_factor(double value) {
  require(value > 0 && value < 1, "a backoff_factor between 0 and 1", value);
  backoff_factor_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::growth_interval(std::int64_t value) {
  require(value >= 0, "a growth_interval of at least 0", static_cast<double>(value));
  growth_interval_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::min_scale(double value) {
  require(value >= 0 && std::isfinite(value), "a finite min_scale of at least 0", value);
  min_scale_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::max_scale(double value) {
  require(value > 0, "a max_scale above 0", value);
  max_scale_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::hysteresis(std::int64_t value) {
  require(value >= 1, "a hysteresis of at least 1", static_cast<double>(value));
  hysteresis_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::overflow_count(OverflowCount value) {
  overflow_count_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::dynamic(bool value) {
  dynamic_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::max_consecutive_skips(std::int64_t value) {
  require(value >= 0, "max_consecutive_skips of at least 0", static_cast<double>(value));
  max_consecutive_skips_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::scale_dtype(c10::ScalarType value) {
  if (value != c10::ScalarType::Float && value != c10::ScalarType::Double) {
    throw Error("amp.loss_scale", "scale_dtype float32 or float64", dtype_name(value));
  }
  scale_dtype_ = value;
  return *this;
}

LossScaleState initial_loss_scale(const LossScaleOptions& options) {
  LossScaleState state;
  state.scale = rounded(options, std::min(options.init_scale(), options.max_scale()));
  return state;
}

LossScaleState next_loss_scale(const LossScaleOptions& options, const LossScaleState& state,
                               bool found_inf) {
  LossScaleState next = state;
  if (!options.dynamic()) {
    next.growth_tracker = state.growth_tracker + 1;
    return next;
  }
  if (found_inf) {
    next.growth_tracker = 0;
    next.overflows = state.overflows + 1;
    const bool restart = options.overflow_count() == OverflowCount::run_then_restart;
    // Paddle tests for equality: a count restored beyond the limit never fires there.
    if (restart ? next.overflows == options.hysteresis() : next.overflows >= options.hysteresis()) {
      next.scale =
          std::max(options.min_scale(), rounded(options, state.scale * options.backoff_factor()));
      if (restart) next.overflows = 0;
    }
    return next;
  }
  if (options.overflow_count() != OverflowCount::since_growth) next.overflows = 0;
  next.growth_tracker = state.growth_tracker + 1;
  if (next.growth_tracker == options.growth_interval()) {
    const double grown = rounded(options, state.scale * options.growth_factor());
    if (std::isfinite(grown) || std::isinf(options.max_scale()))
      next.scale = std::min(options.max_scale(), grown);
    next.growth_tracker = 0;
    next.overflows = 0;
  }
  return next;
}

}  // namespace semitone::amp
