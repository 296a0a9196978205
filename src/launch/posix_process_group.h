#pragma once

#include <sys/types.h>

namespace semitone::launch {

// Whether a process of the group is alive. Zombies do not count, although the system still knows
// the group: their parent has ended, and the first process of a container may not reap them.
bool is_group_alive(pid_t group);

}  // namespace semitone::launch
