#pragma once

#include <functional>
#include <thread>

namespace semitone::launch {

// A thread that gets no signals, since they are for the program's own threads. That includes
// SIGPIPE: writing to a pipe without a reader is an ordinary error in this thread.
std::thread quiet_thread(std::function<void()> work);

}  // namespace semitone::launch
