#include "src/launch/descriptor.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace semitone::launch {
namespace {

constexpr auto kComponent = "launch.process";

}  // namespace

// If this process has closed one of the standard streams, the system reuses its number.
Descriptor above_standard_streams(Descriptor descriptor) {
  if (!descriptor.is_open() || descriptor.number() > STDERR_FILENO) return descriptor;
  Descriptor copy(::fcntl(descriptor.number(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!copy.is_open())
    throw Error(kComponent, "a file descriptor from the system", reason_of(errno));
  return copy;
}

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(kComponent, "a pipe from the system", reason_of(errno), "raise 'ulimit -n'");
  }
  Descriptor read(ends[0]);
  Descriptor write(ends[1]);
  return {above_standard_streams(std::move(read)), above_standard_streams(std::move(write))};
}

Descriptor open_null(int flags) {
  Descriptor null(::open("/dev/null", flags | O_CLOEXEC));
  if (!null.is_open()) throw Error(kComponent, "to open /dev/null", reason_of(errno));
  return above_standard_streams(std::move(null));
}

}  // namespace semitone::launch
