#pragma once

#include "src/train/train_options.h"

namespace semitone::train {

// Error for options out of range, and for those that contradict each other.
void check_options(const TrainOptions& options);

}  // namespace semitone::train
