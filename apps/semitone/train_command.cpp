#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/help.h"
#include "apps/semitone/job.h"
#include "apps/semitone/output.h"
#include "apps/semitone/results.h"
#include "apps/semitone/train_config.h"
#include "apps/semitone/train_data.h"
#include "apps/semitone/train_flags.h"
#include "apps/semitone/train_record.h"
#include "semitone/checkpoint/stop_signals.h"
#include "semitone/comm/init.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/version.h"
#include "src/checkpoint/folder.h"
#include "src/comm/rendezvous.h"
#include "src/core/counted.h"
#include "src/core/file.h"
#include "src/launch/process.h"
#include "src/train/checkpoints.h"
#include "src/train/models.h"
#include "src/train/optimizers.h"
#include "src/train/progress.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace semitone::cli {
namespace {

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
  // Other machines may have another number of processes.
  const std::string where =
      flags.nodes == 1 ? "" : fmt::format(" on this machine, in a job of {} machines", flags.nodes);
  return fmt::format("{}{}{}{}", flags.processes(), where, synced, wire);
}

// "100", for each process, or "256 for all processes together".
std::string batches_of(const TrainFlags& flags, bool has_ranks) {
  if (flags.global_batch_size == 0) return std::to_string(flags.options.batch_size());
  return fmt::format("{}{}", flags.global_batch_size,
                     has_ranks ? " for all processes together" : "");
}

std::string checkpoints_line(const train::TrainOptions& options) {
  const std::filesystem::path& directory = options.checkpoint_dir();
  const bool is_new = options.resume_auto() && checkpoint::steps_in(directory).empty();
  const std::string kept =
      options.keep() == 0 ? "all stay" : fmt::format("the newest {} stay", options.keep());
  return fmt::format("'{}', {}, {}{}", directory.string(), train::describe(options.save_every()),
                     kept, is_new ? "; none yet: a new run" : "");
}

void print_head(std::ostream& out, const TrainFlags& flags, const train::Task& task,
                const comm::Group& group) {
  const auto line = [&out](const char* what, const std::string& text) {
    out << fmt::format("{:<14}{}\n", what, text);
  };
  const c10::DeviceType device = flags.find_device().type();
  line("semitone", fmt::format("{}, LibTorch {}, {}", version(), libtorch_version(), compiler()));
  line("device", describe_device(device));
  line("16 bits", dtype_line(flags, device));
  if (flags.fp8)
    line("fp8", "linear layers and convolutions, emulated: float8_e4m3fn, gradients float8_e5m2");
  if (task.data.kind.has_memory_format) line("memory", format_line(flags));
  line("data", fmt::format("{}, from {}", task.description, flags.data.path));
  const bool has_ranks = flags.starts_job() || group.size() > 1;
  if (has_ranks) line("processes", processes_line(flags, group));
  if (!flags.options.checkpoint_dir().empty()) line("checkpoints", checkpoints_line(flags.options));
  line("training",
       fmt::format("{}, {} in batches of {}, {} lr {}{}, {}, seed {}", flags.model,
                   counted(flags.options.epochs(), "epoch"), batches_of(flags, has_ranks),
                   flags.options.optimizer(), flags.options.lr(),
                   train::find_optimizer(flags.options.optimizer()).has_momentum
                       ? fmt::format(" momentum {}", flags.options.momentum())
                       : "",
                   train::name_of(flags.options.schedule()), flags.options.seed()));
  out << std::flush;
}

train::TrainResult train_here(const CLI::App& command, const TrainFlags& flags, amp::OptLevel level,
                              const train::Task& task, const comm::Group& group) {
  auto options = options_of(flags, level, group);
  std::optional<checkpoint::StopSignals> signals;
  if (!options.checkpoint_dir().empty()) {
    signals.emplace();
    options.stop_signal(&checkpoint::StopSignals::first);
  }
  const auto train_with = [&](train::Observer& observer) {
    return train::train_classifier(task.make_model, task.data, options, observer);
  };
  if (flags.quiet || group.rank() > 0) {
    train::Observer silent;
    return train_recorded(flags, command, options, silent, train_with);
  }
  train::Progress progress(
      std::cerr,
      fmt::format("{} {:<8}", amp::name_of(level), dtype_name(train::training_dtype(options))),
      terminal_columns(std::cerr), flags.log_every);
  return train_recorded(flags, command, options, progress, train_with);
}

// A folder for this process's own files, removed with this object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::error_code error;
    std::string path = (std::filesystem::temp_directory_path(error) / "semitone-XXXXXX").string();
    if (!error && ::mkdtemp(path.data()) == nullptr)
      error = std::error_code(errno, std::generic_category());
    if (error)
      throw FileError(kTrain, "a folder for temporary files", error.message(), "set TMPDIR");
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

