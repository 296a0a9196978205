#include "semitone/comm/init.h"

#include "semitone/core/device.h"
#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/gpu.h"
#include "src/comm/introduction.h"
#include "src/comm/machine.h"
#include "src/comm/network.h"
#include "src/comm/process_group.h"
#include "src/comm/ranks.h"
#include "src/comm/rendezvous.h"
#include "src/comm/store.h"
#include "src/core/env.h"
#include "src/core/log.h"
#include "src/core/named_rows.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

// c10d's store writes to sockets whose other end may be closed, and leaves SIGPIPE to the program,
// where Python ignores it. A lost rank would silently end the others. A handler of the program
// stays installed.
void ignore_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

// The number of ranks that have read the others' values.
constexpr auto kReadCount = "have_read";

// The store ends with rank 0. Before rank 0 fails, the others get time to read the reason.
void wait_until_read(c10d::Store& store, int ranks) {
  constexpr auto kReadTimeout = std::chrono::seconds(5);
  const auto end = std::chrono::steady_clock::now() + kReadTimeout;
  while (store.add(kReadCount, 0) < ranks && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Waits until all ranks have arrived with the same settings, and returns their machines. Otherwise
// CommError with the ranks that are missing or differ.
std::vector<Machine> exchange_introductions(c10d::Store& store, const Rendezvous& rendezvous,
                                            const Introduction& own,
                                            std::chrono::milliseconds timeout) {
  if (store.add(fmt::format("taken/{}", rendezvous.rank), 1) > 1) {
    throw CommError(
        kInitComponent, fmt::format("one process of rank {}", rendezvous.rank), "a second one",
        rendezvous.kind == Rendezvous::Kind::file
            ? "was the process started twice, or is the file from an earlier run? It must "
              "be a new one for each"
            : "was the process started twice, or does another job use the same port?",
        {rendezvous.rank});
  }
  put(store, fmt::format("rank/{}", rendezvous.rank), to_string(own));
  const auto missing = wait_for_ranks(store, "rank/", rendezvous.world_size, timeout);
  if (!missing.empty()) {
    throw CommError(kInitComponent,
                    fmt::format("{} ranks to meet within {}", rendezvous.world_size,
                                seconds(std::chrono::duration<double>(timeout).count())),
                    "no sign of " + name_ranks(missing),
                    "were all processes started, with the same world size and address?", missing);
  }
  std::vector<Introduction> ranks;
  for (const std::string& text : get_of_ranks(store, "rank/", rendezvous.world_size))
    ranks.push_back(parse_introduction(text));
  store.add(kReadCount, 1);
  try {
    require_equal_settings(own, ranks);
  } catch (const CommError&) {
    if (rendezvous.rank == 0) wait_until_read(store, rendezvous.world_size);
    throw;
  }
  std::vector<Machine> machines;
  machines.reserve(ranks.size());
  for (Introduction& rank : ranks) machines.push_back(std::move(rank.machine));
  return machines;
}

// Which ranks share this rank's machine, if only the rendezvous can tell.
void set_local_ranks(Rendezvous& rendezvous, const std::vector<Machine>& machines) {
  const auto self = machines.begin() + rendezvous.rank;
  const auto is_local = [&](const Machine& other) { return are_same_machine(*self, other); };
  if (!rendezvous.local_rank.has_value())
    rendezvous.local_rank = static_cast<int>(std::count_if(machines.begin(), self, is_local));
  if (!rendezvous.local_world_size.has_value()) {
    rendezvous.local_world_size =
        static_cast<int>(std::count_if(machines.begin(), machines.end(), is_local));
  }
}

std::string chosen_interface(const InitOptions& options) {
  return options.interface().empty() ? env::get(env::kGlooInterface).value_or("")
                                     : options.interface();
}

// The first rank that cannot reach this rank's loopback address.
std::optional<std::size_t> find_remote_rank(const Rendezvous& rendezvous,
                                            const std::vector<Machine>& machines) {
  const Machine& self = machines[static_cast<std::size_t>(rendezvous.rank)];
  const auto other =
      std::find_if_not(machines.begin(), machines.end(),
                       [&](const Machine& machine) { return share_loopback(self, machine); });
  if (other == machines.end()) return std::nullopt;
  return static_cast<std::size_t>(other - machines.begin());
}

// The local address to listen on.
std::string listen_address(const Rendezvous& rendezvous, const std::vector<Machine>& machines,
                           const InitOptions& options) {
  const std::string interface = chosen_interface(options);
  if (!interface.empty()) return address_of_interface(interface);
  const auto remote = find_remote_rank(rendezvous, machines);
  // The same for every rank, whatever leads to its master: localhost may be IPv6 for one rank while
  // another has an IPv4 address, and Gloo connects addresses of one family only.
  if (!remote.has_value()) return "127.0.0.1";
  const auto names = [&] {
    return fmt::format("for rank {} on '{}' and rank {} on '{}'", rendezvous.rank,
                       machines[static_cast<std::size_t>(rendezvous.rank)].host, *remote,
                       machines[*remote].host);
  };
  if (rendezvous.kind == Rendezvous::Kind::file) {
    // A file URL contains nothing about the network.
    throw Error(kInitComponent, "the name of an interface that leads to the other machines",
                "none, " + names(),
                "set InitOptions::interface or GLOO_SOCKET_IFNAME, or meet at tcp://");
  }
  const auto route = resolved_within({.any = options.timeout()},
                                     [&] { return net::address_towards(rendezvous.host); });
  if (!route.ok()) {
    throw CommError(kInitComponent, fmt::format("a route to {}", rendezvous.host), "none",
                    "is the network up?");
  }
  const std::string& address = route.value;
  if (!net::is_loopback(address)) return address;
  // MASTER_ADDR is localhost in the master's pod, or a host's name resolves to 127.0.1.1 there.
  if (const auto routed = net::address_of_default_route()) return *routed;
  throw Error(
      kInitComponent, "an address of this machine that other machines can reach",
      fmt::format("'{}', which is {} here, and no default route, {}", rendezvous.host, address,
                  names()),
      "set InitOptions::interface or GLOO_SOCKET_IFNAME, or MASTER_ADDR to the address of a "
      "network interface of rank 0's machine");
}

// The prefix of the processes' keys in the store. Restarted workers use other names than those
// before them. torchrun's own store outlives its workers, and a node that joins or leaves does not
// count as a restart, but changes their number.
std::string store_prefix(const Rendezvous& rendezvous) {
  std::string prefix = "semitone/" + env::get(env::kRestartCount).value_or("0");
  if (rendezvous.store_is_hosted) prefix += fmt::format("/{}", rendezvous.world_size);
  return prefix;
}

// A single process uses its GPU as one of several processes does.
c10::Device device_of_single_process(const Rendezvous& rendezvous, const InitOptions& options) {
  const Backend* const backend = find_backend(options.backend());
  if ((backend != nullptr && backend->device == c10::DeviceType::CPU) ||
      default_device() != c10::DeviceType::CUDA)
    return c10::kCPU;
  return select_gpu(rendezvous);
}

struct CheckLevelName {
  std::string_view name;  // in SEMITONE_COMM_CHECK
  CheckLevel level;
};
constexpr CheckLevelName kCheckLevels[] = {
    {"none", CheckLevel::none}, {"calls", CheckLevel::calls}, {"full", CheckLevel::full}};

CheckLevel check_level(const InitOptions& options) {
  if (options.check().has_value()) return *options.check();
  const std::string name = env::get(env::kCommCheck).value_or("calls");
  if (const auto* const found = find_row(kCheckLevels, name)) return found->level;
  throw Error(kInitComponent,
              fmt::format("{} to be {}", env::kCommCheck.name, join_names(kCheckLevels, " or ")),
              fmt::format("'{}'", name));
}

// Which settings the group of this rank has.
Introduction introduce(const Group::Impl& group) {
  const auto* const level =
      std::find_if(std::begin(kCheckLevels), std::end(kCheckLevels),
                   [&](const CheckLevelName& row) { return row.level == group.options.check(); });
  return {std::to_string(group.size), group.backend, std::string(level->name), this_machine()};
}

void require_backend(const InitOptions& options) {
  if (options.backend() == "auto" || has_backend(options.backend())) return;
  const Backend* const backend = find_backend(options.backend());
  throw Error(kInitComponent, fmt::format("a build with the backend {}", options.backend()),
              "one without",
              backend == nullptr ? "" : fmt::format("use gloo, or {}", backend->remedy));
}

const Backend& chosen_backend(const InitOptions& options) {
  const Backend& gloo = *find_backend("gloo");
  if (options.backend() != "auto") {
    require_backend(options);
    return *find_backend(options.backend());
  }
  const auto device = default_device();
  if (device != c10::DeviceType::CUDA) return gloo;
  const auto of_device = [device](const Backend& backend) { return backend.device == device; };
  const auto found = std::find_if(backends().begin(), backends().end(), of_device);
  if (found == backends().end()) return gloo;
  if (found->available) return *found;
  log()->warn("{}", found->warning);
  return gloo;
}

// A group without a transport so far.
std::shared_ptr<Group::Impl> make_group(const Rendezvous& rendezvous, const InitOptions& options) {
  auto group = std::make_shared<Group::Impl>();
  group->options = options;
  group->rank = rendezvous.rank;
  group->size = rendezvous.world_size;
  group->members.resize(static_cast<std::size_t>(rendezvous.world_size));
  std::iota(group->members.begin(), group->members.end(), 0);
  return group;
}

WatchOptions watch_options(const Rendezvous& rendezvous, const InitOptions& options) {
  WatchOptions watch;
  watch.rank = rendezvous.rank;
  watch.size = rendezvous.world_size;
  watch.interval = options.heartbeat();
  watch.silence = options.heartbeat_timeout();
  watch.timeout = options.timeout();
  return watch;
}

// Waits for the other ranks, and starts to watch them.
void join_ranks(Group::Impl& group, Rendezvous& rendezvous) {
  const InitOptions& options = group.options;
  if (!chosen_interface(options).empty()) address_of_interface(chosen_interface(options));
  group.store = c10::make_intrusive<c10d::PrefixStore>(store_prefix(rendezvous),
                                                       open_store(rendezvous, options));
  WatchOptions watch = watch_options(rendezvous, options);
  try {
    const auto machines =
        exchange_introductions(*group.store, rendezvous, introduce(group), options.timeout());
    set_local_ranks(rendezvous, machines);
    watch.address = group.address = listen_address(rendezvous, machines, options);
    group.watch = std::make_shared<Watch>(group.store, watch);
  } catch (const c10::DistError& error) {
    throw CommError(kInitComponent, "rank 0 to keep the store until all have met",
                    error.what_without_backtrace(), "see its output for the reason", {0});
  }
}

}  // namespace

bool has_backend(std::string_view name) {
  const Backend* const backend = find_backend(name);
  return backend != nullptr && backend->available;
}

Group init(std::string_view url, const InitOptions& given) {
  Rendezvous rendezvous = parse_rendezvous(url, given);
  InitOptions options = given;
  options.check(check_level(given));
  // net::SilenceTimer, which is asked at every heartbeat, takes a pause of half the timeout for one
  // of this process.
  if (options.heartbeat_timeout() < 3 * options.heartbeat()) {
    throw Error(kInitComponent, "a heartbeat timeout of at least three heartbeats",
                fmt::format("{} ms with one every {} ms", options.heartbeat_timeout().count(),
                            options.heartbeat().count()));
  }
  auto group = make_group(rendezvous, options);
  if (rendezvous.world_size == 1) {
    require_backend(options);
    group->device = device_of_single_process(rendezvous, options);
    return Group(std::move(group));
  }
  const Backend& backend = chosen_backend(options);
  group->backend = backend.name;
  ignore_broken_pipes();
  join_ranks(*group, rendezvous);
  if (backend.device == c10::DeviceType::CUDA) {
    select_distinct_gpus(*group->store, *group->watch, rendezvous, options.timeout(), [&] {
      group->device = select_gpu(rendezvous);
      return backend.device_identity(group->device);
    });
  }
  connect(*group);
  return Group(std::move(group));
}

}  // namespace semitone::comm
