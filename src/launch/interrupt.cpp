#include "src/launch/interrupt.h"

#include "semitone/core/error.h"
#include "semitone/launch/exit_status.h"

#include <sys/eventfd.h>

#include <bit>
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
  // A terminal that closes may send SIGHUP twice, which is not a request to kill at once.
  if (signal == SIGKILL || (!first && (signal == SIGINT || signal == SIGQUIT))) urgent_ = true;
  ::eventfd_write(event_.number(), 1);
  errno = before_errno;
}

void Interrupt::forward(int signal) noexcept {
  if (signal < 1 || signal > 64) return;
  const int before_errno = errno;
  forwarded_ |= std::uint64_t{1} << (signal - 1);
  ::eventfd_write(event_.number(), 1);
  errno = before_errno;
}

int Interrupt::take_forwarded() {
  const std::uint64_t waiting = forwarded_;
  if (waiting == 0) return 0;
  const int bit = std::countr_zero(waiting);
  forwarded_ &= ~(std::uint64_t{1} << bit);
  return bit + 1;
}

void Interrupt::acknowledge() const {
  eventfd_t count = 0;
  ::eventfd_read(event_.number(), &count);
}

std::string Interrupt::reason() const {
  return "stopped by " + ExitStatus{0, signal()}.to_string();
}

}  // namespace semitone::launch
