#pragma once

#include "semitone/zoo/mnist.h"
#include "src/train/train_options.h"

namespace semitone::train {

// Error for options out of range, and for those that contradict each other.
void check_options(const TrainOptions& options);

// Error unless the set has uint8 images and a label for each.
// @param name  "training", for the message
void check_set(const zoo::ImageSet& set, const char* name);

}  // namespace semitone::train
