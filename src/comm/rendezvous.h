#pragma once

// Internal interface: other rooms include this header.

#include "semitone/comm/init_options.h"

#include <optional>
#include <string>
#include <string_view>

namespace semitone::comm {

// This process's rank, the world size, and the place where the processes meet.
struct Rendezvous {
  enum class Kind { tcp, file };
  Kind kind = Kind::tcp;
  int rank = 0;
  int world_size = 1;
  // Rank among the processes of this machine; it selects the GPU. If nothing specifies it, init
  // counts the ranks on each machine after the rendezvous.
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::string host;  // of the store; tcp only
  int port = 0;
  std::string path;              // of the store; file only
  bool store_is_hosted = false;  // a launcher runs the store, not rank 0
};

// Reads a URL:
//
// - `env://`: the launcher's environment variables. The first set that is present counts:
//   1. torchrun's and `semitone launch`'s RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
//      MASTER_ADDR, MASTER_PORT. Kubernetes operators set these without the LOCAL_ variables.
//   2. OMPI_COMM_WORLD_RANK … of Open MPI, MV2_COMM_WORLD_RANK … of MVAPICH2, and PMI_RANK … of
//      MPICH, Intel MPI and Cray PALS. MASTER_ADDR defaults to this machine if all processes run
//      on it, and is required otherwise. MASTER_PORT is derived from the job's number, if there
//      is one.
//   3. SLURM_PROCID, SLURM_STEP_NUM_TASKS … of a step that Slurm's srun runs. MASTER_ADDR
//      defaults to the first node of the step, and MASTER_PORT is derived from the numbers of job
//      and step. These take precedence over PMI_RANK if both agree, since srun sets PMI_RANK too.
//
//   Without any of these, as in a batch script without srun, this is a single process, unless the
//   options set rank and world size, and MASTER_ADDR and MASTER_PORT are set. docs/environment.md
//   lists the variables.
// - `tcp://HOST:PORT?rank=R&world_size=N`
// - `file://PATH?rank=R&world_size=N`: a file that all processes can access, new for each run.
//   For processes on several machines, set InitOptions::interface or GLOO_SOCKET_IFNAME.
//
// If the local rank is not specified, as in the last two forms, init determines it: ranks with the
// same host name and the same boot of the kernel are on one machine. Derived ports lie between
// 20000 and 32767, below the range that Linux assigns to outgoing connections.
//
// Error that names what is missing or wrong.
Rendezvous parse_rendezvous(std::string_view url, const InitOptions& options = {});

// The ranks and sizes that env:// means, also where the environment does not say where the processes
// meet. Error as above.
Rendezvous ranks_in_environment();

}  // namespace semitone::comm
