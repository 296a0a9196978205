#pragma once

#include <string>

namespace semitone::launch {

// Cores that this process may run on.
int usable_cores();

// The name that people know this machine by.
std::string host_name();

}  // namespace semitone::launch
