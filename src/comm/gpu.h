#pragma once

#include "src/comm/rendezvous.h"
#include "src/comm/watch.h"

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
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

// Selects this rank's GPU, and waits until all ranks have selected theirs. Error on every rank if
// two ranks have the same GPU, which NCCL would report only in the first collective, with another
// message. If `select` throws, this rank gets its exception, and the others get a CommError with its
// message, without waiting for the timeout. CommError also if a rank is lost, leaves, or is late.
// @param select  selects the GPU, and returns its identity
void select_distinct_gpus(c10d::Store& store, Watch& watch, const Rendezvous& rendezvous,
                          std::chrono::milliseconds timeout,
                          const std::function<std::string()>& select);

}  // namespace semitone::comm
