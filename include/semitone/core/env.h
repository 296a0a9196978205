#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace semitone::env {

/// An environment variable that Semitone reads. This list is the only place that names them.
struct Variable {
  const char* name;
  const char* meaning;
};

/// trace, debug, info, warning, error or off. Default: info.
inline constexpr Variable kLogLevel{
    "SEMITONE_LOG_LEVEL", "How much the library logs: trace, debug, info, warning, error, off"};
/// Default: data/mnist beside the sources that the program was built from.
inline constexpr Variable kDataDir{"SEMITONE_DATA_DIR", "Where the default data set lies"};
/// Default: tests/conformance/data.
inline constexpr Variable kConformanceDir{
    "SEMITONE_CONFORMANCE_DIR",
    "Where the conformance tests read their cases, instead of the repository's"};
/// Set by any program for libraries that follow the convention: plain output, see no-color.org.
inline constexpr Variable kNoColor{"NO_COLOR", "Set to anything: no colours on the terminal"};
/// Set by every terminal to its kind.
inline constexpr Variable kTerm{"TERM", "dumb: no colours and no moving line on the terminal"};

/// The number of this process among those that train together, as torchrun sets it.
inline constexpr Variable kRank{"RANK", "Number of this process among those that train together"};

inline constexpr Variable kWorldSize{"WORLD_SIZE", "How many processes train together"};
inline constexpr Variable kLocalRank{"LOCAL_RANK",
                                     "Number of this process among those of its machine"};
inline constexpr Variable kLocalWorldSize{"LOCAL_WORLD_SIZE",
                                          "How many of the processes run on this machine"};
inline constexpr Variable kMasterAddr{"MASTER_ADDR", "Address of the machine that rank 0 runs on"};
inline constexpr Variable kMasterPort{"MASTER_PORT",
                                      "Port of the store at which the processes meet"};
inline constexpr Variable kUseAgentStore{"TORCHELASTIC_USE_AGENT_STORE",
                                         "True: the launcher runs the store, rank 0 does not"};
inline constexpr Variable kRestartCount{"TORCHELASTIC_RESTART_COUNT",
                                        "How often the launcher has restarted the processes"};
inline constexpr Variable kSlurmProcId{"SLURM_PROCID", "Slurm's RANK"};
inline constexpr Variable kSlurmTasks{"SLURM_NTASKS", "Slurm's WORLD_SIZE"};
inline constexpr Variable kSlurmLocalId{"SLURM_LOCALID", "Slurm's LOCAL_RANK"};
inline constexpr Variable kSlurmTasksPerNode{"SLURM_NTASKS_PER_NODE", "Slurm's LOCAL_WORLD_SIZE"};
inline constexpr Variable kSlurmNodeList{"SLURM_JOB_NODELIST",
                                         "The first of Slurm's nodes is the default MASTER_ADDR"};
inline constexpr Variable kSlurmJobId{"SLURM_JOB_ID",
                                      "Makes the default MASTER_PORT of a Slurm job"};
inline constexpr Variable kMpiRank{"OMPI_COMM_WORLD_RANK", "Open MPI's RANK"};
inline constexpr Variable kMpiSize{"OMPI_COMM_WORLD_SIZE", "Open MPI's WORLD_SIZE"};
inline constexpr Variable kMpiLocalRank{"OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI's LOCAL_RANK"};
inline constexpr Variable kMpiLocalSize{"OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "Open MPI's LOCAL_WORLD_SIZE"};
inline constexpr Variable kMpiJobId{"PMIX_NAMESPACE",
                                    "Makes the default MASTER_PORT of an Open MPI job"};
inline constexpr Variable kGlooInterface{"GLOO_SOCKET_IFNAME",
                                         "Network interface for connections between ranks"};
/// none, calls or full. Default: calls.
inline constexpr Variable kCommCheck{
    "SEMITONE_COMM_CHECK",
    "Which collectives verify that all ranks call the same: none, calls, full"};

/// Every variable above, for documentation and tests.
std::span<const Variable> all();

/// The value of a variable, nothing if it is unset or empty.
std::optional<std::string> get(const Variable& variable);

}  // namespace semitone::env
