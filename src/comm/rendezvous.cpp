#include "src/comm/rendezvous.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"
#include "src/core/env.h"
#include "src/core/parse_number.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

int number_from(std::string_view text, std::string_view name, int least, int most) {
  const auto value = parse_number<int>(text);
  if (!value.has_value() || *value < least || *value > most) {
    throw Error(kInitComponent, fmt::format("{} from {} to {}", name, least, most),
                fmt::format("'{}'", text));
  }
  return *value;
}

constexpr int kMaxRanks = 1 << 20;

Error missing(const env::Variable& variable, std::string_view launcher) {
  return Error(kInitComponent, fmt::format("{} in the environment", variable.name), "nothing",
               fmt::format("{} sets it", launcher));
}

// The value of a required environment variable, as a number.
int required(const env::Variable& variable, int least, int most, std::string_view launcher) {
  const auto text = env::get(variable);
  if (!text.has_value()) throw missing(variable, launcher);
  return number_from(*text, variable.name, least, most);
}

std::optional<int> optional(const env::Variable& variable, int least, int most) {
  const auto text = env::get(variable);
  if (!text.has_value()) return std::nullopt;
  return number_from(*text, variable.name, least, most);
}

// The value of the first variable that is set.
std::optional<int> first_of(const std::vector<env::Variable>& variables, int least, int most) {
  for (const env::Variable& variable : variables) {
    if (const auto value = optional(variable, least, most)) return value;
  }
  return std::nullopt;
}

// A port derived from the identity of a job, so that by default two jobs on a machine do not
// collide. It is below 32768, where the ports begin that Linux assigns to connections of any
// process.
int port_of_job(std::string_view job) {
  constexpr int kFirst = 20000;
  constexpr int kEnd = 32768;
  return kFirst + static_cast<int>(std::hash<std::string_view>()(job) % (kEnd - kFirst));
}

// "rack[1-2]-n[01-04,07],other": the first number in each pair of brackets belongs to the first
// node.
std::string first_slurm_node(std::string_view list) {
  std::string node;
  while (!list.empty() && list.front() != ',') {
    if (list.front() != '[') {
      node += list.front();
      list.remove_prefix(1);
      continue;
    }
    const auto close = std::min(list.find(']'), list.size() - 1);
    const std::string_view numbers = list.substr(1, close - 1);
    node += numbers.substr(0, numbers.find_first_of("-,"));
    list.remove_prefix(close + 1);
  }
  return node;
}

// The number of processes and this process's rank, from the options or else from these variables.
void set_ranks(Rendezvous& result, const InitOptions& options, const env::Variable& size,
               const env::Variable& rank, std::string_view launcher) {
  result.world_size =
      options.world_size().has_value()
          ? number_from(std::to_string(*options.world_size()), "world_size", 1, kMaxRanks)
          : required(size, 1, kMaxRanks, launcher);
  result.rank = options.rank().has_value()
                    ? number_from(std::to_string(*options.rank()), "rank", 0, result.world_size - 1)
                    : required(rank, 0, result.world_size - 1, launcher);
}

// What to read from the environment.
enum class Extent { ranks, ranks_and_place };

Rendezvous from_torchrun(const InitOptions& options, Extent extent) {
  constexpr auto kLauncher = "torchrun or semitone launch";
  Rendezvous result;
  set_ranks(result, options, env::kWorldSize, env::kRank, kLauncher);
  result.local_rank = optional(env::kLocalRank, 0, kMaxRanks);
  result.local_world_size = optional(env::kLocalWorldSize, 1, kMaxRanks);
  if (extent == Extent::ranks) return result;
  const auto host = env::get(env::kMasterAddr);
  if (!host.has_value() && result.world_size > 1) throw missing(env::kMasterAddr, kLauncher);
  result.host = host.value_or("127.0.0.1");
  if (result.world_size > 1) result.port = required(env::kMasterPort, 1, 65535, kLauncher);
  result.store_is_hosted = env::get(env::kUseAgentStore).value_or("False") == "True";
  return result;
}

