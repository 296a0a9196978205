#include "semitone/checkpoint/stop_signals.h"

#include "semitone/core/error.h"

#include <torch/types.h>

#include <atomic>
#include <utility>

namespace semitone::checkpoint {
namespace {

std::atomic<bool> object_exists = false;
std::atomic<int> first_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free, "a signal's handler may not wait");

}  // namespace

StopSignals::StopSignals(comm::Group group) : group_(std::move(group)) {
  if (object_exists.exchange(true)) {
    throw Error("checkpoint.StopSignals", "one StopSignals at a time", "a second one",
                "signals belong to the whole process: share the first");
  }
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
  object_exists = false;
}

int StopSignals::received() const {
  if (group_.size() == 1) return first();
  at::Tensor largest = torch::tensor({first()}, torch::kInt).to(group_.device());
  group_.all_reduce(largest, comm::ReduceOp::max);
  return largest.item<int>();
}

int StopSignals::first() {
  return first_signal;
}

}  // namespace semitone::checkpoint
