#pragma once

#include "src/train/data_set.h"
#include "src/train/train_options.h"

namespace semitone::train {

// Error for options out of range, and for those that contradict each other.
void check_options(const TrainOptions& options);

// Error unless both sets have uint8 images of one size, and a label for each.
void check_data(const DataSet& data);

}  // namespace semitone::train
