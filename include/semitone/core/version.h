#pragma once

#include <string>

// The version of these headers, as in CMakeLists.txt.
#define SEMITONE_VERSION_MAJOR 0
#define SEMITONE_VERSION_MINOR 1
#define SEMITONE_VERSION_PATCH 0

/// Whether these headers have this version or a newer one, for the preprocessor:
///
///     #if SEMITONE_VERSION_AT_LEAST(0, 2, 0)
#define SEMITONE_VERSION_AT_LEAST(major, minor, patch) \
  (SEMITONE_VERSION_MAJOR > (major) ||                 \
   (SEMITONE_VERSION_MAJOR == (major) &&               \
    (SEMITONE_VERSION_MINOR > (minor) ||               \
     (SEMITONE_VERSION_MINOR == (minor) && SEMITONE_VERSION_PATCH >= (patch)))))

namespace semitone {

/// The version of the library: "0.1.0". A shared library may be newer than the headers that a
/// program was compiled with.
std::string version();

/// The LibTorch that Semitone was built with: "2.11.0".
std::string libtorch_version();

/// The compiler that built Semitone: "GNU 12.2.0".
std::string compiler();

}  // namespace semitone
