#pragma once

#include "semitone/comm/group.h"

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::comm {

/// What a group verifies before a collective: that all ranks call the same one with the same
/// shapes, dtypes and root. If not, CommError on every rank lists what each called. Without the
/// check, ranks that disagree wait until the timeout, or end: Gloo ends a process that receives
/// more than it expects.
enum class CheckLevel {
  none,   ///< nothing
  calls,  ///< the collectives that the program itself calls on a Group, but for those whose names
          ///< end in _async: to compare is to wait for the other ranks. Each costs one more small
          ///< exchange, 0.1 ms between processes of a machine; with nccl a wait for the GPU
  full,   ///< all, with those that DistributedDataParallel and its kin make: for finding mistakes
};

/// Options of init, with chained setters.
class InitOptions {
 public:
  /// "gloo", "nccl", or "auto": nccl where there is a GPU for this process and the build has NCCL,
  /// else gloo. Default auto. init throws Error if the build does not have the backend. A model on
  /// the CPU of a machine with GPUs needs gloo.
  InitOptions& backend(std::string value);
  /// How long a collective, and the meeting of all processes at the start, may take. Default 30
  /// minutes, as torch's.
  InitOptions& timeout(std::chrono::milliseconds value);
  /// Network interface for connections between ranks ("eth0"). Default: the one that leads to the
  /// master's address; GLOO_SOCKET_IFNAME counts too. All listening sockets are bound to that
  /// interface's address, and to no other; but NCCL's own, which go by NCCL_SOCKET_IFNAME.
  InitOptions& interface(std::string value);
  /// The local address that rank 0's store listens on, where that is not the master's address:
  /// "0.0.0.0" for all interfaces. Default: the master's address if it is one of this machine's. All
  /// interfaces if it is not (a Kubernetes service, a forwarded port), and if it is a loopback address
  /// and the environment does not say that all ranks are on this machine.
  InitOptions& bind_address(std::string value);
  /// In place of what the URL or the environment says.
  InitOptions& rank(int value);
  InitOptions& world_size(int value);
  /// Default: calls, or what SEMITONE_COMM_CHECK says.
  InitOptions& check(CheckLevel value);
  /// How often a rank shows the others that it lives. Default 1 second.
  InitOptions& heartbeat(std::chrono::milliseconds value);
  /// How long a rank may show no sign of life — stopped, or its machine unreachable — before all
  /// others give up with a CommError that names it. A rank that ends is noticed at once. Default 30
  /// seconds; more for ranks that are stopped in a debugger.
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

/// Where this process stands among those that train together, and where they meet.
struct Rendezvous {
  enum class Kind { tcp, file };
  Kind kind = Kind::tcp;
  int rank = 0;
  int world_size = 1;
  /// Among the processes of this machine; chooses the GPU. None if nothing says it: init counts the
  /// ranks on each machine when all have met.
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::string host;  ///< of the store; tcp only
  int port = 0;
  std::string path;              ///< of the store; file only
  bool store_is_hosted = false;  ///< a launcher runs the store: rank 0 does not
};

/// Reads a URL:
///
/// - `env://`: what the launcher has put into the environment. The first of these that is there:
///   1. torchrun's and `semitone launch`'s RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
///      MASTER_ADDR, MASTER_PORT. Kubernetes operators set these without the LOCAL_ ones.
///   2. Open MPI's OMPI_COMM_WORLD_RANK …, MVAPICH2's MV2_COMM_WORLD_RANK …, and PMI_RANK … of
///      MPICH, Intel MPI and Cray PALS. MASTER_ADDR defaults to this machine if all processes are on
///      it, and is an Error if not. MASTER_PORT is made from the job's number, if it has one.
///   3. Those of a step that Slurm's srun runs: SLURM_PROCID, SLURM_STEP_NUM_TASKS … MASTER_ADDR
///      defaults to the first node of the step, MASTER_PORT is made from the numbers of job and step.
///      They come before PMI_RANK if both say the same: srun sets that, too.
///
///   Without any of these, as in a batch script that does not use srun: a single process, unless the
///   options say otherwise, and MASTER_ADDR and MASTER_PORT where. docs/environment.md has the list.
/// - `tcp://HOST:PORT?rank=R&world_size=N`
/// - `file:///PATH?rank=R&world_size=N`: a file that all processes see, new for each run. Those of
///   several machines need InitOptions::interface
///
/// What does not name the local rank, as the last two, leaves it to init: ranks with the same host name
/// on the same running kernel are on one machine. Ports that are made from a job's number lie between
/// 20000 and 32767, below those that Linux hands out to connections.
///
/// Error with the name of what is missing or wrong.
Rendezvous parse_rendezvous(std::string_view url, const InitOptions& options = {});

/// Meets the other processes and returns the group of all. Blocks until all are there or the
/// timeout is over (CommError naming the missing ranks). Error for a URL, environment or options
/// that make no sense, and for a backend that the build does not have; CommError if the port is
/// taken, the master cannot be reached, a rank is there twice, or the ranks disagree on the world
/// size. A port or file serves one group of all: a second call needs another.
///
/// With nccl each rank has a GPU of its own: the only one that it sees, or number LOCAL_RANK of
/// all. It becomes the current device of the calling thread, and is Group::device(). Error, with
/// both numbers, if a machine has fewer GPUs than ranks, and with both ranks if two have the same. A
/// single process takes its GPU in the same way, unless the backend is gloo.
///
/// SIGPIPE is ignored from then on, as in Python, unless the program handles it: a rank that is lost
/// is an exception in the others.
///
/// Nothing on the network is encrypted or authenticated. The store listens on the master's address
/// (see InitOptions::bind_address for when it cannot), all other sockets on that of the interface that
/// leads to the master; where that is the loopback interface and not all ranks share it, on that of
/// the default route. Give an address of a network that you trust.
Group init(std::string_view url = "env://", const InitOptions& options = {});

/// Whether this build and this LibTorch have a backend.
bool has_backend(std::string_view name);

}  // namespace semitone::comm
