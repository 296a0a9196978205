#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/help.h"
#include "apps/semitone/job.h"
#include "apps/semitone/output.h"
#include "apps/semitone/results.h"
#include "apps/semitone/train_flags.h"
#include "semitone/comm/init.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/version.h"
#include "semitone/zoo/mnist.h"
#include "src/comm/rendezvous.h"
#include "src/core/env.h"
#include "src/launch/process.h"
#include "src/train/models.h"
#include "src/train/optimizers.h"
#include "src/train/progress.h"

#include <ATen/Parallel.h>

#include <fmt/format.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <system_error>
#include <utility>

namespace semitone::cli {
namespace {

train::DataSet load_data(const TrainFlags& flags) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(flags.data, ignored)) {
    throw FileError(kTrain, "a folder with the data at '" + flags.data + "'", "none",
                    std::string("give --data DIR or set ") + env::kDataDir.name);
  }
  return {zoo::load_mnist(flags.data, zoo::Split::train),
          zoo::load_mnist(flags.data, zoo::Split::test)};
}

std::string dtype_line(const TrainFlags& flags, c10::DeviceType device) {
  const auto requested = flags.options.dtype();
  const auto dtype = requested.value_or(default_16bit_dtype(device));
  const char* why = "requested";
  if (!requested.has_value()) {
    why = dtype == torch::kBFloat16 ? "default, since it has float32's range"
                                    : "default, since older GPUs support it too";
  }
  std::string how = describe_16bit(device, dtype) + " here";
  if (how.find("emulated") != std::string::npos)
    how += " (emulated: computed in float32 and rounded)";
  return fmt::format("{}: {}; {}", dtype_name(dtype), why, how);
}

std::string format_line(const TrainFlags& flags) {
  const auto requested = flags.options.memory_format();
  if (requested != train::MemoryFormat::automatic)
    return std::string(train::name_of(requested)) + ": requested";
  const auto format = train::choose_memory_format(flags.find_device().type());
  return fmt::format("{}: default, since convolutions are faster in it", train::name_of(format));
}

std::string processes_line(const TrainFlags& flags, const comm::Group& group) {
  const std::string synced =
      flags.options.sync_batch_norm() ? ", BatchNorm over all processes" : "";
  const auto compress = flags.options.ddp().compress();
  std::string wire;
  if (compress.has_value())
    wire = *compress == torch::kHalf ? ", gradients sent in fp16" : ", gradients sent in bf16";
  if (!flags.starts_job()) {
    return fmt::format("{} that a launcher started, over {}{}{}", group.size(), group.backend(),
                       synced, wire);
  }
  const auto count = flags.nodes * flags.processes();
  const std::string where = flags.nodes == 1 ? "" : fmt::format(" on {} machines", flags.nodes);
  return fmt::format("{}{}{}{}", count, where, synced, wire);
}

