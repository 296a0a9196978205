#include "src/launch/descriptor.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace semitone::launch {
namespace {

constexpr auto kDescriptor = "launch.process";

}  // namespace

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(kDescriptor, "a pipe from the system", reason_of(errno), "raise 'ulimit -n'");
  }
  Descriptor read(ends[0]);
  Descriptor write(ends[1]);
  return {above_standard_streams(std::move(read)), above_standard_streams(std::move(write))};
}

Descriptor open_null(int flags) {
  Descriptor null(::open("/dev/null", flags | O_CLOEXEC));
  if (!null.is_open()) throw Error(kDescriptor, "to open /dev/null", reason_of(errno));
  return above_standard_streams(std::move(null));
}

std::pair<Descriptor, Descriptor> socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0)
    throw Error(kDescriptor, "a pair of sockets from the system", reason_of(errno));
  Descriptor first(ends[0]);
  Descriptor second(ends[1]);
  return {above_standard_streams(std::move(first)), above_standard_streams(std::move(second))};
}

void send_number(int socket, pid_t number) {
  while (::send(socket, &number, sizeof number, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

}  // namespace semitone::launch
