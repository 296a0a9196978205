#include "src/train/nonfinite_steps.h"

#include "semitone/core/error.h"
#include "src/train/diverged_elsewhere.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

constexpr auto kNonfiniteSteps = "train.trainer";

report::NonFiniteCheckOptions options_for(std::int64_t first_step, const comm::Group& group) {
  auto options = report::NonFiniteCheckOptions().first_step(first_step);
  if (group.size() > 1) options.rank(group.rank());
  return options;
}

// What the ranks send: nothing; or whether an operator or function is named (m), the value came from
// outside (o) or the check itself failed (f), and the text.
std::string message_of(const report::NonFiniteCheck& check) {
  const auto finding = check.finding();
  if (finding.has_value()) {
    const bool is_from_outside = finding->origin == report::NonFiniteFinding::Origin::outside;
    return (is_from_outside ? "o" : "m") + finding->to_string();
  }
  try {
    check.throw_if_found();
  } catch (const Error& error) {
    return std::string("f") + error.what();
  }
  return {};
}

}  // namespace

NonFiniteSteps::NonFiniteSteps(bool is_on, const torch::nn::Module& model, std::int64_t first_step,
                               comm::Group group)
    : group_(std::move(group)) {
  if (is_on) check_.emplace(model, options_for(first_step, group_));
}

void NonFiniteSteps::after_step(bool was_skipped, Observer& observer) {
  if (!check_.has_value()) return;
  const std::string mine = message_of(*check_);
  const std::int64_t step = check_->step();
  const auto all = group_.size() > 1 ? group_.all_gather(mine) : std::vector{mine};
  check_->next_step();
  const auto begins_with = [&](char origin) {
    return std::find_if(all.begin(), all.end(), [&](const std::string& message) {
      return !message.empty() && message.front() == origin;
    });
  };
  auto chosen = begins_with('m');
  if (chosen == all.end()) chosen = begins_with('o');
  if (chosen == all.end()) {
    const auto failed = begins_with('f');
    if (failed == all.end()) return;
    throw Error(kNonfiniteSteps, "a check for non-finite values that looks at every result",
                failed->substr(1));
  }
  const std::string text = chosen->substr(1);
  if (was_skipped) return observer.on(NonFiniteStep{step, text});
  constexpr auto kExpected = "finite results of all operators";
  if (chosen - all.begin() != group_.rank())
    throw DivergedElsewhere(kNonfiniteSteps, kExpected, text);
  throw DivergedError(kNonfiniteSteps, kExpected, text,
                      "check the arguments, lower the learning rate, or use a level with a loss "
                      "scale");
}

void NonFiniteSteps::continue_at(std::int64_t step) {
  while (check_.has_value() && check_->step() < step) check_->next_step();
}

}  // namespace semitone::train
