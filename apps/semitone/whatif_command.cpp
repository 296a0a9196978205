#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/short_training.h"
#include "semitone/report/what_if.h"
#include "src/core/log.h"
#include "src/train/models.h"
#include "src/train/step_count.h"
#include "src/train/trainer.h"

#include <fmt/format.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

namespace semitone::cli {
namespace {

constexpr auto kWhatIfCommand = "cli.whatif";
constexpr std::int64_t kWhatIfSteps = 10;
constexpr std::int64_t kLeastSteps = 2;  // it examines those after the first

// Looks at the steps after the first, by when the model has its device and memory format, and not at
// the test after the last.
class Examiner : public train::Observer {
 public:
  // @param last  the last step
  explicit Examiner(std::int64_t last) : last_(last) {}

  train::Classifier keep(train::Classifier model) {
    model_ = model;
    return model;
  }

  using Observer::on;
  void on(const train::StepDone& step) override {
    if (what_if_.has_value()) what_if_->next_step();
    if (step.step == 1) what_if_.emplace(*model_->module());
    if (step.step != last_) return;
    text_ = what_if_->to_string();
    json_ = what_if_->to_json();
    what_if_.reset();
  }

  const std::string& text() const { return text_; }
  const std::string& json() const { return json_; }

 private:
  std::int64_t last_;
  std::optional<train::Classifier> model_;
  std::optional<report::WhatIf> what_if_;
  std::string text_;
  std::string json_;
};

int run(ShortTraining training) {
  const std::string& json = training.json;
  require_two_files(kWhatIfCommand, {"--data", training.data.path}, {"--json", json});
  require_json_writable(json);
  if (training.options.max_steps() < kLeastSteps) {
    throw UsageError(kWhatIfCommand, fmt::format("--max-steps from {}", kLeastSteps),
                     std::to_string(training.options.max_steps()),
                     "use at least 2: whatif examines the steps after the first");
  }
  if (training.options.dtype().has_value())
    log()->warn("{}: --dtype has no effect: all 16-bit dtypes are shown", kWhatIfCommand);
  training.prepare(amp::OptLevel::O0);
  const train::Task task =
      load_task(train::find_model(training.model), training.data, kWhatIfCommand);
  train::require_steps(task.data, training.options, kLeastSteps, kWhatIfCommand);
  Examiner examiner(train::count_steps(task.data, training.options).end);
  train::train_classifier([&] { return examiner.keep(task.make_model()); },
                          train::with_one_test_example(task.data), training.options, examiner);
  human_output(json) << examiner.text();
  write_json(json, json.empty() ? "" : examiner.json());
  return kSuccess;
}

constexpr auto kWhatIfFooter =
    R"(Trains for --max-steps steps in fp32, at least 2, and computes each matrix product, convolution and attention again with
arguments rounded to fp16, bf16, fp8 e4m3fn and e5m2 (with delayed scaling). error is the relative change of the results;
underflow and overflow are the shares of the arguments' elements that would be 0, or exceed the format. Gradients are
those of the loss times --loss-scale.

Examples:
  semitone whatif
  semitone whatif --model gpt --data novel.txt
  semitone whatif --loss-scale 65536 --max-steps 20 --json whatif.json

)";

}  // namespace

void add_whatif_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "whatif", "Show what fp16, bf16 and fp8 would do to each operator, from a few steps in fp32");
  const auto training = std::make_shared<ShortTraining>();
  training->options.max_steps(kWhatIfSteps);
  Flags add(command, kWhatIfCommand);
  add_short_training_flags(add, *training);
  command.footer(std::string(kWhatIfFooter) + kExitCodesHelp);
  command.callback([&action, &command, training] {
    apply_model(command, train::find_model(training->model), kWhatIfCommand);
    check_momentum(command, training->options, kWhatIfCommand);
    action = [training] { return run(*training); };
  });
}

}  // namespace semitone::cli
