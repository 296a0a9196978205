#include "src/launch/roster.h"

#include "semitone/core/error.h"
#include "src/launch/sockets.h"

#include <fmt/format.h>

#include <algorithm>

namespace semitone::launch {
namespace {

constexpr Roster::Id kHost = 0;

std::string to_string(NodeCount nodes) {
  return nodes.min == nodes.max ? fmt::format("{}", nodes.max)
                                : fmt::format("{}:{}", nodes.min, nodes.max);
}

// "rank 3", "ranks 4 to 7".
std::string name_ranks(int first, int count) {
  return count == 1 ? fmt::format("rank {}", first)
                    : fmt::format("ranks {} to {}", first, first + count - 1);
}

}  // namespace

Roster::Roster(Job job, Time now) : job_(std::move(job)), gathering_since_(now) {}

void Roster::joined(Id id, const Join& join, Time now) {
  if (is_over()) {
    mail_.emplace_back(id, *verdict_);
    return;
  }
  if (const std::string objection = objection_to(id, join); !objection.empty()) {
    mail_.emplace_back(id, Verdict{Verdict::Kind::refused, std::nullopt, objection});
    return;
  }
  nodes_[id] = {join, State::waiting, join.node_rank};
  // Those who are done would have to do it all again.
  if (count(State::running) > 0 && count(State::done) == 0) {
    gather_again({Verdict::Kind::restart, std::nullopt, fmt::format("{} joined", join.host)}, now);
  }
  tick(now);
}

std::string Roster::objection_to(Id id, const Join& join) const {
  if (join.protocol != kProtocol) return "it is of another version of Semitone";
  if (!join.run_id.empty() && join.run_id != job_.run_id)
    return fmt::format("the job here has the rdzv-id '{}', not '{}'", job_.run_id, join.run_id);
  if (join.min_nodes != job_.nodes.min || join.max_nodes != job_.nodes.max) {
    return fmt::format("the job here has nnodes {}, not {}", to_string(job_.nodes),
                       to_string({join.min_nodes, join.max_nodes}));
  }
  if (join.processes < 1) return "it has no processes";
  if (job_.numbered != (join.node_rank >= 0))
    return job_.numbered ? "the nodes here have a node-rank" : "the nodes here have no node-rank";
  for (const auto& [other, node] : nodes_) {
    if (other != id && job_.numbered && node.join.node_rank == join.node_rank)
      return fmt::format("node-rank {} is {}'s already", join.node_rank, node.join.host);
  }
  if (!nodes_.contains(id) && static_cast<int>(nodes_.size()) >= job_.nodes.max)
    return fmt::format("the job here has its {} nodes", job_.nodes.max);
  return {};
}

void Roster::failed(Id id, const WorkerFailure& failure, Time now) {
  const auto node = nodes_.find(id);
  // One that was told to stop already brings nothing new.
  if (is_over() || node == nodes_.end() || node->second.state != State::running) return;
  decide(failure, fmt::format("rank {} failed: {}", failure.rank, failure.status.to_string()), now);
}

void Roster::succeeded(Id id) {
  const auto node = nodes_.find(id);
  if (is_over() || node == nodes_.end() || node->second.state != State::running) return;
  node->second.state = State::done;
  if (count(State::running) == 0) finish({Verdict::Kind::succeeded, std::nullopt, ""});
}

void Roster::gone(Id id, const std::string& reason, Time now) {
  const auto found = nodes_.find(id);
  if (is_over() || found == nodes_.end()) return;
  const Node node = found->second;
  nodes_.erase(found);
  const std::string what = fmt::format("node {} ({}, {}) is gone: {}", node.number, node.join.host,
                                       name_ranks(node.first_rank, node.join.processes), reason);
  if (id == kHost) return finish({Verdict::Kind::lost, std::nullopt, what});
  if (node.state == State::running) decide(std::nullopt, what, now);
  tick(now);
}

void Roster::tick(Time now) {
  if (is_over() || !is_gathering() || count(State::stopping) > 0) return;
  const int waiting = count(State::waiting);
  if (waiting == job_.nodes.max) return begin();
  if (waiting >= job_.nodes.min) {
    if (nodes_before_ > 0 && waiting >= nodes_before_) return begin();
    if (!last_call_.has_value()) last_call_ = now + job_.last_call;
    if (now >= *last_call_) return begin();
    return;
  }
  last_call_.reset();
  if (now < gathering_since_ + job_.join_timeout) return;
  std::string reason =
      fmt::format("{} of {} nodes came within {:.3g} s", waiting, to_string(job_.nodes),
                  std::chrono::duration<double>(job_.join_timeout).count());
  if (!last_reason_.empty()) reason += ", after " + last_reason_;
  finish({Verdict::Kind::lost, std::nullopt, reason});
}

Time Roster::deadline() const {
  if (is_over() || !is_gathering()) return Time::max();
  return last_call_.value_or(gathering_since_ + job_.join_timeout);
}

int Roster::count(State state) const {
  return static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(), [state](const auto& node) {
    return node.second.state == state;
  }));
}

void Roster::begin() {
  std::vector<std::pair<Id, Node*>> members;
  for (auto& [id, node] : nodes_) members.emplace_back(id, &node);
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
    return finish({Verdict::Kind::lost, std::nullopt, error.what()});
  }
  for (const auto& [id, node] : members) {
    node->number = common.node++;
    node->first_rank = common.first_rank;
    node->state = State::running;
    Assignment own = common;
    own.node = node->number;
    mail_.emplace_back(id, own);
    common.first_rank += node->join.processes;
  }
  nodes_before_ = common.nodes;
}

void Roster::decide(std::optional<WorkerFailure> failure, const std::string& reason, Time now) {
  const auto kind = failure.has_value() ? Verdict::Kind::failed : Verdict::Kind::lost;
  if (restarts_ >= job_.max_restarts) return finish({kind, std::move(failure), reason});
  ++restarts_;
  gather_again({Verdict::Kind::restart, std::move(failure), reason}, now);
}

void Roster::gather_again(const Verdict& verdict, Time now) {
  for (auto& [id, node] : nodes_) {
    if (node.state == State::waiting) continue;
    node.state = State::stopping;
    mail_.emplace_back(id, verdict);
  }
  gathering_since_ = now;
  last_call_.reset();
  last_reason_ = verdict.reason;
}

void Roster::finish(const Verdict& verdict) {
  verdict_ = verdict;
  for (const auto& [id, node] : nodes_) mail_.emplace_back(id, verdict);
}

}  // namespace semitone::launch
