#pragma once

#include "semitone/comm/init.h"

#include <c10/core/Device.h>

#include <string>
#include <vector>

// Which of a machine's GPUs a rank uses.
namespace semitone::comm {

// The number of a rank's GPU. Error if there are too few; one alone may be this rank's own, of several
// that the launcher has given out: whether it is, require_own_gpus tells.
// @param gpus  that this process sees: all of the machine, or its own one
int gpu_of(int local_rank, int local_world_size, int gpus);

// Error if two ranks have the same GPU.
// @param identities  of each rank's
void require_own_gpus(const std::vector<std::string>& identities);

// The GPU of a rank, which becomes this thread's current device.
c10::Device take_gpu(const Rendezvous& place);

}  // namespace semitone::comm
