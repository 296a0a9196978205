#include "semitone/scaling/loss_scaler.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "src/core/archive.h"

#include <torch/serialize.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace semitone::amp {

LossScaler::LossScaler(const LossScaleOptions& options, std::int64_t loss_id)
    : options_(options), loss_id_(loss_id), state_(detail::initial_loss_scale(options)) {}

namespace {

// In fp32, or fp64.
at::Tensor widened(const at::Tensor& loss) {
  if (!loss.defined() || !loss.is_floating_point()) {
    throw Error("amp.loss_scaler", "a floating-point loss",
                loss.defined() ? dtype_name(loss.scalar_type()) : "an undefined tensor");
  }
  return loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat);
}

}  // namespace

at::Tensor LossScaler::scaled(const at::Tensor& loss) const {
  return widened(loss) * state_.scale;
}

at::Tensor LossScaler::scaled(const at::Tensor& loss, const at::Tensor& scale) {
  return widened(loss) * scale.reshape({});
}

void LossScaler::note_skip(const detail::Overflow& overflow) {
  ++skipped_;
  note_overflow(overflow);
  events::emit(events::StepSkipped{overflow.parameter, overflow.parameters, consecutive_ + 1,
                                   skipped_, state_.scale});
}

void LossScaler::note_overflow(const detail::Overflow& overflow) {
  if (consecutive_ == 0 && first_of_run_.parameter.empty()) first_of_run_ = overflow;
}

void LossScaler::update(bool found_inf) {
  const detail::LossScaleState before = state_;
  state_ = detail::next_loss_scale(options_, state_, found_inf);
  events::emit(events::LossScaleUpdated{loss_id_, before.scale, state_.scale, found_inf});
  if (!found_inf) {
    consecutive_ = 0;
    first_of_run_ = {};
    return;
  }
  ++consecutive_;
  const std::int64_t limit = options_.max_consecutive_skips();
  if (limit == 0 || consecutive_ < limit) return;
  const std::string first =
      first_of_run_.parameter.empty()
          ? "the first where no gradient was looked at, as on another rank"
          : fmt::format("the first with inf or NaN in {} gradients, nearest the loss that of '{}'",
                        first_of_run_.parameters, first_of_run_.parameter);
  throw DivergedError(
      "amp.loss_scaler", fmt::format("finite gradients within {} steps", limit),
      fmt::format("{} consecutive skipped steps for loss {}, {}; the loss scale is {}",
                  consecutive_, loss_id_, first, state_.scale),
      "check the loss and the input first; a lower learning rate or gradient clipping may help, a "
      "smaller scale will not");
}

bool LossScaler::back_off() {
  if (!options_.dynamic()) return false;
  const double before = state_.scale;
  const double after = detail::backed_off_scale(options_, before);
  // Without a lower bound it could become 0. set_scale() may have set one below the bound.
  if (!(after > 0) || after >= before) return false;
  state_.scale = after;
  state_.growth_tracker = -options_.growth_delay();
  events::emit(events::LossScaleUpdated{loss_id_, before, after, /*found_inf=*/false});
  return true;
}

void LossScaler::set_scale(double scale) {
  const double rounded = options_.rounded(scale);
  if (!(rounded > 0) || !std::isfinite(rounded)) {
    throw Error("amp.loss_scaler",
                "a finite scale above 0 in " + dtype_name(options_.scale_dtype()),
                fmt::format("{}", scale));
  }
  const double before = std::exchange(state_.scale, rounded);
  events::emit(events::LossScaleUpdated{loss_id_, before, rounded, /*found_inf=*/false});
}

void LossScaler::set_options(const LossScaleOptions& options) {
  detail::initial_loss_scale(options);  // checks them
  options_ = options;
  fit_counters();
}

