#include "src/report/verdicts.h"

#include "src/core/counted.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

namespace semitone::report {
namespace {

// What makes a training wrong comes before what makes it slow.
constexpr auto kRules = std::to_array<Rule>({
    judge_losses,
    judge_weights,
    judge_low_scale,
    judge_skipped_steps,
    judge_underflow,
    judge_updates,
    judge_outputs,
    judge_eps,
    judge_running_statistics,
    judge_subnormals,
    judge_zero_gradients,
    judge_threads,
    judge_wide_operators,
    judge_emulation,
    judge_samples,
    judge_batch_norms,
    judge_casts,
    judge_products,
    judge_communication,
    judge_data,
    judge_growing_scale,
    judge_first_scale,
    judge_sizes,
    judge_formats,
    judge_float8,
});

constexpr auto kSeverities =
    std::to_array({Severity::problem, Severity::warning, Severity::advice, Severity::good});

}  // namespace

std::string_view name_of(Severity severity) {
  switch (severity) {
    case Severity::problem:
      return "problem";
    case Severity::warning:
      return "warning";
    case Severity::advice:
      return "advice";
    case Severity::good:
      return "good";
  }
  return "";
}

std::vector<Verdict> verdicts_of(const RunData& run, const Summary& summary) {
  const bool is_bfloat16 = run.info.dtype == kNumberFormats[kBFloat16].name;
  const Evidence evidence{run, summary, sixteen_bit_format(run.info.dtype),
                          is_bfloat16 ? kBFloat16 : kFloat16};
  std::vector<Verdict> found;
  found.reserve(kRules.size());
  for (const Rule rule : kRules) {
    if (auto verdict = rule(evidence); verdict.has_value()) found.push_back(std::move(*verdict));
  }
  std::vector<Verdict> sorted;
  sorted.reserve(found.size());
  for (const Severity severity : kSeverities) {
    for (Verdict& verdict : found) {
      if (verdict.severity == severity) sorted.push_back(std::move(verdict));
    }
  }
  return sorted;
}

std::string percent(double share) {
  const double value = 100 * share;
  if (value > 0 && value < 0.01) return "less than 0.01 %";
  if (value > 99.9 && value < 100) return "more than 99.9 %";
  return fmt::format("{:.3g} %", value);
}

std::vector<std::string> worst_first(Ranked ranked) {
  constexpr std::size_t kMostNames = 10;
  std::sort(ranked.begin(), ranked.end(), [](const auto& left, const auto& right) {
    return left.first > right.first || (left.first == right.first && left.second < right.second);
  });
  ranked.resize(std::min(ranked.size(), kMostNames));
  std::vector<std::string> names;
  names.reserve(ranked.size());
  for (auto& [figure, name] : ranked) names.push_back(std::move(name));
  return names;
}

std::string first_and_others(const std::vector<std::string>& names, std::size_t all) {
  if (names.empty()) return {};
  if (all < 2) return fmt::format("'{}'", names.front());
  return fmt::format("'{}' and {}", names.front(),
                     counted(static_cast<std::int64_t>(all) - 1, "other"));
}

std::optional<Verdict> number_verdict(Severity severity, std::string id, double figure,
                                      std::string unit) {
  std::optional<Verdict> verdict(std::in_place);
  verdict->severity = severity;
  verdict->id = std::move(id);
  verdict->figure = figure;
  verdict->unit = std::move(unit);
  return verdict;
}

std::optional<Verdict> share_verdict(Severity severity, std::string id, double share) {
  return number_verdict(severity, std::move(id), 100 * share, "%");
}

}  // namespace semitone::report
