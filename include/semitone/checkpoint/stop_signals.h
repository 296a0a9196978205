#pragma once

#include "semitone/comm/group.h"

#include <csignal>
#include <utility>
#include <vector>

namespace semitone::checkpoint {

/// Catches SIGTERM, SIGUSR1 and SIGHUP, which batch systems, launchers and terminals send before they
/// end a process, so that a training can save a checkpoint first:
///
///     checkpoint::StopSignals signals(group);
///     for (auto step = checkpoint.resume().value_or(0); step < steps;) {
///       …  // one training step
///       const int signal = signals.received();
///       if (++step % 100 == 0 || signal != 0) checkpoint.save(step);
///       if (signal != 0) return 128 + signal;
///     }
///
/// While this object exists these signals do nothing else; later ones have no effect. A batch system
/// may signal a launcher and its processes, to which the launcher forwards the signal, and the second
/// one must not interrupt a save. The destructor restores the previous handlers. A signal that the
/// process was started to ignore, as SIGHUP under nohup, stays ignored.
///
/// Signals belong to the whole process, so at most one object exists at a time.
class StopSignals {
 public:
  /// Error if another object exists.
  /// @param group  the ranks of the training; default: a single process
  explicit StopSignals(comm::Group group = {});
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Returns the number of the signal that has arrived at this process or at another rank, the
  /// largest if there are several, or 0 if none has. All ranks get the same number in the same call,
  /// and so save and stop after the same step, even if only one of them was signalled.
  ///
  /// Collective, and one all-reduce of one number: about 0.1 ms between processes of one machine. On
  /// a GPU it waits for the device. A single process communicates nothing.
  int received() const;

  /// Returns the number of the first signal that has arrived at this process while the object
  /// exists, or 0 if none has. Not collective.
  static int first();

 private:
  comm::Group group_;
  std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace semitone::checkpoint
