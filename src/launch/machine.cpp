#include "src/launch/machine.h"

#include "src/core/cuda_driver.h"

#include <sched.h>

#include <thread>

namespace semitone::launch {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  // The machine has more cores than the set can represent.
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > 0 ? cores : 1;
}

int usable_gpus() {
  return gpu_count();
}

}  // namespace semitone::launch
