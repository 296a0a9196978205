#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/channel.h"
#include "src/launch/coordinator.h"
#include "src/launch/interrupt.h"
#include "src/launch/messages.h"
#include "src/launch/sockets.h"

#include <optional>
#include <string>
#include <variant>

namespace semitone::launch {

// The rendezvous of the launchers of all nodes, seen from one of them: it finds node 0, or is node
// 0.
class Meeting {
 public:
  // Starts to listen if this is node 0. Error if it cannot.
  explicit Meeting(const LaunchOptions& options);

  // Waits for the next attempt to begin. Returns the verdict if there will be none. Leaves the job
  // if interrupted. Error if node 0 cannot be found, or refuses.
  std::variant<Assignment, Verdict> join(const Interrupt& interrupt);

  // The channel to node 0, between attempts.
  Channel& channel() { return *channel_; }

 private:
  void meet_alone();
  void meet_by_rank();
  void meet_at_endpoint();
  void host(Job job, Descriptor listener);
  Job job() const;
  std::string program() const;
  Join request() const;
  bool connect(const Interrupt& interrupt);
  void require_time(const std::string& problem) const;
  void pause(const Interrupt& interrupt) const;
  void require_sound(const Assignment& given) const;
  std::optional<std::variant<Assignment, Verdict>> hear();

  const LaunchOptions& options_;
  Endpoint endpoint_;
  std::optional<Coordinator> coordinator_;
  std::optional<Channel> channel_;
  bool met_ = false;  // node 0 has answered
  Time deadline_;     // to find node 0
};

}  // namespace semitone::launch
