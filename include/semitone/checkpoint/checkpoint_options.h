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

  /// Saves models whose trainable weights are inf or NaN, too, instead of throwing DivergedError.
  /// Default false: a diverged training then keeps its last good checkpoint.
  TORCH_ARG(bool, nonfinite_weights) = false;

  /// Lets save_async() return before it has copied what only an optimizer's step changes: of tensors
  /// on the CPU, the parameters of models, their fp32 master weights, and the states of optimizers.
  /// Its thread copies them, on one core, during the next forward and backward. Call
  /// Checkpoint::wait_for_copy() before anything changes them:
  ///
  ///     loss.backward();
  ///     checkpoint.wait_for_copy();  // returns at once unless a checkpoint is being copied
  ///     optimizer.step();
  ///
  /// All else is copied by save_async() itself: buffers of models, generators, loss scales, tensors
  /// and objects of the program, and tensors on devices.
  ///
  /// Without that call a change makes the checkpoint fail: it is not written, and the next call of
  /// save(), save_async(), resume() or wait() throws an Error. Changes are recognised by the
  /// tensors' version counters. A write through data() or data_ptr() does not change these, and
  /// torch::optim::SGD writes parameters so: then the checkpoint may have values from before and
  /// after the step.
  ///
  /// Not for models that change parameters in their forward, such as torch::nn::Embedding with
  /// max_norm, or the averaged copy of a model in self-supervised training: call wait_for_copy()
  /// before forward, or do without. The end of MixedPrecision::fp32_weights and
  /// ExponentialMovingAverage's functions write parameters too. Default false.
  TORCH_ARG(bool, copy_in_background) = false;

 private:
  std::optional<std::int64_t> keep_ = 3;
  std::int64_t keep_best_ = 0;
  Best best_ = Best::lowest;
  comm::Group group_;
};

}  // namespace semitone::checkpoint
