#include "src/launch/interrupt.h"

#include "semitone/core/error.h"
#include "semitone/launch/process.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <csignal>

namespace semitone::launch {

Interrupt::Interrupt()
    : event_(above_standard_streams(Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)))) {
  if (!event_.is_open())
    throw Error("launch.launcher", "an event from the system", reason_of(errno));
}

void Interrupt::request(int signal) noexcept {
  const int before_errno = errno;
  int none = 0;
  const bool first = signal_.compare_exchange_strong(none, signal);
  // A terminal that closes may send SIGHUP twice: that is no impatience.
  if (signal == SIGKILL || (!first && signal == SIGINT)) urgent_ = true;
  ::eventfd_write(event_.number(), 1);
  errno = before_errno;
}

void Interrupt::acknowledge() const {
  eventfd_t count = 0;
  ::eventfd_read(event_.number(), &count);
}

std::string Interrupt::reason() const {
  return "stopped by " + ExitStatus{0, signal()}.to_string();
}

}  // namespace semitone::launch
