#pragma once

#include "src/net/clock.h"

#include <utility>

// Processes that watch each other send heartbeats, so that silence is meaningful.
namespace semitone::net {

// When this process's next heartbeat is due.
class HeartbeatTimer {
 public:
  HeartbeatTimer(Clock::duration interval, Time now) : interval_(interval), sent_at_(now) {}

  Time deadline() const { return sent_at_ + interval_; }

  // Whether a heartbeat is due. If so, it counts as sent.
  bool take_due(Time now) {
    if (now < deadline()) return false;
    sent_at_ = now;
    return true;
  }

 private:
  Clock::duration interval_;
  Time sent_at_;
};

// How long the other side has been silent.
class SilenceTimer {
 public:
  SilenceTimer(Clock::duration timeout, Time now)
      : timeout_(timeout), received_at_(now), checked_at_(now) {}

  Time deadline() const { return received_at_ + timeout_; }

  void received(Time now) { received_at_ = now; }

  // Whether the silence has lasted for the timeout. It is to be called at least twice as often: if
  // a call comes later, this process itself was stopped (Ctrl-Z and fg, a debugger), so the silence
  // means nothing, and counts from now on.
  bool has_expired(Time now) {
    if (now - std::exchange(checked_at_, now) > timeout_ / 2) received_at_ = now;
    return now - received_at_ >= timeout_;
  }

 private:
  Clock::duration timeout_;
  Time received_at_;
  Time checked_at_;
};

}  // namespace semitone::net
