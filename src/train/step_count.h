#pragma once

#include "src/train/data_set.h"
#include "src/train/train_options.h"

#include <cstdint>
#include <string_view>

namespace semitone::train {

// How many steps a training has. It is the same on all processes.
struct StepCount {
  std::int64_t examples = 0;     // per epoch and process
  std::int64_t all_batches = 0;  // of these examples
  std::int64_t batches = 0;      // per epoch: all, or limit_batches if that is less
  std::int64_t last_batch = 0;   // examples in the last of all_batches, from 1 to batch_size
  std::int64_t steps = 0;        // in all epochs; the learning rate's schedule has this length
  std::int64_t end = 0;  // the step after which it stops: steps, or max_steps if that is less
};

// Counts the steps of a training from its start. The options are those that check_options accepts.
StepCount count_steps(const DataSet& data, const TrainOptions& options);

// Error of the component, with the number of steps and a remedy, for a training that has less than
// `least` steps. Error as check_options.
void require_steps(const DataSet& data, const TrainOptions& options, std::int64_t least,
                   std::string_view component);

// Error, with a remedy, if a step after those that are done has a batch with too few examples.
// @param smallest  Classifier::smallest_batch
void require_batches(const StepCount& count, std::int64_t done, std::int64_t smallest,
                     const TrainOptions& options, const DataKind& kind);

}  // namespace semitone::train
