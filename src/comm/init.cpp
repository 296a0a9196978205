#include "semitone/comm/init.h"

#include "semitone/core/device.h"
#include "semitone/core/env.h"
#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/gpu.h"
#include "src/comm/network.h"
#include "src/comm/process_group.h"
#include "src/comm/ranks.h"
#include "src/comm/store.h"
#include "src/core/host_name.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

int parse_number(std::string_view text, std::string_view name, int least, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw Error(kInit, fmt::format("{} from {} to {}", name, least, most),
                fmt::format("'{}'", text));
  }
  return value;
}

constexpr int kMostRanks = 1 << 20;

constexpr std::string_view kEnvironment = "env://";

// An environment variable that has to be there, as a number.
int required(const env::Variable& variable, int least, int most, std::string_view launcher) {
  const auto text = env::get(variable);
  if (!text.has_value()) {
    throw Error(kInit, fmt::format("{} in the environment", variable.name), "nothing",
                fmt::format("{} sets it", launcher));
  }
  return parse_number(*text, variable.name, least, most);
}

int optional(const env::Variable& variable, int otherwise, int least, int most) {
  const auto text = env::get(variable);
  return text.has_value() ? parse_number(*text, variable.name, least, most) : otherwise;
}

// A port from what tells one job from another, so that two jobs on a machine do not collide by
// default.
int port_of_job(std::string_view job) {
  return 20000 + static_cast<int>(std::hash<std::string_view>()(job) % 20000);
}

std::string first_slurm_node(std::string_view list) {
  // "node[01-03,07],other": the first number in brackets belongs to the first node.
  const auto bracket = list.find('[');
  const auto comma = list.find(',');
  if (bracket == std::string_view::npos || comma < bracket)
    return std::string(list.substr(0, comma));
  const auto end = list.find_first_of("-,]", bracket);
  return std::string(list.substr(0, bracket)) +
         std::string(list.substr(bracket + 1, end - bracket - 1));
}

// How many processes there are and which of them this is: what the options say, or else these
// variables.
void place_among_ranks(Rendezvous& place, const InitOptions& options, const env::Variable& size,
                       const env::Variable& rank, std::string_view launcher) {
  place.world_size =
      options.world_size().has_value()
          ? parse_number(std::to_string(*options.world_size()), "world_size", 1, kMostRanks)
          : required(size, 1, kMostRanks, launcher);
  place.rank = options.rank().has_value()
                   ? parse_number(std::to_string(*options.rank()), "rank", 0, place.world_size - 1)
                   : required(rank, 0, place.world_size - 1, launcher);
}

Rendezvous from_torchrun(const InitOptions& options) {
  constexpr auto kLauncher = "torchrun or semitone launch";
  Rendezvous place;
  place_among_ranks(place, options, env::kWorldSize, env::kRank, kLauncher);
  place.local_rank = optional(env::kLocalRank, place.rank, 0, kMostRanks);
  place.local_world_size = optional(env::kLocalWorldSize, place.world_size, 1, kMostRanks);
  const auto host = env::get(env::kMasterAddr);
  if (!host.has_value() && place.world_size > 1) {
    throw Error(kInit, "MASTER_ADDR in the environment", "nothing",
                fmt::format("{} sets it", kLauncher));
  }
  place.host = host.value_or("127.0.0.1");
  if (place.world_size > 1) place.port = required(env::kMasterPort, 1, 65535, kLauncher);
  place.store_is_hosted = env::get(env::kUseAgentStore).value_or("False") == "True";
  return place;
}

// How many of a step's tasks are on a node: "2(x3),1" are two on the first three nodes, and one on
// the fourth.
int slurm_tasks_on(int node, std::string_view list) {
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(item.size() + 1, list.size()));
    const auto bracket = item.find("(x");
    const int tasks =
        parse_number(item.substr(0, bracket), env::kSlurmTasksPerNode.name, 1, kMostRanks);
    const int nodes = bracket == std::string_view::npos
                          ? 1
                          : parse_number(item.substr(bracket + 2, item.size() - bracket - 3),
                                         env::kSlurmTasksPerNode.name, 1, kMostRanks);
    if (node < nodes) return tasks;
    node -= nodes;
  }
  throw Error(kInit, fmt::format("the tasks of every node in {}", env::kSlurmTasksPerNode.name),
              "fewer nodes");
}

