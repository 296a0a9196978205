#include "semitone/amp/divergence_guard.h"

#include "src/core/archive.h"

#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

namespace semitone::amp {
namespace {

constexpr auto kGuard = "amp.divergence_guard";

void require_option(bool right, std::string_view expected, double got) {
  if (!right) throw Error(kGuard, expected, fmt::format("{}", got));
}

void require_count(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw Error(kGuard, fmt::format("{} of at least {}", name, least), fmt::format("{}", value));
}

// A NaN has a sign, which says nothing.
std::string to_string(double loss) {
  return std::isnan(loss) ? "nan" : fmt::format("{:.6g}", loss);
}

}  // namespace

DivergenceGuard::DivergenceGuard(const DivergenceGuardOptions& options) : options_(options) {
  require_count("max_consecutive_skips", options.max_consecutive_skips(), 0);
  require_count("max_consecutive_spikes", options.max_consecutive_spikes(), 1);
  require_count("warmup_steps", options.warmup_steps(), 2);
  require_count("max_rollbacks", options.max_rollbacks(), 1);
  const double ratio = options.max_loss_ratio();
  require_option(ratio == 0 || (ratio > 1 && std::isfinite(ratio)),
                 "a max_loss_ratio of 0 (none) or above 1", ratio);
  const double z_score = options.max_z_score();
  require_option(z_score >= 0 && std::isfinite(z_score), "a max_z_score of 0 (none) or above",
                 z_score);
  require_option(options.decay() >= 0 && options.decay() < 1, "a decay in [0, 1)", options.decay());
}

void DivergenceGuard::read(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1 || !loss.is_floating_point()) {
    throw Error(kGuard, "a loss of one floating-point element",
                loss.defined() ? c10::str("shape ", loss.sizes(), " in ", loss.scalar_type())
                               : "an undefined tensor");
  }
  at::Tensor value = loss.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  if (options_.agree() != nullptr) options_.agree()(value);
  last_loss_ = value.item<double>();
  ++state_.steps;
}

double DivergenceGuard::limit() const {
  double least = std::numeric_limits<double>::infinity();
  if (state_.losses < options_.warmup_steps()) return least;
  if (options_.max_loss_ratio() > 0 && state_.mean > 0)
    least = options_.max_loss_ratio() * state_.mean;
  if (options_.max_z_score() > 0 && state_.variance > 0)
    least = std::min(least, state_.mean + options_.max_z_score() * std::sqrt(state_.variance));
  return least;
}

// West 1979, with a weight that falls to 1 - decay.
void DivergenceGuard::add(double loss) {
  ++state_.losses;
  const double weight = std::max(1 - options_.decay(), 1 / static_cast<double>(state_.losses));
  const double distance = loss - state_.mean;
  state_.mean += weight * distance;
  state_.variance = (1 - weight) * (state_.variance + weight * distance * distance);
}

DivergenceGuard::Observed DivergenceGuard::classify() {
  if (std::isfinite(last_loss_) && last_loss_ <= limit()) {
    state_.spikes = 0;
    add(last_loss_);
    return Observed::normal;
  }
  ++state_.spikes;
  return state_.spikes >= options_.max_consecutive_spikes() ? too_many_spikes() : Observed::spike;
}

DivergenceGuard::Observed DivergenceGuard::inspect(const at::Tensor& loss) {
  read(loss);
  return classify();
}

DivergenceGuard::Observed DivergenceGuard::observe(const StepResult& step) {
  if (state_.steps == 0) {
    throw Error(kGuard, "inspect(loss) before the step", "no call",
                "call it, or call observe(loss, step) instead");
  }
  if (step == Step::skipped) {
    ++state_.skips;
    const std::int64_t most = options_.max_consecutive_skips();
    return most > 0 && state_.skips >= most ? too_many_skips() : Observed::skipped;
  }
  state_.skips = 0;
  return Observed::normal;
}

DivergenceGuard::Observed DivergenceGuard::observe(const at::Tensor& loss, const StepResult& step) {
  read(loss);
  const Observed of_step = observe(step);
  if (of_step != Observed::normal) return of_step;
  return std::isfinite(last_loss_) ? classify() : not_finite();
}

