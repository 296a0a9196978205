#pragma once

#include "src/core/descriptor.h"

namespace semitone {

// Whether this process got the lock (flock) of an open file or directory, or the file system has no
// locks, as some network file systems. False if another process, or another opening, has it.
bool try_lock(const Descriptor& file);

}  // namespace semitone
