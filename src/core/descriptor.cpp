#include "src/core/descriptor.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
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

bool write_all(int number, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(number, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      if (written == 0) errno = EIO;
      return false;
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace semitone
