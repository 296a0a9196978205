#include "semitone/launch/launcher.h"

#include "semitone/core/error.h"
#include "src/core/log.h"
#include "src/core/usable_cores.h"
#include "src/launch/attempt.h"
#include "src/launch/clock.h"
#include "src/launch/interrupt.h"
#include "src/launch/log_files.h"
#include "src/launch/output_relay.h"
#include "src/launch/program.h"
#include "src/launch/rendezvous.h"
#include "src/launch/worker_environment.h"
#include "src/launch/worker_reaper.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>
#include <variant>

namespace semitone::launch {
namespace {

// How long an error is held back for output that the console has not taken yet.
constexpr auto kOutputTimeout = std::chrono::seconds(10);

}  // namespace

class Launcher::Impl {
 public:
  explicit Impl(LaunchOptions options) : options_(std::move(options)) {
    options_.check();
    require_program(options_.program());
    if (!options_.log_dir().empty()) require_log_dir(options_.log_dir());
  }

  LaunchResult run();
  void stop(int signal) noexcept { interrupt_.request(signal); }
  void forward(int signal) noexcept { interrupt_.forward(signal); }

 private:
  Outcome run_attempts(OutputRelay& relay);
  Outcome attempt(const Assignment& assignment, Channel& channel, OutputRelay& relay,
                  WorkerReaper& reaper);
  void announce(const Assignment& assignment) const;
  LaunchResult result_of(const Outcome& outcome) const;

  LaunchOptions options_;
  Interrupt interrupt_;
  std::string run_id_;
  int restarts_ = 0;
  std::vector<WorkerStatus> workers_;
};

LaunchResult Launcher::Impl::run() {
  OutputRelay relay;
  try {
    const Outcome outcome = run_attempts(relay);
    relay.finish(interrupt_);
    return result_of(outcome);
  } catch (...) {
    relay.finish(interrupt_, Clock::now() + kOutputTimeout);
    throw;
  }
}

// Starts the processes, again after each restart. Returns the outcome of the last attempt.
Outcome Launcher::Impl::run_attempts(OutputRelay& relay) {
  Rendezvous rendezvous(options_);
  WorkerReaper reaper(options_.nproc_per_node());
  while (true) {
    const auto joined = rendezvous.join(interrupt_);
    if (const auto* const outcome = std::get_if<Outcome>(&joined)) {
      if (outcome->kind == Outcome::Kind::succeeded)
        log()->warn("the job ended without this node: no process was started here");
      // How those of an earlier attempt ended says nothing about this end.
      if (interrupt_.signal() != 0) workers_.clear();
      return *outcome;
    }
    const auto& assignment = std::get<Assignment>(joined);
    run_id_ = assignment.run_id;
    restarts_ = assignment.restarts;
    announce(assignment);
    const Outcome outcome = attempt(assignment, rendezvous.channel(), relay, reaper);
    if (outcome.kind != Outcome::Kind::restart) return outcome;
    log()->warn("restarting: {}",
                outcome.failure.has_value() ? outcome.failure->to_string() : outcome.reason);
  }
}

Outcome Launcher::Impl::attempt(const Assignment& assignment, Channel& channel, OutputRelay& relay,
                                WorkerReaper& reaper) {
  try {
    Attempt attempt(options_, assignment, interrupt_, channel, relay, reaper);
    Outcome outcome = attempt.run();
    workers_ = attempt.statuses();
    return outcome;
  } catch (const Error& error) {
    channel.send(Leave{error.what()});
    throw;
  }
}

void Launcher::Impl::announce(const Assignment& assignment) const {
  const int count = options_.nproc_per_node();
  if (assignment.attempt == 0) {
    if (const int threads = threads_of_each(options_); threads > 0) {
      log()->info(
          "OMP_NUM_THREADS={} for each of {} processes on {} cores; set the variable to override",
          threads, count, granted_cores());
    }
  }
  if (assignment.nodes > 1) {
    log()->info("job {}: this is node {} of {}, with ranks {} to {} of {}; master {}:{}",
                assignment.run_id, assignment.node, assignment.nodes, assignment.first_rank,
                assignment.first_rank + count - 1, assignment.world_size, assignment.master_addr,
                assignment.master_port);
  }
  if (!options_.log_dir().empty()) {
    log()->info("logs: {}", log_folder(options_.log_dir(), assignment).string());
  }
}

LaunchResult Launcher::Impl::result_of(const Outcome& outcome) const {
  LaunchResult result;
  result.run_id = run_id_;
  result.restarts = restarts_;
  result.workers = workers_;
  result.signal = interrupt_.signal();
  if (outcome.kind == Outcome::Kind::succeeded) return result;
  result.reason = outcome.reason;
  result.first_failure = outcome.failure;
  if (outcome.kind == Outcome::Kind::failed) {
    result.outcome = LaunchOutcome::failed;
  } else {
    result.outcome = result.signal != 0 ? LaunchOutcome::interrupted : LaunchOutcome::lost;
  }
  return result;
}

Launcher::Launcher(LaunchOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Launcher::~Launcher() = default;

LaunchResult Launcher::run() {
  return impl_->run();
}

void Launcher::stop(int signal) noexcept {
  impl_->stop(signal);
}

void Launcher::forward(int signal) noexcept {
  impl_->forward(signal);
}

}  // namespace semitone::launch
