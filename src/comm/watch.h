#pragma once

#include "src/core/descriptor.h"
#include "src/net/clock.h"
#include "src/net/heartbeat.h"
#include "src/net/line_channel.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

// Tracks which ranks take part, are lost, or are late.
//
// Transports notice a broken connection, but not which rank caused it, and a rank that is merely
// stopped breaks none. So every rank keeps one more connection, to rank 0. Every second it sends a
// heartbeat with its progress. A process that dies closes its connection at once. A process that is
// stopped, or whose machine is lost, becomes silent. Rank 0 informs all others. The first loss is
// the one that counts, so that all ranks name the same rank.
//
// The messages are lines. To rank 0: "hello TOKEN RANK", "beat CALLS" (the heartbeat), "blame
// RANKS: WHAT", "arrive COUNT NAME" (at a barrier of COUNT ranks), "who NAME" (asks which ranks
// arrived), "bye". From rank 0: "beat CALLS RANKS" (the smallest number of calls, and the ranks
// with it), "arrived RANKS NAME", "left RANK", "lost RANKS: WHAT", "bye".
namespace semitone::comm {

struct WatchOptions {
  int rank = 0;
  int size = 1;
  std::string address;                   // local IP address for rank 0 to listen on
  std::chrono::milliseconds interval{};  // between two signs of life
  std::chrono::milliseconds silence{};   // duration after which a rank counts as lost
  std::chrono::milliseconds timeout{};   // for connecting
};

class Watch {
 public:
  // Ranks that are permanently lost to the group.
  struct Loss {
    std::vector<int> ranks;
    std::string what;  // "its process has ended"
  };

  Watch(c10::intrusive_ptr<c10d::Store> store, const WatchOptions& options);
  // Tells the others that this rank leaves. Rank 0 then waits briefly for the others to leave,
  // since it may host their store.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  std::optional<Loss> loss() const;
  // The ranks that have left the group by themselves.
  std::vector<int> left() const;
  bool has_left() const { return !left().empty(); }

  // Reports this rank as lost to all ranks, including itself: it cannot continue with the others.
  void report_lost(const std::string& what);

  // The number of collectives and messages that this rank has started, on all groups of these
  // processes.
  void count_start() { ++starts_; }
  std::uint64_t starts() const { return starts_; }

  // The number of collectives that this rank has called on the group of all processes.
  void count_call() { ++calls_; }
  std::uint64_t calls() const { return calls_; }

  // The CommError for a failed collective. Waits briefly for a message of rank 0 if none has
  // arrived.
  // @param timed_out  the collective reached its timeout
  std::exception_ptr explain(const std::string& collective, const std::string& problem,
                             bool timed_out);

  // The CommError for a call after a loss, or null if there is no loss.
  std::exception_ptr lost(const std::string& collective) const;

  // Waits until all these ranks have called this with the same name, and returns those that did not
  // arrive in time. CommError if a rank is lost.
  // @param name  new for each use
  std::vector<int> barrier(const std::string& name, const std::vector<int>& ranks,
                           std::chrono::milliseconds timeout, const std::string& collective);

  // Calls a function when a rank is lost, from the watch's thread, or at once if one is lost
  // already. It may be called twice. The subscription ends with the scope and must not outlive the
  // watch.
  class Subscription {
   public:
    Subscription(Watch& watch, std::function<void()> on_loss);
    ~Subscription();
    Subscription(const Subscription&) = delete;
    Subscription& operator=(const Subscription&) = delete;

   private:
    Watch& watch_;
    int number_;
  };

 private:
  struct Peer {
    net::LineChannel channel;
    net::Time connected_at;
    std::uint64_t calls = 0;
    bool has_answered = false;  // with any line
    bool left = false;
  };

  Peer make_peer(Descriptor connection) const;
  // Of the other ranks: a connection to rank 0, which begins with "hello".
  Peer make_rank0(Descriptor connection) const;
  bool reconnect(Peer& rank0);
  void run();
  void wait_for_events(net::Time until);
  void accept_peers();
  void receive_from(int rank, Peer& peer);
  void handle_line(int rank, std::string_view line);
  void check_silence();
  void send_heartbeat();
  void leave();
  void set_loss(const Loss& loss);
  void send_to_all(const std::string& line);
  void send_arrivals(const std::string& name, const std::vector<int>& to);
  void request(std::string line);
  std::exception_ptr error_of(const std::string& collective, const Loss& loss) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const WatchOptions options_;
  std::string token_;  // so that a foreign connection is not taken for a rank's
  net::Address rank0_;

  // Used by the thread only.
  net::Listener listener_;  // of rank 0
  net::WakeEvent wake_;
  net::Time reconnect_until_;
  std::vector<std::string> unanswered_;  // sent to rank 0 before it has sent a line
  std::vector<Peer> pending_;            // connected, without a valid hello so far
  std::map<int, Peer> peers_;            // rank 0: all others; the others: rank 0
  net::HeartbeatTimer heartbeat_;
  net::SilenceTimer unconnected_;  // of ranks without a connection, on rank 0

  std::atomic<std::uint64_t> calls_ = 0;
  std::atomic<std::uint64_t> starts_ = 0;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::optional<Loss> loss_;
  std::vector<int> left_;
  std::uint64_t fewest_calls_ = 0;
  std::vector<int> slowest_;
  std::vector<std::string> requests_;                // lines for rank 0
  std::map<std::string, std::vector<int>> arrived_;  // by barrier
  bool stopping_ = false;

  std::mutex subscribers_mutex_;
  std::map<int, std::function<void()>> subscribers_;
  int subscriptions_ = 0;

  std::thread thread_;
};

}  // namespace semitone::comm
