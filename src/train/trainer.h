#pragma once

#include "semitone/amp/opt_level.h"
#include "semitone/zoo/mnist.h"
#include "src/train/classifier.h"
#include "src/train/memory_format.h"
#include "src/train/observer.h"
#include "src/train/train_options.h"

#include <c10/core/ScalarType.h>

#include <cstdint>

// Trains an image classifier at an opt level, as `semitone train` does.
namespace semitone::train {

struct DataSet {
  zoo::ImageSet train;
  zoo::ImageSet test;
};

struct TrainResult {
  amp::OptLevel opt_level = amp::OptLevel::O1;
  c10::ScalarType dtype = c10::ScalarType::Float;   // of the level: fp32 at O0
  MemoryFormat memory_format = MemoryFormat::nchw;  // the chosen one
  std::int64_t epochs = 0;                          // as requested
  std::int64_t steps = 0;                           // including those before a resume
  double test_accuracy = 0;                         // 0 to 1
  double test_loss = 0;
  double train_loss = 0;               // mean over the last epoch's steps that were not skipped
  double images_per_second = 0;        // over all processes
  double ms_per_step = 0;              // median; includes making the batch
  std::int64_t peak_rss_bytes = 0;     // of this process
  std::int64_t peak_tensor_bytes = 0;  // of the training in this process, without the data set
  std::int64_t skipped_steps = 0;
  double final_loss_scale = 1;
  // Wall time of all of this run's steps and of the time between them, without the test.
  double train_seconds = 0;
  // Whether TrainOptions::stop ended the training; the results of the test are then NaN.
  bool stopped = false;
  std::uint64_t seed = 0;
  int processes = 1;
  int threads = 1;  // per process
};

// Trains a classifier and then tests it.
//
// Training is deterministic. With the same options, data, threads and machine, every loss and
// weight is bit for bit the same, in one run or in several with save and resume between them.
// Seeds LibTorch's default generator.
//
// With a group, every process must call it. Each step trains on batch_size images per process, in
// the order in which one process with batches of the total size would take them. Gradients are
// averaged by parallel::DistributedDataParallel. Each process draws its own random numbers.
// Accuracy and losses are those over all processes, on each of them. An observer receives the
// events of its own process.
//
// A saved state is one file: weights (fp32 at every level), master weights, optimizer, loss scale,
// random numbers, position, and the options that must match in a resumed run. It appears whole or
// not at all. Only rank 0 reads and writes it.
//
// Error for options out of range. FileError for a state that cannot be written (checked before
// training) or read, or that belongs to another run. DivergedError if too many consecutive steps
// were skipped, if a step was taken with a non-finite loss, or if the test loss is not finite;
// nothing is saved then. CommError, naming the rank, if another process is lost.
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options, Observer& observer);
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options);

}  // namespace semitone::train
