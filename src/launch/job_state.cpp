#include "src/launch/job_state.h"

#include "semitone/core/error.h"
#include "src/launch/limits.h"
#include "src/launch/ports.h"
#include "src/net/token.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

// The job alternates between two phases.
//
// While it gathers (no node is running or done), nodes that join become `waiting`. The attempt
// begins when all nodes.max have joined, or when nodes.min have joined and the last call is over,
// or, after a failure, as soon as as many nodes as before are back; never without node 0. If
// join_timeout passes first, the job ends.
//
// While an attempt runs, its nodes are `running`, then `done`. The job ends when all are done. A
// failure or a lost node ends it too, unless a restart is left. A restart makes all members
// `stopping`; each joins again once its processes have ended, and the next attempt waits for all of
// them. New nodes also cause a restart, after their last call, which does not count towards
// max_restarts.
//
// A node without room is on `standby`, and takes part as soon as there is room for it.

namespace semitone::launch {
namespace {

constexpr JobState::Id kNode0 = 0;

std::string to_string(detail::NodeCount nodes) {
  return nodes.min == nodes.max ? fmt::format("{}", nodes.max)
                                : fmt::format("{}:{}", nodes.min, nodes.max);
}

std::string quoted(const std::string& text) {
  return "'" + text + "'";
}

// "rank 3", "ranks 4 to 7".
std::string describe_ranks(int first, int count) {
  return count == 1 ? fmt::format("rank {}", first)
                    : fmt::format("ranks {} to {}", first, first + count - 1);
}

}  // namespace

JobState::JobState(Job job, Time now) : job_(std::move(job)), gathering_since_(now) {}

void JobState::joined(Id id, const Join& join, Time now) {
  // The nodes of the job were told its outcome. Another launcher may belong to the next job at this
  // address, and would take the outcome for that of its own job.
  if (is_over()) return;
  const auto found = nodes_.find(id);
  // A node that takes part already has no reason to ask.
  if (found != nodes_.end() && found->second.state != State::stopping) return;
  if (const std::string refusal = refusal_reason(id, join); !refusal.empty()) {
    outbox_.emplace_back(id, Outcome{Outcome::Kind::refused, std::nullopt, refusal});
    return;
  }
  if (found != nodes_.end()) {
    found->second = {join, State::waiting, join.node_rank};
    // The time for more nodes starts now.
    if (count(State::stopping) == 0) gathering_since_ = now;
  } else if (const std::string reason = standby_reason(id, join);
             !reason.empty() && count(State::standby) >= kMaxStandbys) {
    outbox_.emplace_back(
        id, Outcome{Outcome::Kind::refused, std::nullopt,
                    fmt::format("{}, and {} nodes wait for room", reason, kMaxStandbys)});
  } else if (!reason.empty()) {
    nodes_[id] = {join, State::standby};
    outbox_.emplace_back(id, StandBy{reason});
  } else {
    admit(id, join, now);
  }
  tick(now);
}

std::string JobState::refusal_reason(Id id, const Join& join) const {
  if (join.protocol != kProtocol) return "the node has another version of Semitone";
  if (!net::are_equal(join.token, job_.token)) {
    return job_.token.empty() ? "this job has no rdzv-token: set the same on every node, or on none"
                              : "this job has another rdzv-token: set the same on every node";
  }
  // The job's own name is not revealed to a launcher that does not know it.
  if (job_.named && join.run_id.empty()) return "this job has an rdzv-id: set it on every node";
  if (job_.named && join.run_id != job_.run_id)
    return fmt::format("this job has another rdzv-id than '{}'", join.run_id);
  if (!job_.named && !join.run_id.empty())
    return fmt::format("this job has no rdzv-id, but the node has '{}': set it on every node",
                       join.run_id);
  if (join.min_nodes != job_.nodes.min || join.max_nodes != job_.nodes.max) {
    return fmt::format("this job has nnodes {}, not {}", to_string(job_.nodes),
                       to_string({join.min_nodes, join.max_nodes}));
  }
  if (join.processes < 1) return "the node has no processes";
  if (join.processes > kMaxProcesses) return "the node has too many processes";
  if (job_.numbered != (join.node_rank >= 0))
    return job_.numbered ? "the nodes of this job have a node-rank"
                         : "the nodes of this job have no node-rank";
  if (join.node_rank >= job_.nodes.max)
    return fmt::format("the node-ranks of this job go from 0 to {}", job_.nodes.max - 1);
  // For nodes that are numbered or use the job's name, the program may differ.
  if (!job_.named && !job_.numbered && join.command != job_.command) {
    return fmt::format(
        "this job runs {}, not {}: set an rdzv-id for each job, the same on its nodes",
        quoted(job_.program),
        join.program == job_.program ? "the same with other arguments" : quoted(join.program));
  }
  const auto host = nodes_.find(kNode0);
  if (job_.numbered && id != kNode0 && host != nodes_.end() &&
      host->second.join.node_rank == join.node_rank)
    return fmt::format("node-rank {} is already used by {}", join.node_rank,
                       host->second.join.host);
  return {};
}

std::string JobState::standby_reason(Id id, const Join& join) const {
  // Node 0's place is never given to another node, even if others arrived first.
  if (id == kNode0) return {};
  int others = 1;
  for (const auto& [other, node] : nodes_) {
    if (other == id || other == kNode0 || node.state == State::standby) continue;
    if (job_.numbered && node.join.node_rank == join.node_rank)
      return fmt::format("node-rank {} is already used by {}", join.node_rank, node.join.host);
    ++others;
  }
  if (others < job_.nodes.max) return {};
  return fmt::format("this job already has {} nodes", job_.nodes.max);
}

void JobState::admit(Id id, const Join& join, Time now) {
  nodes_[id] = {join, State::waiting, join.node_rank};
  // More nodes may follow: running nodes continue until the last call is over.
  last_call_ = now + job_.last_call;
}

void JobState::admit_standbys(Time now) {
  for (const auto& [id, node] : nodes_) {
    if (node.state == State::standby && standby_reason(id, node.join).empty())
      admit(id, Join(node.join), now);
  }
}

std::string JobState::new_hosts() const {
  std::string text;
  for (const auto& [id, node] : nodes_) {
    if (node.state == State::waiting) text += (text.empty() ? "" : " and ") + node.join.host;
  }
  return text;
}

std::string JobState::describe_standbys() const {
  std::string text;
  for (const auto& [id, node] : nodes_) {
    if (node.state != State::standby) continue;
    text += fmt::format("; {} waits for room: {}", node.join.host, standby_reason(id, node.join));
  }
  return text;
}

void JobState::failed(Id id, const WorkerFailure& failure, Time now) {
  const auto node = nodes_.find(id);
  // A node that was told to stop already reports nothing new.
  if (is_over() || node == nodes_.end() || node->second.state != State::running) return;
  end_attempt(failure, fmt::format("rank {} failed: {}", failure.rank, failure.status.to_string()),
              now);
}

void JobState::succeeded(Id id) {
  const auto node = nodes_.find(id);
  if (is_over() || node == nodes_.end() || node->second.state != State::running) return;
  node->second.state = State::done;
  any_done_ = true;
  if (count(State::running) == 0) end_job({Outcome::Kind::succeeded, std::nullopt, ""});
}

void JobState::lost(Id id, const std::string& reason, Time now) {
  const auto found = nodes_.find(id);
  if (is_over() || found == nodes_.end()) return;
  const Node node = found->second;
  nodes_.erase(found);
  const std::string what =
      fmt::format("node {} ({}, {}) is lost: {}", node.number, node.join.host,
                  describe_ranks(node.first_rank, node.join.processes), reason);
  if (id == kNode0) return end_job({Outcome::Kind::lost, std::nullopt, what});
  if (node.state == State::running) end_attempt(std::nullopt, what, now);
  if (node.state == State::stopping && count(State::stopping) == 0) gathering_since_ = now;
  tick(now);
}

void JobState::tick(Time now) {
  if (is_over()) return;
  if (is_gathering() || admits_nodes()) admit_standbys(now);
  const int waiting = count(State::waiting);
  if (!is_gathering()) {
    if (waiting == 0) last_call_.reset();
    if (!last_call_.has_value() || !admits_nodes()) return;
    const int all = waiting + count(State::running);
    if (now >= *last_call_ || all == job_.nodes.max)
      restart({Outcome::Kind::restart, std::nullopt, new_hosts() + " joined"}, now);
    return;
  }
  if (count(State::stopping) > 0) return;
  if (waiting == job_.nodes.max) return begin_attempt();
  // Node 0's launcher manages the job, and its address is MASTER_ADDR.
  if (waiting >= job_.nodes.min && has(kNode0)) {
    const bool has_new = last_call_.has_value();
    if (!has_new && previous_nodes_ > 0 && waiting >= previous_nodes_) return begin_attempt();
    if (!has_new) last_call_ = now + job_.last_call;
    if (now >= *last_call_) return begin_attempt();
    return;
  }
  last_call_.reset();
  // Node 0 itself needs a moment to join, and is the one that the timeout is reported to.
  if (!has(kNode0) || now < gathering_since_ + job_.join_timeout) return;
  std::string reason =
      fmt::format("{} of {} nodes joined within {:.3g} s", waiting, to_string(job_.nodes),
                  std::chrono::duration<double>(job_.join_timeout).count());
  if (!previous_reason_.empty()) reason += ", after " + previous_reason_;
  end_job({Outcome::Kind::lost, std::nullopt, reason + describe_standbys()});
}

Time JobState::deadline() const {
  // A node that stops has its own deadline, and reports when it has stopped.
  if (is_over() || count(State::stopping) > 0) return Time::max();
  if (!is_gathering()) return admits_nodes() ? last_call_.value_or(Time::max()) : Time::max();
  if (!has(kNode0)) return Time::max();
  return last_call_.value_or(gathering_since_ + job_.join_timeout);
}

int JobState::count(State state) const {
  return static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(), [state](const auto& node) {
    return node.second.state == state;
  }));
}

