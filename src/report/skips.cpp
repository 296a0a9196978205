#include "src/report/skips.h"

#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace semitone::report {
namespace {

// A scale of 2^16 falls below 1 within 17 skips. The first gradients are often the largest ones,
// and the scale falls again while they still vary.
constexpr std::int64_t kStartUpSteps = 100;

using ScalePlace = decltype(RunData::scale_changes)::const_iterator;

bool grew(const ScaleChange& change) {
  return change.before.has_value() && *change.before < change.after;
}

// The first change of a step or a later one.
ScalePlace first_change(const RunData& run, std::int64_t step) {
  return run.scale_changes.lower_bound({step, 0});
}

std::optional<std::int64_t> last_growth(const RunData& run, std::int64_t after,
                                        std::int64_t before) {
  std::optional<std::int64_t> step;
  for (ScalePlace change = first_change(run, after); change != first_change(run, before); ++change)
    if (grew(change->second)) step = change->first.first;
  return step;
}

std::optional<double> scale_after(const RunData& run, const SkippedStep& skip) {
  for (ScalePlace change = first_change(run, skip.step); change != first_change(run, skip.step + 1);
       ++change) {
    if (change->second.after < skip.loss_scale) return change->second.after;
  }
  return std::nullopt;
}

}  // namespace

std::string ExplainedSkip::to_string() const {
  std::string text = fmt::format("step {} was skipped: ", skip.step);
  if (skip.parameter.empty()) {
    text += "a gradient not finite on another rank";
  } else {
    text += fmt::format("gradient of '{}' not finite", skip.parameter);
    if (skip.non_finite > 1)
      text += fmt::format(" (and of {} other parameter{})", skip.non_finite - 1,
                          skip.non_finite == 2 ? "" : "s");
  }
  text += fmt::format(" at loss scale {:.8g}", skip.loss_scale);
  text += scale_after.has_value() ? fmt::format("; the scale is {:.8g} now", *scale_after)
                                  : "; the scale stays";
  return text;
}

std::string ExplainedSkip::reason() const {
  switch (kind) {
    case SkipKind::start_up:
      return "The first loss scale is high on purpose, and falls until the gradients fit.";
    case SkipKind::after_growth:
      return fmt::format(
          "The loss scale grew at step {}: a dynamic scale finds its limit by a skipped step now "
          "and "
          "then.",
          growth.value_or(0));
    case SkipKind::unexpected:
      return "The loss scale had not grown before: the gradients became larger, or are not finite "
             "at any scale.";
  }
  return {};
}

std::vector<ExplainedSkip> explain_skips(const RunData& run) {
  std::vector<ExplainedSkip> skips;
  skips.reserve(run.skipped.size());
  const std::int64_t first = run.first_step.value_or(0);
  std::int64_t search_from = first;
  bool has_grown = false;
  for (const auto& [step, skip] : run.skipped) {
    ExplainedSkip explained;
    explained.skip = skip;
    explained.scale_after = scale_after(run, skip);
    explained.growth = last_growth(run, search_from, step);
    has_grown = has_grown || explained.growth.has_value();
    if (explained.growth.has_value()) {
      explained.kind = SkipKind::after_growth;
    } else if (!has_grown && step - first < kStartUpSteps) {
      explained.kind = SkipKind::start_up;
    }
    skips.push_back(std::move(explained));
    search_from = step;
  }
  return skips;
}

std::vector<std::string> parameters_of(const std::vector<ExplainedSkip>& skips) {
  std::map<std::string, double> numbers;
  for (const ExplainedSkip& skip : skips) {
    if (!skip.skip.parameter.empty()) ++numbers[skip.skip.parameter];
  }
  Ranked ranked;
  ranked.reserve(numbers.size());
  for (const auto& [name, number] : numbers) ranked.emplace_back(number, name);
  return worst_first(std::move(ranked));
}

std::vector<std::int64_t> steps_of(const std::vector<ExplainedSkip>& skips) {
  std::vector<std::int64_t> steps;
  steps.reserve(kMostSteps);
  const std::size_t first = skips.size() > kMostSteps ? skips.size() - kMostSteps : 0;
  for (std::size_t i = first; i < skips.size(); ++i) steps.push_back(skips[i].skip.step);
  return steps;
}

std::int64_t number_of(const std::vector<ExplainedSkip>& skips, SkipKind kind) {
  return std::count_if(skips.begin(), skips.end(),
                       [&](const ExplainedSkip& skip) { return skip.kind == kind; });
}

}  // namespace semitone::report
