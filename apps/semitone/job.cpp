#include "apps/semitone/job.h"

#include "src/core/counted.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <csignal>
#include <iostream>
#include <utility>
#include <vector>

namespace semitone::cli {
namespace {

using launch::LaunchOutcome;
using launch::LaunchResult;
using launch::WorkerStatus;

// Stop the job.
constexpr std::array kStop{SIGINT, SIGTERM, SIGHUP, SIGQUIT};
// Forwarded to the processes: batch systems send these before a time limit, for a checkpoint.
constexpr std::array kForward{SIGUSR1, SIGUSR2};

// Forwards this process's signals to a launcher while this object exists; then the previous
// handlers are restored. Signals that the process was started to ignore (SIGHUP under nohup) stay
// ignored.
class SignalsTo {
 public:
  explicit SignalsTo(launch::Launcher& launcher) {
    launcher_ = &launcher;
    // If it were ignored, exit statuses would be lost.
    ::signal(SIGCHLD, SIG_DFL);
    for (const int signal : kStop) {
      handle(signal, [](int number) {
        if (launch::Launcher* const target = launcher_.load()) target->stop(number);
      });
    }
    for (const int signal : kForward) {
      handle(signal, [](int number) {
        if (launch::Launcher* const target = launcher_.load()) target->forward(number);
      });
    }
  }
  ~SignalsTo() {
    for (const auto& [signal, before] : before_) ::sigaction(signal, &before, nullptr);
    launcher_ = nullptr;
  }
  SignalsTo(const SignalsTo&) = delete;
  SignalsTo& operator=(const SignalsTo&) = delete;

 private:
  void handle(int signal, void (*handler)(int)) {
    struct sigaction before{};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) return;
    before_.emplace_back(signal, before);
    struct sigaction action{};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
  }

  static inline std::atomic<launch::Launcher*> launcher_ = nullptr;
  std::vector<std::pair<int, struct sigaction>> before_;
};

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
    const SignalsTo signals(launcher);
    return launcher.run();
  }();
  print_failure(result);
  return result;
}

}  // namespace semitone::cli
