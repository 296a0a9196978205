#pragma once

#include "src/train/data_set.h"
#include "src/train/train_options.h"

namespace semitone::train {

// Error for options out of range, and for those that contradict each other or the kind of data.
void check_options(const TrainOptions& options, const DataKind& kind);

}  // namespace semitone::train
