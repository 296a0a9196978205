#pragma once

#include "semitone/comm/group.h"

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::comm {

/// What a group verifies before a collective: that all ranks call the same one with the same
/// shapes, dtypes and root. On a mismatch, CommError on every rank lists the call of each. Without
/// the check, ranks that disagree wait until the timeout or end: Gloo terminates a process that
/// receives more data than it expects.
enum class CheckLevel {
  none,   ///< nothing
  calls,  ///< collectives that the program itself calls on a Group, except those whose names end in
          ///< _async, since comparing means waiting for the other ranks. Each check costs one small
          ///< exchange, 0.1 ms between processes of a machine; with nccl it also waits for the GPU
  full,   ///< all collectives, including those of DistributedDataParallel: for debugging
};

/// Options of init, with chained setters.
class InitOptions {
 public:
  /// "gloo", "nccl" or "auto". "auto" is nccl if the build has NCCL and there is a GPU for this
  /// process, otherwise gloo. A model on the CPU of a machine with GPUs needs gloo. Default "auto".
  /// init throws Error if the build does not have the backend.
  InitOptions& backend(std::string value);
  /// Timeout of a collective, and of the rendezvous at the start. Default 30 minutes, as in torch.
  InitOptions& timeout(std::chrono::milliseconds value);
  /// Network interface for connections between ranks ("eth0"). Default: GLOO_SOCKET_IFNAME, else
  /// the interface that leads to the master's address. Listening sockets are bound to this
  /// interface's address only, except NCCL's own, which follow NCCL_SOCKET_IFNAME.
  InitOptions& interface(std::string value);
  /// The local address that rank 0's store listens on, if it is not the master's address: "0.0.0.0"
  /// for all interfaces. Default: the master's address if it belongs to this machine. The default
  /// is all interfaces if it does not (a Kubernetes service, a forwarded port), or if it is a
  /// loopback address and the environment does not say that all ranks are on this machine.
  InitOptions& bind_address(std::string value);
  /// Overrides the rank and world size of the URL or the environment.
  InitOptions& rank(int value);
  InitOptions& world_size(int value);
  /// Default: SEMITONE_COMM_CHECK, else CheckLevel::calls.
  InitOptions& check(CheckLevel value);
  /// Interval at which a rank tells the others that it is alive. Default 1 second.
  InitOptions& heartbeat(std::chrono::milliseconds value);
  /// How long a rank may be silent, because it is stopped or its machine is unreachable, before all
  /// other ranks raise a CommError that names it. A rank that ends is noticed at once. Increase it
  /// for ranks that a debugger stops. Default 30 seconds.
  InitOptions& heartbeat_timeout(std::chrono::milliseconds value);

  const std::string& backend() const { return backend_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  const std::string& interface() const { return interface_; }
  const std::string& bind_address() const { return bind_address_; }
  std::optional<int> rank() const { return rank_; }
  std::optional<int> world_size() const { return world_size_; }
  std::optional<CheckLevel> check() const { return check_; }
  std::chrono::milliseconds heartbeat() const { return heartbeat_; }
  std::chrono::milliseconds heartbeat_timeout() const { return heartbeat_timeout_; }

 private:
  std::string backend_ = "auto";
  std::chrono::milliseconds timeout_ = std::chrono::minutes(30);
  std::string interface_;
  std::string bind_address_;
  std::optional<int> rank_;
  std::optional<int> world_size_;
  std::optional<CheckLevel> check_;
  std::chrono::milliseconds heartbeat_ = std::chrono::seconds(1);
  std::chrono::milliseconds heartbeat_timeout_ = std::chrono::seconds(30);
};

/// This process's rank, the world size, and the place where the processes meet.
struct Rendezvous {
  enum class Kind { tcp, file };
  Kind kind = Kind::tcp;
  int rank = 0;
  int world_size = 1;
  /// Rank among the processes of this machine; it selects the GPU. If nothing specifies it, init
  /// counts the ranks on each machine after the rendezvous.
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::string host;  ///< of the store; tcp only
  int port = 0;
  std::string path;              ///< of the store; file only
  bool store_is_hosted = false;  ///< a launcher runs the store, not rank 0
};

/// Reads a URL:
///
/// - `env://`: the launcher's environment variables. The first set that is present counts:
///   1. torchrun's and `semitone launch`'s RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
///      MASTER_ADDR, MASTER_PORT. Kubernetes operators set these without the LOCAL_ variables.
///   2. OMPI_COMM_WORLD_RANK … of Open MPI, MV2_COMM_WORLD_RANK … of MVAPICH2, and PMI_RANK … of
///      MPICH, Intel MPI and Cray PALS. MASTER_ADDR defaults to this machine if all processes run
///      on it, and is required otherwise. MASTER_PORT is derived from the job's number, if there
///      is one.
///   3. SLURM_PROCID, SLURM_STEP_NUM_TASKS … of a step that Slurm's srun runs. MASTER_ADDR
///      defaults to the first node of the step, and MASTER_PORT is derived from the numbers of job
///      and step. These take precedence over PMI_RANK if both agree, since srun sets PMI_RANK too.
///
///   Without any of these, as in a batch script without srun, this is a single process, unless the
///   options set rank and world size, and MASTER_ADDR and MASTER_PORT are set. docs/environment.md
///   lists the variables.
/// - `tcp://HOST:PORT?rank=R&world_size=N`
/// - `file:///PATH?rank=R&world_size=N`: a file that all processes can access, new for each run.
///   For processes on several machines, set InitOptions::interface or GLOO_SOCKET_IFNAME.
///
/// If the local rank is not specified, as in the last two forms, init determines it: ranks with the
/// same host name and the same boot of the kernel are on one machine. Derived ports lie between
/// 20000 and 32767, below the range that Linux assigns to outgoing connections.
///
/// Error that names what is missing or wrong.
Rendezvous parse_rendezvous(std::string_view url, const InitOptions& options = {});

/// Meets the other processes and returns the group of all. Blocks until all have arrived or the
/// timeout expires, which is a CommError naming the missing ranks. Error for an invalid URL,
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
