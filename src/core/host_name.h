#pragma once

#include <string>

namespace semitone {

// The name that people know this machine by.
std::string host_name();

}  // namespace semitone
