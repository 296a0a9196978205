#pragma once

#include "src/launch/messages.h"
#include "src/launch/spawn.h"

#include <string>

namespace semitone::launch {

// What a process is told about itself, in torchrun's names.
Variables worker_environment(const Assignment& assignment, const LaunchOptions& options,
                             int local_rank);

// The threads of each process, where the launcher chooses them; else 0.
int threads_of_each(const LaunchOptions& options);

// "${local_rank}" becomes the number, wherever it stands.
std::string with_local_rank(std::string argument, int local_rank);

}  // namespace semitone::launch
