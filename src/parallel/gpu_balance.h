#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>
#include <vector>

namespace semitone::parallel {

struct GpuCapacity {
  std::size_t memory = 0;  // bytes
  int multiprocessors = 0;
};

// Names two devices of which one has less than 75 % of the other's memory or multiprocessors, as
// torch.nn.DataParallel does; empty if there are none. The slower one makes all others wait.
std::string imbalance_of(const std::vector<c10::Device>& devices,
                         const std::vector<GpuCapacity>& capacities);

// The same for GPUs of this machine, as their driver describes them.
std::string imbalance_of(const std::vector<c10::Device>& devices);

}  // namespace semitone::parallel
