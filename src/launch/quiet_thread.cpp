#include "src/launch/quiet_thread.h"

#include <csignal>
#include <utility>

namespace semitone::launch {

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