Rendezvous from_slurm(const InitOptions& options) {
  constexpr auto kLauncher = "srun";
  Rendezvous place;
  place_among_ranks(place, options, env::kSlurmTasks, env::kSlurmProcId, kLauncher);
  place.local_rank = optional(env::kSlurmLocalId, place.rank, 0, kMostRanks);
  const auto tasks = env::get(env::kSlurmTasksPerNode);
  place.local_world_size =
      tasks.has_value() ? slurm_tasks_on(optional(env::kSlurmNodeId, 0, 0, kMostRanks), *tasks)
                        : place.world_size;
  place.host = env::get(env::kMasterAddr)
                   .value_or(first_slurm_node(env::get(env::kSlurmNodeList).value_or("127.0.0.1")));
  // Several steps of a job may run at the same time.
  const std::string step = fmt::format("slurm{}.{}", env::get(env::kSlurmJobId).value_or(""),
                                       env::get(env::kSlurmStepId).value_or(""));
  place.port = optional(env::kMasterPort, port_of_job(step), 1, 65535);
  return place;
}

Rendezvous from_open_mpi(const InitOptions& options) {
  constexpr auto kLauncher = "mpirun";
  Rendezvous place;
  place_among_ranks(place, options, env::kMpiSize, env::kMpiRank, kLauncher);
  place.local_rank = optional(env::kMpiLocalRank, place.rank, 0, kMostRanks);
  place.local_world_size = optional(env::kMpiLocalSize, place.world_size, 1, kMostRanks);
  const auto host = env::get(env::kMasterAddr);
  if (!host.has_value() && place.local_world_size < place.world_size) {
    throw Error(kInit, "MASTER_ADDR in the environment of a job on several machines", "nothing",
                "mpirun -x MASTER_ADDR=<address of rank 0's machine> …");
  }
  place.host = host.value_or("127.0.0.1");
  place.port = optional(env::kMasterPort,
                        port_of_job("mpi" + env::get(env::kMpiJobId).value_or("")), 1, 65535);
  return place;
}

// Innermost launcher first: mpirun may run in a Slurm job, and torchrun under either.
Rendezvous from_environment(const InitOptions& options) {
  if (env::get(env::kRank).has_value() || env::get(env::kWorldSize).has_value())
    return from_torchrun(options);
  if (env::get(env::kMpiRank).has_value()) return from_open_mpi(options);
  // A batch script without srun has a SLURM_PROCID too, but is not one of several ranks.
  if (env::get(env::kSlurmProcId).has_value() && env::get(env::kSlurmTasks).value_or("1") != "1")
    return from_slurm(options);
  // No launcher, but a program that knows its place: the rest is as torchrun would set it.
  if (options.world_size().value_or(1) != 1 || options.rank().value_or(0) != 0)
    return from_torchrun(options);
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
      throw Error(kInit, "rank and world_size in the URL", fmt::format("'{}'", item));
    values[name] = equals == std::string_view::npos ? "" : item.substr(equals + 1);
    query = end == std::string_view::npos ? "" : query.substr(end + 1);
  }
  return values;
}

Rendezvous from_url(std::string_view url, const InitOptions& options) {
  const auto question = url.find('?');
  const auto query =
      parse_query(question == std::string_view::npos ? "" : url.substr(question + 1));
  const std::string_view place_text = url.substr(0, question);
  Rendezvous place;
  const auto number = [&](const char* name, std::optional<int> given, int least, int most) {
    if (given.has_value()) return parse_number(std::to_string(*given), name, least, most);
    const auto found = query.find(name);
    if (found == query.end()) {
      throw Error(kInit, fmt::format("{} in the URL", name), fmt::format("'{}'", url),
                  fmt::format("append {}{}=…", query.empty() ? "?" : "&", name));
    }
    return parse_number(found->second, name, least, most);
  };
  place.world_size = number("world_size", options.world_size(), 1, kMostRanks);
  place.rank = number("rank", options.rank(), 0, place.world_size - 1);
  place.local_rank = place.rank;
  place.local_world_size = place.world_size;
  if (place_text.substr(0, 7) == "file://") {
    place.kind = Rendezvous::Kind::file;
    place.path = place_text.substr(7);
    if (place.path.empty() || place.path.front() != '/')
      throw Error(kInit, "file:///ABSOLUTE/PATH", fmt::format("'{}'", url));
    return place;
  }
  std::string_view address = place_text.substr(6);  // after tcp://
  const auto colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0)
    throw Error(kInit, "tcp://HOST:PORT", fmt::format("'{}'", url));
  std::string_view host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);  // IPv6
  if (host.empty()) throw Error(kInit, "tcp://HOST:PORT", fmt::format("'{}'", url));
  place.host = host;
  place.port = parse_number(address.substr(colon + 1), "the port", 1, 65535);
  return place;
}