// Trains a level in its own process, so that peak memory, threads and the state of the allocators
// are those of the level. Returns the exit code; the result is JSON, and empty if there is none.
// The process's table is not shown, and libraries may print to standard output too.
int train_apart(const CLI::App& command, amp::OptLevel level, std::string& result) {
  const TemporaryFolder folder;
  const auto json = folder / "result.json";
  const auto finished = launch::run(launch::ProcessOptions("/proc/self/exe")
                                        .arguments(arguments_for(command, level, json.string()))
                                        .out(launch::Output::capture));
  result = read_text(json);
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

// What became of the levels.
struct Trained {
  std::vector<train::TrainResult> results;
  std::vector<amp::OptLevel> left_out;  // since an earlier one failed
  int code = kSuccess;
  std::exception_ptr error;  // of a level in this process
};

Trained train_levels(const CLI::App& command, const TrainFlags& flags, train::Task task,
                     const comm::Group& group, bool was_launched) {
  const auto levels = flags.levels();
  const bool apart = flags.starts_job() || (levels.size() > 1 && !was_launched);
  if (apart) task = {};
  Trained trained;
  for (const amp::OptLevel level : levels) {
    if (trained.code != kSuccess || trained.error) {
      trained.left_out.push_back(level);
    } else if (apart) {
      std::string result;
      trained.code = flags.starts_job() ? train_together(command, flags, level, result)
                                        : train_apart(command, level, result);
      if (!result.empty()) trained.results.push_back(from_json(result).at(0));
    } else {
      try {
        trained.results.push_back(train_here(command, flags, level, task, group));
      } catch (const std::exception&) {
        trained.error = std::current_exception();
      }
    }
  }
  return trained;
}

void print_notes(std::ostream& out, const std::vector<train::TrainResult>& results) {
  constexpr int kTableWidth = 104;  // of its lines
  const int columns = terminal_columns(out);
  for (const train::TrainResult& result : results) {
    if (result.opt_level != amp::OptLevel::O3 || result.dtype != torch::kHalf) continue;
    out << wrapped(
               "O3 in float16 keeps nothing in float32: gradients below 6e-8 become 0 unless a "
               "--loss-scale lifts them, and updates smaller than 2^-11 of a weight are lost. "
               "Compare "
               "with O2.",
               static_cast<std::size_t>(columns > 0 ? columns : kTableWidth))
        << '\n';
  }
}

void say_left_out(const std::vector<amp::OptLevel>& levels) {
  if (levels.empty()) return;
  std::vector<std::string_view> names;
  names.reserve(levels.size());
  for (const amp::OptLevel level : levels) names.push_back(amp::name_of(level));
  std::cerr << fmt::format("[train] not trained: {}\n", fmt::join(names, ", "));
}

void say_stopped(const train::TrainResult& result, const TrainFlags& flags) {
  const std::filesystem::path& directory = flags.options.checkpoint_dir();
  const std::int64_t last = result.last_checkpoint.value_or(result.steps);
  std::cerr << fmt::format(
      "[train] stopped by {} after step {}: the checkpoint is '{}'{} — continue with "
      "--checkpoint-dir '{}' --resume auto\n",
      launch::ExitStatus{0, result.stop_signal}.to_string(), result.steps,
      checkpoint::complete_path(directory, last).string(),
      last == result.steps ? "" : ", since later losses are spikes", directory.string());
}

// On the CPU of a machine with GPUs the default would be NCCL.
comm::Group join_group(const TrainFlags& flags) {
  return comm::init("env://",
                    comm::InitOptions().backend(flags.find_device().is_cpu() ? "gloo" : "auto"));
}

int run(const CLI::App& command, const TrainFlags& flags) {
  if (flags.print_config) {
    std::cout << config_text(command);
    return kSuccess;
  }
  const comm::Rendezvous place = comm::parse_rendezvous("env://");
  check(flags, command, place);
  flags.find_device();  // an Error at once, before any process starts
  set_threads(flags.threads, kTrain);
  // One process prints for all.
  const bool speaks = place.rank == 0 && flags.node_rank == 0;
  const bool was_launched = place.world_size > 1;
  if (speaks && !flags.as_part) warn_of_unused_flags(flags, command, place);
  if (speaks) require_json_writable(flags.json);
  // Not on one of several machines: the others would wait for it.
  if (speaks && flags.nodes == 1) {
    train::require_resumable(flags.options);
    if (!flags.as_part) require_recordable(flags);
  }
  std::ostream& out = human_output(flags.json);
  Trained trained;
  {
    const comm::Group group = was_launched ? join_group(flags) : comm::Group();
    train::Task task = load_task(train::find_model(flags.model), flags.data, kTrain);
    if (speaks && !flags.quiet && !flags.as_part) print_head(out, flags, task, group);
    trained = train_levels(command, flags, std::move(task), group, was_launched);
  }
  std::vector<std::string> not_saved;
  for (const train::TrainResult& result : trained.results)
    not_saved.insert(not_saved.end(), result.not_saved.begin(), result.not_saved.end());
  const int signal = trained.results.size() == 1 ? trained.results.front().stop_signal : 0;
  if (signal != 0 && not_saved.empty()) {
    if (speaks) say_stopped(trained.results.front(), flags);
    return kSignal + signal;
  }
  const bool has_results = speaks && signal == 0 && !trained.results.empty();
  if (has_results && !flags.as_part) {
    print_table(out, trained.results, terminal_columns(out));
    print_notes(out, trained.results);
  }
  for (const std::string& error : not_saved) std::cerr << error + '\n';
  if (speaks) say_left_out(trained.left_out);
  try {
    if (has_results) write_json(flags.json, to_json(trained.results));
  } catch (const FileError& error) {
    if (!trained.error) throw;
    std::cerr << error.what() << '\n';  // that of the level follows
  }
  if (trained.error) std::rethrow_exception(trained.error);
  return not_saved.empty() ? trained.code : static_cast<int>(kFailure);
}

}  // namespace

void add_train_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "train", "Train a model on images or a text at one opt level, or compare all levels");
  const auto flags = add_train_flags(command);
  command.callback([&action, &command, flags] {
    if (!flags->config.empty()) apply_config(command, flags->config);
    apply_model(command, train::find_model(flags->model), kTrain);
    action = [&command, flags] { return run(command, *flags); };
  });
}

}  // namespace semitone::cli
