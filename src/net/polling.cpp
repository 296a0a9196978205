#include "src/net/polling.h"

#include "semitone/core/error.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace semitone::net {

void poll_until(std::vector<pollfd>& events, Time until) {
  int milliseconds = -1;
  if (until != Time::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    milliseconds = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
  }
  for (pollfd& event : events) event.revents = 0;
  // An interrupted call is treated as a timeout: the caller checks everything.
  ::poll(events.data(), events.size(), milliseconds);
}

WakeEvent::WakeEvent()
    : event_(above_standard_streams(Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)))) {
  if (!event_.is_open()) throw Error("net.polling", "an event from the system", reason_of(errno));
}

void WakeEvent::set() const noexcept {
  const int before_errno = errno;
  ::eventfd_write(descriptor(), 1);
  errno = before_errno;
}

void WakeEvent::clear() const {
  eventfd_t count = 0;
  ::eventfd_read(descriptor(), &count);
}

}  // namespace semitone::net
