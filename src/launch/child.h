#pragma once

#include "semitone/launch/exit_status.h"

#include <sys/types.h>

#include <csignal>
#include <string>
#include <utility>
#include <vector>

namespace semitone::launch {

using Variables = std::vector<std::pair<std::string, std::string>>;

// The parameters of a child process.
struct ChildOptions {
  std::vector<std::string> argv;  // the program, and what comes after its name
  Variables environment;          // added to this process's own
  int in = -1;                    // descriptors of its standard streams; -1: this process's
  int out = -1;
  int err = -1;
  bool own_group = false;      // leads a process group of its own, or stays in ours
  int death_signal = SIGTERM;  // when the thread that started it ends
  // A socket to which the child sends its number, a pid_t, before it runs the program, and then the
  // negative of its number if the program cannot be run; -1: none.
  int registry = -1;
};

// Starts a process; returns when it runs. Error if it cannot be run. The child has no blocked
// signals. In a group of its own it ignores SIGTTOU.
pid_t start_child(const ChildOptions& child);

// The status as waitpid() returns it.
ExitStatus exit_status(int status);
// Waits for it to end.
ExitStatus wait_for(pid_t id);

}  // namespace semitone::launch
