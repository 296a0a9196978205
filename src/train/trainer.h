#pragma once

#include "semitone/amp/opt_level.h"
#include "src/train/classifier.h"
#include "src/train/data_set.h"
#include "src/train/memory_format.h"
#include "src/train/observer.h"
#include "src/train/train_options.h"

#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

// Trains a classifier at an opt level, as `semitone train` does.
namespace semitone::train {

struct TrainResult {
  amp::OptLevel opt_level = amp::OptLevel::O1;
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the level: fp32 at O0
  DataKind kind = kImages;
  bool fp8 = false;                                 // linear layers and convolutions compute in it
  MemoryFormat memory_format = MemoryFormat::nchw;  // the chosen one
  std::int64_t epochs = 0;                          // as requested
  std::int64_t steps = 0;                           // including those before a resume
  // The share of test labels (of images, or of characters) whose logit is the largest, 0 to 1.
  double test_accuracy = 0;
  double test_loss = 0;                // mean over the test labels, in nats
  double train_loss = 0;               // mean over the last epoch's steps that were not skipped
  double items_per_second = 0;         // over all processes
  double ms_per_step = 0;              // median; includes making the batch
  std::int64_t peak_rss_bytes = 0;     // of this process
  std::int64_t peak_tensor_bytes = 0;  // of the training in this process, without the data set
  std::int64_t skipped_steps = 0;
  // Since this start: spikes of the loss (TrainOptions::divergence_guard), and rollbacks.
  std::int64_t loss_spikes = 0;
  std::int64_t rollbacks = 0;
  double final_loss_scale = 1;
  // Wall time of all of this run's steps and of the time between them, without the test.
  double train_seconds = 0;
  // The signal of TrainOptions::stop_signal that ended the training, the largest if there were
  // several; the results of the test are then NaN. 0: none.
  int stop_signal = 0;
  // The step of the last checkpoint in TrainOptions::checkpoint_dir, if there is one. After a signal
  // among loss spikes it is from before them.
  std::optional<std::int64_t> last_checkpoint;
  std::uint64_t seed = 0;
  int processes = 1;
  int threads = 1;  // per process
  // The errors of the last checkpoint and of the weights, if they could not be written. Every
  // process has that of the checkpoint, though not the same text.
  std::vector<std::string> not_saved;

  // exp(test_loss): 1 if every label is predicted with certainty, the number of classes for a uniform guess.
  double test_perplexity() const { return std::exp(test_loss); }
};

// Trains a classifier and then tests it.
//
// Training is deterministic. With the same options, data, threads and machine, every loss and
// weight is bit for bit the same, in one run or in several that resume from checkpoints.
// Seeds LibTorch's default generator.
//
// With a group, every process must call it. Each step trains on batch_size examples per process, in
// the order in which one process with batches of the total size would take them. Gradients are
// averaged by parallel::DistributedDataParallel. Each process draws its own random numbers.
// Accuracy and losses are those over all processes, on each of them. An observer receives the
// events of its own process.
//
// Checkpoints are those of checkpoint::Checkpoint, in a directory that all processes share, with the
// settings that must match in a resumed run (run_config_of). At another opt level or dtype the
// weights continue exactly, and loss scales start anew. With another number of processes every step
// has the same examples, and the processes that are new draw random numbers from the seed. The last
// checkpoint is saved before the test, so that a run that is killed during the test need only be
// tested. A training that resume_auto finds finished is only tested.
//
// Error for options out of range. Error on every process, before the first step, if processes of
// the group have other settings or other data than others (require_same_run), and if one of the
// steps to come has a batch of fewer examples than Classifier::smallest_batch. FileError for
// places where checkpoints or weights cannot be written, before training, for checkpoints that
// cannot be read or belong to another run, and for later steps, another run or another training in
// checkpoint_dir.
// DivergedError if too many consecutive steps were skipped, if a step was taken with a non-finite
// loss, if too many consecutive losses were spikes, or if the test loss is not finite; earlier
// checkpoints stay. With OnSpike::rollback those in the steps, and in the saves between them, first
// cause rollbacks. CommError, naming the rank, if another process is lost.
//
// A batch that is left out (OnSpike::skip) and the steps between a checkpoint and a rollback to it
// count as steps: the learning rate, the order of the batches and the end of the training are those
// of an undisturbed one. Random numbers continue from the checkpoint.
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options, Observer& observer);
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options);

}  // namespace semitone::train