// c10d's store writes to sockets whose other end may be gone, and leaves SIGPIPE to the program, where
// Python ignores it: a lost rank would end the others without a word. A handler of the program's own
// stays.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

// How many ranks have read what the others said.
constexpr auto kHaveRead = "have_read";

// The store ends with rank 0: before it goes on to fail, the others get the time to see why.
void let_others_read(c10d::Store& store, int ranks) {
  constexpr auto kPatience = std::chrono::seconds(2);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (store.add(kHaveRead, 0) < ranks && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Returns when all ranks have come and agree on how many they are, the names of their machines;
// CommError with those that have not or do not.
std::vector<std::string> meet(c10d::Store& store, const Rendezvous& place,
                              std::chrono::milliseconds timeout) {
  if (store.add(fmt::format("taken/{}", place.rank), 1) > 1) {
    throw CommError(
        kInit, fmt::format("one process of rank {}", place.rank), "a second one",
        place.kind == Rendezvous::Kind::file
            ? "was the process started twice, or is the file from an earlier run? It must "
              "be a new one for each"
            : "was the process started twice, or does another job use the same port?",
        {place.rank});
  }
  put(store, fmt::format("rank/{}", place.rank),
      fmt::format("{} {}", place.world_size, host_name()));
  const auto missing = wait_for_ranks(store, "rank/", place.world_size, timeout);
  if (!missing.empty()) {
    throw CommError(kInit,
                    fmt::format("{} ranks to meet within {}", place.world_size,
                                seconds(std::chrono::duration<double>(timeout).count())),
                    "no sign of " + name_ranks(missing),
                    "were all processes started, with the same world size and address?", missing);
  }
  const auto texts = get_of_ranks(store, "rank/", place.world_size);
  store.add(kHaveRead, 1);
  std::vector<std::string> hosts;
  for (const std::string& text : texts) {
    const std::string size = text.substr(0, text.find(' '));
    const int rank = static_cast<int>(hosts.size());
    if (size != std::to_string(place.world_size)) {
      if (place.rank == 0) let_others_read(store, place.world_size);
      throw CommError(kInit, fmt::format("a world size of {} on all ranks", place.world_size),
                      fmt::format("{} on rank {}", size, rank), "start all with the same one",
                      {rank});
    }
    hosts.push_back(text.substr(size.size() + 1));
  }
  return hosts;
}

// Who shares this rank's machine, where nothing but the ranks' meeting tells.
void find_neighbours(Rendezvous& place, const std::vector<std::string>& hosts) {
  const auto self = hosts.begin() + place.rank;
  place.local_rank = static_cast<int>(std::count(hosts.begin(), self, *self));
  place.local_world_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), *self));
}

std::string chosen_interface(const InitOptions& options) {
  return options.interface().empty() ? env::get(env::kGlooInterface).value_or("")
                                     : options.interface();
}

// A file says nothing about the network.
void require_interface(const Rendezvous& place, const std::vector<std::string>& hosts,
                       const InitOptions& options) {
  if (place.kind != Rendezvous::Kind::file || !chosen_interface(options).empty()) return;
  for (std::size_t rank = 1; rank < hosts.size(); ++rank) {
    if (hosts[rank] == hosts[0]) continue;
    throw Error(
        kInit, "the name of an interface that leads to the other machines",
        fmt::format("none, for rank 0 on '{}' and rank {} on '{}'", hosts[0], rank, hosts[rank]),
        "set InitOptions::interface or GLOO_SOCKET_IFNAME, or meet at tcp://");
  }
}

// The local address to listen on.
std::string own_address(const Rendezvous& place, const InitOptions& options) {
  const std::string interface = chosen_interface(options);
  if (!interface.empty()) return address_of_interface(interface);
  if (place.kind == Rendezvous::Kind::file) return "127.0.0.1";
  const std::string address = address_towards(place.host, place.port);
  if (is_loopback(address) && place.local_world_size < place.world_size) {
    throw Error(
        kInit, "a master address that other machines can reach",
        fmt::format("'{}', which is {} here, for a job on several machines", place.host, address),
        "set MASTER_ADDR to the address of a network interface of rank 0's machine");
  }
  return address;
}

CheckLevel check_level(const InitOptions& options) {
  if (options.check().has_value()) return *options.check();
  const std::string level = env::get(env::kCommCheck).value_or("calls");
  if (level == "none") return CheckLevel::none;
  if (level == "calls") return CheckLevel::calls;
  if (level == "full") return CheckLevel::full;
  throw Error(kInit, fmt::format("{} to be none, calls or full", env::kCommCheck.name),
              fmt::format("'{}'", level));
}

