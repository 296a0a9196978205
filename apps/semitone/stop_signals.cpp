#include "apps/semitone/stop_signals.h"

#include <atomic>

namespace semitone::cli {
namespace {

std::atomic<int> first_signal = 0;

}  // namespace

StopSignals::StopSignals() {
  first_signal = 0;
  for (const int signal : {SIGTERM, SIGUSR1, SIGHUP}) {
    struct sigaction before{};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) continue;  // under nohup, say
    struct sigaction action{};
    action.sa_handler = [](int number) {
      int none = 0;
      first_signal.compare_exchange_strong(none, number);
    };
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
    before_.emplace_back(signal, before);
  }
}

StopSignals::~StopSignals() {
  for (const auto& [signal, before] : before_) ::sigaction(signal, &before, nullptr);
}

int StopSignals::first() {
  return first_signal;
}

}  // namespace semitone::cli
