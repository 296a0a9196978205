#pragma once

#include "src/train/data_set.h"
#include "src/train/on_spike.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <string>

// The events of a training in progress.
namespace semitone::train {

// Event: the training continues from a checkpoint.
struct Resumed {
  std::int64_t step;  // steps done
  std::filesystem::path path;
};

// Event: the first step is about to begin. The references are good until TrainingEnds.
struct TrainingBegins {
  const torch::nn::Module& model;
  torch::optim::Optimizer& optimizer;
  const DataKind& kind;
};

// Event: no further step comes, also because of an exception. Comes before the test.
struct TrainingEnds {};

// Event: a step begins.
struct StepBegins {
  std::int64_t step;  // in the training, from 1
};

// Event: a step is done.
struct StepDone {
  std::int64_t epoch;  // from 1
  std::int64_t epochs;
  std::int64_t batch;       // in the epoch, from 1
  std::int64_t batches;     // per epoch
  std::int64_t step;        // in the training, from 1
  double loss;              // of this process's batch, before the step
  bool skipped;             // by the loss scale, or since the batch was left out (OnSpike::skip)
  double loss_scale;        // after the step
  double items_per_second;  // so far, over all processes; DataKind::items says of what
  double seconds_left;      // until the end of the training, estimated
  double lr = 0;            // of this step
};

// Event: a step with infs or NaNs was skipped, as a loss scale does (TrainOptions::check_nonfinite).
struct NonFiniteStep {
  std::int64_t step;  // in the training, from 1
  std::string found;  // report::NonFiniteFinding::to_string
};

// Event: the loss of a step was a spike (TrainOptions::divergence_guard).
struct LossSpike {
  std::int64_t step;  // in the training, from 1
  double loss;        // mean over all processes
  double mean_loss;   // running mean of the losses before it
  OnSpike action;     // what was done
  double loss_scale;  // after it
};

// Event: the training had diverged, and has loaded a checkpoint (OnSpike::rollback). It goes on
// with the next batch.
struct RolledBack {
  std::int64_t step;   // the one that diverged, in the training, from 1
  std::int64_t saved;  // the step of the checkpoint
  std::string reason;  // the message of the DivergedError
};

// Event: the last batch of an epoch is done.
struct EpochDone {
  std::int64_t epoch;
  std::int64_t epochs;
  double train_loss;  // mean, see TrainResult
  double loss_scale;
  std::int64_t skipped_steps;  // so far
  double items_per_second;     // so far
  double seconds;              // duration of this epoch's steps
};

// Event: the test is done.
struct Tested {
  double accuracy;  // the share of labels whose logit is the largest, 0 to 1
  double loss;      // mean over the labels
};

// Receives the events of a training. Override the functions for the events of interest.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;

  virtual void on(const Resumed&) {}
  virtual void on(const TrainingBegins&) {}
  virtual void on(const TrainingEnds&) {}
  virtual void on(const StepBegins&) {}
  virtual void on(const StepDone&) {}
  virtual void on(const NonFiniteStep&) {}
  virtual void on(const LossSpike&) {}
  virtual void on(const RolledBack&) {}
  virtual void on(const EpochDone&) {}
  virtual void on(const Tested&) {}
};

}  // namespace semitone::train
