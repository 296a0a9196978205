#pragma once

#include "src/core/descriptor.h"
#include "src/net/clock.h"

#include <poll.h>

#include <vector>

namespace semitone::net {

// Waits for an event or until a time. Descriptors below 0 are ignored.
void poll_until(std::vector<pollfd>& events, Time until);

// Wakes a thread that polls, from any thread or signal handler.
class WakeEvent {
 public:
  // Error if the system has no more descriptors.
  WakeEvent();

  // Readable from set() to clear().
  int descriptor() const { return event_.number(); }
  void set() const noexcept;
  void clear() const;

 private:
  Descriptor event_;
};

}  // namespace semitone::net
