#pragma once

#include "semitone/comm/group.h"
#include "src/train/classifier.h"
#include "src/train/train_options.h"

#include <c10/core/Device.h>

namespace semitone::train {

// This process's device: of several GPUs, the one that its group selected.
c10::Device device_of(const TrainOptions& options);

// Returns the model with the weights of the options' seed, which all processes have in common, on
// its device.
Classifier make_seeded(const ModelFactory& make_model, const TrainOptions& options);

// Lets each process draw its own dropout from now on. The first one draws what a single process
// would.
void reseed(const comm::Group& group);

}  // namespace semitone::train
