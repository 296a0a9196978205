#pragma once

namespace semitone::launch {

// Cores that this process may run on.
int usable_cores();

// GPUs that CUDA programs started from here see. 0 without a driver.
int usable_gpus();

}  // namespace semitone::launch
