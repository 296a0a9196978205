#include "src/net/line_channel.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

namespace semitone::net {

LineChannel::LineChannel(Descriptor socket, Clock::duration timeout, const LineLimits& limits)
    : socket_(std::move(socket)), limits_(limits), silence_(timeout, Clock::now()) {
  // Lines are short, and each is to arrive at once. Not for Unix sockets, which refuse it.
  const int yes = 1;
  ::setsockopt(descriptor(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

short LineChannel::events() const {
  const int events = closing_ ? POLLRDHUP : POLLIN;
  return static_cast<short>(unsent() == 0 ? events : events | POLLOUT);
}

void LineChannel::send(std::string_view line) {
  if (!is_open()) return;
  outgoing_.append(line).push_back('\n');
  write();
  if (unsent() > limits_.max_unsent) end(State::closed, "it does not read its messages");
}

void LineChannel::update(Time now) {
  if (!closing_) read(now);
  write();
  if (closing_) finish_closing();
}

std::optional<std::string> LineChannel::receive() {
  if (lines_.empty()) return std::nullopt;
  std::string line = std::move(lines_.front());
  lines_.pop_front();
  return line;
}

void LineChannel::finish() {
  outgoing_.clear();  // what is unsent can no longer be
  sent_ = 0;
  ::shutdown(descriptor(), SHUT_WR);
}

void LineChannel::close_after_sending() {
  lines_.clear();
  incoming_.clear();
  closing_ = true;
  finish_closing();
}

void LineChannel::finish_closing() {
  if (!is_open()) return;
  if (unsent() == 0) ::shutdown(descriptor(), SHUT_WR);
  // Its errors, too, are reported without reading.
  pollfd end_of_input{descriptor(), POLLRDHUP, 0};
  if (::poll(&end_of_input, 1, 0) > 0) end(State::closed, "it closed the connection");
}

void LineChannel::close(State state, std::string problem) {
  lines_.clear();
  end(state, std::move(problem));
}

void LineChannel::read(Time now) {
  std::array<char, 4096> buffer{};
  for (std::size_t done = 0; is_open() && done < limits_.max_read;) {
    const auto count = ::recv(descriptor(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      silence_.received(now);
      take_lines({buffer.data(), static_cast<std::size_t>(count)});
      done += static_cast<std::size_t>(count);
    } else if (count == 0) {
      end(State::closed, "it closed the connection");
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      end(State::closed, reason_of(errno));
    }
  }
}

void LineChannel::write() {
  while (is_open() && unsent() > 0) {
    const auto count =
        ::send(descriptor(), outgoing_.data() + sent_, unsent(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent_ += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      // read() closes a broken connection, after the other end's last lines.
      break;
    }
  }
  // To erase what is sent moves the rest: not before the rest is the smaller part.
  if (sent_ < unsent()) return;
  outgoing_.erase(0, sent_);
  sent_ = 0;
}

void LineChannel::take_lines(std::string_view bytes) {
  std::size_t from = incoming_.size();  // no line ends before it
  incoming_.append(bytes);
  std::size_t begin = 0;
  for (std::size_t stop = 0; (stop = incoming_.find('\n', from)) != std::string::npos;
       begin = from = stop + 1) {
    lines_.push_back(incoming_.substr(begin, stop - begin));
  }
  incoming_.erase(0, begin);
  if (incoming_.size() > limits_.max_line)
    end(State::foreign, fmt::format("it sent a line of more than {} bytes", limits_.max_line));
}

void LineChannel::end(State state, std::string problem) {
  state_ = state;
  problem_ = std::move(problem);
  socket_.close();
}

}  // namespace semitone::net
