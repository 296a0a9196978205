#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/autocast/model.h"
#include "semitone/comm/group.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train {

// The position of a training.
struct Position {
  std::int64_t step = 0;  // steps done
  // For the current epoch, or the one just done: the steps that were not skipped. The sum is this
  // process's.
  double loss_sum = 0;
  std::int64_t loss_count = 0;
};

using NamedValues = std::vector<std::pair<std::string, std::string>>;

// The settings that must match on resume: (the option's flag, its value).
using RunConfig = NamedValues;

// The objects that a checkpoint saves and restores.
struct Training {
  const amp::Model& model;
  torch::optim::Optimizer& optimizer;
  amp::MixedPrecision& mixed;
  Position& position;
  const comm::Group& group;
};

// Writes everything, and the states of the default generators (the CPU's and the model's device's)
// of all processes. FileError on rank 0, which writes, if it cannot. Every rank calls it.
void save_checkpoint(const std::filesystem::path& path, const Training& training,
                     const RunConfig& config);

// FileError if the file is not a checkpoint, is damaged, or was made with other options or another
// model (the message names the option, or the first tensor that differs); nothing is changed then.
// Every rank calls it; rank 0 reads.
void load_checkpoint(const std::filesystem::path& path, const Training& training,
                     const RunConfig& config);

}  // namespace semitone::train
