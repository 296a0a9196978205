#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/train_data.h"
#include "semitone/report/what_if.h"
#include "src/train/device.h"
#include "src/train/models.h"
#include "src/train/trainer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

namespace semitone::cli {
namespace {

constexpr auto kWhatIfCommand = "cli.whatif";
constexpr std::int64_t kWhatIfSteps = 10;

struct WhatIfFlags {
  train::TrainOptions options = train::TrainOptions().max_steps(kWhatIfSteps);
  std::string model = "convnet";
  std::string data = default_data_dir();
  std::string device = "auto";
  std::int64_t threads = 0;
  std::string json;
};

// Looks at the steps after the first, by when the model has its device and memory format, and not at
// the test after the last.
class Examiner : public train::Observer {
 public:
  explicit Examiner(std::int64_t last) : last_(last) {}

  train::Classifier keep(train::Classifier model) {
    model_ = model;
    return model;
  }

  using Observer::on;
  void on(const train::StepDone& step) override {
    if (what_if_.has_value()) what_if_->next_step();
    if (step.step == 1) what_if_.emplace(*model_->module());
    if (step.step != std::min(last_, step.epochs * step.batches)) return;
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

int run(WhatIfFlags flags) {
  require_json_writable(flags.json);
  if (flags.options.max_steps() < 2) {
    throw UsageError(kWhatIfCommand, "--max-steps from 2",
                     std::to_string(flags.options.max_steps()),
                     "use at least 2: whatif examines the steps after the first");
  }
  if (flags.threads > 0) at::set_num_threads(static_cast<int>(flags.threads));
  flags.options.device(train::find_device(flags.device)).opt_level(amp::OptLevel::O0);
  const train::DataSet data = train::with_one_test_image(load_data(flags.data, kWhatIfCommand));
  Examiner examiner(flags.options.max_steps());
  const auto make = [&] { return examiner.keep(train::find_model(flags.model).make()); };
  train::train_classifier(make, data, flags.options, examiner);
  if (flags.json != "-") human_output(flags.json) << examiner.text();
  write_json(flags.json, flags.json.empty() ? "" : examiner.json());
  return kSuccess;
}

constexpr auto kWhatIfFooter =
    R"(Trains for --max-steps steps in fp32, at least 2, and computes each matrix product, convolution and attention again with
arguments rounded to fp16, bf16, fp8 e4m3fn and e5m2 (with delayed scaling). error is the relative change of the results;
underflow and overflow are the shares of the arguments' elements that would be 0, or exceed the format. Gradients are
those of the loss times --loss-scale.

Examples:
  semitone whatif
  semitone whatif --loss-scale 65536 --max-steps 20 --json whatif.json

)";

}  // namespace

void add_whatif_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "whatif", "Show what fp16, bf16 and fp8 would do to each operator, from a few steps in fp32");
  const auto flags = std::make_shared<WhatIfFlags>();
  Flags add(command, kWhatIfCommand);
  add.choice("--model", flags->model, names_of(train::models()), "Model to train");
  add.text("--data", flags->data, "DIR", "Directory of the data set");
  train::add_training_flags(add, flags->options);
  train::add_device_flag(add, flags->device);
  add.integer("--threads", flags->threads, 0, 1024,
              "Threads, at most the number of cores; 0: LibTorch's choice");
  add.json(flags->json);
  command.footer(std::string(kWhatIfFooter) + kExitCodesHelp);
  command.callback([&action, flags] { action = [flags] { return run(*flags); }; });
}

}  // namespace semitone::cli
