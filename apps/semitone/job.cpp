#include "apps/semitone/job.h"

#include "src/core/counted.h"
#include "src/launch/signals_to.h"

#include <fmt/format.h>

#include <csignal>
#include <iostream>

namespace semitone::cli {
namespace {

using launch::LaunchOutcome;
using launch::LaunchResult;
using launch::WorkerStatus;

// Prints the processes of this node that failed after the first.
void print_others(const LaunchResult& result) {
  for (const WorkerStatus& worker : result.workers) {
    if (worker.stopped || worker.status.success() || worker.rank == result.first_failure->rank)
      continue;
    std::cerr << fmt::format("  rank {} failed after it: {}\n", worker.rank,
                             worker.status.to_string());
  }
}

void print_failure(const LaunchResult& result) {
  if (result.outcome == LaunchOutcome::succeeded) return;
  if (result.outcome == LaunchOutcome::failed) {
    std::cerr << "[launch] " << result.first_failure->to_string() << '\n';
    print_others(result);
  } else {
    std::cerr << "[launch] " << result.reason << '\n';
  }
  if (result.restarts > 0)
    std::cerr << fmt::format("  after {}\n", counted(result.restarts, "restart"));
}

// A reader of the messages that goes away must not end the job.
class IgnoreBrokenPipes {
 public:
  IgnoreBrokenPipes() : before_(::signal(SIGPIPE, SIG_IGN)) {}
  ~IgnoreBrokenPipes() { ::signal(SIGPIPE, before_); }
  IgnoreBrokenPipes(const IgnoreBrokenPipes&) = delete;
  IgnoreBrokenPipes& operator=(const IgnoreBrokenPipes&) = delete;

 private:
  void (*before_)(int);
};

}  // namespace

LaunchResult run_job(const launch::LaunchOptions& options) {
  const IgnoreBrokenPipes ignore_broken_pipes;
  launch::Launcher launcher(options);
  const LaunchResult result = [&] {
    const launch::SignalsTo signals(launcher);
    return launcher.run();
  }();
  print_failure(result);
  return result;
}

}  // namespace semitone::cli
