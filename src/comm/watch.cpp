#include "src/comm/watch.h"

#include "semitone/core/error.h"
#include "src/comm/store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace semitone::comm {
namespace {

constexpr auto kFailureKey = "watch/failure";
constexpr auto kGoodbye = "left";

std::string life_key(int rank) {
  return "watch/life/" + std::to_string(rank);
}
std::string seen_key(int rank) {
  return "watch/seen/" + std::to_string(rank);
}

std::string names(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

Watch::Watch(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::string host_of_store, std::chrono::milliseconds interval)
    : store_(store->clone()),
      own_(store->clone()),
      rank_(rank),
      size_(size),
      host_of_store_(std::move(host_of_store)),
      interval_(interval) {
  // A question to a dead store must not take as long as a collective may.
  const auto patience = std::max<std::chrono::milliseconds>(4 * interval_, std::chrono::seconds(2));
  store_->setTimeout(patience);
  own_->setTimeout(patience);
  put(*own_, life_key(rank_), "0");
  thread_ = std::thread([this] { show_life(); });
}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
  try {
    put(*own_, life_key(rank_), kGoodbye);
  } catch (const std::exception&) {
    // The store is gone: so is everybody who could read it.
  }
}

void Watch::show_life() {
  for (std::uint64_t beat = 1;; ++beat) {
    std::unique_lock lock(mutex_);
    if (stop_.wait_for(lock, interval_, [this] { return stopping_; })) return;
    lock.unlock();
    try {
      put(*own_, life_key(rank_), std::to_string(beat));
    } catch (const std::exception&) {
      return;  // whoever waits in a collective will find out
    }
  }
}

std::vector<int> Watch::silent_ranks() {
  const auto listen = [this] {
    std::vector<std::optional<std::string>> lives;
    for (int rank = 0; rank < size_; ++rank) lives.push_back(peek(*store_, life_key(rank)));
    return lives;
  };
  const auto before = listen();
  std::this_thread::sleep_for(3 * interval_);
  const auto after = listen();
  std::vector<int> silent;
  for (int rank = 0; rank < size_; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (rank != rank_ && (!after[index].has_value() || after[index] == before[index]))
      silent.push_back(rank);
  }
  return silent;
}

std::exception_ptr Watch::explanation(const std::string& collective, const std::string& problem) {
  const std::lock_guard lock(explaining_);
  if (explained_ != nullptr) return explained_;
  const auto error = [&](const std::string& got, const std::vector<int>& ranks,
                         const std::string& remedy) {
    return std::make_exception_ptr(CommError(
        "comm." + collective, fmt::format("all {} ranks to take part", size_), got, remedy, ranks));
  };
  const std::string see = "see its output for the reason";
  try {
    std::string culprits;
    if (const auto failure = peek(*store_, kFailureKey)) {
      culprits = *failure;
    } else {
      const auto silent = silent_ranks();
      // Somebody may have written it down meanwhile; the first one counts.
      const std::string mine = fmt::format("{}", fmt::join(silent, " "));
      const auto bytes =
          store_->compareSet(kFailureKey, {}, std::vector<std::uint8_t>(mine.begin(), mine.end()));
      culprits.assign(bytes.begin(), bytes.end());
    }
    put(*store_, seen_key(rank_), "1");
    // Rank 0 takes the store with it when it ends: it waits, so that the others can read.
    if (rank_ == 0) {
      for (auto waited = std::chrono::milliseconds(0); waited < 6 * interval_;
           waited += interval_ / 4) {
        int seen = 0;
        for (int rank = 0; rank < size_; ++rank) seen += store_->check({seen_key(rank)}) ? 1 : 0;
        if (seen + static_cast<int>(std::count(culprits.begin(), culprits.end(), ' ')) +
                (culprits.empty() ? 0 : 1) >=
            size_)
          break;
        std::this_thread::sleep_for(interval_ / 4);
      }
    }
    std::vector<int> ranks;
    std::istringstream stream(culprits);
    for (int rank = 0; stream >> rank;) ranks.push_back(rank);
    explained_ = ranks.empty() ? error("all of them alive, but: " + problem, {},
                                       "do all ranks run the same collectives in the same order? "
                                       "Is the timeout long enough?")
                               : error(names(ranks) + " lost: no sign of life", ranks, see);
  } catch (const std::exception&) {
    explained_ = error(fmt::format("rank 0 lost: its store{} does not answer",
                                   host_of_store_.empty() ? "" : " at " + host_of_store_),
                       {0}, see);
  }
  return explained_;
}

void Watch::explain(const std::string& collective, const std::string& problem) {
  std::rethrow_exception(explanation(collective, problem));
}

}  // namespace semitone::comm
