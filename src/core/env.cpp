#include "src/core/env.h"

#include <array>
#include <cstdlib>

namespace semitone::env {

std::span<const Variable> all() {
  static constexpr std::array kAll{kLogLevel,         kDataDir,       kConformanceDir,
                                   kNoColor,          kTerm,          kRank,
                                   kWorldSize,        kLocalRank,     kLocalWorldSize,
                                   kMasterAddr,       kMasterPort,    kUseAgentStore,
                                   kRestartCount,     kAttempt,       kSlurmProcId,
                                   kSlurmTasks,       kSlurmLocalId,  kSlurmTasksPerNode,
                                   kSlurmNodeId,      kSlurmNodeList, kSlurmJobId,
                                   kSlurmStepId,      kMpiRank,       kMpiSize,
                                   kMpiLocalRank,     kMpiLocalSize,  kMpiJobId,
                                   kPmiRank,          kPmiSize,       kHydraLocalRank,
                                   kHydraLocalSize,   kPmiLocalRank,  kPmiLocalSize,
                                   kPalsLocalRank,    kPalsLocalSize, kPalsJobId,
                                   kMvapichRank,      kMvapichSize,   kMvapichLocalRank,
                                   kMvapichLocalSize, kGlooInterface, kNcclErrorHandling,
                                   kCommCheck,        kRdzvToken,     kOneDnnMaxIsa,
                                   kDnnlMaxIsa,       kGroupRank,     kGroupWorldSize,
                                   kRoleName,         kRoleRank,      kRoleWorldSize,
                                   kMaxRestarts,      kRunId,         kOmpThreads};
  return kAll;
}

std::optional<std::string> get(const Variable& variable) {
  const char* value = std::getenv(variable.name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace semitone::env
