#pragma once

#include "src/launch/descriptor.h"
#include "src/launch/messages.h"

#include <chrono>
#include <deque>
#include <optional>
#include <string>

namespace semitone::launch {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// Messages to and from another launcher over a socket. Never waits.
class Channel {
 public:
  // @param timeout  silence after which the other end counts as gone; a beat is sent five times
  //                 as often
  Channel(Descriptor socket, Clock::duration timeout);

  int descriptor() const { return socket_.number(); }
  // What to poll for.
  short events() const;

  void send(const Message& message);

  // For us, all is said.
  void hang_up() { close(State::closed, "we closed the connection"); }

  // Reads and writes what can be, says that we live, and looks whether the other end does.
  void update(Time now);
  // When to call update() although poll() tells nothing.
  Time deadline() const;

  // The next message, except beats.
  std::optional<Message> receive();

  enum class State {
    open,
    closed,   // by the other end or the network
    silent,   // for too long
    foreign,  // the other end is no launcher
  };
  State state() const { return state_; }
  bool is_open() const { return state_ == State::open; }
  // Why it is not open. What receive() still has came before.
  const std::string& problem() const { return problem_; }

 private:
  void read(Time now);
  void write();
  void take_lines();
  void close(State state, std::string problem);

  Descriptor socket_;
  Clock::duration timeout_;
  Time looked_;  // when update() was called
  Time heard_;
  Time said_;
  std::string incoming_;
  std::string outgoing_;
  std::deque<Message> messages_;
  State state_ = State::open;
  std::string problem_;
};

}  // namespace semitone::launch
