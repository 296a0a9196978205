#pragma once

#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace semitone::report {

/// Options of RunLog.
class RunLogOptions {
 public:
  /// The settings of the run, for run.json and TensorBoard's text page: {{"lr", "0.1"}, …}.
  /// Default: none.
  using Config = std::map<std::string, std::string>;
  TORCH_ARG(Config, config);

  /// This process's rank among those that train together, and their number. Default: RANK and
  /// WORLD_SIZE of the environment, as launchers like torchrun set them, or 0 and 1. Under srun and
  /// mpirun, pass `group.rank()` and `group.size()`.
  TORCH_ARG(std::optional<std::int64_t>, rank);
  TORCH_ARG(std::optional<std::int64_t>, world_size);
  /// Whether ranks above 0 write too, into the directories DIRECTORY/rank-1, rank-2 … TensorBoard
  /// shows each of them as a run. Default false: only rank 0 writes, and the RunLog of any other
  /// rank ignores what it is given.
  TORCH_ARG(bool, every_rank) = false;

  /// Whether a directory that has a run already is continued. False: FileError for such a
  /// directory. Default true, so that the first start of a run and every later one can have the
  /// same options.
  TORCH_ARG(bool, append) = true;

  /// Whether the loss scales and skipped steps of the constructing thread, and of the threads that
  /// work for it, are recorded (see RunLog). On a GPU, every step of MixedPrecision and GradScaler
  /// then reads its outcome from the device, as with any events::Listener. Default true.
  TORCH_ARG(bool, record_events) = true;

  /// What is added stays in memory until a call of add_scalar, add_text, add_histogram or set_step
  /// comes this time after the last write, or until there is 1 MiB of it. There is no background
  /// thread. 0: every call writes. Default 2 s.
  TORCH_ARG(std::chrono::milliseconds, flush_interval) = std::chrono::seconds(2);

  /// Whether training continues if a file cannot be written, on a full disk for example: the log
  /// has one warning, values are lost until writing works again, and the constructor still throws.
  /// Default false: FileError.
  TORCH_ARG(bool, ignore_write_errors) = false;
};

}  // namespace semitone::report
