#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/policy_flag.h"
#include "apps/semitone/short_training.h"
#include "semitone/amp/tune.h"
#include "semitone/core/dtype.h"
#include "src/core/file.h"
#include "src/train/models.h"
#include "src/train/step_count.h"
#include "src/train/tuning.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>

namespace semitone::cli {
namespace {

constexpr auto kTune = "cli.tune";
constexpr std::int64_t kTuneSteps = 100;

struct TuneFlags {
  ShortTraining training{.options = train::TrainOptions().max_steps(kTuneSteps)};
  std::string policy = "semitone";
  double band = 1;  // in percent
  bool operators_only = false;
  std::string out;
};

// NaN and inf are null.
// @param steps  of each training
std::string json_of(const amp::TuneResult& result, const TuneFlags& flags, std::int64_t steps) {
  auto trials = nlohmann::ordered_json::array();
  for (const amp::TuneTrial& trial : result.trials) {
    trials.push_back({{"is_fp32", trial.is_fp32},
                      {"kept", trial.kept},
                      {"loss", trial.loss},
                      {"in_band", trial.in_band}});
  }
  const nlohmann::ordered_json object = {
      {"steps", steps},
      {"band_percent", flags.band},
      {"fp32_loss", result.fp32_loss},
      {"given_loss", result.given_loss},
      {"loss", result.loss},
      {"operators", result.operators},
      {"parameters", result.parameters},
      {"policy", nlohmann::ordered_json::parse(result.policy.to_json())},
      {"code", result.policy.to_code()},
      {"trials", std::move(trials)}};
  return object.dump(2);
}

void print_trial(const amp::TuneTrial& trial) {
  std::string how = "under the given policy";
  if (trial.is_fp32) {
    how = "in fp32";
  } else if (!trial.kept.empty()) {
    how = fmt::format("in fp32 in addition: {}", fmt::join(trial.kept, ", "));
  }
  std::cerr << fmt::format("[tune] loss {:<10.6g} {}  {}\n", trial.loss,
                           trial.in_band ? "in the band     " : "outside the band", how)
            << std::flush;
}

int run(TuneFlags flags) {
  const ShortTraining& training = flags.training;
  const std::string& json = training.json;
  require_two_files(kTune, {"--out", flags.out}, {"--json", json});
  for (const FlagOfFile& read :
       {FlagOfFile{"--policy", flags.policy}, FlagOfFile{"--data", training.data.path}}) {
    require_two_files(kTune, read, {"--out", flags.out});
    require_two_files(kTune, read, {"--json", json});
  }
  if (training.options.max_steps() < 4) {
    throw UsageError(kTune, "--max-steps from 4", std::to_string(training.options.max_steps()),
                     "the mean loss of the last quarter of the steps is compared");
  }
  require_json_writable(json);
  if (!flags.out.empty()) require_writable(flags.out, kTune);
  flags.training.prepare(amp::OptLevel::O1);
  const train::TrainOptions& options = training.options;
  const amp::CastTarget target(options.device().type(), train::training_dtype(options));
  const amp::CastPolicy given = policy_of(flags.policy, target, kTune);
  const train::Task task = load_task(train::find_model(training.model), training.data, kTune);
  const amp::TuneResult result = train::tune_classifier(task.make_model, task.data, options, given,
                                                        amp::TuneOptions()
                                                            .band(flags.band / 100)
                                                            .layers(!flags.operators_only)
                                                            .on_trial(&print_trial));
  human_output(json) << result.to_string();
  if (!flags.out.empty()) result.policy.save(flags.out);
  write_json(
      json, json.empty() ? "" : json_of(result, flags, train::count_steps(task.data, options).end));
  return kSuccess;
}

constexpr auto kTuneFooter =
    R"(Repeats a training of --max-steps steps, at least 4, from the same weights: twice in fp32, then under the policy with
different sets of operators kept in fp32. It compares the mean loss of the last quarter of the steps. If the given policy
suffices, 3 trainings are enough. Each operator that has to stay in fp32 adds 6 to 10.

Examples:
  semitone tune --dtype fp16 --out policy.json
  semitone train --dtype fp16 --policy policy.json
  semitone tune --model gpt --data novel.txt
  semitone tune --policy paddle-o2 --band 0.5 --max-steps 200 --json tune.json

)";

}  // namespace

void add_tune_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "tune",
      "Find the smallest set of operators and layers to keep in fp32, so that the loss of a short "
      "training stays near that of fp32");
  const auto flags = std::make_shared<TuneFlags>();
  Flags add(command, kTune);
  add.text("--policy", flags->policy, kPolicyType,
           "Cast policy to begin with, a preset or a file: " + policy_choices());
  add.number(
      "--band", flags->band, [](double value) { return value > 0 && std::isfinite(value); },
      "above 0", "Largest difference from the loss in fp32, in percent");
  add.mark("--operators-only", flags->operators_only,
           "Keep whole operators, never single layers, in fp32");
  add.text("--out", flags->out, "FILE",
           "File to write the policy to, for semitone train --policy FILE; default: none");
  add_short_training_flags(add, flags->training);
  command.footer(std::string(kTuneFooter) + kExitCodesHelp);
  command.callback([&action, &command, flags] {
    apply_model(command, train::find_model(flags->training.model), kTune);
    check_momentum(command, flags->training.options, kTune);
    action = [flags] { return run(*flags); };
  });
}

}  // namespace semitone::cli