DivergenceGuard::Observed DivergenceGuard::diverged(const std::string& expected,
                                                    const std::string& got,
                                                    const std::string& remedy) {
  state_.skips = 0;
  state_.spikes = 0;
  if (options_.rollback() == nullptr || rollbacks_ >= options_.max_rollbacks())
    throw DivergedError(kGuard, expected, got, remedy);
  ++rollbacks_;
  options_.rollback()(DivergedError(kGuard, expected, got, remedy));
  return Observed::rolled_back;
}

DivergenceGuard::Observed DivergenceGuard::too_many_skips() {
  return diverged(
      fmt::format("a step within {} steps", options_.max_consecutive_skips()),
      fmt::format("{} consecutive skipped steps up to step {}; before them the mean loss was {}",
                  state_.skips, state_.steps, to_string(mean_loss())),
      "check the loss and the input for inf and NaN first; a lower learning rate or gradient "
      "clipping may help, a smaller loss scale will not");
}

DivergenceGuard::Observed DivergenceGuard::not_finite() {
  return diverged(
      "a finite loss",
      fmt::format("{} in step {}, which was not skipped; before it the mean loss was {}",
                  to_string(last_loss_), state_.steps, to_string(mean_loss())),
      "load an earlier checkpoint, since the weights may be NaN; then check the input, lower "
      "the learning rate or clip gradients. With a loss scale such steps are skipped");
}

DivergenceGuard::Observed DivergenceGuard::too_many_spikes() {
  const double most = limit();
  return diverged(
      std::isfinite(most) ? fmt::format("finite losses of at most {}", to_string(most))
                          : "finite losses",
      fmt::format("{} consecutive others, the last {} in step {}; before them the mean was {} "
                  "and the standard deviation {}",
                  state_.spikes, to_string(last_loss_), state_.steps, to_string(mean_loss()),
                  to_string(std::sqrt(state_.variance))),
      std::isfinite(last_loss_)
          ? "load an earlier checkpoint, and lower the learning rate, clip gradients or skip "
            "these batches; raise max_loss_ratio or max_z_score if the loss is usually that "
            "noisy"
          : "check the input for inf and NaN, then the weights: load an earlier checkpoint if "
            "they have some. report::NonFiniteCheck names the operator that made the first");
}

void DivergenceGuard::set_step(std::int64_t step) {
  require_count("a step", step, 1);
  state_.steps = step - 1;
}

double DivergenceGuard::mean_loss() const {
  return state_.losses > 0 ? state_.mean : std::numeric_limits<double>::quiet_NaN();
}

void DivergenceGuard::save(torch::serialize::OutputArchive& archive) const {
  archive.write("steps", c10::IValue(state_.steps));
  archive.write("skips", c10::IValue(state_.skips));
  archive.write("spikes", c10::IValue(state_.spikes));
  archive.write("losses", c10::IValue(state_.losses));
  archive.write("mean", c10::IValue(state_.mean));
  archive.write("variance", c10::IValue(state_.variance));
}

void DivergenceGuard::load(torch::serialize::InputArchive& archive) {
  constexpr auto kComponent = "amp.divergence_guard.load";
  const auto count = [&](const char* key) {
    const auto value = read_value<std::int64_t>(archive, key, kComponent);
    if (value < 0)
      throw FileError(kComponent, fmt::format("'{}' of at least 0", key), fmt::format("{}", value));
    return value;
  };
  State loaded{count("steps"),
               count("skips"),
               count("spikes"),
               count("losses"),
               read_value<double>(archive, "mean", kComponent),
               read_value<double>(archive, "variance", kComponent)};
  if (!std::isfinite(loaded.mean) || !(loaded.variance >= 0) || !std::isfinite(loaded.variance)) {
    throw FileError(kComponent, "a finite mean and a finite variance of at least 0",
                    fmt::format("{} and {}", loaded.mean, loaded.variance));
  }
  state_ = loaded;
}

}  // namespace semitone::amp
