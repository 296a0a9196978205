#include "src/launch/attempt.h"

#include "src/core/log.h"
#include "src/net/polling.h"

#include <algorithm>
#include <csignal>
#include <string>

namespace semitone::launch {

namespace {

// Signals that arrived before the processes of an attempt start were meant for earlier ones. To be
// called before the start: a later signal is for the new processes.
Interrupt& without_earlier_signals(Interrupt& interrupt) {
  while (const int signal = interrupt.take_forwarded())
    log()->warn("{} arrived while no process was running: not forwarded",
                ExitStatus{0, signal}.to_string());
  return interrupt;
}

}  // namespace

Attempt::Attempt(const LaunchOptions& options, const Assignment& assignment, Interrupt& interrupt,
                 Channel& channel, OutputRelay& relay, WorkerReaper& reaper)
    : interrupt_(without_earlier_signals(interrupt)),
      channel_(channel),
      group_(options, assignment, relay, reaper) {}

Outcome Attempt::run() {
  // The rendezvous may have acknowledged a signal that arrived with node 0's answer: the event that
  // wakes wait() is gone.
  check_interrupt(Clock::now());
  while (!outcome_.has_value() || !group_.has_ended()) {
    wait();
    const Time now = Clock::now();
    group_.update(now);
    channel_.update(now);
    report_result(now);
    apply_outcome(now);
    check_interrupt(now);
  }
  return *outcome_;
}

void Attempt::wait() {
  std::vector<pollfd> events{{interrupt_.descriptor(), POLLIN, 0},
                             {channel_.descriptor(), channel_.events(), 0}};
  group_.watch(events);
  net::poll_until(events, std::min(channel_.deadline(), group_.deadline(Clock::now())));
}

void Attempt::report_result(Time now) {
  if (reported_ || outcome_.has_value()) return;
  if (const auto failure = group_.first_failure()) {
    // Whatever follows, the remaining processes are stopped.
    channel_.send(*failure);
    group_.stop(SIGTERM, now);
    reported_ = true;
  } else if (group_.all_succeeded()) {
    channel_.send(Succeeded());
    reported_ = true;
  }
}

void Attempt::apply_outcome(Time now) {
  while (const auto message = channel_.receive()) {
    const auto* const outcome = std::get_if<Outcome>(&*message);
    if (outcome == nullptr || is_final()) continue;
    end(*outcome, SIGTERM, now);
    // Node 0 waits until all launchers have received the outcome, not until all have stopped.
    if (is_final()) channel_.close();
  }
  if (!channel_.is_open() && !outcome_.has_value())
    end({Outcome::Kind::lost, std::nullopt, "node 0 is lost: " + channel_.problem()}, SIGTERM, now);
}

void Attempt::check_interrupt(Time now) {
  interrupt_.acknowledge();
  while (const int signal = interrupt_.take_forwarded()) group_.forward(signal);
  const int signal = interrupt_.signal();
  if (signal == 0) return;
  if (!is_final()) {
    const std::string reason = interrupt_.reason();
    channel_.send(Leave{"it was " + reason});
    end({Outcome::Kind::lost, std::nullopt, reason}, signal == SIGHUP ? SIGTERM : signal, now);
  }
  if (interrupt_.urgent()) group_.stop(SIGKILL, now);
}

void Attempt::end(const Outcome& outcome, int signal, Time now) {
  outcome_ = outcome;
  group_.stop(signal, now);
}

bool Attempt::is_final() const {
  return outcome_.has_value() && outcome_->kind != Outcome::Kind::restart;
}

}  // namespace semitone::launch
