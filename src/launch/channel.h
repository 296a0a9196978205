#pragma once

#include "src/launch/clock.h"
#include "src/launch/descriptor.h"
#include "src/launch/messages.h"

#include <deque>
#include <optional>
#include <string>

namespace semitone::launch {

// Messages to and from another launcher over a socket. Never blocks.
class Channel {
 public:
  // @param timeout  silence after which the other end counts as lost; heartbeats are sent five
  //                 times as often
  Channel(Descriptor socket, Clock::duration timeout);

  int descriptor() const { return socket_.number(); }
  // The events to poll for.
  short events() const;

  void send(const Message& message);

  // This side has nothing more to send.
  void close() { close(State::closed, "we closed the connection"); }

  // Reads and writes as far as possible, sends heartbeats, and checks those of the other end.
  void update(Time now);
  // When to call update() even without an event.
  Time deadline() const;

  // The next message, except heartbeats.
  std::optional<Message> receive();

  enum class State {
    open,
    closed,   // by the other end or the network
    silent,   // for too long
    foreign,  // the other end is no launcher
  };
  State state() const { return state_; }
  bool is_open() const { return state_ == State::open; }
  // Why the channel is not open. Messages that receive() still returns arrived before.
  const std::string& problem() const { return problem_; }

 private:
  void read(Time now);
  void write();
  void take_lines();
  void close(State state, std::string problem);

  Descriptor socket_;
  Clock::duration timeout_;
  Time updated_at_;  // when update() was called
  Time received_at_;
  Time sent_at_;
  std::string incoming_;
  std::string outgoing_;
  std::deque<Message> messages_;
  State state_ = State::open;
  std::string problem_;
};

}  // namespace semitone::launch
