#pragma once

#include "src/comm/rendezvous.h"

#include <c10/core/Device.h>

#include <string>
#include <vector>

// The assignment of a machine's GPUs to ranks.
namespace semitone::comm {

// The index of a rank's GPU. Error if there are too few. A single visible GPU may be this rank's
// own, if the launcher assigned one to each rank; require_distinct_gpus checks that.
// @param gpus  that this process sees: all of the machine, or its own one
int gpu_index(int local_rank, int local_world_size, int gpus);

// Error if two ranks have the same GPU.
// @param identities  of each rank's
void require_distinct_gpus(const std::vector<std::string>& identities);

// Selects the GPU of a rank, which becomes this thread's current device.
c10::Device select_gpu(const Rendezvous& rendezvous);

}  // namespace semitone::comm
