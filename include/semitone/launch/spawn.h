#pragma once

#include "semitone/launch/launch_options.h"
#include "semitone/launch/launch_result.h"

#include <functional>

namespace semitone::launch {

/// Runs a function in several processes of this program, and waits for them: the counterpart of
/// torch.multiprocessing.spawn.
///
///     void train(int local_rank) {
///       const auto group = comm::init();
///       …
///     }
///
///     int main() {
///       return launch::spawn(train, 4).exit_code();
///     }
///
/// As with Python's start method "spawn", no process is forked in the middle of its work. A
/// Launcher starts this program again, with its arguments, in each process. There main() runs from
/// its beginning up to its call of spawn, which calls the function and returns. In the process that
/// started the others, spawn only waits, and does not call the function. Code before the call may
/// prepare values that the function captures, but runs in every process. Return from main() after
/// the call, as above, or if the result has no workers: in these processes, and if none was started.
///
///     const auto result = launch::spawn(train, 4);
///     if (result.workers.empty()) return result.exit_code();
///
/// In the process that started the others, SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job as
/// `semitone launch` does: the processes get the signal (SIGTERM for SIGHUP), and
/// LaunchOptions::grace to save their work. SIGUSR1 and SIGUSR2 go to all processes. Signals that
/// have a handler already are left to it. To stop the job from such a handler, use a Launcher
/// instead of spawn, and call its stop().
///
/// A process that `semitone launch` or torchrun has started (RANK or WORLD_SIZE is set) calls the
/// function at once, and starts no others. Such a program therefore also runs on several machines.
///
/// Error for a second call in the same process, since the processes of the first call would run it
/// too, and if LOCAL_RANK or RANK is not a number from 0. Errors of Launcher otherwise. An
/// exception of the function leaves spawn in its process. If main() does not catch it, or returns
/// anything but 0 after it, the process counts as failed: the others are stopped, and the result of
/// the starting process is LaunchOutcome::failed.
///
/// @param function  gets LOCAL_RANK, from 0 to nproc - 1; RANK where a launcher sets RANK alone, as
///                  operators of Kubernetes do (group.device() of comm::init knows the local rank)
/// @param nproc     number of processes
/// @return          in the starting process, how the job ended; in the processes of the function, a
///                  success without workers
LaunchResult spawn(const std::function<void(int local_rank)>& function, int nproc);

/// The same with restarts, log files or other options. Their program should be this one:
///
///     launch::spawn(train, launch::this_program().nproc_per_node(4).max_restarts(2));
LaunchResult spawn(const std::function<void(int local_rank)>& function,
                   const LaunchOptions& options);

/// Returns options for this program with its arguments. Error if they cannot be read, since /proc
/// is not mounted.
LaunchOptions this_program();

}  // namespace semitone::launch
