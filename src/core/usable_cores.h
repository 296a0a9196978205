#pragma once

#include <optional>
#include <string_view>

namespace semitone {

// Cores that this process may run on.
int usable_cores();

// Cores of the machine, or of the virtual one.
int all_cores();

// Cores' worth of time that the process's control group gets; nothing: no limit.
std::optional<double> cpu_quota();

// The limit in a text of /sys/fs/cgroup/cpu.max, "150000 100000": 1.5. Nothing for "max 100000", and
// for other texts.
std::optional<double> parse_cpu_quota(std::string_view text);

}  // namespace semitone
