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
  return static_cast<short>(outgoing_.empty() ? POLLIN : POLLIN | POLLOUT);
}

void LineChannel::send(std::string_view line) {
  if (!is_open()) return;
  outgoing_.append(line).push_back('\n');
  write();
  if (outgoing_.size() > limits_.max_unsent) end(State::closed, "it does not read its messages");
}

void LineChannel::update(Time now) {
  read(now);
  write();
}

std::optional<std::string> LineChannel::receive() {
  if (lines_.empty()) return std::nullopt;
  std::string line = std::move(lines_.front());
  lines_.pop_front();
  return line;
}

void LineChannel::finish() {
  outgoing_.clear();  // what is unsent can no longer be
  ::shutdown(descriptor(), SHUT_WR);
}

void LineChannel::close(State state, std::string problem) {
  lines_.clear();
  end(state, std::move(problem));
}

void LineChannel::read(Time now) {
  // Another end that sends without pause must neither hold this thread nor fill its memory: the
  // rest is read in the next update, for which poll() returns at once.
  constexpr std::size_t kMaxRead = std::size_t{1} << 18;
  std::array<char, 4096> buffer{};
  for (std::size_t done = 0; is_open() && done < kMaxRead;) {
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
  while (is_open() && !outgoing_.empty()) {
    const auto count =
        ::send(descriptor(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      outgoing_.erase(0, static_cast<std::size_t>(count));
    } else if (errno != EINTR) {
      // read() closes a broken connection, after the other end's last lines.
      return;
    }
  }
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
