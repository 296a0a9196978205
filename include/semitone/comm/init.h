#pragma once

#include "semitone/comm/group.h"
#include "semitone/comm/init_options.h"

#include <string_view>

namespace semitone::comm {

/// Performs the rendezvous and returns the group of all processes. Blocks until all have arrived.
/// If the timeout expires, it throws a CommError that names the missing ranks. Error for an invalid
/// URL, environment or option, and for a backend that the build does not have. CommError if the
/// port is taken, the master is unreachable, two processes have the same rank, or the ranks
/// disagree on the world size, the backend or the check level (the message names the ranks and
/// their values). Each call needs a port or file of its own.
///
/// If the master's name cannot be resolved yet, init looks it up again until the timeout: a name
/// server may not be reachable yet. If name servers answer that there is no such name, init tries
/// again for 60 seconds, since a Kubernetes pod gets its name some time after it has started. Then
/// it throws an Error with the name.
///
/// With nccl each rank has its own GPU: the only visible one, or cuda:LOCAL_RANK if several are
/// visible. The GPU becomes the current device of the calling thread, and is Group::device(). Error
/// if the number of visible GPUs is neither 1 nor at least the machine's number of ranks (the
/// message states both), or if two ranks have the same GPU (the message names both). If one rank
/// gets no GPU, the others get a CommError with its message. A single process gets its GPU in the
/// same way, unless the backend is gloo.
///
/// With several processes, init makes the process ignore SIGPIPE, as Python does, unless the
/// program has a handler for it. A lost rank therefore raises an exception in the other processes,
/// and no signal ends them.
///
/// Network traffic is neither encrypted nor authenticated, so use a network that you trust. The
/// store listens on the master's address; InitOptions::bind_address documents when it listens on
/// another one. The other sockets, except NCCL's own, listen on InitOptions::interface. Its default
/// is GLOO_SOCKET_IFNAME, else 127.0.0.1 if no rank is on another machine or in another network
/// namespace, else the interface that leads to the master, or that of the default route if the
/// former is the loopback interface. A file:// URL has no master: ranks of several machines that
/// meet there need the option.
///
/// @param url  "env://": the variables of torchrun, semitone launch, MPI or Slurm
///             (docs/environment.md). "tcp://HOST:PORT?rank=R&world_size=N": HOST is an address of
///             rank 0's machine. "file:///PATH?rank=R&world_size=N": a new file that all ranks can
///             access.
Group init(std::string_view url = "env://", const InitOptions& options = {});

/// Returns whether this build and this LibTorch have a backend.
bool has_backend(std::string_view name);

}  // namespace semitone::comm
