#include "src/comm/gpu.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"
#include "src/comm/ranks.h"
#include "src/comm/store.h"
#include "src/comm/watch_messages.h"
#include "src/net/clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace semitone::comm {
namespace {

using std::chrono::milliseconds;

// A rank's value in the store is one of these words and the identity of its GPU, or the message of
// the exception that it got instead.
constexpr auto kSelected = "selected";
constexpr auto kFailed = "failed";
constexpr auto kPrefix = "gpu/";

// The number of ranks that have stored a value.
constexpr auto kStoredCount = "have_gpu";

std::string key_of(int rank) {
  return kPrefix + std::to_string(rank);
}

// The value is there when this returns, which c10d's set() alone does not guarantee.
void store_value(c10d::Store& store, int rank, std::string_view word, const std::string& text) {
  put(store, key_of(rank), fmt::format("{} {}", word, text));
  store.add(kStoredCount, 1);
}

// The identity in a rank's value. CommError if the rank has failed.
std::string identity_of(int rank, std::string_view value) {
  if (next_word(value) == kSelected) return std::string(value);
  throw CommError(kInitComponent, "a GPU for each rank",
                  fmt::format("an error on rank {}: {}", rank, value), "", {rank});
}

// Returns when all ranks have stored a value. The store alone is not enough: a rank that is lost
// stores none.
void wait_for_values(c10d::Store& store, Watch& watch, int size, milliseconds timeout) {
  constexpr milliseconds kFirstPause(10);
  constexpr milliseconds kLongestPause(200);  // rank 0, which may host the store, serves all ranks
  const auto deadline = net::Clock::now() + timeout;
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    // Asked before the store, since a rank that fails stores its value before it leaves.
    const auto left = watch.left();
    const bool is_late = net::Clock::now() >= deadline;
    if (const auto lost = watch.lost("init")) std::rethrow_exception(lost);
    if (store.add(kStoredCount, 0) >= size) return;
    // A rank that has left after selecting a GPU did so because of another one.
    for (const int rank : left) {
      if (!store.check({key_of(rank)}))
        std::rethrow_exception(watch.explain("init", "a rank has left", /*timed_out=*/false));
      identity_of(rank, get(store, key_of(rank)));
    }
    if (is_late) break;
    std::this_thread::sleep_for(pause);
  }
  const std::vector<int> missing = ranks_without_value(store, kPrefix, size);
  if (missing.empty()) return;
  throw CommError(kInitComponent,
                  fmt::format("all {} ranks to select their GPU within {}", size,
                              seconds(std::chrono::duration<double>(timeout).count())),
                  "no sign of " + name_ranks(missing), "check these ranks", missing);
}

}  // namespace

int gpu_index(int local_rank, int local_world_size, int gpus) {
  // A launcher may show each process its own GPU only: srun --gpus-per-task 1.
  if (gpus == 1) return 0;
  if (gpus < local_world_size) {
    throw Error(kInitComponent,
                fmt::format("a GPU for each of the {} ranks of this machine", local_world_size),
                std::to_string(gpus), "start fewer, or choose backend(\"gloo\") and the CPU");
  }
  return local_rank % gpus;
}

void require_distinct_gpus(const std::vector<std::string>& identities) {
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [owner, added] = owners.try_emplace(identities[rank], rank);
    if (added) continue;
    throw Error(
        kInitComponent, "a GPU of its own for each rank",
        fmt::format("the same one, {}, for ranks {} and {}", identities[rank], owner->second, rank),
        "start as many processes on a machine as it has GPUs, each with a LOCAL_RANK of its "
        "own or one GPU visible; or choose backend(\"gloo\") and the CPU");
  }
}

c10::Device select_gpu(const Rendezvous& rendezvous) {
  const c10::impl::VirtualGuardImpl gpus(c10::DeviceType::CUDA);
  const int number = gpu_index(rendezvous.local_rank.value_or(0),
                               rendezvous.local_world_size.value_or(1), gpus.deviceCount());
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number));
  gpus.setDevice(device);
  return device;
}

void select_distinct_gpus(c10d::Store& store, Watch& watch, const Rendezvous& rendezvous,
                          milliseconds timeout, const std::function<std::string()>& select) {
  std::string own;
  try {
    own = select();
  } catch (...) {
    try {
      store_value(store, rendezvous.rank, kFailed, what_of(std::current_exception()));
    } catch (const std::exception&) {  // the store is lost, which the others notice themselves
    }
    throw;
  }
  std::vector<std::string> identities;
  try {
    store_value(store, rendezvous.rank, kSelected, own);
    wait_for_values(store, watch, rendezvous.world_size, timeout);
    for (const std::string& value : get_of_ranks(store, kPrefix, rendezvous.world_size))
      identities.push_back(identity_of(static_cast<int>(identities.size()), value));
  } catch (const c10::DistError& error) {
    std::rethrow_exception(
        watch.explain("init", error.what_without_backtrace(), /*timed_out=*/false));
  }
  require_distinct_gpus(identities);
}

}  // namespace semitone::comm
