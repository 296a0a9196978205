#pragma once

#include "src/launch/clock.h"

#include <poll.h>

#include <functional>
#include <thread>
#include <vector>

namespace semitone::launch {

// Waits for an event or until a time.
void poll_until(std::vector<pollfd>& events, Time until);

// A thread that gets no signals, since they are for the program's own threads. That includes
// SIGPIPE: writing to a pipe without a reader is an ordinary error in this thread.
std::thread quiet_thread(std::function<void()> work);

}  // namespace semitone::launch
