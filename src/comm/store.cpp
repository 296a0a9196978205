#include "src/comm/store.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"
#include "src/comm/ranks.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fmt/format.h>

#include <filesystem>

namespace semitone::comm {
namespace {

c10::intrusive_ptr<c10d::Store> open_file_store(const Rendezvous& rendezvous,
                                                std::chrono::milliseconds timeout) {
  const auto folder = std::filesystem::path(rendezvous.path).parent_path();
  if (!std::filesystem::is_directory(folder)) {
    throw Error(kInit, "a file in a folder that exists", fmt::format("'{}'", rendezvous.path));
  }
  auto store = c10::make_intrusive<c10d::FileStore>(rendezvous.path, rendezvous.world_size);
  store->setTimeout(timeout);
  return store;
}

std::vector<std::string> keys_of_ranks(const std::string& prefix, int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(prefix + std::to_string(rank));
  return keys;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_store(const Rendezvous& rendezvous,
                                           std::chrono::milliseconds timeout) {
  if (rendezvous.kind == Rendezvous::Kind::file) return open_file_store(rendezvous, timeout);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(rendezvous.port);
  options.isServer = rendezvous.rank == 0 && !rendezvous.store_is_hosted;
  options.waitWorkers = false;  // init waits itself, and says who is missing
  options.timeout = timeout;
  if (options.isServer) {
    options.masterListenFd = listen_on(rendezvous.host, rendezvous.port).release();
  }
  try {
    return c10::make_intrusive<c10d::TCPStore>(rendezvous.host, options);
  } catch (const std::exception&) {
    throw CommError(kInit,
                    fmt::format("rank 0 to answer at {}:{}", rendezvous.host, rendezvous.port),
                    "nothing within " + seconds(std::chrono::duration<double>(timeout).count()),
                    "was rank 0 started? Can this machine reach it? Are MASTER_ADDR and "
                    "MASTER_PORT the same on "
                    "all ranks?",
                    {0});
  }
}

void put(c10d::Store& store, const std::string& key, std::string_view value) {
  store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::string get(c10d::Store& store, const std::string& key) {
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

std::vector<std::string> get_of_ranks(c10d::Store& store, const std::string& prefix, int size) {
  std::vector<std::string> texts;
  for (const auto& value : store.multiGet(keys_of_ranks(prefix, size)))
    texts.emplace_back(value.begin(), value.end());
  return texts;
}

std::vector<int> wait_for_ranks(c10d::Store& store, const std::string& prefix, int size,
                                std::chrono::milliseconds timeout) {
  const auto keys = keys_of_ranks(prefix, size);
  std::vector<int> missing;
  try {
    store.wait(keys, timeout);
  } catch (const c10::DistStoreError&) {
    for (int rank = 0; rank < size; ++rank) {
      if (!store.check({keys[static_cast<std::size_t>(rank)]})) missing.push_back(rank);
    }
  }
  return missing;
}

}  // namespace semitone::comm
