#include "apps/semitone/bench_flags.h"
#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/results.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/version.h"
#include "src/core/counted.h"
#include "src/core/parse_number.h"
#include "src/train/device.h"
#include "src/train/models.h"
#include "src/train/step_floor.h"
#include "src/train/workload.h"

#include <ATen/Parallel.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::cli {
namespace {

using nlohmann::ordered_json;
using train::StepFloor;
using train::TensorMemory;
using train::Workload;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

bool trains_on_images(const Workload& workload) {
  return workload.options().workload().has_images;
}

const char* name_of_items(const Workload& workload) {
  return trains_on_images(workload) ? "images" : "tokens";
}

ordered_json json_of(const TensorMemory& memory) {
  return {{"peak", megabytes(memory.peak)},
          {"parameters", megabytes(memory.parameters)},
          {"masters", megabytes(memory.masters)},
          {"gradients", megabytes(memory.gradients)},
          {"optimizer_state", megabytes(memory.optimizer_state)},
          {"rest", megabytes(memory.rest())}};
}

ordered_json json_of(const StepFloor& floor) {
  ordered_json products = ordered_json::array();
  for (const auto& product : floor.products) {
    products.push_back(
        {{"name", product.name}, {"calls", product.calls}, {"seconds", product.seconds}});
  }
  return {{"seconds", floor.seconds()},
          {"attention_seconds", floor.attention_seconds},
          {"step_seconds", floor.step_seconds},
          {"products", products}};
}

// The timed steps, and perhaps their floor, for which further steps ran.
struct Measured {
  std::vector<double> seconds;  // of each step, or of each step of a group on average
  std::vector<double> losses;
  std::int64_t skipped_steps = 0;
  std::optional<StepFloor> floor;
};

std::string json_of(const BenchFlags& flags, const Workload& workload, const Measured& measured) {
  const auto& options = workload.options();
  const auto& check = workload.check();
  ordered_json object{
      {"workload", options.workload().name},
      {"opt_level", amp::name_of(options.opt_level())},
      {"dtype", dtype_name(workload.dtype())},
      {"policy", flags.policy},
      {"without_kernels", flags.without_kernels},
      {"memory_format", nullptr},
      {"optimizer", flags.optimizer},
      {"batch_size", options.batch_size()},
      {"items", name_of_items(workload)},
      {"items_per_step", workload.items()},
      {"seed", options.seed()},
      {"threads", at::get_num_threads()},
      {"check",
       {{"losses", check.losses},
        {"float32_losses", check.fp32_losses},
        {"difference", check.difference()},
        {"tolerance", check.tolerance}}},
      {"losses", measured.losses},
      {"skipped_steps", measured.skipped_steps},
      {"step_seconds", measured.seconds},
      {"min_step_seconds", nullptr},
      {"median_step_seconds", nullptr},
      {"items_per_second", nullptr},
      {"tensor_mb", json_of(workload.memory())},
      {"versions",
       {{"semitone", version()}, {"libtorch", libtorch_version()}, {"compiler", compiler()}}}};
  if (trains_on_images(workload))
    object["memory_format"] = train::name_of(workload.memory_format());
  if (const auto& seconds = measured.seconds; !seconds.empty()) {
    object["min_step_seconds"] = *std::min_element(seconds.begin(), seconds.end());
    object["median_step_seconds"] = median(seconds);
    object["items_per_second"] = static_cast<double>(workload.items()) / median(seconds);
  }
  if (measured.floor.has_value()) object["floor"] = json_of(*measured.floor);
  return object.dump(2);
}

void line(std::ostream& out, const char* what, const std::string& text) {
  out << fmt::format("{:<10}{}\n", what, text) << std::flush;
}

void print_head(std::ostream& out, const BenchFlags& flags) {
  line(out, "semitone",
       fmt::format("{}, LibTorch {}, {}", version(), libtorch_version(), compiler()));
  line(out, "device", describe_device(train::find_device(flags.device).type()));
  line(out, "workload",
       fmt::format("{} at {}, {} optimizer, seed {}", flags.workload, flags.opt_level,
                   flags.optimizer, flags.seed));
}

void print_set_up(std::ostream& out, const Workload& workload) {
  const auto& check = workload.check();
  const auto& memory = workload.memory();
  const std::string format = trains_on_images(workload)
                                 ? fmt::format(", {}", train::name_of(workload.memory_format()))
                                 : "";
  line(out, "step",
       fmt::format("{} {} in {}{}", workload.items(), name_of_items(workload),
                   dtype_name(workload.dtype()), format));
  line(out, "check",
       fmt::format("{} losses from {:.4f} to {:.4f}; {} from float32's by at most {:.1e} of the "
                   "first ({:.0e} is allowed)",
                   check.losses.size(), check.losses.front(), check.losses.back(),
                   check.fp32_losses.size() == 1 ? "the first differs" : "they differ",
                   check.difference(), check.tolerance));
  line(out, "memory",
       fmt::format("peak of {:.1f} MB of tensors: parameters {:.1f}, masters {:.1f}, gradients "
                   "{:.1f}, optimizer {:.1f}, activations and others {:.1f}",
                   megabytes(memory.peak), megabytes(memory.parameters), megabytes(memory.masters),
                   megabytes(memory.gradients), megabytes(memory.optimizer_state),
                   megabytes(memory.rest())));
}

void print_times(std::ostream& out, const Workload& workload, const std::vector<double>& seconds) {
  const double typical = median(seconds);
  line(out, "time",
       fmt::format("minimum {:.3f} ms, median {:.3f} ms per step over {}; {:.1f} {}/s",
                   1e3 * *std::min_element(seconds.begin(), seconds.end()), 1e3 * typical,
                   seconds.size(), static_cast<double>(workload.items()) / typical,
                   name_of_items(workload)));
}

void print_floor(std::ostream& out, const StepFloor& floor) {
  constexpr std::size_t kShown = 8;
  line(out, "floor",
       fmt::format("products and convolutions alone {:.3f} ms, of which {:.3f} ms in attention; "
                   "the step {:.3f} ms, {:.2f} times as long",
                   1e3 * floor.seconds(), 1e3 * floor.attention_seconds, 1e3 * floor.step_seconds,
                   floor.step_seconds / floor.seconds()));
  for (std::size_t i = 0; i < std::min(kShown, floor.products.size()); ++i) {
    const auto& product = floor.products[i];
    line(out, "",
         fmt::format("{:>3} x {:8.3f} ms  {}", product.calls, 1e3 * product.seconds, product.name));
  }
}

// The number of "step N"; 0 if the line is something else.
std::int64_t steps_of(std::string_view command) {
  constexpr std::string_view kStep = "step ";
  if (!command.starts_with(kStep)) return 0;
  command.remove_prefix(kStep.size());
  const std::int64_t steps = parse_number<std::int64_t>(command).value_or(0);
  return steps <= kBenchMost ? std::max<std::int64_t>(steps, 0) : 0;
}

// Prints that it is ready, and then runs the number of steps that each line requests.
std::vector<double> run_as_asked(Workload& workload) {
  std::vector<double> seconds;
  std::cout << "ready\n" << std::flush;
  for (std::string command; std::getline(std::cin, command);) {
    const std::int64_t steps = steps_of(command);
    if (steps == 0) {
      throw UsageError(kBench,
                       fmt::format("'step N' with N from 1 to {} on standard input", kBenchMost),
                       "'" + command + "'");
    }
    const double taken = workload.run(steps);
    seconds.push_back(taken / static_cast<double>(steps));
    const ordered_json answer{
        {"steps", steps}, {"seconds", taken}, {"loss", workload.losses().back()}};
    std::cout << answer.dump() << '\n' << std::flush;
  }
  return seconds;
}

std::vector<double> run_rounds(Workload& workload, std::int64_t rounds) {
  std::vector<double> seconds(static_cast<std::size_t>(rounds));
  for (double& round : seconds) round = workload.run(1);
  return seconds;
}

Workload make_workload(const BenchFlags& flags) {
  try {
    return Workload(options_of(flags));
  } catch (const DivergedError&) {
    throw;
  } catch (const Error& error) {
    // The constructors check their sizes.
    if (error.component() == "zoo.encoder" || error.component() == "zoo.decoder")
      throw UsageError(error);
    throw;
  }
}

int run(const CLI::App& command, const BenchFlags& flags) {
  check(flags, command);
  require_json_writable(flags.json);
  set_threads(flags.threads, kBench);
  std::ostream& out = flags.steps_from_stdin ? std::cerr : human_output(flags.json);
  print_head(out, flags);
  Workload workload = make_workload(flags);
  print_set_up(out, workload);
  Measured measured;
  measured.seconds =
      flags.steps_from_stdin ? run_as_asked(workload) : run_rounds(workload, flags.rounds);
  measured.losses = workload.losses();
  measured.skipped_steps = workload.skipped_steps();
  if (!measured.seconds.empty()) print_times(out, workload, measured.seconds);
  if (measured.skipped_steps > 0) {
    line(out, "skipped",
         fmt::format("{}, whose times count too", counted(measured.skipped_steps, "step")));
  }
  if (flags.floor) measured.floor = train::measure_floor(workload, flags.rounds);
  if (measured.floor.has_value()) print_floor(out, *measured.floor);
  write_json(flags.json, flags.json.empty() ? "" : json_of(flags, workload, measured));
  return kSuccess;
}

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "bench",
      "Check a training on synthetic data against float32, and measure its speed and memory");
  const auto flags = add_bench_flags(command);
  command.callback(
      [&action, &command, flags] { action = [&command, flags] { return run(command, *flags); }; });
}

}  // namespace semitone::cli