// The number of a step's tasks on a node: "2(x3),1" means two on the first three nodes, and one on
// the fourth.
int slurm_tasks_on(int node, std::string_view list) {
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(item.size() + 1, list.size()));
    const auto bracket = item.find("(x");
    const int tasks =
        number_from(item.substr(0, bracket), env::kSlurmTasksPerNode.name, 1, kMaxRanks);
    const int nodes = bracket == std::string_view::npos
                          ? 1
                          : number_from(item.substr(bracket + 2, item.size() - bracket - 3),
                                        env::kSlurmTasksPerNode.name, 1, kMaxRanks);
    if (node < nodes) return tasks;
    node -= nodes;
  }
  throw Error(kInitComponent,
              fmt::format("the tasks of every node in {}", env::kSlurmTasksPerNode.name),
              "fewer nodes");
}

Rendezvous from_slurm(const InitOptions& options, Extent extent) {
  constexpr auto kLauncher = "srun";
  Rendezvous result;
  set_ranks(result, options, env::kSlurmTasks, env::kSlurmProcId, kLauncher);
  result.local_rank = optional(env::kSlurmLocalId, 0, kMaxRanks);
  if (const auto tasks = env::get(env::kSlurmTasksPerNode)) {
    result.local_world_size =
        slurm_tasks_on(optional(env::kSlurmNodeId, 0, kMaxRanks).value_or(0), *tasks);
  }
  if (extent == Extent::ranks) return result;
  result.host =
      env::get(env::kMasterAddr)
          .value_or(first_slurm_node(env::get(env::kSlurmNodeList).value_or("127.0.0.1")));
  // Several steps of a job may run at the same time.
  const std::string step = fmt::format("slurm{}.{}", env::get(env::kSlurmJobId).value_or(""),
                                       env::get(env::kSlurmStepId).value_or(""));
  result.port = optional(env::kMasterPort, 1, 65535).value_or(port_of_job(step));
  return result;
}

// The variables that a kind of MPI sets for each process.
struct MpiLauncher {
  std::string_view launcher;
  env::Variable rank;
  env::Variable size;
  std::vector<env::Variable> local_rank;  // the first that is there
  std::vector<env::Variable> local_size;
  std::string_view how_to_set_master;  // how its launcher hands a variable on

  bool is_present() const { return env::get(rank).has_value() || env::get(size).has_value(); }
};

std::vector<MpiLauncher> mpi_launchers() {
  return {{"mpirun",
           env::kMpiRank,
           env::kMpiSize,
           {env::kMpiLocalRank},
           {env::kMpiLocalSize},
           "mpirun -x MASTER_ADDR=<address of rank 0's machine> …"},
          {"mpirun_rsh",
           env::kMvapichRank,
           env::kMvapichSize,
           {env::kMvapichLocalRank},
           {env::kMvapichLocalSize},
           "mpirun_rsh … MASTER_ADDR=<address of rank 0's machine> PROGRAM"},
          {"mpiexec",
           env::kPmiRank,
           env::kPmiSize,
           {env::kHydraLocalRank, env::kPmiLocalRank, env::kPalsLocalRank},
           {env::kHydraLocalSize, env::kPmiLocalSize, env::kPalsLocalSize},
           "mpiexec -genv MASTER_ADDR <address of rank 0's machine> …; with Cray's, "
           "mpiexec --env MASTER_ADDR=<address of rank 0's machine> …"}};
}

Rendezvous from_mpi(const MpiLauncher& mpi, const InitOptions& options, Extent extent) {
  Rendezvous result;
  set_ranks(result, options, mpi.size, mpi.rank, mpi.launcher);
  result.local_rank = first_of(mpi.local_rank, 0, kMaxRanks);
  result.local_world_size = first_of(mpi.local_size, 1, kMaxRanks);
  if (extent == Extent::ranks) return result;
  const auto host = env::get(env::kMasterAddr);
  const bool on_one_machine = result.local_world_size.value_or(1) == result.world_size;
  if (!host.has_value() && !on_one_machine) {
    throw Error(
        kInitComponent,
        result.local_world_size.has_value()
            ? "MASTER_ADDR in the environment of a job on several machines"
            : "MASTER_ADDR in the environment, which does not say how many of the ranks are "
              "on this machine",
        "nothing", mpi.how_to_set_master);
  }
  result.host = host.value_or("127.0.0.1");
  std::string job = "mpi";
  for (const env::Variable& variable : {env::kMpiJobId, env::kPalsJobId})
    job += env::get(variable).value_or("");
  result.port = optional(env::kMasterPort, 1, 65535).value_or(port_of_job(job));
  return result;
}

// A batch script without srun has a SLURM_PROCID too, but is not one of several ranks.
bool is_slurm_task() {
  return env::get(env::kSlurmProcId).has_value() && env::get(env::kSlurmTasks).value_or("1") != "1";
}

