#pragma once

#include "semitone/comm/init.h"

#include <c10/core/Device.h>

// Which of a machine's GPUs a rank uses.
namespace semitone::comm {

// The number of a rank's GPU. Error if there are too few.
// @param gpus  that this process sees: all of the machine, or its own one
int gpu_of(int local_rank, int local_world_size, int gpus);

// The GPU of a rank, which becomes this thread's current device.
c10::Device take_gpu(const Rendezvous& place);

}  // namespace semitone::comm
