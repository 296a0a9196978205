#include "src/launch/worker_environment.h"

#include "src/core/env.h"
#include "src/core/usable_cores.h"

#include <algorithm>

namespace semitone::launch {

Variables worker_environment(const Assignment& assignment, const LaunchOptions& options,
                             int local_rank) {
  const std::string rank = std::to_string(assignment.first_rank + local_rank);
  const std::string world_size = std::to_string(assignment.world_size);
  Variables result{
      {env::kLocalRank.name, std::to_string(local_rank)},
      {env::kRank.name, rank},
      {env::kGroupRank.name, std::to_string(assignment.node)},
      {env::kRoleRank.name, rank},
      {env::kRoleName.name, options.role()},
      {env::kLocalWorldSize.name, std::to_string(options.nproc_per_node())},
      {env::kWorldSize.name, world_size},
      {env::kGroupWorldSize.name, std::to_string(assignment.nodes)},
      {env::kRoleWorldSize.name, world_size},
      {env::kMasterAddr.name, assignment.master_addr},
      {env::kMasterPort.name, std::to_string(assignment.master_port)},
      {env::kRestartCount.name, std::to_string(assignment.restarts)},
      {env::kAttempt.name, std::to_string(assignment.attempt)},
      {env::kMaxRestarts.name, std::to_string(assignment.max_restarts)},
      {env::kRunId.name, assignment.run_id},
      {env::kUseAgentStore.name, "False"},
  };
  if (const int threads = threads_of_each(options); threads > 0)
    result.emplace_back(env::kOmpThreads.name, std::to_string(threads));
  return result;
}

int threads_of_each(const LaunchOptions& options) {
  if (options.nproc_per_node() == 1 || env::get(env::kOmpThreads).has_value()) return 0;
  return std::max(1, granted_cores() / options.nproc_per_node());
}

std::string with_local_rank(std::string argument, int local_rank) {
  constexpr std::string_view kMacro = "${local_rank}";
  const std::string number = std::to_string(local_rank);
  for (std::size_t at = 0; (at = argument.find(kMacro, at)) != std::string::npos;
       at += number.size())
    argument.replace(at, kMacro.size(), number);
  return argument;
}

}  // namespace semitone::launch
