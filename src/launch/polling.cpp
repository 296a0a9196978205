#include "src/launch/polling.h"

#include <algorithm>
#include <csignal>

namespace semitone::launch {

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

std::thread quiet_thread(std::function<void()> work) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(work));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace semitone::launch
