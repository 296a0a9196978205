#include "semitone/launch/exit_status.h"

#include <csignal>
#include <cstring>
#include <string>
#include <string_view>

namespace semitone::launch {
namespace {

constexpr int kSignalled = 128;  // and above it the number of a signal, by the shells' convention

// glibc has such names since 2.32.
struct NamedSignal {
  int number;
  std::string_view name;
};
constexpr NamedSignal kSignals[] = {
    {SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},
    {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"},
    {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"}, {SIGPIPE, "SIGPIPE"},
    {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"},
};

}  // namespace

std::string ExitStatus::to_string() const {
  if (signal == 0) {
    std::string text = "exit code " + std::to_string(code);
    for (const auto& [number, name] : kSignals) {
      if (code == kSignalled + number) text.append(" (128 + ").append(name).append(")");
    }
    return text;
  }
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

}  // namespace semitone::launch
