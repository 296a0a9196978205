#pragma once

#include "semitone/launch/exit_status.h"

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace semitone::launch {

/// The first process to fail in a job, on any node.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  int node = 0;
  std::string host;  ///< the node's name
  int pid = 0;       ///< on that node
  ExitStatus status;
  std::string log;  ///< path of the log file of last_lines; empty without log files
  /// Up to 20 last lines of stderr, or of stdout if stderr is empty. Empty if these streams are
  /// neither relayed nor logged.
  std::string last_lines;

  /// A message with the process, its exit status and its last lines of output. No newline at the
  /// end.
  std::string to_string() const;
};

/// A process of this node, in the last attempt.
struct WorkerStatus {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  ExitStatus status;     ///< how it ended
  bool stopped = false;  ///< it was still running when the launcher stopped it
};

enum class LaunchOutcome {
  succeeded,    ///< every process of every node returned 0
  failed,       ///< a process failed, and no restart was left
  lost,         ///< a node's launcher was lost or stopped, or too few nodes arrived
  interrupted,  ///< Launcher::stop was called on this node
};

/// How a job ended.
struct LaunchResult {
  LaunchOutcome outcome = LaunchOutcome::succeeded;
  std::optional<WorkerFailure> first_failure;  ///< in the last attempt; always set after `failed`
  std::string reason;                          ///< one sentence; empty after `succeeded`
  std::string run_id;                          ///< name of the job
  int restarts = 0;  ///< restarts that counted towards max_restarts, and that began
  int signal = 0;    ///< the argument of stop()
  /// Of this node. Empty if none was started, and if stop() was called between two attempts.
  std::vector<WorkerStatus> workers;

  /// The exit code for a program, as shells define it: 0 on success; the first failed process's
  /// exit code, or 128 + its signal; 1 for a lost node; 128 + the signal of stop().
  ///
  /// After stop(SIGTERM) and stop(SIGHUP) a process of this node may not have saved its work. If one
  /// had not ended when the grace period was over, the result is 137 (SIGKILL). Otherwise, if one
  /// ended with an exit code other than 0, 128 + the signal and 128 + SIGTERM, or by another signal,
  /// the result is that of the last such process.
  int exit_code() const;
};

}  // namespace semitone::launch
