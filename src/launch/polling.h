#pragma once

#include "src/launch/channel.h"

#include <poll.h>

#include <functional>
#include <thread>
#include <vector>

namespace semitone::launch {

// Waits for an event, or for a time to come.
void poll_until(std::vector<pollfd>& events, Time until);

// A thread that gets no signals: they are for the threads of whoever uses us. That includes
// SIGPIPE; writing to a pipe that nobody reads is an error for it like any other.
std::thread quiet_thread(std::function<void()> work);

}  // namespace semitone::launch
