#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/results.h"
#include "apps/semitone/train_flags.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/env.h"
#include "semitone/core/version.h"
#include "semitone/launch/process.h"
#include "semitone/train/progress.h"
#include "semitone/zoo/convnet.h"
#include "semitone/zoo/mnist.h"

#include <ATen/Parallel.h>

#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <system_error>
#include <utility>

namespace semitone::cli {
namespace {

constexpr auto kWhere = "cli.train";

train::DataSet load_data(const TrainFlags& flags) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(flags.data, ignored)) {
    throw FileError(kWhere, "a folder with the data at '" + flags.data + "'", "none",
                    std::string("give --data DIR or set ") + env::kDataDir.name);
  }
  return {zoo::load_mnist(flags.data, zoo::Split::train),
          zoo::load_mnist(flags.data, zoo::Split::test)};
}

std::string dtype_line(const TrainFlags& flags, c10::DeviceType device) {
  const auto dtype = flags.dtype == "auto" ? default_16bit_dtype(device) : parse_dtype(flags.dtype);
  const char* why = "asked for";
  if (flags.dtype == "auto") {
    why = dtype == torch::kBFloat16 ? "chosen for its range, which is float32's"
                                    : "chosen, as it is the faster one everywhere on a GPU";
  }
  const char* const how = has_fast_dtype(device, dtype)
                              ? "computed natively here"
                              : "computed through float32 and rounded: no instructions for it here";
  return fmt::format("{}: {}; {}", dtype_name(dtype), why, how);
}

std::string format_line(const TrainFlags& flags) {
  if (flags.memory_format != "auto") return flags.memory_format + ": asked for";
  const auto format = train::choose_memory_format(default_device());
  return fmt::format("{}: chosen, as the faster one for convolutions", train::name_of(format));
}

void print_head(std::ostream& out, const TrainFlags& flags, const train::DataSet& data) {
  const auto line = [&out](const char* what, const std::string& text) {
    out << fmt::format("{:<14}{}\n", what, text);
  };
  const auto device = default_device();
  line("semitone", fmt::format("{}, LibTorch {}, {}", version(), libtorch_version(), compiler()));
  line("device", describe_device(device));
  line("16 bits", dtype_line(flags, device));
  line("memory", format_line(flags));
  line("data", fmt::format("{} training and {} test images from {}", data.train.size(),
                           data.test.size(), flags.data));
  line("training",
       fmt::format("{}, {} epoch{} in batches of {}, {} lr {}{}, {}, seed {}", flags.model,
                   flags.epochs, flags.epochs == 1 ? "" : "s", flags.batch_size, flags.optimizer,
                   flags.lr,
                   flags.optimizer == "sgd" ? fmt::format(" momentum {}", flags.momentum) : "",
                   flags.schedule, flags.seed));
  out << std::flush;
}

train::TrainResult train_here(const TrainFlags& flags, const train::DataSet& data) {
  const auto options = options_of(flags, amp::parse_opt_level(flags.opt_level));
  const auto make_model = [] { return train::Classifier(zoo::ConvNet()); };
  if (flags.quiet) return train::train_classifier(make_model, data, options);
  train::Progress progress(
      std::cerr,
      fmt::format("{} {:<8}", flags.opt_level, dtype_name(train::training_dtype(options))),
      terminal_columns());
  return train::train_classifier(make_model, data, options, progress);
}

// Trains each level in a process of its own: peak memory, threads and the state of the allocators
// are then each level's own. Stops at the first that fails, and returns its code.
int train_all(const CLI::App& command, std::vector<train::TrainResult>& results) {
  for (const amp::OptLevel level :
       {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
    const auto finished = launch::run(launch::ProcessOptions("/proc/self/exe")
                                          .arguments(arguments_for(command, level))
                                          .out(launch::Output::capture));
    if (!finished.status.success()) {
      const std::string name(amp::name_of(level));
      std::cerr << Error(kWhere, name + " to train", finished.status.to_string()).what() << '\n';
      return finished.status.signal != 0 ? static_cast<int>(kFailure) : finished.status.code;
    }
    results.push_back(from_json(finished.out).at(0));
  }
  return kSuccess;
}

void print_notes(std::ostream& out, const std::vector<train::TrainResult>& results) {
  for (const train::TrainResult& result : results) {
    if (result.opt_level != amp::OptLevel::O3 || result.dtype != torch::kHalf) continue;
    out << "O3 in float16 keeps nothing in float32: gradients below 6e-8 become 0 unless a "
           "--loss-scale lifts them,\nand updates smaller than 2^-11 of a weight are lost. This "
           "model bears it; others may not.\n";
  }
}

int run(const CLI::App& command, const TrainFlags& flags) {
  check(flags, command);
  if (flags.threads > 0) at::set_num_threads(static_cast<int>(flags.threads));
  require_json_writable(flags.json);
  std::ostream& out = for_people(flags.json);
  std::vector<train::TrainResult> results;
  {
    const train::DataSet data = load_data(flags);
    if (!flags.quiet && !flags.as_part) print_head(out, flags, data);
    if (!flags.all_levels()) results.push_back(train_here(flags, data));
  }
  // What a level that fails leaves behind are the levels before it.
  const int code = flags.all_levels() ? train_all(command, results) : static_cast<int>(kSuccess);
  if (!flags.as_part && !results.empty()) {
    print_table(out, results);
    print_notes(out, results);
  }
  if (!results.empty()) write_json(flags.json, to_json(results));
  return code;
}

}  // namespace

void add_train_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "train", "Train a model on real data at one opt level or at all of them, and compare");
  const auto flags = add_train_flags(command);
  command.callback(
      [&action, &command, flags] { action = [&command, flags] { return run(command, *flags); }; });
}

}  // namespace semitone::cli
