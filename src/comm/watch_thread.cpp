#include "src/comm/ranks.h"
#include "src/comm/watch.h"
#include "src/comm/watch_messages.h"
#include "src/core/parse_number.h"
#include "src/net/sockets.h"
#include "src/net/token.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

// On rank 0 a connection goes through these states. It is pending until its first line, "hello"
// with the token, makes it a peer. A pending connection that sends anything else is closed, as is
// one that sends nothing within the silence. A peer is alive until it says "bye" (left), its
// connection closes without that (lost), or it is silent for too long (lost). Other ranks have one
// peer, rank 0, with the same states.
//
// Only the first loss counts: set_loss() keeps it, and later losses are ignored. Rank 0 sends it
// to all peers, also to those that arrive later. A rank that only knows that a collective failed
// asks for the cause with "blame", and waits for rank 0's "lost" (explain, report_lost).
//
// The thread owns connections and peers. Callers communicate with it through requests_, guarded by
// mutex_, and wait for its results on changed_.

namespace semitone::comm {
namespace {

using net::Clock;
using net::Time;
using std::chrono::milliseconds;

// How long rank 0 waits for the others to leave first, and the others for rank 0 to receive their
// "bye".
constexpr milliseconds kLeaveTimeout(5000);
constexpr milliseconds kGoodbyeTimeout(500);

// Connections that are kept before their first line, beyond those of the ranks that are missing.
constexpr std::size_t kMaxStrangers = 128;

// Of a rank whose connection rank 0 has closed without an answer.
constexpr milliseconds kRetryInterval(250);
constexpr milliseconds kReconnectTimeout(1000);

// Largest number of ranks in a heartbeat.
constexpr std::size_t kMaxNamed = 8;

}  // namespace

Watch::Peer Watch::make_peer(Descriptor connection) const {
  return {net::LineChannel(std::move(connection), options_.silence), Clock::now()};
}

Watch::Peer Watch::make_rank0(Descriptor connection) const {
  Peer rank0 = make_peer(std::move(connection));
  rank0.channel.send(fmt::format("hello {} {}", token_, options_.rank));
  return rank0;
}

// Rank 0 closes a connection at once while strangers use up those that it can keep.
bool Watch::reconnect(Peer& rank0) {
  if (options_.rank == 0 || rank0.has_answered || Clock::now() >= reconnect_until_) return false;
  std::this_thread::sleep_for(kRetryInterval);
  auto connection = net::connect_to(rank0_, kReconnectTimeout);
  if (!connection.ok()) return false;
  rank0 = make_rank0(std::move(connection.value));
  for (const std::string& line : unanswered_) rank0.channel.send(line);
  return true;
}

void Watch::set_loss(const Loss& loss) {
  if (loss.ranks.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (loss_.has_value()) return;
    loss_ = loss;
  }
  changed_.notify_all();
  if (options_.rank == 0) send_to_all("lost " + format_loss(loss));
  const std::lock_guard lock(subscribers_mutex_);
  for (const auto& [number, on_loss] : subscribers_) on_loss();
}

void Watch::send_to_all(const std::string& line) {
  for (auto& [rank, peer] : peers_) peer.channel.send(line);
}

// With mutex_ held.
void Watch::send_arrivals(const std::string& name, const std::vector<int>& to) {
  const std::string line = fmt::format("arrived {} {}", format_ranks(arrived_[name]), name);
  for (const int rank : to) {
    if (const auto peer = peers_.find(rank); peer != peers_.end()) peer->second.channel.send(line);
  }
}

void Watch::run() {
  for (;;) {
    wait_for_events(heartbeat_.deadline());
    if (options_.rank == 0) accept_peers();
    for (auto& [rank, peer] : peers_) receive_from(rank, peer);
    std::vector<std::string> requests;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
      requests.swap(requests_);
    }
    for (const std::string& line : requests) {
      if (options_.rank == 0) {
        handle_line(0, line);
      } else {
        if (!peers_.at(0).has_answered) unanswered_.push_back(line);
        send_to_all(line);
      }
    }
    check_silence();
    send_heartbeat();
  }
  leave();
}

void Watch::wait_for_events(Time until) {
  until = std::min(until, listener_.deadline());
  std::vector<pollfd> events{{wake_.descriptor(), POLLIN, 0}, {listener_.descriptor(), POLLIN, 0}};
  const auto add = [&](const net::LineChannel& channel) {
    events.push_back({channel.descriptor(), channel.events(), 0});
  };
  for (const Peer& peer : pending_) add(peer.channel);
  for (const auto& [rank, peer] : peers_) add(peer.channel);
  net::poll_until(events, until);
  wake_.clear();
}

