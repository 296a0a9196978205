#pragma once

#include "apps/semitone/flags.h"
#include "apps/semitone/train_data.h"
#include "src/train/train_options.h"

#include <cstdint>
#include <string>
#include <string_view>

// What the commands that train for a few steps in one process have in common.
namespace semitone::cli {

struct ShortTraining {
  train::TrainOptions options;
  std::string model = "convnet";
  DataFlags data{};
  std::string device = "auto";
  std::int64_t threads = 0;  // 0: as many as LibTorch takes
  std::string json{};

  // Sets the number of threads, and the device and the level of the options.
  void prepare(amp::OptLevel level);
};

// UsageError if --momentum is given for an optimizer that has none.
void check_momentum(const CLI::App& command, const train::TrainOptions& options,
                    std::string_view component);

// Adds their flags, and --json.
void add_short_training_flags(Flags& add, ShortTraining& training);

}  // namespace semitone::cli
