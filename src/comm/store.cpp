#include "src/comm/store.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"
#include "src/comm/ranks.h"
#include "src/core/log.h"
#include "src/net/sockets.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <thread>

namespace semitone::comm {
namespace {

using Clock = std::chrono::steady_clock;

c10::intrusive_ptr<c10d::Store> open_file_store(const Rendezvous& rendezvous,
                                                std::chrono::milliseconds timeout) {
  const auto folder = std::filesystem::path(rendezvous.path).parent_path();
  if (!std::filesystem::is_directory(folder)) {
    throw Error(kInitComponent, "a file in a folder that exists",
                fmt::format("'{}'", rendezvous.path));
  }
  auto store = c10::make_intrusive<c10d::FileStore>(rendezvous.path, rendezvous.world_size);
  store->setTimeout(timeout);
  return store;
}

// Whether a loopback address reaches all ranks, as far as is known before the rendezvous.
bool is_on_one_machine(const Rendezvous& rendezvous) {
  return rendezvous.local_world_size == rendezvous.world_size;
}

// Listens on the master's address only, if possible.
Descriptor listen_for_ranks(const Rendezvous& rendezvous, const InitOptions& options) {
  if (!options.bind_address().empty()) return listen_on(options.bind_address(), rendezvous.port);
  // A name that is not resolved yet may be this machine's: only its address tells whether all
  // interfaces have to listen.
  const auto look_up = [&] { return net::address_kind(rendezvous.host); };
  const net::AddressKind kind = resolved_within({.any = options.timeout()}, look_up).value;
  if (kind == net::AddressKind::local ||
      (kind == net::AddressKind::loopback && is_on_one_machine(rendezvous)))
    return listen_on(rendezvous.host, rendezvous.port);
  if (kind == net::AddressKind::remote) {
    log()->warn(
        "MASTER_ADDR {} is not an address of this machine, on which rank 0 runs: listening on port "
        "{} of all interfaces",
        rendezvous.host, rendezvous.port);
  }
  return listen_on_all(rendezvous.port);
}

c10::intrusive_ptr<c10d::Store> host_store(const Rendezvous& rendezvous,
                                           const InitOptions& options) {
  Descriptor listener = listen_for_ranks(rendezvous, options);
  const net::Address here = net::address_of(listener);
  const bool on_all = here.host == "0.0.0.0" || here.host == "::";
  c10d::TCPStoreOptions store;
  store.port = static_cast<std::uint16_t>(here.port);
  store.isServer = true;
  store.waitWorkers = false;  // init itself waits, and reports missing ranks
  store.timeout = options.timeout();
  store.masterListenFd = listener.release();
  // Rank 0's own connection: the address that others use for the master may not be reachable from
  // the master itself.
  return c10::make_intrusive<c10d::TCPStore>(on_all ? "localhost" : here.host, store);
}

// TCPStore may wait twice the timeout for its server. It is therefore constructed only once there
// is a server.
c10::intrusive_ptr<c10d::Store> connect_store(const Rendezvous& rendezvous,
                                              const InitOptions& options) {
  using std::chrono::milliseconds;
  constexpr milliseconds kRetryInterval(100);
  constexpr milliseconds kAnswerTimeout(5000);  // of a server that accepts connections
  const auto deadline = Clock::now() + options.timeout();
  const auto left = [&] {
    return std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()),
                    milliseconds(1));
  };
  const auto look_up = [&] { return net::address_kind(rendezvous.host); };
  const bool is_unreachable =
      !is_on_one_machine(rendezvous) &&
      resolved_within({.any = left()}, look_up).value == net::AddressKind::loopback;
  const auto reach_master = [&] {
    return net::connect_to({rendezvous.host, rendezvous.port}, left());
  };
  c10d::TCPStoreOptions store;
  store.port = static_cast<std::uint16_t>(rendezvous.port);
  store.waitWorkers = false;
  do {
    // The connection ends here: the store makes its own.
    const bool is_there = resolved_within({.any = left()}, reach_master).ok();
    try {
      if (is_there) {
        store.timeout = std::min(left(), kAnswerTimeout);
        auto found = c10::make_intrusive<c10d::TCPStore>(rendezvous.host, store);
        found->setTimeout(options.timeout());
        return found;
      }
    } catch (const c10::Error&) {  // what answers is no store yet: a proxy before rank 0 is there
    }
    std::this_thread::sleep_for(std::min(left(), kRetryInterval));
  } while (Clock::now() < deadline);
  throw CommError(
      kInitComponent, fmt::format("rank 0 to answer at {}:{}", rendezvous.host, rendezvous.port),
      fmt::format("nothing within {}{}",
                  seconds(std::chrono::duration<double>(options.timeout()).count()),
                  is_unreachable ? ", and only this machine can be reached there" : ""),
      is_unreachable ? "set MASTER_ADDR to the address of a network interface of rank 0's machine"
                     : "was rank 0 started? Can this machine reach it? Are MASTER_ADDR and "
                       "MASTER_PORT the same on all ranks?",
      {0});
}

std::vector<std::string> keys_of_ranks(const std::string& prefix, int size) {
  std::vector<std::string> keys;
  keys.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) keys.push_back(prefix + std::to_string(rank));
  return keys;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_store(const Rendezvous& rendezvous,
                                           const InitOptions& options) {
  if (rendezvous.kind == Rendezvous::Kind::file)
    return open_file_store(rendezvous, options.timeout());
  if (rendezvous.rank == 0 && !rendezvous.store_is_hosted) return host_store(rendezvous, options);
  return connect_store(rendezvous, options);
}

void put(c10d::Store& store, const std::string& key, std::string_view value) {
  store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::string get(c10d::Store& store, const std::string& key) {
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

std::vector<std::string> get_of_ranks(c10d::Store& store, const std::string& prefix, int size) {
  std::vector<std::string> strings;
  for (const auto& value : store.multiGet(keys_of_ranks(prefix, size)))
    strings.emplace_back(value.begin(), value.end());
  return strings;
}

std::vector<int> ranks_without_value(c10d::Store& store, const std::string& prefix, int size) {
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!store.check({prefix + std::to_string(rank)})) missing.push_back(rank);
  }
  return missing;
}

std::vector<int> wait_for_ranks(c10d::Store& store, const std::string& prefix, int size,
                                std::chrono::milliseconds timeout) {
  try {
    store.wait(keys_of_ranks(prefix, size), timeout);
  } catch (const c10::DistStoreError&) {
    return ranks_without_value(store, prefix, size);
  }
  return {};
}

}  // namespace semitone::comm
