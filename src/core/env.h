#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace semitone::env {

// An environment variable that Semitone reads, or sets for the processes that it launches. All
// variable names of the library are in this list, except PATH, TMPDIR and cuDNN's
// CUDNN_CONV_WSCAP_DBG.
struct Variable {
  const char* name;
  const char* meaning;
};

// trace, debug, info, warning, error or off. Default: info.
inline constexpr Variable kLogLevel{
    "SEMITONE_LOG_LEVEL", "Log level of the library: trace, debug, info, warning, error, off"};
// Default: data/mnist in the source folder that the program was built from.
inline constexpr Variable kDataDir{"SEMITONE_DATA_DIR", "Directory of the default data set"};
// Default: tests/conformance/data.
inline constexpr Variable kConformanceDir{
    "SEMITONE_CONFORMANCE_DIR",
    "Directory of the conformance tests' cases, in place of the repository's"};
// A convention of terminal programs, see no-color.org: if it is set, output is plain.
inline constexpr Variable kNoColor{"NO_COLOR", "Set to anything: no colours on the terminal"};
// Every terminal sets this to its type.
inline constexpr Variable kTerm{"TERM", "dumb: no colours and no moving line on the terminal"};

// The rank of this process in the job, as torchrun sets it.
inline constexpr Variable kRank{"RANK", "Rank of this process in the job"};

inline constexpr Variable kWorldSize{"WORLD_SIZE", "Number of processes in the job"};
inline constexpr Variable kLocalRank{"LOCAL_RANK", "Rank of this process on its machine"};
inline constexpr Variable kLocalWorldSize{"LOCAL_WORLD_SIZE",
                                          "Number of processes on this machine"};
inline constexpr Variable kMasterAddr{"MASTER_ADDR", "Address of the machine that rank 0 runs on"};
inline constexpr Variable kMasterPort{"MASTER_PORT", "Port of the store for the rendezvous"};
inline constexpr Variable kUseAgentStore{"TORCHELASTIC_USE_AGENT_STORE",
                                         "True: the launcher runs the store, not rank 0"};
inline constexpr Variable kRestartCount{"TORCHELASTIC_RESTART_COUNT",
                                        "Number of restarts of the processes so far"};
// Also counts the starts after nodes had joined, which TORCHELASTIC_RESTART_COUNT does not.
inline constexpr Variable kAttempt{"SEMITONE_ATTEMPT",
                                   "How often the launcher has started the processes before"};
inline constexpr Variable kSlurmProcId{"SLURM_PROCID", "Slurm's RANK"};
// Only srun sets this. A batch script without srun also has SLURM_NTASKS and SLURM_PROCID, although
// it is a single process.
inline constexpr Variable kSlurmTasks{"SLURM_STEP_NUM_TASKS", "Slurm's WORLD_SIZE"};
inline constexpr Variable kSlurmLocalId{"SLURM_LOCALID", "Slurm's LOCAL_RANK"};
inline constexpr Variable kSlurmTasksPerNode{"SLURM_STEP_TASKS_PER_NODE",
                                             "Slurm's LOCAL_WORLD_SIZE of every node: 2(x3),1"};
inline constexpr Variable kSlurmNodeId{"SLURM_NODEID", "Slurm's GROUP_RANK"};
inline constexpr Variable kSlurmNodeList{"SLURM_STEP_NODELIST",
                                         "Its first node is the default MASTER_ADDR"};
inline constexpr Variable kSlurmJobId{"SLURM_JOB_ID",
                                      "Determines the default MASTER_PORT of a Slurm job"};
inline constexpr Variable kSlurmStepId{"SLURM_STEP_ID",
                                       "Also determines the default MASTER_PORT of a Slurm job"};