bool is_file(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

void print_head(std::ostream& out, const TrainFlags& flags, const train::DataSet& data,
                const comm::Group& group) {
  const auto line = [&out](const char* what, const std::string& text) {
    out << fmt::format("{:<14}{}\n", what, text);
  };
  const c10::DeviceType device = flags.find_device().type();
  line("semitone", fmt::format("{}, LibTorch {}, {}", version(), libtorch_version(), compiler()));
  line("device", describe_device(device));
  line("16 bits", dtype_line(flags, device));
  line("memory", format_line(flags));
  line("data", fmt::format("{} training and {} test images from {}", data.train.size(),
                           data.test.size(), flags.data));
  if (flags.starts_job() || group.size() > 1) line("processes", processes_line(flags, group));
  if (flags.goes_on_with_what_it_saves() && !is_file(flags.options.resume()))
    line("state",
         fmt::format("'{}' does not exist yet: a new run", flags.options.resume().string()));
  line("training",
       fmt::format("{}, {} epoch{} in batches of {}, {} lr {}{}, {}, seed {}", flags.model,
                   flags.options.epochs(), flags.options.epochs() == 1 ? "" : "s",
                   flags.options.batch_size(), flags.options.optimizer(), flags.options.lr(),
                   train::find_optimizer(flags.options.optimizer()).has_momentum
                       ? fmt::format(" momentum {}", flags.options.momentum())
                       : "",
                   train::name_of(flags.options.schedule()), flags.options.seed()));
  out << std::flush;
}

// The first of the signals that end a training and save its state; 0: none has arrived.
std::atomic<int> stop_signal = 0;

// Handles these signals while it exists. Batch systems and launchers send them before a time limit,
// and the step is finished first. A second signal has its usual effect.
class StopSignals {
 public:
  explicit StopSignals(bool wanted) {
    if (!wanted) return;
    for (const int signal : {SIGTERM, SIGUSR1}) {
      struct sigaction action{};
      action.sa_handler = [](int number) {
        int none = 0;
        stop_signal.compare_exchange_strong(none, number);
      };
      action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
      struct sigaction before{};
      ::sigaction(signal, &action, &before);
      before_.emplace_back(signal, before);
    }
  }
  ~StopSignals() {
    for (const auto& [signal, before] : before_) ::sigaction(signal, &before, nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  std::vector<std::pair<int, struct sigaction>> before_;
};

train::TrainResult train_here(const TrainFlags& flags, amp::OptLevel level,
                              const train::DataSet& data, const comm::Group& group) {
  const StopSignals signals(!flags.options.save().empty());
  auto options = options_of(flags, level, group);
  if (!flags.options.save().empty()) options.stop([] { return stop_signal != 0; });
  const train::ModelFactory make_model = train::find_model(flags.model).make;
  if (flags.quiet || group.rank() > 0) return train::train_classifier(make_model, data, options);
  train::Progress progress(
      std::cerr,
      fmt::format("{} {:<8}", amp::name_of(level), dtype_name(train::training_dtype(options))),
      terminal_columns(std::cerr), flags.log_every);
  return train::train_classifier(make_model, data, options, progress);
}

// A folder for this process's own files, removed with this object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "semitone-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) {
      throw FileError(kTrain, "a folder for temporary files",
                      std::error_code(errno, std::generic_category()).message(), "set TMPDIR");
    }
    path_ = path;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::filesystem::path operator/(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Trains a level in its own process, so that peak memory, threads and the state of the allocators
// are those of the level. Returns the exit code; the result is JSON.
int train_apart(const CLI::App& command, amp::OptLevel level, std::string& result) {
  const auto finished = launch::run(launch::ProcessOptions("/proc/self/exe")
                                        .arguments(arguments_for(command, level, "-"))
                                        .out(launch::Output::capture));
  result = finished.out;
  if (finished.status.success()) return kSuccess;
  const std::string name(amp::name_of(level));
  std::cerr << Error(kTrain, name + " to train", finished.status.to_string()).what() << '\n';
  return finished.status.signal != 0 ? static_cast<int>(kFailure) : finished.status.code;
}

// The same in several processes. The result is on node 0 only, and empty on others.
int train_together(const CLI::App& command, const TrainFlags& flags, amp::OptLevel level,
                   std::string& result) {
  const TemporaryFolder folder;
  const auto json = folder / "result.json";
  const int code =
      run_job(job_of(flags).arguments(arguments_for(command, level, json.string()))).exit_code();
  result = read_text(json);
  return code;
}

void print_notes(std::ostream& out, const std::vector<train::TrainResult>& results) {
  constexpr int kTableWidth = 104;  // of its lines
  const int columns = terminal_columns(out);
  for (const train::TrainResult& result : results) {
    if (result.opt_level != amp::OptLevel::O3 || result.dtype != torch::kHalf) continue;
    out << wrapped(
               "O3 in float16 keeps nothing in float32: gradients below 6e-8 become 0 unless a "
               "--loss-scale lifts them, and updates smaller than 2^-11 of a weight are lost. This "
               "model tolerates it; others may not.",
               static_cast<std::size_t>(columns > 0 ? columns : kTableWidth))
        << '\n';
  }
}

// Called before anything is loaded or printed.
void require_state(const TrainFlags& flags) {
  if (flags.options.resume().empty() || flags.goes_on_with_what_it_saves() ||
      is_file(flags.options.resume()))
    return;
  throw FileError(kTrain, "a saved state '" + flags.options.resume().string() + "'", "no such file",
                  "to start a new run with this file, pass it to --save too");
}

// The signal that this process received, or SIGTERM if another process of the job received one.
int signal_of_stop() {
  const int own = stop_signal;
  return own != 0 ? own : SIGTERM;
}

void say_stopped(const train::TrainResult& result, const TrainFlags& flags) {
  std::cerr << fmt::format("[train] stopped by {} after step {}: the state is in '{}'\n",
                           launch::ExitStatus{0, signal_of_stop()}.to_string(), result.steps,
                           flags.options.save().string());
}

// On the CPU of a machine with GPUs the default would be NCCL.
comm::Group join_group(const TrainFlags& flags) {
  return comm::init("env://",
                    comm::InitOptions().backend(flags.find_device().is_cpu() ? "gloo" : "auto"));
}

int run(const CLI::App& command, const TrainFlags& flags) {
  const comm::Rendezvous place = comm::parse_rendezvous("env://");
  check(flags, command, place);
  flags.find_device();  // an Error at once, before any process starts
  if (flags.threads > 0) at::set_num_threads(static_cast<int>(flags.threads));
  // One process prints for all.
  const bool speaks = place.rank == 0 && flags.node_rank == 0;
  const bool was_launched = place.world_size > 1;
  if (speaks) require_json_writable(flags.json);
  if (speaks && !flags.starts_job()) require_state(flags);
  std::ostream& out = human_output(flags.json);
  const auto levels = flags.levels();
  std::vector<train::TrainResult> results;
  int code = kSuccess;
  {
    const comm::Group group = was_launched ? join_group(flags) : comm::Group();
    train::DataSet data = load_data(flags);
    if (speaks && !flags.quiet && !flags.as_part) print_head(out, flags, data, group);
    if (flags.starts_job() || (levels.size() > 1 && !was_launched)) {
      data = {};
      // If a level fails, the results of earlier levels remain.
      for (std::size_t i = 0; i < levels.size() && code == kSuccess; ++i) {
        std::string result;
        code = flags.starts_job() ? train_together(command, flags, levels[i], result)
                                  : train_apart(command, levels[i], result);
        if (code == kSuccess && speaks) results.push_back(from_json(result).at(0));
      }
    } else {
      for (const amp::OptLevel level : levels)
        results.push_back(train_here(flags, level, data, group));
    }
  }
  if (results.size() == 1 && results.front().stopped) {
    if (speaks) say_stopped(results.front(), flags);
    return kSignal + signal_of_stop();
  }
  if (!speaks || results.empty()) return code;
  if (!flags.as_part) {
    print_table(out, results, terminal_columns(out));
    print_notes(out, results);
  }
  write_json(flags.json, to_json(results));
  return code;
}

}  // namespace

void add_train_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "train", "Train a model on a data set at one opt level, or compare all levels");
  const auto flags = add_train_flags(command);
  command.callback(
      [&action, &command, flags] { action = [&command, flags] { return run(command, *flags); }; });
}

}  // namespace semitone::cli
