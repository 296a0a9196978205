#include "src/launch/interrupt.h"

#include "semitone/launch/exit_status.h"

#include <bit>
#include <csignal>

namespace semitone::launch {

void Interrupt::request(int signal) noexcept {
  int none = 0;
  const bool first = signal_.compare_exchange_strong(none, signal);
  // A terminal that closes may send SIGHUP twice, which is not a request to kill at once.
  if (signal == SIGKILL || (!first && (signal == SIGINT || signal == SIGQUIT))) urgent_ = true;
  event_.set();
}

void Interrupt::forward(int signal) noexcept {
  if (signal < 1 || signal > 64) return;
  forwarded_ |= std::uint64_t{1} << (signal - 1);
  event_.set();
}

int Interrupt::take_forwarded() {
  const std::uint64_t waiting = forwarded_;
  if (waiting == 0) return 0;
  const int bit = std::countr_zero(waiting);
  forwarded_ &= ~(std::uint64_t{1} << bit);
  return bit + 1;
}

std::string Interrupt::reason() const {
  return "stopped by " + ExitStatus{0, signal()}.to_string();
}

}  // namespace semitone::launch
