#include "src/report/skips.h"

#include "src/core/counted.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <utility>

namespace semitone::report {
namespace {

// A scale of 2^16 falls below 1 within 17 skips. The first gradients are often the largest ones,
// and the scale falls again while they still vary.
constexpr std::int64_t kStartUpSteps = 100;

// The changes of a loss's scale, by step.
using Scale = std::map<std::int64_t, ScaleChange>;

std::map<std::int64_t, Scale> scales_by_loss(const RunData& run) {
  std::map<std::int64_t, Scale> scales;
  for (const auto& [key, change] : run.scale_changes) scales[key.second][key.first] = change;
  return scales;
}

bool changed_from(const Scale& scale, const SkippedStep& skip) {
  const auto change = scale.find(skip.step);
  return change != scale.end() && change->second.before == skip.loss_scale &&
         change->second.after < skip.loss_scale;
}

bool was_in_force(const Scale& scale, const SkippedStep& skip) {
  const auto next = scale.lower_bound(skip.step);
  return next != scale.begin() && std::prev(next)->second.after == skip.loss_scale;
}

// The loss whose scale a skipped step had: lines of skips do not name it.
std::int64_t loss_of(const SkippedStep& skip, const std::map<std::int64_t, Scale>& scales) {
  for (auto* const is_its : {changed_from, was_in_force}) {
    for (const auto& [loss_id, scale] : scales) {
      if (is_its(scale, skip)) return loss_id;
    }
  }
  return scales.empty() ? 0 : scales.begin()->first;
}

// The last growth before a step, and not before another one. A scale that begins anew is in force in
// the step of its line already, one that grows after it.
std::optional<ScaleGrowth> last_growth(const Scale& scale, std::int64_t after,
                                       std::int64_t before) {
  std::optional<ScaleGrowth> growth;
  std::optional<double> previous;
  for (const auto& [step, change] : scale) {
    if (step > before) break;
    const double begin = change.before.value_or(change.after);
    const bool began_anew = previous.has_value() && begin > *previous;
    const bool has_grown = step < before && begin < change.after;
    if (step >= after && (began_anew || has_grown))
      growth = {step, began_anew, began_anew ? *previous : begin};
    previous = change.after;
  }
  return growth;
}

std::optional<double> lowered_to(const Scale& scale, const SkippedStep& skip) {
  const auto change = scale.find(skip.step);
  if (change == scale.end() || change->second.after >= skip.loss_scale) return std::nullopt;
  return change->second.after;
}

// Whether the scale's next value is a lower one: with hysteresis, that of a later step.
bool falls_from(const Scale& scale, const SkippedStep& skip) {
  for (auto change = scale.lower_bound(skip.step); change != scale.end(); ++change) {
    if (change->second.after != skip.loss_scale) return change->second.after < skip.loss_scale;
  }
  return false;
}

// What the skips so far tell of a loss's scale.
struct Search {
  std::int64_t from = 0;              // the step of the last skip
  std::optional<ScaleGrowth> growth;  // the last one
};

// The growth that a skip tried. The scale may stay for some skips (hysteresis), and one that began
// anew may fall several times: until it is where it was before.
std::optional<ScaleGrowth> growth_of(const SkippedStep& skip, const Scale& scale,
                                     const Search& search) {
  if (const auto growth = last_growth(scale, search.from, skip.step)) return growth;
  const bool is_above = search.growth.has_value() && skip.loss_scale > search.growth->from;
  return is_above && falls_from(scale, skip) ? search.growth : std::nullopt;
}

SkipKind kind_of(const ExplainedSkip& skip, const Scale& scale, const Search& search,
                 std::int64_t first_step) {
  if (skip.growth.has_value()) return SkipKind::after_growth;
  const bool is_at_start =
      !search.growth.has_value() && skip.skip.step - first_step < kStartUpSteps;
  return is_at_start && falls_from(scale, skip.skip) ? SkipKind::start_up : SkipKind::unexpected;
}

}  // namespace

std::string ExplainedSkip::cause() const {
  std::string text;
  if (skip.parameter.empty()) {
    text = "a gradient on another rank was";
  } else if (skip.non_finite > 1) {
    text = fmt::format("the gradients of '{}' and {} were", skip.parameter,
                       counted(skip.non_finite - 1, "other parameter"));
  } else {
    text = fmt::format("the gradient of '{}' was", skip.parameter);
  }
  text += fmt::format(" not finite at loss scale {:.8g}", skip.loss_scale);
  text += scale_after.has_value() ? fmt::format("; the scale fell to {:.8g}", *scale_after)
                                  : "; the scale stayed the same";
  return text;
}

std::string ExplainedSkip::to_string() const {
  return fmt::format("{} {} was skipped: {}", skip.is_exact ? "step" : "one of the steps up to",
                     skip.step, cause());
}

std::string ExplainedSkip::reason() const {
  switch (kind) {
    case SkipKind::start_up:
      return "The first loss scale is high on purpose, and falls until the gradients fit.";
    case SkipKind::after_growth: {
      const ScaleGrowth last = growth.value_or(ScaleGrowth());
      return fmt::format(
          "The loss scale {} at step {}. A dynamic scale finds its limit by growing until a step "
          "is skipped.",
          last.began_anew ? "began anew" : "grew", last.step);
    }
    case SkipKind::unexpected:
      return "The gradients became larger, or are not finite at any scale.";
  }
  return {};
}

std::vector<ExplainedSkip> explain_skips(const RunData& run) {
  std::vector<ExplainedSkip> skips;
  skips.reserve(run.skipped.size());
  std::map<std::int64_t, Scale> scales = scales_by_loss(run);
  const std::int64_t first = run.first_step.value_or(0);
  std::map<std::int64_t, Search> searches;  // by loss
  for (const auto& [step, skip] : run.skipped) {
    ExplainedSkip explained;
    explained.skip = skip;
    explained.loss_id = loss_of(skip, scales);
    const Scale& scale = scales[explained.loss_id];
    Search& search = searches.try_emplace(explained.loss_id, Search{first, {}}).first->second;
    explained.scale_after = lowered_to(scale, skip);
    explained.growth = growth_of(skip, scale, search);
    explained.kind = kind_of(explained, scale, search, first);
    if (explained.growth.has_value()) search.growth = explained.growth;
    search.from = step;
    skips.push_back(std::move(explained));
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
