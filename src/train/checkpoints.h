#pragma once

#include "semitone/amp/divergence_guard.h"
#include "semitone/amp/mixed_precision.h"
#include "semitone/autocast/model.h"
#include "semitone/checkpoint/checkpoint.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "src/train/run_config.h"
#include "src/train/run_lock.h"
#include "src/train/train_options.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace semitone::train {

// The position of a training.
struct Position {
  std::int64_t step = 0;  // steps done
  // For the current epoch, or the one just done: the steps that were not skipped. The sum is this
  // process's.
  double loss_sum = 0;
  std::int64_t loss_count = 0;
};

// The objects of a training that a checkpoint saves and restores.
struct Training {
  const amp::Model& model;
  torch::optim::Optimizer& optimizer;
  amp::MixedPrecision& mixed;
  amp::DivergenceGuard& guard;
  parallel::detail::ReplicaSync& replicas;
  Position& position;
};

// Saves and resumes a training as its options say. Every process of the group calls the same
// functions, and if one throws, all throw.
class Checkpoints {
 public:
  // The options and the objects must outlive it.
  Checkpoints(const TrainOptions& options, const Training& training, RunConfig config);
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  // Loads the checkpoint that the options name, sets the position, and returns the directory of that
  // step. Returns std::nullopt for a new run. The optimizer keeps this run's options. No other
  // training gets the options' directory from now on.
  //
  // FileError as checkpoint::Checkpoint::resume, if there is no such checkpoint, if the options'
  // directory has checkpoints of another run or of later steps, or is one step's, or if another
  // training uses it.
  std::optional<std::filesystem::path> resume();

  // The step of the last checkpoint that this training has saved in the options' directory, or
  // loaded from there.
  std::optional<std::int64_t> last_step() const { return last_; }

  // Loads the newest checkpoint of the options' directory that this training has saved there or
  // resumed from, with its position, and returns its step. Returns std::nullopt if there is none.
  // The optimizer keeps the options of this run. FileError as resume().
  std::optional<std::int64_t> roll_back();

  // FileError if the options' directory could not be written now. Changes nothing.
  void require_writable() const;

  // Saves the position's step, unless the directory has just been resumed or saved at it. Nothing
  // without a directory in the options. A thread copies the state and writes the files. If it could
  // not write those of the save before, that is logged: a disk may have been full, or checkpoints of
  // another run in the way, for a while only.
  void save();

  // Waits until the last save() has copied the state. Called before a step of the optimizer.
  void wait_for_copy();

  // Waits for the files of the last save(). Returns the error if they could not be written, on all
  // processes, though not the same text; otherwise "". CommError is thrown.
  std::string wait();

  // The same, but logs the error: what follows does not need that checkpoint.
  void settle();

 private:
  checkpoint::Checkpoint make(const std::filesystem::path& directory);
  std::optional<std::int64_t> resume_from(std::filesystem::path& directory);
  void take_lock();
  void require_last(std::optional<std::int64_t> step) const;
  void restore_position(std::int64_t step);

  const TrainOptions& options_;
  Training training_;
  RunConfig config_;
  at::Tensor loss_sums_;         // of all processes
  std::optional<RunLock> lock_;  // on rank 0
  std::optional<checkpoint::Checkpoint> own_;
  std::optional<std::int64_t> last_;     // the step of own_ that was loaded or saved last
  std::optional<std::int64_t> written_;  // the same, without a save that may still fail
};

// FileError if resume() of these options would find no checkpoint, or those of another run, or one
// step's directory in the place of a run's. Looks at directories only, so that a mistake is
// reported before data are read. Called by one process.
void require_resumable(const TrainOptions& options);

}  // namespace semitone::train
