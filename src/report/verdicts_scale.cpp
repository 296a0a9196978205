// The loss and its scale.

#include "src/core/counted.h"
#include "src/report/skips.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <map>

namespace semitone::report {
namespace {

// Skips in a row at one scale that are no hysteresis (DeepSpeed's default is 2).
constexpr std::int64_t kStuckRow = 3;
constexpr std::int64_t kManyFirstSkips = 5;
constexpr int kManyGrowths = 2;

// Whether the run ends with skips that leave the scale as it is.
bool is_stuck(const ExplainedSkip& last, const RunData& run) {
  return last.skip.step == run.last_step && last.skip.consecutive >= kStuckRow &&
         last.skip.loss_scale == run.last_scale(last.loss_id) && !last.scale_after.has_value();
}

}  // namespace

std::optional<Verdict> judge_losses(const Evidence& evidence) {
  const RunData& run = evidence.run;
  std::vector<std::int64_t> steps;
  std::int64_t number = 0;
  for (const auto& [step, loss] : run.losses) {
    // A skipped step has done no harm.
    if (std::isfinite(loss) || run.was_skipped(step)) continue;
    ++number;
    if (steps.size() < kMostSteps) steps.push_back(step);
  }
  if (number == 0) return std::nullopt;
  std::optional<Verdict> verdict =
      number_verdict(Severity::problem, "nonfinite_loss", static_cast<double>(number),
                     number == 1 ? "step" : "steps");
  verdict->steps = steps;
  verdict->title =
      fmt::format("The loss is not finite in {} of {} recorded steps, first in step {}", number,
                  run.losses.size(), steps.front());
  verdict->detail = "The forward pass made an inf or a NaN, or the weights have one.";
  verdict->remedy =
      "find the operator with report::NonFiniteCheck (semitone train --check-nonfinite), from a "
      "checkpoint before that step";
  return verdict;
}

std::optional<Verdict> judge_low_scale(const Evidence& evidence) {
  const auto skips = explain_skips(evidence.run);
  if (skips.empty()) return std::nullopt;
  const ExplainedSkip& last = skips.back();
  const auto scale = evidence.run.last_scale(last.loss_id);
  const bool stuck = is_stuck(last, evidence.run);
  if (!scale.has_value() || (*scale >= 1 && !stuck)) return std::nullopt;
  std::optional<Verdict> verdict = number_verdict(Severity::problem, "low_scale", *scale, "");
  verdict->where = parameters_of(skips);
  verdict->steps = steps_of(skips);
  verdict->title =
      stuck
          ? fmt::format("Steps are skipped and the loss scale stays at {:.3g}", *scale)
          : fmt::format("The loss scale fell to {:.3g}: gradients overflow even unscaled", *scale);
  verdict->detail =
      "A scale below 1 makes gradients smaller than they are: a value of the backward pass is "
      "larger than the format's largest number, or not finite at any scale.";
  if (stuck)
    verdict->detail =
        fmt::format("The scale is constant or at its minimum, and the last {} steps were skipped.",
                    last.skip.consecutive);
  verdict->remedy =
      "train in bfloat16 (--dtype bf16), or divide the loss by the number of its elements (mean "
      "instead of sum); report::NonFiniteCheck names the operator";
  return verdict;
}

std::optional<Verdict> judge_growing_scale(const Evidence& evidence) {
  int growths = 0;
  bool has_fallen = !evidence.run.skipped.empty();
  for (const auto& [key, change] : evidence.run.scale_changes) {
    if (change.loss_id != 0 || !change.before.has_value()) continue;
    if (change.after > *change.before) ++growths;
    has_fallen = has_fallen || change.after < *change.before;
  }
  if (growths < kManyGrowths || has_fallen) return std::nullopt;
  const double scale = evidence.run.last_scale(0).value_or(1);
  std::optional<Verdict> verdict = number_verdict(Severity::advice, "growing_scale", scale, "");
  verdict->title = fmt::format("The loss scale only grew: {} times, to {:.8g}", growths, scale);
  verdict->detail =
      "It began lower than the gradients allow, so the first steps lost more small gradients.";
  verdict->remedy = fmt::format("begin with LossScaleOptions::init_scale({:.8g})", scale);
  return verdict;
}

std::optional<Verdict> judge_first_scale(const Evidence& evidence) {
  const auto skips = explain_skips(evidence.run);
  const auto number = number_of(skips, SkipKind::start_up);
  if (number < kManyFirstSkips || judge_low_scale(evidence).has_value()) return std::nullopt;
  std::optional<double> scale;
  for (const ExplainedSkip& skip : skips) {
    if (skip.kind == SkipKind::start_up && skip.scale_after.has_value()) scale = skip.scale_after;
  }
  if (!scale.has_value()) return std::nullopt;
  std::optional<Verdict> verdict =
      number_verdict(Severity::advice, "first_scale", static_cast<double>(number), "steps");
  verdict->title = fmt::format("The first loss scale cost {}", counted(number, "skipped step"));
  verdict->detail = fmt::format("The first scale at which the gradients fit was {:.8g}.", *scale);
  verdict->remedy = fmt::format("begin with LossScaleOptions::init_scale({:.8g})", *scale);
  return verdict;
}

}  // namespace semitone::report