// The innermost launcher comes first: mpirun may run in a Slurm job, and torchrun under either.
Rendezvous from_environment(const InitOptions& options, Extent extent) {
  if (env::get(env::kRank).has_value() || env::get(env::kWorldSize).has_value())
    return from_torchrun(options, extent);
  // srun sets PMI_RANK for its own tasks. If an mpiexec starts its helpers with srun, one on each
  // node, the helpers' variables are set as well.
  const bool is_set_by_srun = is_slurm_task() &&
                              env::get(env::kPmiRank) == env::get(env::kSlurmProcId) &&
                              env::get(env::kPmiSize) == env::get(env::kSlurmTasks);
  for (const MpiLauncher& mpi : mpi_launchers()) {
    if (mpi.is_present() && !(is_set_by_srun && mpi.rank.name == env::kPmiRank.name))
      return from_mpi(mpi, options, extent);
  }
  if (is_slurm_task()) return from_slurm(options, extent);
  // Without a launcher, a program may still set its rank itself: the rest is as torchrun would set
  // it.
  if (options.world_size().value_or(1) != 1 || options.rank().value_or(0) != 0)
    return from_torchrun(options, extent);
  return {};
}

// rank=…&world_size=…
std::map<std::string, std::string> parse_query(std::string_view query) {
  std::map<std::string, std::string> values;
  while (!query.empty()) {
    const auto end = query.find('&');
    const auto item = query.substr(0, end);
    const auto equals = item.find('=');
    const std::string name(item.substr(0, equals));
    if (name != "rank" && name != "world_size")
      throw Error(kInitComponent, "rank and world_size in the URL", fmt::format("'{}'", item));
    values[name] = equals == std::string_view::npos ? "" : item.substr(equals + 1);
    query = end == std::string_view::npos ? "" : query.substr(end + 1);
  }
  return values;
}

Rendezvous from_url(std::string_view url, const InitOptions& options) {
  const auto question = url.find('?');
  const auto query =
      parse_query(question == std::string_view::npos ? "" : url.substr(question + 1));
  const std::string_view location = url.substr(0, question);
  Rendezvous result;
  const auto number = [&](const char* name, std::optional<int> given, int least, int most) {
    if (given.has_value()) return number_from(std::to_string(*given), name, least, most);
    const auto found = query.find(name);
    if (found == query.end()) {
      throw Error(kInitComponent, fmt::format("{} in the URL", name), fmt::format("'{}'", url),
                  fmt::format("append {}{}=…", query.empty() ? "?" : "&", name));
    }
    return number_from(found->second, name, least, most);
  };
  result.world_size = number("world_size", options.world_size(), 1, kMaxRanks);
  result.rank = number("rank", options.rank(), 0, result.world_size - 1);
  if (location.substr(0, 7) == "file://") {
    result.kind = Rendezvous::Kind::file;
    result.path = location.substr(7);
    if (result.path.empty() || result.path.front() != '/')
      throw Error(kInitComponent, "file:///ABSOLUTE/PATH", fmt::format("'{}'", url));
    return result;
  }
  std::string_view address = location.substr(6);  // after tcp://
  const auto colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0)
    throw Error(kInitComponent, "tcp://HOST:PORT", fmt::format("'{}'", url));
  std::string_view host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);  // IPv6
  if (host.empty()) throw Error(kInitComponent, "tcp://HOST:PORT", fmt::format("'{}'", url));
  result.host = host;
  result.port = number_from(address.substr(colon + 1), "the port", 1, 65535);
  // All ranks have the same URL.
  if (result.host == "localhost" || net::is_loopback(result.host)) {
    result.local_rank = result.rank;
    result.local_world_size = result.world_size;
  }
  return result;
}

}  // namespace

Rendezvous parse_rendezvous(std::string_view url, const InitOptions& options) {
  if (url == "env://") return from_environment(options, Extent::ranks_and_place);
  if (url.substr(0, 6) == "tcp://" || url.substr(0, 7) == "file://") return from_url(url, options);
  throw Error(kInitComponent,
              "env://, tcp://HOST:PORT?rank=R&world_size=N or file:///PATH?rank=R&world_size=N",
              fmt::format("'{}'", url));
}

Rendezvous ranks_in_environment() {
  return from_environment({}, Extent::ranks);
}

}  // namespace semitone::comm
