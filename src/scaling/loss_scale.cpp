#include "semitone/scaling/loss_scale.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace semitone::amp {
namespace {

void require(bool holds, const char* expected, double got) {
  if (!holds) throw Error("amp.loss_scale", expected, fmt::format("{}", got));
}

void require(bool holds, const char* expected, std::int64_t got) {
  if (!holds) throw Error("amp.loss_scale", expected, fmt::format("{}", got));
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
      .growth_delay(1)
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
  require(value >= 0, "a growth_interval of at least 0", value);
  growth_interval_ = value;
  return *this;
}

LossScaleOptions& LossScaleOptions::growth_delay(std::int64_t value) {
  require(value >= 0, "a growth_delay of at least 0", value);
  growth_delay_ = value;
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
  require(value >= 1, "a hysteresis of at least 1", value);
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
  require(value >= 0, "max_consecutive_skips of at least 0", value);
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

double LossScaleOptions::rounded(double scale) const {
  return scale_dtype_ == c10::ScalarType::Float ? static_cast<double>(static_cast<float>(scale))
                                                : scale;
}

}  // namespace semitone::amp
