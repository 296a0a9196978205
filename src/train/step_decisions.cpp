#include "src/train/step_decisions.h"

#include <torch/types.h>

#include <algorithm>
#include <utility>

namespace semitone::train {
namespace {

constexpr std::chrono::duration<double> kBetweenQuestions = std::chrono::milliseconds(50);
// If steps become slower suddenly, this many of them pass before the next question.
constexpr std::int64_t kMostSteps = 100;

}  // namespace

StepDecisions::StepDecisions(const SaveInterval& interval, StopSignal stop_signal,
                             comm::Group group, c10::Device device)
    : interval_(interval),
      stop_signal_(std::move(stop_signal)),
      group_(std::move(group)),
      device_(device) {}

StepDecision StepDecisions::after(std::int64_t step) {
  StepDecision decision;
  const bool is_timed = interval_.time.count() > 0;
  if (group_.size() == 1) {
    decision.stop_signal = stop_signal_ ? stop_signal_() : 0;
    decision.save = is_time_over();
  } else if ((is_timed || stop_signal_) && step >= next_question_) {
    decision = ask_all(step);
  }
  if (interval_.steps > 0 && step % interval_.steps == 0) decision.save = true;
  return decision;
}

bool StepDecisions::is_time_over() const {
  return interval_.time.count() > 0 && Clock::now() - last_save_ >= interval_.time;
}

StepDecision StepDecisions::ask_all(std::int64_t step) {
  const bool is_first = group_.rank() == 0;
  const double signal = stop_signal_ ? stop_signal_() : 0;
  const double save = is_first && is_time_over() ? 1 : 0;
  const double next = is_first ? static_cast<double>(steps_to_next_question(step)) : 0;
  at::Tensor answers = torch::tensor({signal, save, next}, torch::kDouble).to(device_);
  group_.all_reduce(answers, comm::ReduceOp::max);
  answers = answers.cpu();
  const auto* const values = answers.const_data_ptr<double>();
  next_question_ = step + static_cast<std::int64_t>(values[2]);
  return {values[1] > 0, static_cast<int>(values[0])};
}

std::int64_t StepDecisions::steps_to_next_question(std::int64_t step) {
  const auto now = Clock::now();
  const auto per_step = std::chrono::duration<double>(now - question_time_) /
                        static_cast<double>(std::max<std::int64_t>(step - question_step_, 1));
  // The first step prepares what later ones use, and says nothing about them.
  const bool is_first_question = next_question_ == 0;
  question_time_ = now;
  question_step_ = step;
  if (is_first_question || per_step * kMostSteps < kBetweenQuestions)
    return is_first_question ? 1 : kMostSteps;
  return std::max<std::int64_t>(static_cast<std::int64_t>(kBetweenQuestions / per_step), 1);
}

}  // namespace semitone::train
