#pragma once

#include <optional>
#include <string_view>

namespace semitone {

// Cores that this process may run on.
int usable_cores();

// Those of them that are cores of their own: two hyperthreads of a core count as one. LibTorch with MKL
// computes with so many threads if no variable says otherwise.
int physical_cores();

// Cores of the machine, or of the virtual one.
int all_cores();

// Cores' worth of time that the process's control group gets; nothing: no limit.
std::optional<double> cpu_quota();

// Cores that this process may run on and has the time of, rounded up: how many processes or threads
// make sense.
int granted_cores();

// The limit in a text of /sys/fs/cgroup/cpu.max, "150000 100000": 1.5. Nothing for "max 100000", and
// for other texts.
std::optional<double> parse_cpu_quota(std::string_view text);

}  // namespace semitone
