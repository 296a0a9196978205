#pragma once

#include "semitone/comm/group.h"

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace semitone::checkpoint {

/// Which values of a metric are the best: losses are best if they are low, accuracies if high.
enum class Best { lowest, highest };

/// Options of Checkpoint.
class CheckpointOptions {
 public:
  /// Number of checkpoints that are kept in the directory: the newest ones, with the one just saved.
  /// At least 1, Error otherwise; 2 if another process reads the directory meanwhile. std::nullopt
  /// keeps all. Default 3.
  CheckpointOptions& keep(std::optional<std::int64_t> count);
  const std::optional<std::int64_t>& keep() const { return keep_; }

  /// Also keeps the checkpoints with the best metrics of all in the directory (Checkpoint::save),
  /// whether they are among the newest or not: with keep(3) and keep_best(2), 3 to 5 checkpoints
  /// stay. Of equal metrics the later is better. Without effect if keep is std::nullopt. At least 1,
  /// Error otherwise. Default: none.
  CheckpointOptions& keep_best(std::int64_t count, Best best = Best::lowest);
  std::int64_t keep_best() const { return keep_best_; }
  Best best() const { return best_; }

  /// The ranks of the run. Each of them constructs a Checkpoint with the same directory, which must
  /// be on a file system that all of them share, and calls the same functions in the same order.
  /// Default: a single process.
  CheckpointOptions& group(comm::Group group) {
    group_ = std::move(group);
    return *this;
  }
  const comm::Group& group() const { return group_; }

  /// Saves the states of LibTorch's default generators, from which dropout and
  /// shuffling draw: the CPU's, and those of the devices of the added models and optimizers. The
  /// entry's name is "random". Default true.
  TORCH_ARG(bool, default_generators) = true;

 private:
  std::optional<std::int64_t> keep_ = 3;
  std::int64_t keep_best_ = 0;
  Best best_ = Best::lowest;
  comm::Group group_;
};

}  // namespace semitone::checkpoint
