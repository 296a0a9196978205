#pragma once

#include "src/core/descriptor.h"
#include "src/net/clock.h"
#include "src/net/heartbeat.h"

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::net {

// Limits of what is read from the other end and kept for it. The other end may be any program.
struct LineLimits {
  std::size_t max_line = 1 << 16;    // bytes of an incoming line
  std::size_t max_unsent = 1 << 16;  // bytes that the other end has not read yet
  // Bytes that one update reads, rounded up to 4 KiB. Another end that sends without pause must
  // neither hold this thread nor fill its memory. The rest is read in the next update, for which
  // poll() returns at once.
  std::size_t max_read = 1 << 18;
};

// A connection that carries lines of text. Never blocks.
class LineChannel {
 public:
  // @param timeout  silence after which is_silent() is true
  LineChannel(Descriptor socket, Clock::duration timeout, const LineLimits& limits = {});

  // Replaces the limits, for what arrives or is sent from now on.
  void set_limits(const LineLimits& limits) { limits_ = limits; }

  // The descriptor and the events to poll for. The number is negative once the channel is closed.
  int descriptor() const { return socket_.number(); }
  short events() const;

  // Sends a line, without its end. What cannot be sent at once is sent in later updates.
  void send(std::string_view line);

  // Reads and writes as far as possible, but reads no more than the limit.
  void update(Time now);

  // The next line, without its end. Lines that arrived before the channel was closed are returned
  // too.
  std::optional<std::string> receive();

  // Whether nothing has come for the timeout. To be called after every update.
  bool is_silent(Time now) { return silence_.has_expired(now); }
  // When to check that even without an event.
  Time deadline() const { return silence_.deadline(); }

  // Ends sending from this side; the other side can still send.
  void finish();

  // Closes the channel without losing what was sent: closing a connection while it has input that
  // was not read resets it, and a reset can overtake the last lines. From now on the channel reads
  // nothing, and drops lines that have not been received. Later updates send the rest, end sending,
  // and close the channel once the other end has closed the connection. How long that may take is
  // up to the owner.
  void close_after_sending();

  enum class State {
    open,
    closed,   // by the other end, the network or this side
    silent,   // for too long
    foreign,  // the other end speaks another protocol
  };
  // Closes the channel, for this reason even if it was closed before, and drops the lines that have
  // not been received.
  void close(State state, std::string problem);
  State state() const { return state_; }
  bool is_open() const { return state_ == State::open; }
  // Why the channel is not open.
  const std::string& problem() const { return problem_; }

 private:
  void read(Time now);
  void write();
  void finish_closing();
  std::size_t unsent() const { return outgoing_.size() - sent_; }
  void take_lines(std::string_view bytes);
  void end(State state, std::string problem);

  Descriptor socket_;
  LineLimits limits_;
  SilenceTimer silence_;
  std::string incoming_;  // the beginning of a line
  std::string outgoing_;
  std::size_t sent_ = 0;  // bytes of outgoing_
  std::deque<std::string> lines_;
  State state_ = State::open;
  bool closing_ = false;  // after sending
  std::string problem_;
};

}  // namespace semitone::net
