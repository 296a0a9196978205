#include "src/comm/watch.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"
#include "src/comm/ranks.h"
#include "src/comm/store.h"
#include "src/comm/watch_messages.h"
#include "src/core/parse_number.h"
#include "src/net/sockets.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <utility>

// What callers use. The thread that they communicate with is in watch_thread.cpp.

namespace semitone::comm {
namespace {

using net::Clock;
using std::chrono::milliseconds;

std::string make_token() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace

Watch::Watch(c10::intrusive_ptr<c10d::Store> store, const WatchOptions& options)
    : store_(std::move(store)),
      options_(options),
      heartbeat_(options.interval, Clock::now()),
      unconnected_(options.silence, Clock::now()) {
  if (options_.rank == 0) {
    token_ = make_token();
    Descriptor socket = listen_on(options_.address, 0);
    const net::Address here = net::address_of(socket);
    listener_ = net::Listener(std::move(socket));
    put(*store_, "watch", fmt::format("{} {} {}", token_, here.host, here.port));
  } else {
    const std::string endpoint = get(*store_, "watch");
    std::string_view words = endpoint;
    token_ = next_word(words);
    rank0_.host = next_word(words);
    rank0_.port = parse_number<int>(words).value_or(0);
    reconnect_until_ = Clock::now() + options_.timeout;
    auto connection = net::connect_to(rank0_, options_.timeout);
    if (!connection.ok()) {
      throw CommError(kInitComponent, fmt::format("an answer from {}:{}", rank0_.host, rank0_.port),
                      connection.problem, "can this machine reach it?");
    }
    peers_.emplace(0, make_rank0(std::move(connection.value)));
  }
  thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.set();
  thread_.join();
}

std::optional<Watch::Loss> Watch::loss() const {
  const std::lock_guard lock(mutex_);
  return loss_;
}

std::vector<int> Watch::left() const {
  const std::lock_guard lock(mutex_);
  return left_;
}

void Watch::report_lost(const std::string& what) {
  std::unique_lock lock(mutex_);
  request("blame " + format_loss({{options_.rank}, what}));
  // Wait for rank 0's reply.
  changed_.wait_for(lock, std::max<milliseconds>(2 * options_.interval, std::chrono::seconds(2)),
                    [this] { return loss_.has_value(); });
}

std::exception_ptr Watch::error_of(const std::string& collective, const Loss& loss) const {
  const bool self = loss.ranks == std::vector<int>{options_.rank};
  return std::make_exception_ptr(CommError(
      "comm." + collective, fmt::format("all {} ranks to take part", options_.size),
      fmt::format("{}{} lost: {}", name_ranks(loss.ranks), self ? " (this one)" : "", loss.what),
      self ? "the other ranks have given up; restart the job" : "see its output for the reason",
      loss.ranks));
}

std::exception_ptr Watch::lost(const std::string& collective) const {
  const auto loss = this->loss();
  return loss.has_value() ? error_of(collective, *loss) : nullptr;
}

std::exception_ptr Watch::explain(const std::string& collective, const std::string& problem,
                                  bool timed_out) {
  std::unique_lock lock(mutex_);
  if (timed_out && !loss_.has_value() && !slowest_.empty() && fewest_calls_ < calls_) {
    const Loss late{slowest_,
                    fmt::format("did not call {} in time; other ranks are waiting in their "
                                "collective number {}",
                                collective, calls_.load())};
    request("blame " + format_loss(late));
  }
  // A connection may break a moment before the message with the reason arrives.
  const auto timeout = std::max<milliseconds>(2 * options_.interval, std::chrono::seconds(2));
  changed_.wait_for(lock, timeout, [this] { return loss_.has_value() || !left_.empty(); });
  if (!loss_.has_value() && !left_.empty()) {
    // Ranks that left because of the failure are not its cause: the first report counts.
    const Loss departed{left_, fmt::format("left the group while others are in {}", collective)};
    request("blame " + format_loss(departed));
    changed_.wait_for(lock, timeout, [this] { return loss_.has_value(); });
    if (!loss_.has_value()) return error_of(collective, departed);
  }
  if (loss_.has_value()) return error_of(collective, *loss_);
  return std::make_exception_ptr(
      CommError("comm." + collective, fmt::format("all {} ranks to take part", options_.size),
                "all ranks alive, but: " + problem,
                "check that all ranks run the same collectives in the same order with the same "
                "shapes: SEMITONE_COMM_CHECK=full on all ranks reports a difference"));
}

// With mutex_ held.
void Watch::request(std::string line) {
  requests_.push_back(std::move(line));
  wake_.set();
}

std::vector<int> Watch::barrier(const std::string& name, const std::vector<int>& ranks,
                                milliseconds timeout, const std::string& collective) {
  std::unique_lock lock(mutex_);
  std::vector<int> missing;
  const auto all_are_there = [&] {
    missing.clear();
    const auto& there = arrived_[name];
    for (const int rank : ranks) {
      if (std::find(there.begin(), there.end(), rank) == there.end()) missing.push_back(rank);
    }
    return missing.empty();
  };
  const auto decided = [&] { return all_are_there() || loss_.has_value(); };
  request(fmt::format("arrive {} {}", ranks.size(), name));
  if (!changed_.wait_for(lock, timeout, decided)) {
    request("who " + name);
    changed_.wait_for(lock, 2 * options_.interval, decided);
  }
  if (!missing.empty() && loss_.has_value()) std::rethrow_exception(error_of(collective, *loss_));
  // Rank 0 keeps the list for ranks that still ask.
  if (missing.empty() || options_.rank != 0) arrived_.erase(name);
  std::erase(missing, options_.rank);
  return missing;
}

Watch::Subscription::Subscription(Watch& watch, std::function<void()> on_loss) : watch_(watch) {
  const std::lock_guard lock(watch_.subscribers_mutex_);
  number_ = watch_.subscriptions_++;
  if (watch_.loss().has_value()) on_loss();
  watch_.subscribers_.emplace(number_, std::move(on_loss));
}

Watch::Subscription::~Subscription() {
  const std::lock_guard lock(watch_.subscribers_mutex_);
  watch_.subscribers_.erase(number_);
}

}  // namespace semitone::comm
