#pragma once

#include "src/launch/clock.h"
#include "src/launch/messages.h"
#include "src/net/heartbeat.h"
#include "src/net/line_channel.h"

#include <deque>
#include <optional>
#include <string>

namespace semitone::launch {

// Messages to and from another launcher over a socket. Never blocks.
class Channel {
 public:
  using State = net::LineChannel::State;

  // @param timeout  silence after which the other end counts as lost. Heartbeats are sent five
  //                 times as often, and at least once a second: the timeouts of the two ends may
  //                 differ if both are well above a second
  Channel(Descriptor socket, Clock::duration timeout);
  // Continues a connection, with the lines of it that have not been received.
  Channel(net::LineChannel lines, Clock::duration timeout);

  // The descriptor and the events to poll for.
  int descriptor() const { return lines_.descriptor(); }
  short events() const { return lines_.events(); }

  void send(const Message& message) { lines_.send(encode(message)); }

  // This side has nothing more to send.
  void close();

  // Reads and writes as far as possible, sends heartbeats, and checks those of the other end.
  void update(Time now);
  // When to call update() even without an event.
  Time deadline() const;

  // The next message, except heartbeats.
  std::optional<Message> receive();

  State state() const { return lines_.state(); }
  bool is_open() const { return lines_.is_open(); }
  // Why the channel is not open. Messages that receive() still returns arrived before.
  std::string problem() const;

 private:
  void decode_lines();

  Clock::duration timeout_;
  net::LineChannel lines_;
  net::HeartbeatTimer heartbeat_;
  std::deque<Message> messages_;
};

}  // namespace semitone::launch
