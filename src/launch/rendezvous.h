#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/channel.h"
#include "src/launch/clock.h"
#include "src/launch/coordinator.h"
#include "src/launch/endpoint.h"
#include "src/launch/interrupt.h"
#include "src/launch/messages.h"
#include "src/net/sockets.h"

#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace semitone::launch {

// The rendezvous of the launchers of all nodes, seen from one of them: it finds node 0, or is node
// 0.
class Rendezvous {
 public:
  // Starts to listen if this is node 0. Error if it cannot. If the name of the machine to meet at
  // cannot be resolved yet, join() does that.
  explicit Rendezvous(const LaunchOptions& options);

  // Waits for the next attempt to begin. Returns the outcome if there will be none. Leaves the job
  // if interrupted. Error if node 0 cannot be found, or refuses.
  std::variant<Assignment, Outcome> join(const Interrupt& interrupt);

  // The channel to node 0, between attempts.
  Channel& channel() { return *channel_; }

 private:
  void start_single_node();
  void start_static();
  void start_at_endpoint();
  // Becomes node 0 if the address is this machine's, and no other program listens there.
  net::Result<Descriptor> host_at_endpoint();
  bool is_numbered() const;
  // Error if other machines cannot reach an endpoint that is a machine's name.
  void require_reachable(const std::vector<Descriptor>& listeners) const;
  void require_one_machine(const std::vector<Descriptor>& listeners) const;
  void host(Job job, std::vector<Descriptor> listeners);
  Job job() const;
  std::string program() const;
  std::string command_digest() const;
  Join request() const;
  net::Result<Descriptor> open_channel();
  bool connect(const Interrupt& interrupt);
  void check_deadline(const std::string& problem) const;
  void wait_until(Time time, const Interrupt& interrupt) const;
  void check_assignment(const Assignment& given) const;
  std::optional<std::variant<Assignment, Outcome>> receive_answer();

  const LaunchOptions& options_;
  Endpoint endpoint_;
  std::optional<Coordinator> coordinator_;
  std::string listening_at_;  // the addresses of node 0, for the log
  std::optional<Channel> channel_;
  bool answered_ = false;  // node 0 has answered
  Time deadline_;          // to find node 0
};

}  // namespace semitone::launch
