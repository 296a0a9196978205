#pragma once

#include "src/launch/channel.h"
#include "src/launch/clock.h"
#include "src/launch/descriptor.h"
#include "src/launch/job_state.h"
#include "src/launch/messages.h"
#include "src/net/line_channel.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"

#include <cstddef>
#include <map>
#include <optional>
#include <thread>
#include <vector>

namespace semitone::launch {

// The part of node 0 that manages the job: a thread that keeps the state of the job and
// communicates with the launchers of all nodes, including its own.
//
// A connection is a stranger's until it has asked to take part and JobState has admitted it. Any
// program may open one, so a stranger costs little, however much it sends: one line of limited
// length, which must be a join, and one answer. If the answer is a refusal, nothing more is read,
// and the connection is closed once the stranger has the answer.
//
// Once the job is over, only its nodes are told the outcome. Launchers that connect later get no
// answer and try again, up to their join timeout. Those of the next job at this address then find
// it. A node that is late for this job cannot be told apart from them: it joins the next job if
// that job admits it, and otherwise reports that nothing answers.
class Coordinator {
 public:
  // @param listeners  where the other nodes' launchers connect; none for one node
  // @param most_strangers  connections that are kept although their other ends have not joined.
  //                        Launchers that find none free try again. A start of 4096 nodes at the
  //                        same moment then takes some seconds
  Coordinator(Job job, std::vector<Descriptor> listeners, Clock::duration heartbeat_timeout,
              std::size_t most_strangers = 512);
  // Waits up to five seconds until the others have received the outcome.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // This node's own connection. Call it once.
  Channel connect() { return {std::move(own_end_), kOwnTimeout}; }

 private:
  // The two ends of node 0's own connection are in one process, whose threads may wait: one that
  // starts many workers or prints to a terminal that is paused is not lost.
  static constexpr std::chrono::hours kOwnTimeout{24 * 365};

  struct Stranger {
    net::LineChannel lines;
    Time close_at;  // unless it has become a member
  };

  void run();
  void wait();
  void accept(Time now);
  void receive_joins(Time now);
  void receive_join(JobState::Id id, Stranger& stranger, Time now);
  void receive_messages(JobState::Id id, Channel& channel, Time now);
  void send_messages();
  void erase_closed(Time now);
  bool has_connections() const { return !members_.empty() || !strangers_.empty(); }

  Clock::duration heartbeat_timeout_;
  std::size_t most_strangers_;
  std::vector<net::Listener> listeners_;
  Descriptor own_end_;
  JobState job_;
  std::map<JobState::Id, Channel> members_;  // this node's own, and nodes that JobState has
  std::map<JobState::Id, Stranger> strangers_;
  JobState::Id next_ = 0;  // 0: this node's own connection
  net::WakeEvent stop_;    // set when the owner goes
  std::optional<Time> stop_at_;
  std::thread thread_;
};

}  // namespace semitone::launch
