#include "semitone/launch/exit_status.h"

#include <cstring>

namespace semitone::launch {

std::string ExitStatus::to_string() const {
  if (signal == 0) return "exit code " + std::to_string(code);
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

}  // namespace semitone::launch
