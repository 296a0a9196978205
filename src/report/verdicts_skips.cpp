// Skipped steps: whether they are normal, and what to change.

#include "src/core/counted.h"
#include "src/report/skips.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace semitone::report {
namespace {

// Growth with torch's interval of 2000 steps skips 0.05 % of them, with an interval of 20 nearly
// this share. More is work that is thrown away.
constexpr double kSkippedSteps = 0.05;
// From 2^16, so many skips in a row end below a scale of 1.
constexpr std::int64_t kHopelessRow = 17;

std::vector<ExplainedSkip> unexpected_ones(const std::vector<ExplainedSkip>& skips) {
  std::vector<ExplainedSkip> unexpected;
  std::copy_if(skips.begin(), skips.end(), std::back_inserter(unexpected),
               [](const ExplainedSkip& skip) { return skip.kind == SkipKind::unexpected; });
  return unexpected;
}

double share_of_steps(std::int64_t number, const RunData& run) {
  // Values in few steps do not tell how many there were.
  const std::int64_t steps = run.steps();
  return steps > 0 && number <= steps ? static_cast<double>(number) / static_cast<double>(steps)
                                      : 0;
}

std::string sentence(std::string text) {
  if (!text.empty() && text.front() >= 'a' && text.front() <= 'z')
    text.front() = static_cast<char>(text.front() - 'a' + 'A');
  return text + '.';
}

// "Step 312 was skipped" or "3 of 400 steps were skipped (0.75 %)".
std::string how_many(const std::vector<ExplainedSkip>& skips, const RunData& run) {
  const auto number = static_cast<std::int64_t>(skips.size());
  if (number == 1 && skips.front().skip.is_exact)
    return fmt::format("Step {} was skipped", skips.front().skip.step);
  if (number > run.steps()) return counted(number, "skipped step");
  return fmt::format("{} of {} steps {} skipped ({})", number, run.steps(),
                     number == 1 ? "was" : "were", percent(share_of_steps(number, run)));
}

std::optional<Verdict> no_skips() {
  std::optional<Verdict> good = share_verdict(Severity::good, "skipped_steps", 0);
  good->title = "No step was skipped";
  return good;
}

// The last skip, where the title does not name it, and why it happened.
std::string detail_of(const std::vector<ExplainedSkip>& skips) {
  const ExplainedSkip& last = skips.back();
  return fmt::format("{} {}", sentence(skips.size() == 1 ? last.cause() : last.to_string()),
                     last.reason());
}

// Of skips that all belong to the search for the scale.
std::optional<Verdict> normal_skips(const std::vector<ExplainedSkip>& skips, const RunData& run) {
  const auto number = static_cast<std::int64_t>(skips.size());
  std::optional<Verdict> good =
      share_verdict(Severity::good, "skipped_steps", share_of_steps(number, run));
  good->where = parameters_of(skips);
  good->steps = steps_of(skips);
  good->title = how_many(skips, run) + ", which is normal: " +
                (skips.back().kind == SkipKind::start_up ? "the loss scale was being found"
                                                         : "the loss scale had grown");
  good->detail = detail_of(skips) + " Nothing needs to change.";
  return good;
}

std::string remedy_for_many(const std::vector<ExplainedSkip>& skips) {
  const auto after_growth = number_of(skips, SkipKind::after_growth);
  if (2 * after_growth > static_cast<std::int64_t>(skips.size()))
    return "raise LossScaleOptions::growth_interval: the scale grows too often";
  return "find the operator with report::NonFiniteCheck (semitone train --check-nonfinite); if "
         "gradients are too large for float16, train in bfloat16 (--dtype bf16) or clip them";
}

// Many skips in a row that the run has not left behind, or at a scale that helps no gradient.
bool is_hopeless(const std::vector<ExplainedSkip>& skips, const RunData& run) {
  const ExplainedSkip& last = skips.back();
  const double scale = last.scale_after.value_or(last.skip.loss_scale);
  return last.skip.consecutive >= kHopelessRow && (last.skip.step == run.last_step || scale < 1);
}

std::optional<Verdict> many_skips(const std::vector<ExplainedSkip>& skips, const RunData& run) {
  const auto number = static_cast<std::int64_t>(skips.size());
  std::optional<Verdict> verdict =
      share_verdict(Severity::problem, "skipped_steps", share_of_steps(number, run));
  verdict->where = parameters_of(skips);
  verdict->steps = steps_of(skips);
  verdict->title = how_many(skips, run);
  if (!verdict->where.empty())
    verdict->title +=
        fmt::format(", most of them for the gradient of '{}'", verdict->where.front());
  verdict->detail = detail_of(skips);
  if (is_hopeless(skips, run))
    verdict->detail +=
        fmt::format(" {} were skipped in a row: no scale helps.", skips.back().skip.consecutive);
  verdict->remedy = remedy_for_many(skips);
  return verdict;
}

std::optional<Verdict> unexpected_skips(const std::vector<ExplainedSkip>& skips,
                                        const std::vector<ExplainedSkip>& unexpected,
                                        const RunData& run) {
  const auto number = static_cast<std::int64_t>(unexpected.size());
  std::optional<Verdict> verdict =
      share_verdict(Severity::warning, "skipped_steps", share_of_steps(number, run));
  verdict->where = parameters_of(unexpected);
  verdict->steps = steps_of(unexpected);
  verdict->title = how_many(unexpected, run) + " although the loss scale had not grown";
  verdict->detail = detail_of(unexpected);
  const auto normal = skips.size() - unexpected.size();
  if (normal > 0)
    verdict->detail += fmt::format(" {} more {} normal.", normal, normal == 1 ? "is" : "are");
  verdict->remedy = fmt::format(
      "look at the batch of step {} and at the learning rate there; clipping gradients "
      "(optim::clip_grad_norm_) or a longer warm-up avoids such peaks",
      unexpected.back().skip.step);
  return verdict;
}

}  // namespace

std::optional<Verdict> judge_skipped_steps(const Evidence& evidence) {
  const RunData& run = evidence.run;
  const auto skips = explain_skips(run);
  if (skips.empty()) {
    if (run.scale_changes.empty()) return std::nullopt;
    return no_skips();
  }
  const auto beyond_start =
      static_cast<std::int64_t>(skips.size()) - number_of(skips, SkipKind::start_up);
  if ((beyond_start > 1 && share_of_steps(beyond_start, run) > kSkippedSteps) ||
      is_hopeless(skips, run))
    return many_skips(skips, run);
  const auto unexpected = unexpected_ones(skips);
  return unexpected.empty() ? normal_skips(skips, run) : unexpected_skips(skips, unexpected, run);
}

}  // namespace semitone::report
