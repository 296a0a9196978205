#include "semitone/amp/loss_scaler.h"

#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/core/archive.h"

#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace semitone::amp {

LossScaler::LossScaler(const LossScaleOptions& options, std::int64_t loss_id)
    : options_(options), loss_id_(loss_id), state_(initial_loss_scale(options)) {}

at::Tensor LossScaler::scaled(const at::Tensor& loss) const {
  if (!loss.defined() || !loss.is_floating_point()) {
    throw Error("amp.loss_scaler", "a floating-point loss",
                loss.defined() ? loss.toString() : std::string("an undefined tensor"));
  }
  const at::Tensor wide = loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat);
  return wide * state_.scale;
}

void LossScaler::note_skip(const Overflow& overflow) {
  ++skipped_;
  if (consecutive_ == 0 && !overflow.parameter.empty()) first_of_run_ = overflow;
  events::emit(events::StepSkipped{overflow.parameter, overflow.parameters, consecutive_ + 1,
                                   skipped_, state_.scale});
}

void LossScaler::update(bool found_inf) {
  const LossScaleState before = state_;
  state_ = next_loss_scale(options_, state_, found_inf);
  events::emit(events::LossScaleUpdated{loss_id_, before.scale, state_.scale, found_inf});
  if (!found_inf) {
    consecutive_ = 0;
    return;
  }
  ++consecutive_;
  const std::int64_t limit = options_.max_consecutive_skips();
  if (limit > 0 && consecutive_ >= limit) {
    throw DivergedError(
        "amp.loss_scaler", "a finite gradient within " + std::to_string(limit) + " steps",
        std::to_string(consecutive_) + " skipped steps in a row, the first with inf or NaN in " +
            std::to_string(first_of_run_.parameters) + " gradients, nearest the loss that of '" +
            first_of_run_.parameter + "'; the loss scale is " + std::to_string(state_.scale),
        "look at the loss and the input first: a lower learning rate or gradient clipping may "
        "help, a smaller scale "
        "will not");
  }
}

void LossScaler::set_scale(double scale) {
  if (!(scale > 0) || !std::isfinite(scale)) {
    throw Error("amp.loss_scaler", "a finite scale above 0", std::to_string(scale));
  }
  state_.scale = scale;
}

bool LossScaler::wants_names() const {
  return events::listening() || (options_.max_consecutive_skips() > 0 && consecutive_ == 0);
}

void LossScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(state_.scale));
  archive.write("growth_tracker", c10::IValue(state_.growth_tracker));
  archive.write("overflows", c10::IValue(state_.overflows));
  archive.write("skipped", c10::IValue(skipped_));
  archive.write("consecutive", c10::IValue(consecutive_));
  archive.write("first_parameter", c10::IValue(first_of_run_.parameter));
  archive.write("first_parameters", c10::IValue(first_of_run_.parameters));
  archive.write("growth_factor", c10::IValue(options_.growth_factor()));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor()));
  archive.write("growth_interval", c10::IValue(options_.growth_interval()));
}

void LossScaler::load(torch::serialize::InputArchive& archive) {
  constexpr auto kWhere = "amp.loss_scaler.load";
  LossScaler loaded = *this;
  loaded.set_scale(read_value<double>(archive, "scale", kWhere));
  loaded.state_.growth_tracker = read_value<std::int64_t>(archive, "growth_tracker", kWhere);
  loaded.state_.overflows = read_value<std::int64_t>(archive, "overflows", kWhere);
  loaded.skipped_ = read_value<std::int64_t>(archive, "skipped", kWhere);
  loaded.consecutive_ = read_value<std::int64_t>(archive, "consecutive", kWhere);
  loaded.first_of_run_.parameter = read_value<std::string>(archive, "first_parameter", kWhere);
  loaded.first_of_run_.parameters = read_value<std::int64_t>(archive, "first_parameters", kWhere);
  loaded.options_.growth_factor(read_value<double>(archive, "growth_factor", kWhere))
      .backoff_factor(read_value<double>(archive, "backoff_factor", kWhere))
      .growth_interval(read_value<std::int64_t>(archive, "growth_interval", kWhere));
  if (loaded.state_.growth_tracker < 0 || loaded.state_.overflows < 0 || loaded.skipped_ < 0 ||
      loaded.consecutive_ < 0) {
    throw FileError(kWhere, "counters of at least 0", "a negative one");
  }
  // The rule tests for equality with its limits: a counter beyond its limit would never fire again.
  if (const auto interval = loaded.options_.growth_interval(); interval > 0) {
    loaded.state_.growth_tracker = std::min(loaded.state_.growth_tracker, interval - 1);
  }
  if (loaded.options_.overflow_count() == OverflowCount::run_then_restart) {
    loaded.state_.overflows = std::min(loaded.state_.overflows, loaded.options_.hysteresis() - 1);
  }
  *this = loaded;
}

}  // namespace semitone::amp
