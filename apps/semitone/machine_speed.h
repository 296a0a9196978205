#pragma once

#include "src/train/machine.h"

namespace semitone::cli {

// Takes about three seconds and 256 MB. Error if connections on 127.0.0.1 are impossible.
train::MachineSpeed measure_machine();

}  // namespace semitone::cli
