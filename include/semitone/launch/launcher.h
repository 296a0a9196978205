#pragma once

#include "semitone/launch/launch_options.h"
#include "semitone/launch/launch_result.h"

#include <memory>

/// The counterpart of torchrun for native programs: starts several processes of the same program,
/// on one machine or more. Each process finds its rank and the address of the others in its
/// environment.
namespace semitone::launch {

/// Launches a job, or this node's part of it, and watches it until it ends.
///
///     launch::Launcher launcher(launch::LaunchOptions("build/train").nproc_per_node(2));
///     const launch::LaunchResult result = launcher.run();
///
/// Each process gets torchrun's environment variables: RANK, LOCAL_RANK, WORLD_SIZE,
/// LOCAL_WORLD_SIZE, GROUP_RANK (the node), GROUP_WORLD_SIZE, ROLE_NAME, ROLE_RANK,
/// ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT,
/// TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE and
/// OMP_NUM_THREADS; and SEMITONE_ATTEMPT, how often they were started before. Two values differ
/// from torchrun's. TORCHELASTIC_USE_AGENT_STORE is False, since rank 0 hosts the store at
/// MASTER_PORT. OMP_NUM_THREADS is the number of cores divided by the number of processes
/// (torchrun: 1); it is not changed if it is set already or if there is one process. Standard input
/// is empty.
///
/// If one process fails, all are stopped: the processes on every node get SIGTERM, and SIGKILL
/// after the grace period. Each process leads a process group, so that the processes that it
/// started are stopped with it. Then all processes are restarted, or run() returns. When run()
/// returns, none of the processes is left. They are also killed if the launcher itself is killed.
/// Exception: a process that SIGKILL does not end within 30 s (it waits for a disk or a driver) is
/// abandoned, and a warning is logged.
///
/// Launchers of several nodes connect over TCP without encryption, so use a network that you trust.
/// A job with an rdzv_id accepts launchers with the same rdzv_id only. A job without one accepts
/// launchers that run the same program with the same arguments; with master_addr, any program and
/// arguments, if node_rank is free. Node 0's launcher makes all decisions; if it is lost, the job
/// ends.
class Launcher {
 public:
  /// Error if the options are invalid or the program cannot be run, FileError if the log folder
  /// cannot be created. Starts nothing yet.
  explicit Launcher(LaunchOptions options);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  /// Runs the job; call it once. Returns when all of this node's processes have ended. Error if the
  /// job cannot start (a port in use, an unreachable endpoint, a program that the system refuses to
  /// run). In that case no process is left. run() relays what the processes wrote before it returns,
  /// however long the console takes, and before it throws, for at most 10 s.
  LaunchResult run();

  /// Makes run() stop all processes and return. The processes get the signal (SIGTERM for SIGHUP),
  /// and SIGKILL after the grace period. stop(SIGKILL) kills them at once. So does stop(SIGINT) or
  /// stop(SIGQUIT) after an earlier stop(). May be called from any thread or signal handler.
  void stop(int signal) noexcept;

  /// Forwards a signal to this node's processes, but not to the processes that those have started.
  /// The job continues. An example is SIGUSR1 before a time limit. The signal may end a process
  /// that has no handler for it. Between two attempts the signal has no effect. May be called from
  /// any thread or signal handler.
  void forward(int signal) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::launch
