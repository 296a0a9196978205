#pragma once

#include <csignal>
#include <utility>
#include <vector>

namespace semitone::cli {

// Catches SIGTERM, SIGUSR1 and SIGHUP, which batch systems, launchers and terminals send before they
// end a process, while this object exists; then the previous handlers are restored. One that the
// process was started to ignore stays ignored. Later such signals have no effect: a
// batch system may signal a launcher and its processes, to which the launcher forwards the signal,
// and the second one must not interrupt a save. At most one object exists at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The first signal that has arrived; 0: none.
  static int first();

 private:
  std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace semitone::cli
