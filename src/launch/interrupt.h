#pragma once

#include "src/net/polling.h"

#include <atomic>
#include <cstdint>
#include <string>

namespace semitone::launch {

// A request to stop, or to forward a signal to the processes, from any thread or signal handler. It
// wakes threads that poll.
class Interrupt {
 public:
  void request(int signal) noexcept;
  // A signal for the processes, which continue.
  void forward(int signal) noexcept;

  // Readable while there is a request that acknowledge() has not seen.
  int descriptor() const { return event_.descriptor(); }
  void acknowledge() const { event_.clear(); }

  // The signal of the first request; 0 if there was none.
  int signal() const { return signal_.load(); }
  // A signal to forward that was not returned yet; 0 if there is none.
  int take_forwarded();
  // "stopped by signal 15 (Terminated)"
  std::string reason() const;
  // Whether to kill the processes at once.
  bool urgent() const { return urgent_.load(); }

 private:
  net::WakeEvent event_;
  std::atomic<int> signal_{0};
  std::atomic<bool> urgent_{false};
  std::atomic<std::uint64_t> forwarded_{0};  // bit n-1: signal n
};

}  // namespace semitone::launch
