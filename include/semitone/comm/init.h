#pragma once

#include "semitone/comm/group.h"
#include "semitone/comm/init_options.h"

#include <string_view>

namespace semitone::comm {

/// Meets the other processes and returns the group of all processes. Blocks until all have arrived
/// or the timeout expires, which is a CommError naming the missing ranks. Error for an invalid URL,
/// environment or option, and for a backend that the build does not have. CommError if the port is
/// taken, the master is unreachable, two processes have the same rank, or the ranks disagree on the
/// world size. A port or file serves one call: a second call needs another.
///
/// With nccl each rank has its own GPU: the only visible one, or number LOCAL_RANK of all. The GPU
/// becomes the current device of the calling thread, and is Group::device(). Error if a machine has
/// fewer GPUs than ranks, with both numbers, or if two ranks have the same GPU, with both ranks. A
/// single process gets its GPU in the same way, unless the backend is gloo.
///
/// From then on SIGPIPE is ignored, as in Python, unless the program handles it: a lost rank raises
/// an exception in the others.
///
/// Network traffic is neither encrypted nor authenticated, so use a network that you trust. The
/// store listens on the master's address (exceptions: InitOptions::bind_address). All other sockets
/// listen on the address of the interface that leads to the master. If that is the loopback
/// interface and not all ranks share it, they use the interface of the default route.
Group init(std::string_view url = "env://", const InitOptions& options = {});

/// Returns whether this build and this LibTorch have a backend.
bool has_backend(std::string_view name);

}  // namespace semitone::comm
