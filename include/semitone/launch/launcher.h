#pragma once

#include "semitone/launch/launch_options.h"
#include "semitone/launch/process.h"

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

/// torchrun's job for native programs: the same program several times, on one machine or more, each
/// process told by its environment who it is and where the others are.
namespace semitone::launch {

/// A process that failed: the first of its job, wherever it ran.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  int node = 0;
  std::string host;  ///< the node's name
  int pid = 0;       ///< on that node
  ExitStatus status;
  std::string log;         ///< its file with the last lines; empty if there is none
  std::string last_lines;  ///< up to 20 of what it wrote last, errors first; empty if not relayed

  /// For people: who, how, and the last lines. Several lines, without a newline at the end.
  std::string to_string() const;
};

/// One of this node's processes, in the last attempt.
struct WorkerStatus {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  ExitStatus status;     ///< how it ended
  bool stopped = false;  ///< it was still running when the launcher told it to stop
};

enum class LaunchOutcome {
  succeeded,    ///< every process of every node returned 0
  failed,       ///< a process failed, and no restart was left
  lost,         ///< a node's launcher is gone, was stopped, or too few came
  interrupted,  ///< Launcher::stop was called here
};

/// How a job ended.
struct LaunchResult {
  LaunchOutcome outcome = LaunchOutcome::succeeded;
  std::optional<WorkerFailure> first_failure;  ///< of the last attempt; always there after `failed`
  std::string reason;                          ///< one sentence; empty after `succeeded`
  std::string run_id;                          ///< name of the job
  int restarts = 0;                            ///< that used up one of max_restarts
  int signal = 0;                              ///< what stop() was called with
  std::vector<WorkerStatus> workers;           ///< of this node; empty if none was started

  /// What a program returns for it, as shells do: 0; the first failed process's own code, or 128 +
  /// its signal; 128 + the signal of stop(); 1 for a lost node.
  int exit_code() const;
};

/// Launches a job, or this node's part of it, and watches it to its end.
///
///     launch::Launcher launcher(launch::LaunchOptions("build/train").nproc_per_node(2));
///     const launch::LaunchResult result = launcher.run();
///
/// Environment of each process, as torchrun sets it: RANK, LOCAL_RANK, WORLD_SIZE,
/// LOCAL_WORLD_SIZE, GROUP_RANK (the node), GROUP_WORLD_SIZE, ROLE_NAME, ROLE_RANK,
/// ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT,
/// TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE (False: rank 0
/// hosts the store at MASTER_PORT), and OMP_NUM_THREADS (the cores shared out, unless it is set or
/// there is one process). Standard input is empty.
///
/// One fails, all stop: the processes on every node get SIGTERM, SIGKILL after the grace, and what
/// they have started themselves gets it with them (each leads a process group). Then all are
/// started again, or run() returns. Nothing outlives run(), nor this process if it is killed.
///
/// Launchers of several nodes meet over TCP, without encryption: on a network that you trust. A job
/// with an rdzv_id takes in those that bring it and no others; of one without, those that run the
/// same program with the same arguments. Node 0's decides; if it is gone, the job is over.
class Launcher {
 public:
  /// Error if the options make no sense or the program cannot be run, FileError if the log folder
  /// cannot be made. Nothing is started yet.
  explicit Launcher(LaunchOptions options);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  /// Once. Returns when all of this node's processes are gone. Error if the job cannot begin (a
  /// port in use, an endpoint that cannot be reached, a program that the system refuses); no
  /// process is left then.
  LaunchResult run();

  /// Makes run() stop everything and return: the processes get the signal (SIGTERM for SIGHUP), and
  /// SIGKILL after the grace. SIGINT or SIGQUIT a second time, or SIGKILL, kills them at once. From
  /// any thread or signal handler.
  void stop(int signal) noexcept;

  /// Hands a signal on to this node's processes (not to what they have started), and the job goes
  /// on: SIGUSR1 before a time limit, for one. Those that have no handler for it die of it. Nothing
  /// happens while no process runs, between two attempts. From any thread or signal handler.
  void forward(int signal) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::launch
