#include "src/launch/machine.h"

#include <dlfcn.h>
#include <sched.h>

#include <thread>

namespace semitone::launch {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  // More cores than the set has room for.
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > 0 ? cores : 1;
}

// Asks the driver itself: LibTorch sees no GPU in a program that its CUDA half is not linked to.
int usable_gpus() {
  // Never unloaded: a driver may have threads.
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(::dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(::dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  if (init == nullptr || get_count == nullptr || init(0) != 0 || get_count(&count) != 0) return 0;
  return count;
}

}  // namespace semitone::launch
