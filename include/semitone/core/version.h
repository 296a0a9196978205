#pragma once

#include <string>

namespace semitone {

/// Semitone's version: "0.1.0".
std::string version();

/// The LibTorch that Semitone was built with: "2.11.0".
std::string libtorch_version();

/// The compiler that built Semitone: "GNU 12.2.0".
std::string compiler();

}  // namespace semitone
