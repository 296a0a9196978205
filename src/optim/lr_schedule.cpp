#include "semitone/optim/lr_schedule.h"

#include "semitone/core/error.h"
#include "src/optim/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <string_view>

namespace semitone::optim {
namespace {

void require_steps(std::string_view component, std::string_view name, std::int64_t value) {
  if (value >= 1) return;
  throw Error(component, c10::str(name, " of at least 1"), c10::str(value));
}

void require_positive(std::string_view component, std::string_view name, double value) {
  require_range(component, name, value, std::numeric_limits<double>::denorm_min());
}

// Error unless low <= value <= high. A NaN is never in range.
void require_fraction(std::string_view component, std::string_view name, double value,
                      double high = 1) {
  if (value >= 0 && value <= high) return;
  throw Error(component, c10::str(name, " in [0, ", high, "]"), c10::str(value));
}

void require_ascending(std::string_view component, const std::vector<std::int64_t>& milestones) {
  std::int64_t last = 0;
  for (const std::int64_t milestone : milestones) {
    if (milestone <= last) {
      throw Error(component, "milestones above 0 in ascending order",
                  c10::str("[", c10::Join(", ", milestones), "]"));
    }
    last = milestone;
  }
}

// The part of `steps` that has been done, from 0 to 1.
double done(std::int64_t step, std::int64_t steps) {
  return static_cast<double>(std::min(step, steps)) / static_cast<double>(steps);
}

// The number of milestones that have been reached.
std::size_t reached(const std::vector<std::int64_t>& milestones, std::int64_t step) {
  return static_cast<std::size_t>(std::upper_bound(milestones.begin(), milestones.end(), step) -
                                  milestones.begin());
}

double half_cosine(double from, double to, double fraction) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * fraction)) / 2;
}

}  // namespace

double LRSchedule::lr(double base_lr, std::int64_t step) const {
  const auto end = total_steps();
  if (step < 0 || (end.has_value() && step > *end)) {
    throw Error(
        "optim.lr_schedule",
        end.has_value() ? c10::str("a step from 0 to ", *end) : "a step of at least 0",
        c10::str(step),
        "give the schedule the number of all steps of the training: the rate after the last "
        "one is not defined");
  }
  return schedule_->lr(base_lr, step);
}

double LinearLR::lr(double base_lr, std::int64_t step) const {
  return base_lr * (start_factor() + (end_factor() - start_factor()) * done(step, total_iters()));
}

void LinearLR::check() const {
  constexpr auto kComponent = "optim.linear_lr";
  require_steps(kComponent, "total_iters", total_iters());
  require_fraction(kComponent, "start_factor", start_factor());
  require_fraction(kComponent, "end_factor", end_factor());
}

double CosineAnnealingLR::lr(double base_lr, std::int64_t step) const {
  if (base_lr < eta_min()) {
    throw Error("optim.cosine_annealing_lr", c10::str("base rates of at least eta_min ", eta_min()),
                c10::str(base_lr), "lower eta_min, or raise the learning rate of the group");
  }
  return half_cosine(base_lr, eta_min(), done(step, T_max()));
}

void CosineAnnealingLR::check() const {
  constexpr auto kComponent = "optim.cosine_annealing_lr";
  require_steps(kComponent, "T_max", T_max());
  require_range(kComponent, "eta_min", eta_min(), 0);
}

double PolynomialLR::lr(double base_lr, std::int64_t step) const {
  return base_lr * std::pow(1 - done(step, total_iters()), power());
}

void PolynomialLR::check() const {
  constexpr auto kComponent = "optim.polynomial_lr";
  require_steps(kComponent, "total_iters", total_iters());
  require_positive(kComponent, "power", power());
}

double StepLR::lr(double base_lr, std::int64_t step) const {
  const std::int64_t decays = step / step_size();
  return base_lr * std::pow(gamma(), static_cast<double>(decays));
}

