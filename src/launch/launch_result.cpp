#include "semitone/launch/launch_result.h"

#include <fmt/format.h>

#include <csignal>

namespace semitone::launch {
namespace {

constexpr int kExitLost = 1;

// Shells use the same numbers.
int code_of_signal(int signal) {
  return 128 + signal;
}

// Processes may save their work after SIGTERM and SIGHUP (which they receive as SIGTERM). What went
// wrong then must not look like work that is saved.
int code_of_interrupted(const LaunchResult& result) {
  int code = code_of_signal(result.signal);
  if (result.signal != SIGTERM && result.signal != SIGHUP) return code;
  for (const WorkerStatus& worker : result.workers) {
    if (!worker.stopped) continue;
    const ExitStatus& status = worker.status;
    if (status.signal == SIGKILL) return code_of_signal(SIGKILL);
    const int own = status.signal != 0 ? code_of_signal(status.signal) : status.code;
    if (own != 0 && own != code_of_signal(SIGTERM) && own != code_of_signal(result.signal))
      code = own;
  }
  return code;
}

std::string indented(const std::string& lines) {
  std::string result = "    ";
  for (const char letter : lines) {
    result += letter;
    if (letter == '\n') result += "    ";
  }
  return result;
}

}  // namespace

std::string WorkerFailure::to_string() const {
  std::string text = fmt::format("rank {} failed: {}\n  local rank {} on node {} ({}), process {}",
                                 rank, status.to_string(), local_rank, node, host, pid);
  if (status.signal == SIGKILL)
    text += "\n  SIGKILL comes from outside: perhaps the machine is out of memory (see dmesg)";
  if (!last_lines.empty()) text += "\n  the last lines it wrote:\n" + indented(last_lines);
  if (!log.empty()) text += "\n  log: " + log;
  return text;
}

int LaunchResult::exit_code() const {
  switch (outcome) {
    case LaunchOutcome::succeeded:
      return 0;
    case LaunchOutcome::interrupted:
      return code_of_interrupted(*this);
    case LaunchOutcome::failed: {
      const ExitStatus status =
          first_failure.has_value() ? first_failure->status : ExitStatus{1, 0};
      return status.signal != 0 ? code_of_signal(status.signal) : status.code;
    }
    case LaunchOutcome::lost:
      break;
  }
  return kExitLost;
}

}  // namespace semitone::launch