void Watch::accept_peers() {
  const Time now = Clock::now();
  const std::size_t most =
      static_cast<std::size_t>(options_.size) - 1 - peers_.size() + kMaxStrangers;
  for (Descriptor& connection : listener_.accept(most - std::min(most, pending_.size())))
    pending_.push_back(make_peer(std::move(connection)));
  for (Peer& peer : pending_) {
    peer.channel.update(now);
    const auto line = peer.channel.receive();
    if (!line.has_value()) continue;
    std::string_view hello = *line;
    const bool known = next_word(hello) == "hello" && net::are_equal(next_word(hello), token_);
    const int rank = known ? parse_number<int>(hello).value_or(0) : 0;
    if (rank <= 0 || rank >= options_.size || peers_.contains(rank)) {
      peer.channel.close(net::LineChannel::State::foreign, "no hello of a rank");
      continue;
    }
    Peer& member = peers_.emplace(rank, std::move(peer)).first->second;
    if (const auto loss = this->loss()) member.channel.send("lost " + format_loss(*loss));
  }
  // Removes connections that became peers, were closed, or are silent for too long.
  std::erase_if(pending_, [&](const Peer& peer) {
    return peer.channel.descriptor() < 0 || now - peer.connected_at > options_.silence;
  });
}

void Watch::receive_from(int rank, Peer& peer) {
  peer.channel.update(Clock::now());
  while (const auto line = peer.channel.receive()) {
    peer.has_answered = true;
    handle_line(rank, *line);
  }
  if (!peer.channel.is_open() && !peer.left && !reconnect(peer))
    set_loss({{rank}, "its process has ended"});
}

void Watch::handle_line(int rank, std::string_view line) {
  const std::string_view verb = next_word(line);
  if (verb == "beat") {
    Peer& peer = peers_.at(rank);
    peer.calls = parse_number<std::uint64_t>(next_word(line)).value_or(peer.calls);
    if (options_.rank == 0) return;
    const std::lock_guard lock(mutex_);
    fewest_calls_ = peer.calls;
    slowest_ = parse_ranks(line);
  } else if (verb == "lost" || verb == "blame") {
    set_loss(parse_loss(line));
  } else if (verb == "bye" || verb == "left") {
    const int leaver = verb == "bye" ? rank : parse_number<int>(line).value_or(rank);
    if (verb == "bye") peers_.at(rank).left = true;
    {
      const std::lock_guard lock(mutex_);
      left_.push_back(leaver);
    }
    changed_.notify_all();
    if (options_.rank == 0) send_to_all(fmt::format("left {}", leaver));
  } else if (verb == "arrive") {
    const auto expected = parse_number<std::size_t>(next_word(line)).value_or(0);
    const std::string name(line);
    const std::lock_guard lock(mutex_);
    std::vector<int>& there = arrived_[name];
    there.push_back(rank);
    if (there.size() < expected) return;
    send_arrivals(name, there);
    changed_.notify_all();
    if (std::count(there.begin(), there.end(), 0) == 0) arrived_.erase(name);
  } else if (verb == "who") {
    const std::lock_guard lock(mutex_);
    send_arrivals(std::string(line), {rank});
  } else if (verb == "arrived") {
    const auto ranks = parse_ranks(next_word(line));
    const std::lock_guard lock(mutex_);
    arrived_[std::string(line)] = ranks;
    changed_.notify_all();
  }
}

void Watch::check_silence() {
  const Time now = Clock::now();
  const auto lose = [&](int rank) {
    set_loss(
        {{rank},
         fmt::format(
             "no sign of life for {}: its process is stopped, or its machine cannot be reached",
             seconds(std::chrono::duration<double>(options_.silence).count()))});
  };
  for (auto& [rank, peer] : peers_) {
    if (peer.channel.is_silent(now) && !peer.left) lose(rank);
  }
  if (options_.rank != 0 || !unconnected_.has_expired(now)) return;
  for (int rank = 1; rank < options_.size; ++rank) {
    if (!peers_.contains(rank)) lose(rank);
  }
}

void Watch::send_heartbeat() {
  if (!heartbeat_.take_due(Clock::now())) return;
  if (options_.rank != 0) return send_to_all(fmt::format("beat {}", calls_.load()));
  std::uint64_t fewest = calls_;
  for (const auto& [rank, peer] : peers_) fewest = std::min(fewest, peer.calls);
  std::vector<int> slowest;
  if (fewest == calls_) slowest.push_back(0);
  for (const auto& [rank, peer] : peers_) {
    if (peer.calls == fewest && slowest.size() < kMaxNamed) slowest.push_back(rank);
  }
  send_to_all(fmt::format("beat {} {}", fewest, format_ranks(slowest)));
  const std::lock_guard lock(mutex_);
  fewest_calls_ = fewest;
  slowest_ = std::move(slowest);
}

void Watch::leave() {
  send_to_all("bye");
  for (auto& [rank, peer] : peers_) {
    if (options_.rank != 0) peer.channel.finish();
  }
  const Time deadline = Clock::now() + (options_.rank == 0 ? kLeaveTimeout : kGoodbyeTimeout);
  const auto has_gone = [&](const auto& member) {
    const auto& [rank, peer] = member;
    const auto loss = this->loss();
    return !peer.channel.is_open() || peer.left ||
           (loss.has_value() && std::count(loss->ranks.begin(), loss->ranks.end(), rank) > 0);
  };
  while (Clock::now() < deadline && !std::all_of(peers_.begin(), peers_.end(), has_gone)) {
    wait_for_events(std::min(deadline, Clock::now() + options_.interval));
    for (auto& [rank, peer] : peers_) receive_from(rank, peer);
  }
}

}  // namespace semitone::comm