void JobState::begin_attempt() {
  std::vector<std::pair<Id, Node*>> members;
  for (auto& [id, node] : nodes_) {
    if (node.state != State::standby) members.emplace_back(id, &node);
  }
  if (job_.numbered) {
    std::sort(members.begin(), members.end(), [](const auto& one, const auto& other) {
      return one.second->join.node_rank < other.second->join.node_rank;
    });
  }
  Assignment common;
  common.run_id = job_.run_id;
  common.attempt = attempts_++;
  common.restarts = restarts_;
  common.max_restarts = job_.max_restarts;
  common.nodes = static_cast<int>(members.size());
  common.world_size = 0;
  for (const auto& [id, node] : members) common.world_size += node->join.processes;
  common.master_addr = job_.master_addr;
  try {
    common.master_port = job_.master_port > 0 ? job_.master_port : free_port();
  } catch (const Error& error) {
    return end_job({Outcome::Kind::lost, std::nullopt, error.what()});
  }
  for (const auto& [id, node] : members) {
    node->number = common.node++;
    node->first_rank = common.first_rank;
    node->state = State::running;
    Assignment own = common;
    own.node = node->number;
    outbox_.emplace_back(id, own);
    common.first_rank += node->join.processes;
  }
  previous_nodes_ = common.nodes;
  last_call_.reset();
  any_done_ = false;
}

void JobState::end_attempt(std::optional<WorkerFailure> failure, const std::string& reason,
                           Time now) {
  const auto kind = failure.has_value() ? Outcome::Kind::failed : Outcome::Kind::lost;
  if (restarts_ >= job_.max_restarts) return end_job({kind, std::move(failure), reason});
  ++restarts_;
  restart({Outcome::Kind::restart, std::move(failure), reason}, now);
}

void JobState::restart(const Outcome& outcome, Time now) {
  for (auto& [id, node] : nodes_) {
    if (node.state == State::waiting || node.state == State::standby) continue;
    node.state = State::stopping;
    outbox_.emplace_back(id, outcome);
  }
  gathering_since_ = now;
  last_call_.reset();
  previous_reason_ = outcome.reason;
}

void JobState::end_job(const Outcome& outcome) {
  outcome_ = outcome;
  for (const auto& [id, node] : nodes_) outbox_.emplace_back(id, outcome);
}

}  // namespace semitone::launch
