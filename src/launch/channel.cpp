#include "src/launch/channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace semitone::launch {
namespace {

// Longest message: a failure contains 20 lines.
constexpr std::size_t kMaxMessageBytes = 1 << 20;
constexpr auto kForeign = "what answers there is no launcher of Semitone";

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

Channel::Channel(Descriptor socket, Clock::duration timeout)
    : socket_(std::move(socket)),
      timeout_(timeout),
      updated_at_(Clock::now()),
      received_at_(updated_at_),
      sent_at_(updated_at_) {}

short Channel::events() const {
  return static_cast<short>(outgoing_.empty() ? POLLIN : POLLIN | POLLOUT);
}

void Channel::send(const Message& message) {
  if (!is_open()) return;
  sent_at_ = Clock::now();
  outgoing_ += encode(message);
  write();
}

void Channel::update(Time now) {
  if (!is_open()) return;
  // Ctrl-Z and fg: this process was stopped, not the other end.
  if (now - updated_at_ > timeout_ / 2) received_at_ = now;
  updated_at_ = now;
  read(now);
  if (now - sent_at_ >= timeout_ / 5) send(Heartbeat());
  write();
  if (is_open() && now - received_at_ >= timeout_)
    close(State::silent, fmt::format("no message from it for {:.3g} s", seconds(timeout_)));
}

Time Channel::deadline() const {
  return is_open() ? std::min(sent_at_ + timeout_ / 5, received_at_ + timeout_) : Time::max();
}

std::optional<Message> Channel::receive() {
  if (messages_.empty()) return std::nullopt;
  Message message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

void Channel::read(Time now) {
  std::array<char, 1 << 16> buffer{};
  while (is_open()) {
    const ssize_t count = ::recv(socket_.number(), buffer.data(), buffer.size(), 0);
    if (count > 0) {
      received_at_ = now;
      incoming_.append(buffer.data(), static_cast<std::size_t>(count));
      take_lines();
    } else if (count == 0) {
      close(State::closed, "it closed the connection");
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      close(State::closed, reason_of(errno));
    }
  }
}

void Channel::write() {
  while (is_open() && !outgoing_.empty()) {
    const ssize_t count =
        ::send(socket_.number(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (count > 0) {
      outgoing_.erase(0, static_cast<std::size_t>(count));
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      // The other end's last messages may still be unread.
      read(Clock::now());
      close(State::closed, reason_of(errno));
    }
  }
}

void Channel::take_lines() {
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = incoming_.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    auto message = decode(std::string_view(incoming_).substr(begin, end - begin));
    if (!message.has_value()) return close(State::foreign, kForeign);
    if (!std::holds_alternative<Heartbeat>(*message)) messages_.push_back(*std::move(message));
  }
  incoming_.erase(0, begin);
  if (incoming_.size() > kMaxMessageBytes) close(State::foreign, kForeign);
}

void Channel::close(State state, std::string problem) {
  if (!is_open()) return;
  state_ = state;
  problem_ = std::move(problem);
  socket_.close();
}

}  // namespace semitone::launch
