#pragma once

#include "src/launch/channel.h"
#include "src/launch/descriptor.h"
#include "src/launch/roster.h"

#include <map>
#include <optional>
#include <thread>
#include <vector>

namespace semitone::launch {

// Node 0's other half: a thread that keeps the roster and talks to the launchers of all nodes, its
// own among them.
class Coordinator {
 public:
  // @param listener  where the other nodes' launchers come; closed for one node
  Coordinator(Job job, Descriptor listener, Clock::duration heartbeat_timeout);
  // Waits up to five seconds for the others to hear the verdict.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // This node's own connection. Once.
  Channel connect() { return {std::move(own_end_), heartbeat_timeout_}; }

 private:
  void run();
  void wait();
  void accept();
  void hear(Roster::Id id, Channel& channel, Time now);
  void deliver();
  void forget(Roster::Id id, Time now);

  Clock::duration heartbeat_timeout_;
  Descriptor listener_;
  Descriptor own_end_;
  Roster roster_;
  std::map<Roster::Id, Channel> channels_;
  Roster::Id next_ = 0;
  Pipe stop_;  // its end closes when the owner goes
  std::optional<Time> stop_at_;
  std::thread thread_;
};

}  // namespace semitone::launch
