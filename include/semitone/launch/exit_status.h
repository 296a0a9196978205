#pragma once

#include <string>

namespace semitone::launch {

/// How a process ended.
struct ExitStatus {
  int code = 0;    ///< what it returned; 0 if a signal ended it
  int signal = 0;  ///< the signal that ended it; 0 if it ended by itself

  bool success() const { return code == 0 && signal == 0; }
  /// "exit code 3", "signal 9 (Killed)".
  std::string to_string() const;
};

}  // namespace semitone::launch
