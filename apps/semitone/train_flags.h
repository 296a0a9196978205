#pragma once

#include "semitone/train/trainer.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace semitone::cli {

// The command line of `semitone train`, checked.
struct TrainFlags {
  std::string model = "convnet";
  std::string data;
  std::string opt_level = "O1";
  std::string dtype = "auto";
  std::int64_t epochs = train::TrainOptions().epochs();
  std::int64_t batch_size = train::TrainOptions().batch_size();
  std::string optimizer = "sgd";
  double lr = train::TrainOptions().lr();
  double momentum = train::TrainOptions().momentum();
  std::string schedule = "cosine";
  std::string loss_scale = "auto";
  std::int64_t growth_interval = train::TrainOptions().growth_interval();
  std::int64_t seed = 0;
  std::int64_t threads = 0;  // 0: as many as LibTorch takes
  std::string memory_format = "auto";
  std::int64_t limit_batches = 0;
  std::int64_t max_steps = 0;
  std::string save;
  std::string resume;
  std::string json;
  bool quiet = false;
  bool as_part = false;  // this is one of the processes of --opt-level all

  bool all_levels() const { return opt_level == "all"; }
};

// Adds the flags to the command; what they say lies in the result once the command line is parsed.
std::shared_ptr<const TrainFlags> add_train_flags(CLI::App& command);

// UsageError for flags that contradict each other.
void check(const TrainFlags& flags, const CLI::App& command);

// What the flags ask of the library, for one level.
train::TrainOptions options_of(const TrainFlags& flags, amp::OptLevel level);

// The arguments that make another process train one of the levels of --opt-level all and write its
// result to standard output: those that were given, and what differs.
std::vector<std::string> arguments_for(const CLI::App& command, amp::OptLevel level);

}  // namespace semitone::cli
