#pragma once

#include "src/launch/channel.h"
#include "src/launch/clock.h"
#include "src/launch/descriptor.h"
#include "src/launch/job_state.h"
#include "src/net/sockets.h"

#include <cstddef>
#include <map>
#include <optional>
#include <thread>
#include <vector>

namespace semitone::launch {

// The part of node 0 that manages the job: a thread that keeps the state of the job and
// communicates with the launchers of all nodes, including its own.
class Coordinator {
 public:
  // @param listener  where the other nodes' launchers connect; closed for one node
  // @param most_strangers  connections that are kept although their other ends have not joined.
  //                        Launchers that find none free try again. A start of 4096 nodes at the
  //                        same moment then takes some seconds
  Coordinator(Job job, Descriptor listener, Clock::duration heartbeat_timeout,
              std::size_t most_strangers = 512);
  // Waits up to five seconds until the others have received the outcome.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // This node's own connection. Call it once.
  Channel connect() { return {std::move(own_end_), heartbeat_timeout_}; }

 private:
  static constexpr JobState::Id kOwn = 0;  // of this node's own connection

  struct Connection {
    Channel channel;
    Time join_by;  // a stranger's connection is closed then
  };

  void run();
  void wait();
  void accept(Time now);
  // Whether the other end is another process that has not joined the job, or has left it.
  bool is_stranger(JobState::Id id) const { return id != kOwn && !job_.has(id); }
  void receive_messages(JobState::Id id, Channel& channel, Time now);
  void send_messages();
  void erase(JobState::Id id, Time now);

  Clock::duration heartbeat_timeout_;
  std::size_t most_strangers_;
  net::Listener listener_;
  Descriptor own_end_;
  JobState job_;
  std::map<JobState::Id, Connection> connections_;
  JobState::Id next_ = 0;
  Pipe stop_;  // its end closes when the owner goes
  std::optional<Time> stop_at_;
  std::thread thread_;
};

}  // namespace semitone::launch
