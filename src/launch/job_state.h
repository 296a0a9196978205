#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/clock.h"
#include "src/launch/messages.h"

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::launch {

// Node 0's initial knowledge of the job.
struct Job {
  std::string run_id;
  bool named = false;   // the user set the run_id: launchers that join must have it
  std::string token;    // that launchers must know; empty: none
  std::string program;  // its file name, as in Join
  std::string command;
  detail::NodeCount nodes;
  bool numbered = false;  // nodes have numbers, or are numbered in order of arrival
  int max_restarts = 0;
  std::string master_addr;
  int master_port = 0;  // 0: a free one for each attempt
  Clock::duration join_timeout{};
  Clock::duration last_call{};
};

// The state machine of a job. It decides for all nodes when an attempt begins and which ranks each
// node gets, what follows a failure, and when the job is over. Its inputs are events, and its
// outputs are messages with their recipients. It uses neither sockets nor processes.
class JobState {
 public:
  // Numbers the connections in the order of their arrival. 0 is node 0's own.
  using Id = int;
  using Messages = std::vector<std::pair<Id, Message>>;

  JobState(Job job, Time now);

  // A launcher asks to take part. If has(id) is false afterwards, a message tells the launcher why,
  // unless the job is over.
  void joined(Id id, const Join& join, Time now);
  void failed(Id id, const WorkerFailure& failure, Time now);
  void succeeded(Id id);
  // The connection is lost.
  void lost(Id id, const std::string& reason, Time now);
  // Time has passed.
  void tick(Time now);

  // When to call tick().
  Time deadline() const;
  // Whether a connection is that of a node that takes part, or waits for room.
  bool has(Id id) const { return nodes_.contains(id); }
  // Whether the job is over: the last messages are the outcome for each node.
  bool is_over() const { return outcome_.has_value(); }
  // The messages to send since the last call.
  Messages take_messages() { return std::exchange(outbox_, {}); }

 private:
  enum class State {
    standby,   // there is no room for it
    waiting,   // waits for the attempt to begin
    running,   // its processes run
    done,      // all its processes returned 0
    stopping,  // was told to restart, and has not joined again yet
  };
  struct Node {
    Join join;
    State state = State::waiting;
    int number = 0;      // GROUP_RANK
    int first_rank = 0;  // in the attempt
  };

  // Why the node can never take part; empty if it can.
  std::string refusal_reason(Id id, const Join& join) const;
  // Why there is no room for it now; empty if there is.
  std::string standby_reason(Id id, const Join& join) const;
  void admit_standbys(Time now);
  // Adds a launcher that is new to the job.
  void admit(Id id, const Join& join, Time now);
  std::string new_hosts() const;
  std::string describe_standbys() const;
  int count(State state) const;
  // Whether new nodes are admitted: not once some nodes are done, since these would have to repeat
  // everything.
  bool admits_nodes() const { return !is_over() && !any_done_; }
  bool is_gathering() const { return count(State::running) + count(State::done) == 0; }
  void begin_attempt();
  void end_attempt(std::optional<WorkerFailure> failure, const std::string& reason, Time now);
  void restart(const Outcome& outcome, Time now);
  void end_job(const Outcome& outcome);

  Job job_;
  std::map<Id, Node> nodes_;
  int attempts_ = 0;
  int restarts_ = 0;
  int previous_nodes_ = 0;  // in the previous attempt
  Time gathering_since_;
  std::optional<Time> last_call_;  // its end
  bool any_done_ = false;          // in this attempt
  std::string previous_reason_;    // why the previous attempt ended
  std::optional<Outcome> outcome_;
  Messages outbox_;
};

}  // namespace semitone::launch
