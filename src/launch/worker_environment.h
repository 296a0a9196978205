#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/child.h"
#include "src/launch/messages.h"

#include <string>

namespace semitone::launch {

// The environment variables of a process, with torchrun's names.
Variables worker_environment(const Assignment& assignment, const LaunchOptions& options,
                             int local_rank);

// The number of threads per process if the launcher chooses it; else 0.
int threads_of_each(const LaunchOptions& options);

// Replaces "${local_rank}" by the number everywhere.
std::string with_local_rank(std::string argument, int local_rank);

}  // namespace semitone::launch
