#pragma once

#include "apps/semitone/train_data.h"
#include "semitone/comm/init.h"
#include "semitone/launch/launch_options.h"
#include "src/comm/rendezvous.h"
#include "src/train/device.h"
#include "src/train/trainer.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace semitone::cli {

// The component in errors.
inline constexpr auto kTrain = "cli.train";

// The command line of `semitone train`, checked.
struct TrainFlags {
  // options_of adds the level, the device and the group.
  train::TrainOptions options;
  std::string model = "convnet";
  DataFlags data;
  std::string opt_level = "O1";
  std::string policy;  // a preset or a file; empty: the level's
  bool fp8 = false;
  std::string device = "auto";
  std::int64_t threads = 0;  // 0: as many as LibTorch takes
  std::string nproc = "1";
  std::int64_t nodes = 1;
  std::int64_t global_batch_size = 0;  // 0: not set
  std::int64_t node_rank = 0;
  std::string master_addr;
  std::int64_t master_port = 0;
  double grace = 300;  // seconds
  std::int64_t log_every = 100;
  std::string log_dir;  // empty: no record
  std::int64_t record_every = 100;
  std::string config;  // file of flags; empty: none
  bool print_config = false;
  std::string json;
  bool quiet = false;
  bool as_part = false;  // another process shows the result

  // See train::find_device.
  c10::Device find_device() const { return train::find_device(device); }
  // One level, or all of them.
  std::vector<amp::OptLevel> levels() const;
  int processes() const;  // on this node
  // Of each of these processes that train together.
  std::int64_t batch_size(int processes_together) const {
    return global_batch_size > 0 ? global_batch_size / processes_together : options.batch_size();
  }
  // Whether this process starts others that train together.
  bool starts_job() const { return processes() > 1 || nodes > 1; }
};

// Adds the flags to the command. The result holds their values once the command line is parsed.
std::shared_ptr<const TrainFlags> add_train_flags(CLI::App& command);

// UsageError for flags that contradict each other, or this process's place in a job.
void check(const TrainFlags& flags, const CLI::App& command, const comm::Rendezvous& place);

// Warns of flags that have no effect.
void warn_of_unused_flags(const TrainFlags& flags, const CLI::App& command,
                          const comm::Rendezvous& place);

// The library's options for the flags, for one level.
train::TrainOptions options_of(const TrainFlags& flags, amp::OptLevel level,
                               const comm::Group& group);

// The job whose processes train one level together.
launch::LaunchOptions job_of(const TrainFlags& flags);

// Arguments for another process, or several together, that trains one level and writes the result
// to a file or to standard output ("-"): the given arguments, with those of --config, and with the
// necessary changes.
std::vector<std::string> arguments_for(const CLI::App& command, amp::OptLevel level,
                                       const std::string& json);

}  // namespace semitone::cli