// Open MPI's mpirun sets these (Open MPI's documentation, 11.1: "Environment variables set for MPI
// applications").
inline constexpr Variable kMpiRank{"OMPI_COMM_WORLD_RANK", "Open MPI's RANK"};
inline constexpr Variable kMpiSize{"OMPI_COMM_WORLD_SIZE", "Open MPI's WORLD_SIZE"};
inline constexpr Variable kMpiLocalRank{"OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI's LOCAL_RANK"};
inline constexpr Variable kMpiLocalSize{"OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "Open MPI's LOCAL_WORLD_SIZE"};
inline constexpr Variable kMpiJobId{"PMIX_NAMESPACE",
                                    "Determines the default MASTER_PORT of an Open MPI job"};
// MPICH's and Intel MPI's launcher Hydra sets PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and
// MPI_LOCALNRANKS (Intel MPI Library, Developer Reference: "Environment Variables Not Propagated
// by Hydra"); HPE Cray's PALS sets PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK and PMI_LOCAL_SIZE, and
// PALS_LOCAL_RANKID, PALS_LOCAL_SIZE and PALS_APID (its manual page mpiexec(1)).
inline constexpr Variable kPmiRank{"PMI_RANK", "RANK under MPICH, Intel MPI and Cray PALS"};
inline constexpr Variable kPmiSize{"PMI_SIZE", "WORLD_SIZE under MPICH, Intel MPI and Cray PALS"};
inline constexpr Variable kHydraLocalRank{"MPI_LOCALRANKID",
                                          "LOCAL_RANK under MPICH and Intel MPI"};
inline constexpr Variable kHydraLocalSize{"MPI_LOCALNRANKS",
                                          "LOCAL_WORLD_SIZE under MPICH and Intel MPI"};
inline constexpr Variable kPmiLocalRank{"PMI_LOCAL_RANK", "LOCAL_RANK under Cray PALS"};
inline constexpr Variable kPmiLocalSize{"PMI_LOCAL_SIZE", "LOCAL_WORLD_SIZE under Cray PALS"};
inline constexpr Variable kPalsLocalRank{"PALS_LOCAL_RANKID",
                                         "LOCAL_RANK under Cray PALS, without Cray's PMI"};
inline constexpr Variable kPalsLocalSize{"PALS_LOCAL_SIZE",
                                         "LOCAL_WORLD_SIZE under Cray PALS, without Cray's PMI"};
inline constexpr Variable kPalsJobId{"PALS_APID",
                                     "Determines the default MASTER_PORT of a Cray PALS job"};
// MVAPICH2's launcher mpirun_rsh sets these (its source: src/pm/mpirun/src/mpispawn.c).
inline constexpr Variable kMvapichRank{"MV2_COMM_WORLD_RANK", "MVAPICH2's RANK"};
inline constexpr Variable kMvapichSize{"MV2_COMM_WORLD_SIZE", "MVAPICH2's WORLD_SIZE"};
inline constexpr Variable kMvapichLocalRank{"MV2_COMM_WORLD_LOCAL_RANK", "MVAPICH2's LOCAL_RANK"};
inline constexpr Variable kMvapichLocalSize{"MV2_COMM_WORLD_LOCAL_SIZE",
                                            "MVAPICH2's LOCAL_WORLD_SIZE"};
inline constexpr Variable kGlooInterface{"GLOO_SOCKET_IFNAME",
                                         "Network interface for connections between ranks"};
// LibTorch reads this. comm sets it to 2 for NCCL groups if it is not set.
inline constexpr Variable kNcclErrorHandling{
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "What NCCL's watchdog does about an error: 3 ends the process, 2 aborts the collective"};
// none, calls or full. Default: calls.
inline constexpr Variable kCommCheck{
    "SEMITONE_COMM_CHECK",
    "Which collectives verify that all ranks make the same call: none, calls, full"};

inline constexpr Variable kRdzvToken{"SEMITONE_RDZV_TOKEN",
                                     "Secret that the launchers of a job must know"};

// oneDNN reads this. Semitone reads it too, so that emulation follows oneDNN: has_native_kernel in
// native_kernels.h.
inline constexpr Variable kOneDnnMaxIsa{
    "ONEDNN_MAX_CPU_ISA", "Highest instruction set that LibTorch's oneDNN uses: AVX2 …"};
inline constexpr Variable kDnnlMaxIsa{"DNNL_MAX_CPU_ISA",
                                      "Older name of ONEDNN_MAX_CPU_ISA, read second"};

inline constexpr Variable kGroupRank{"GROUP_RANK", "Index of this machine in the job"};
inline constexpr Variable kGroupWorldSize{"GROUP_WORLD_SIZE", "Number of machines in the job"};
inline constexpr Variable kRoleName{"ROLE_NAME", "Role of the processes: --role of the launcher"};
inline constexpr Variable kRoleRank{"ROLE_RANK", "RANK among the processes of this role"};
inline constexpr Variable kRoleWorldSize{"ROLE_WORLD_SIZE", "WORLD_SIZE of this role"};
inline constexpr Variable kMaxRestarts{"TORCHELASTIC_MAX_RESTARTS",
                                       "Largest number of restarts of the processes"};
inline constexpr Variable kRunId{"TORCHELASTIC_RUN_ID", "Name of the launcher's job"};
inline constexpr Variable kOmpThreads{"OMP_NUM_THREADS",
                                      "Threads per process; the launcher divides the cores"};

// All variables above, for documentation and tests.
std::span<const Variable> all();

// Returns the value of a variable, or nothing if it is unset or empty.
std::optional<std::string> get(const Variable& variable);

}  // namespace semitone::env
