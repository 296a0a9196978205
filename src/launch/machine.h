#pragma once

namespace semitone::launch {

// Cores that this process may run on.
int usable_cores();

// GPUs that CUDA programs started from here see. 0 where there is no driver.
int usable_gpus();

}  // namespace semitone::launch
