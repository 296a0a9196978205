#include "src/core/descriptor.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <system_error>

namespace semitone {

std::string reason_of(int number) {
  return std::error_code(number, std::generic_category()).message();
}

bool Descriptor::close() {
  return !is_open() || ::close(std::exchange(number_, -1)) == 0;
}

void Descriptor::set_nonblocking() const {
  ::fcntl(number_, F_SETFL, ::fcntl(number_, F_GETFL) | O_NONBLOCK);
}

Descriptor above_standard_streams(Descriptor descriptor) {
  if (!descriptor.is_open() || descriptor.number() > STDERR_FILENO) return descriptor;
  Descriptor copy(::fcntl(descriptor.number(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!copy.is_open())
    throw Error("core.descriptor", "a file descriptor from the system", reason_of(errno));
  return copy;
}

int finish_connecting(const Descriptor& socket, std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  pollfd ready{socket.number(), POLLOUT, 0};
  int count = 0;
  do {
    const auto left =
        std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    count = ::poll(&ready, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX)));
  } while (count < 0 && errno == EINTR);
  if (count == 0) return ETIMEDOUT;
  if (count < 0) return errno;
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace semitone
