#pragma once

#include "src/launch/channel.h"
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
  std::string program;  // its file name, as in Join
  std::string arguments;
  NodeCount nodes;
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
class Roster {
 public:
  // Numbers the connections in the order of their arrival. 0 is node 0's own.
  using Id = int;
  using Mail = std::vector<std::pair<Id, Message>>;

  Roster(Job job, Time now);

  void joined(Id id, const Join& join, Time now);
  void failed(Id id, const WorkerFailure& failure, Time now);
  void succeeded(Id id);
  // The connection is lost.
  void gone(Id id, const std::string& reason, Time now);
  // Time has passed.
  void tick(Time now);

  // When to call tick().
  Time deadline() const;
  // Whether the job is over: only verdicts for late launchers follow.
  bool is_over() const { return verdict_.has_value(); }
  // The messages to send since the last call.
  Mail take_mail() { return std::exchange(mail_, {}); }

 private:
  enum class State {
    spare,     // there is no room for it
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

  // Why a node can never take part; empty if it can.
  std::string objection_to(Id id, const Join& join) const;
  // Why there is no room for it now; empty if there is.
  std::string obstacle_to(Id id, const Join& join) const;
  void take_in_spares(Time now);
  // A launcher that is new to the job.
  void newcomer(Id id, const Join& join, Time now);
  std::string newcomers() const;
  std::string spares() const;
  int count(State state) const;
  // Whether newcomers are admitted: not once some nodes are done, which would have to repeat
  // everything.
  bool takes_in_newcomers() const { return !is_over() && !some_are_done_; }
  bool is_gathering() const { return count(State::running) + count(State::done) == 0; }
  void begin();
  void decide(std::optional<WorkerFailure> failure, const std::string& reason, Time now);
  void gather_again(const Verdict& verdict, Time now);
  void finish(const Verdict& verdict);

  Job job_;
  std::map<Id, Node> nodes_;
  int attempts_ = 0;
  int restarts_ = 0;
  int nodes_before_ = 0;  // in the attempt before
  Time gathering_since_;
  std::optional<Time> last_call_;  // its end
  bool some_are_done_ = false;     // in this attempt
  std::string last_reason_;        // why the attempt before ended
  std::optional<Verdict> verdict_;
  Mail mail_;
};

}  // namespace semitone::launch