void StepLR::check() const {
  constexpr auto kComponent = "optim.step_lr";
  require_steps(kComponent, "step_size", step_size());
  require_positive(kComponent, "gamma", gamma());
}

double MultiStepLR::lr(double base_lr, std::int64_t step) const {
  return base_lr * std::pow(gamma(), static_cast<double>(reached(milestones(), step)));
}

void MultiStepLR::check() const {
  constexpr auto kComponent = "optim.multi_step_lr";
  require_ascending(kComponent, milestones());
  require_positive(kComponent, "gamma", gamma());
}

double OneCycleLR::between(double from, double to, double fraction) const {
  return anneal_strategy() == AnnealStrategy::cos ? half_cosine(from, to, fraction)
                                                  : from + (to - from) * fraction;
}

// As in torch.optim.lr_scheduler.OneCycleLR, the ends of the phases are fractions of steps.
double OneCycleLR::lr(double base_lr, std::int64_t step) const {
  const double initial = base_lr / div_factor();
  const double final_lr = initial / final_div_factor();
  const auto steps = static_cast<double>(total_steps_);
  struct Phase {
    double end;
    double from;
    double to;
  };
  const double rise = pct_start() * steps;
  const Phase up{rise - 1, initial, base_lr};
  const auto phases = three_phase() ? std::array{up, Phase{2 * rise - 2, base_lr, initial},
                                                 Phase{steps - 1, initial, final_lr}}
                                    : std::array{up, up, Phase{steps - 1, base_lr, final_lr}};
  // The rate after the last step, which no step uses, is that of the last step.
  const double at = std::min(static_cast<double>(step), steps - 1);
  double start = 0;
  for (const Phase& phase : phases) {
    if (at <= phase.end || &phase == &phases.back()) {
      const double length = phase.end - start;
      return between(phase.from, phase.to, length > 0 ? (at - start) / length : 1);
    }
    start = phase.end;
  }
  return final_lr;
}

void OneCycleLR::check() const {
  constexpr auto kComponent = "optim.one_cycle_lr";
  require_steps(kComponent, "total_steps", total_steps_);
  require_fraction(kComponent, three_phase() ? "pct_start of three phases" : "pct_start",
                   pct_start(), three_phase() ? 0.5 : 1);
  require_positive(kComponent, "div_factor", div_factor());
  require_positive(kComponent, "final_div_factor", final_div_factor());
}

void LambdaLR::check() const {
  if (factor_ == nullptr) throw Error("optim.lambda_lr", "a function", "an empty one");
}

double SequentialLR::lr(double base_lr, std::int64_t step) const {
  const std::size_t index = reached(milestones_, step);
  return schedules_[index].lr(base_lr, index == 0 ? step : step - milestones_[index - 1]);
}

void SequentialLR::check() const {
  constexpr auto kComponent = "optim.sequential_lr";
  if (schedules_.empty() || milestones_.size() + 1 != schedules_.size()) {
    throw Error(kComponent, "one milestone between each two schedules",
                c10::str(schedules_.size(), " schedules and ", milestones_.size(), " milestones"),
                "give the step at which each schedule but the first starts");
  }
  require_ascending(kComponent, milestones_);
  for (std::size_t i = 0; i < milestones_.size(); ++i) {
    const auto end = schedules_[i].total_steps();
    const std::int64_t steps = milestones_[i] - (i == 0 ? 0 : milestones_[i - 1]);
    if (end.has_value() && *end < steps) {
      throw Error(
          kComponent,
          c10::str("a schedule of at least ", steps, " steps before milestone ", milestones_[i]),
          c10::str("one of ", *end), "move the milestone, or make the schedule longer");
    }
  }
}

std::optional<std::int64_t> SequentialLR::total_steps() const {
  auto end = schedules_.back().total_steps();
  if (end.has_value() && !milestones_.empty()) *end += milestones_.back();
  return end;
}

}  // namespace semitone::optim
