#pragma once

#include <string>

namespace semitone {

// This machine's host name.
std::string host_name();

}  // namespace semitone