// The rule compares with its limits for equality: a counter at or beyond its limit would have no
// effect. load() refuses one that has to wait for longer than the delay.
void LossScaler::fit_counters() {
  state_.growth_tracker = std::max(state_.growth_tracker, -options_.growth_delay());
  if (!options_.dynamic()) return;
  if (options_.growth_interval() > 0) {
    state_.growth_tracker = std::min(state_.growth_tracker, options_.growth_interval() - 1);
  }
  if (options_.overflow_count() == OverflowCount::run_then_restart) {
    state_.overflows = std::min(state_.overflows, options_.hysteresis() - 1);
  }
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
  archive.write("init_scale", c10::IValue(options_.init_scale()));
  archive.write("growth_factor", c10::IValue(options_.growth_factor()));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor()));
  archive.write("growth_interval", c10::IValue(options_.growth_interval()));
  archive.write("growth_delay", c10::IValue(options_.growth_delay()));
  archive.write("min_scale", c10::IValue(options_.min_scale()));
  archive.write("max_scale", c10::IValue(options_.max_scale()));
  archive.write("hysteresis", c10::IValue(options_.hysteresis()));
  archive.write("overflow_count",
                c10::IValue(static_cast<std::int64_t>(options_.overflow_count())));
  archive.write("dynamic", c10::IValue(options_.dynamic()));
  archive.write("max_consecutive_skips", c10::IValue(options_.max_consecutive_skips()));
  archive.write("scale_dtype", c10::IValue(dtype_name(options_.scale_dtype())));
}

void LossScaler::load(torch::serialize::InputArchive& archive) {
  static constexpr auto kComponent = "amp.loss_scaler.load";
  const auto real = [&](const char* key) { return read_value<double>(archive, key, kComponent); };
  const auto integer = [&](const char* key) {
    return read_value<std::int64_t>(archive, key, kComponent);
  };
  const auto text = [&](const char* key) {
    return read_value<std::string>(archive, key, kComponent);
  };
  const auto require = [](bool holds, const char* expected, auto got) {
    if (!holds) throw FileError(kComponent, expected, fmt::format("{}", got));
  };
  const auto counter = [&](const char* key) {
    const std::int64_t value = integer(key);
    require(value >= 0, "counters of at least 0", value);
    return value;
  };

  LossScaler loaded = *this;
  loaded.state_ = {real("scale"), integer("growth_tracker"), counter("overflows")};
  // A rule without a lower bound can reach 0, one without an upper bound infinity.
  require(loaded.state_.scale >= 0, "a scale of at least 0", loaded.state_.scale);
  loaded.skipped_ = counter("skipped");
  loaded.consecutive_ = counter("consecutive");
  loaded.first_of_run_ = {text("first_parameter"), counter("first_parameters")};
  const std::int64_t overflow_count = integer("overflow_count");
  require(overflow_count >= 0 &&
              overflow_count <= static_cast<std::int64_t>(OverflowCount::since_growth),
          "a known overflow_count", overflow_count);
  try {
    loaded.options_.init_scale(real("init_scale"))
        .growth_factor(real("growth_factor"))
        .backoff_factor(real("backoff_factor"))
        .growth_interval(integer("growth_interval"))
        .growth_delay(integer("growth_delay"))
        .min_scale(real("min_scale"))
        .max_scale(real("max_scale"))
        .hysteresis(integer("hysteresis"))
        .overflow_count(static_cast<OverflowCount>(overflow_count))
        .dynamic(read_value<bool>(archive, "dynamic", kComponent))
        .max_consecutive_skips(integer("max_consecutive_skips"))
        .scale_dtype(parse_dtype(text("scale_dtype")));
    detail::initial_loss_scale(loaded.options_);  // checks them together
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    throw FileError(kComponent, "a valid rule", error.what());
  }
  require(loaded.state_.growth_tracker >= -loaded.options_.growth_delay(),
          "a growth_tracker of at least -growth_delay", loaded.state_.growth_tracker);
  loaded.fit_counters();
  const double before = state_.scale;
  *this = std::move(loaded);
  if (before != state_.scale)
    events::emit(events::LossScaleUpdated{loss_id_, before, state_.scale, /*found_inf=*/false});
}

}  // namespace semitone::amp
