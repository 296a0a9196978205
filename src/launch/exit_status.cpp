#include "semitone/launch/exit_status.h"

#include <cstring>

namespace semitone::launch {
namespace {

constexpr int kSignalled = 128;  // and above it the number of a signal, by the shells' convention

}  // namespace

std::string ExitStatus::to_string() const {
  if (signal == 0) {
    const std::string text = "exit code " + std::to_string(code);
    const char* const name = code > kSignalled ? ::sigabbrev_np(code - kSignalled) : nullptr;
    return name == nullptr ? text : text + " (128 + SIG" + name + ")";
  }
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

}  // namespace semitone::launch