std::string chosen_backend(const InitOptions& options) {
  if (options.backend() == "auto") {
    return default_device() == c10::DeviceType::CUDA && has_nccl() ? "nccl" : "gloo";
  }
  if (!has_backend(options.backend())) {
    throw Error(kInit, fmt::format("a build with the backend {}", options.backend()), "one without",
                "use gloo, or configure with SEMITONE_CUDA=ON and a LibTorch that has NCCL");
  }
  return options.backend();
}

}  // namespace

InitOptions& InitOptions::backend(std::string value) {
  if (value != "auto" && value != "gloo" && value != "nccl") {
    throw Error(kInit, "the backend gloo, nccl or auto", fmt::format("'{}'", value),
                value == "mpi"
                    ? "processes that mpirun starts can use gloo: init(\"env://\") reads "
                      "Open MPI's variables"
                    : "");
  }
  backend_ = std::move(value);
  return *this;
}
InitOptions& InitOptions::timeout(std::chrono::milliseconds value) {
  if (value.count() <= 0)
    throw Error(kInit, "a timeout above 0", fmt::format("{} ms", value.count()));
  timeout_ = value;
  return *this;
}
InitOptions& InitOptions::interface(std::string value) {
  interface_ = std::move(value);
  return *this;
}
InitOptions& InitOptions::rank(int value) {
  rank_ = value;
  return *this;
}
InitOptions& InitOptions::world_size(int value) {
  world_size_ = value;
  return *this;
}
InitOptions& InitOptions::check(CheckLevel value) {
  check_ = value;
  return *this;
}
InitOptions& InitOptions::heartbeat(std::chrono::milliseconds value) {
  if (value.count() < 10)
    throw Error(kInit, "a heartbeat of at least 10 ms", fmt::format("{} ms", value.count()));
  heartbeat_ = value;
  return *this;
}
InitOptions& InitOptions::heartbeat_timeout(std::chrono::milliseconds value) {
  if (value.count() < 100) {
    throw Error(kInit, "a heartbeat timeout of at least 100 ms",
                fmt::format("{} ms", value.count()));
  }
  heartbeat_timeout_ = value;
  return *this;
}

Rendezvous parse_rendezvous(std::string_view url, const InitOptions& options) {
  if (url == kEnvironment) return from_environment(options);
  if (url.substr(0, 6) == "tcp://" || url.substr(0, 7) == "file://") return from_url(url, options);
  throw Error(kInit,
              "env://, tcp://HOST:PORT?rank=R&world_size=N or file:///PATH?rank=R&world_size=N",
              fmt::format("'{}'", url));
}

bool has_backend(std::string_view name) {
  return name == "gloo" || (name == "nccl" && has_nccl());
}

Group init(std::string_view url, const InitOptions& given) {
  Rendezvous place = parse_rendezvous(url, given);
  InitOptions options = given;
  options.check(check_level(given));
  if (options.heartbeat_timeout() <= options.heartbeat()) {
    throw Error(kInit, "a heartbeat timeout longer than the heartbeat",
                fmt::format("{} ms and {} ms", options.heartbeat_timeout().count(),
                            options.heartbeat().count()));
  }
  auto group = std::make_shared<Group::Impl>();
  group->options = options;
  const std::string backend = chosen_backend(options);
  if (place.world_size == 1) return Group(std::move(group));
  ignore_broken_pipes();
  group->backend = backend;
  group->rank = place.rank;
  group->size = place.world_size;
  group->members.resize(static_cast<std::size_t>(place.world_size));
  std::iota(group->members.begin(), group->members.end(), 0);
  group->address = own_address(place, options);
  // Restarted workers meet under other names than those before them.
  group->store = c10::make_intrusive<c10d::PrefixStore>(
      "semitone/" + env::get(env::kRestartCount).value_or("0"),
      open_store(place, options.timeout()));
  WatchOptions watch;
  watch.rank = place.rank;
  watch.size = place.world_size;
  watch.address = group->address;
  watch.interval = options.heartbeat();
  watch.silence = options.heartbeat_timeout();
  watch.timeout = options.timeout();
  try {
    const auto hosts = meet(*group->store, place, options.timeout());
    if (url != kEnvironment) find_neighbours(place, hosts);
    require_interface(place, hosts, options);
    group->watch = std::make_shared<Watch>(group->store, watch);
  } catch (const c10::DistError& error) {
    throw CommError(kInit, "rank 0 to keep the store until all have met",
                    error.what_without_backtrace(), "see its output for the reason", {0});
  }
  if (backend == "nccl") group->device = take_gpu(place);
  connect(*group);
  return Group(std::move(group));
}

}  // namespace semitone::comm
