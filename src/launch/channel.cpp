#include "src/launch/channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace semitone::launch {
namespace {

// A failure contains 20 lines of a process.
constexpr net::LineLimits kLimits{.max_line = 1 << 20, .max_unsent = 1 << 26};
// The other end judges this end's silence by its own timeout, which may be shorter.
constexpr auto kMaxHeartbeatInterval = std::chrono::seconds(1);
constexpr auto kForeign = "what answers there is no launcher of Semitone";

}  // namespace

Channel::Channel(Descriptor socket, Clock::duration timeout)
    : Channel(net::LineChannel(std::move(socket), timeout), timeout) {}

Channel::Channel(net::LineChannel lines, Clock::duration timeout)
    : timeout_(timeout),
      lines_(std::move(lines)),
      heartbeat_(std::min<Clock::duration>(timeout / 5, kMaxHeartbeatInterval), Clock::now()) {
  lines_.set_limits(kLimits);
}

void Channel::update(Time now) {
  lines_.update(now);
  decode_lines();
  if (heartbeat_.take_due(now)) send(Heartbeat());
  if (!lines_.is_silent(now) || !is_open()) return;
  const double seconds = std::chrono::duration<double>(timeout_).count();
  lines_.close(State::silent, fmt::format("no message from it for {:.3g} s", seconds));
}

void Channel::close() {
  if (is_open()) lines_.close(State::closed, "we closed the connection");
}

Time Channel::deadline() const {
  return is_open() ? std::min(heartbeat_.deadline(), lines_.deadline()) : Time::max();
}

std::optional<Message> Channel::receive() {
  decode_lines();
  if (messages_.empty()) return std::nullopt;
  Message message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

std::string Channel::problem() const {
  return state() == State::foreign ? kForeign : lines_.problem();
}

void Channel::decode_lines() {
  while (const auto line = lines_.receive()) {
    auto message = decode(*line);
    if (!message.has_value()) return lines_.close(State::foreign, kForeign);
    if (!std::holds_alternative<Heartbeat>(*message)) messages_.push_back(*std::move(message));
  }
}

}  // namespace semitone::launch
