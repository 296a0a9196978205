#pragma once

#include <sys/types.h>

namespace semitone::launch {

// Whether a process of the group is alive. Those that have ended and that nobody waits for (their
// parent is gone, and the first process of a container does not care) do not count, though the
// system still knows the group.
bool is_group_alive(pid_t group);

}  // namespace semitone::launch
