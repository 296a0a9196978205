#include "src/launch/job_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>

// The decisions of node 0, without sockets, processes or real time.
namespace semitone::launch {
namespace {

using namespace std::chrono_literals;
using Kind = Outcome::Kind;
using ::testing::HasSubstr;

class JobStateTest : public ::testing::Test {
 protected:
  static Job job(int min, int max, int max_restarts = 0) {
    Job result;
    result.run_id = "job";
    result.nodes = {min, max};
    result.max_restarts = max_restarts;
    result.master_addr = "node0";
    result.join_timeout = 100s;
    result.last_call = 5s;
    return result;
  }

  Join request(int processes = 1, int node_rank = -1) const {
    Join join;
    join.min_nodes = job_.nodes.min;
    join.max_nodes = job_.nodes.max;
    join.processes = processes;
    join.node_rank = node_rank;
    join.host = "somewhere";
    return join;
  }

  JobState& start(Job job) {
    job_ = job;
    state_.emplace(std::move(job), now_);
    return *state_;
  }

  void join(JobState::Id id, int processes = 1, int node_rank = -1) {
    state_->joined(id, request(processes, node_rank), now_);
  }

  WorkerFailure failure(int rank) const {
    WorkerFailure result;
    result.rank = rank;
    result.status = {3, 0};
    return result;
  }

  // The messages to each node since the last call.
  std::map<JobState::Id, Message> messages() {
    std::map<JobState::Id, Message> result;
    for (auto& [id, message] : state_->take_messages()) {
      EXPECT_FALSE(result.contains(id)) << "two messages to " << id;
      result.emplace(id, std::move(message));
    }
    return result;
  }

  Assignment assignment(const std::map<JobState::Id, Message>& messages, JobState::Id id) {
    const auto found = messages.find(id);
    if (found != messages.end() && std::holds_alternative<Assignment>(found->second))
      return std::get<Assignment>(found->second);
    ADD_FAILURE() << "no assignment for " << id;
    return {};
  }

  Outcome outcome(const std::map<JobState::Id, Message>& messages, JobState::Id id) {
    const auto found = messages.find(id);
    if (found != messages.end() && std::holds_alternative<Outcome>(found->second))
      return std::get<Outcome>(found->second);
    ADD_FAILURE() << "no outcome for " << id;
    return {};
  }

  Job job_;
  Time now_ = Clock::now();
  std::optional<JobState> state_;
};

TEST_F(JobStateTest, OneNodeBeginsAtOnceAndEndsWhenItIsDone) {
  JobState& state = start(job(1, 1));
  join(0, 4);
  const Assignment given = assignment(messages(), 0);
  EXPECT_EQ(given.run_id, "job");
  EXPECT_EQ(given.attempt, 0);
  EXPECT_EQ(given.nodes, 1);
  EXPECT_EQ(given.first_rank, 0);
  EXPECT_EQ(given.world_size, 4);
  EXPECT_EQ(given.master_addr, "node0");
  EXPECT_GT(given.master_port, 0);
  state.succeeded(0);
  EXPECT_TRUE(state.is_over());
  EXPECT_EQ(outcome(messages(), 0).kind, Kind::succeeded);
}

TEST_F(JobStateTest, NumbersNodesInOrderOfArrivalAfterNodeZero) {
  start(job(3, 3));
  join(7, 2);
  join(0, 3);
  EXPECT_TRUE(messages().empty());
  join(2, 1);
  const auto sent = messages();
  EXPECT_EQ(assignment(sent, 0).node, 0);
  EXPECT_EQ(assignment(sent, 2).node, 1);
  EXPECT_EQ(assignment(sent, 7).node, 2);
  EXPECT_EQ(assignment(sent, 0).first_rank, 0);
  EXPECT_EQ(assignment(sent, 2).first_rank, 3);
  EXPECT_EQ(assignment(sent, 7).first_rank, 4);
  for (const int id : {0, 2, 7}) {
    EXPECT_EQ(assignment(sent, id).world_size, 6);
    EXPECT_EQ(assignment(sent, id).nodes, 3);
    EXPECT_EQ(assignment(sent, id).master_port, assignment(sent, 0).master_port);
  }
}

TEST_F(JobStateTest, UsesTheNodeRanksOfNumberedNodes) {
  Job numbered = job(2, 2);
  numbered.numbered = true;
  numbered.master_port = 29500;
  start(numbered);
  join(0, 2, 1);
  join(1, 3, 0);
  const auto sent = messages();
  EXPECT_EQ(assignment(sent, 0).node, 1);
  EXPECT_EQ(assignment(sent, 0).first_rank, 3);
  EXPECT_EQ(assignment(sent, 1).node, 0);
  EXPECT_EQ(assignment(sent, 1).master_port, 29500);
}

TEST_F(JobStateTest, RefusesNodesOfAnotherJob) {
  Job numbered = job(2, 2);
  numbered.numbered = true;
  JobState& state = start(numbered);
  join(0, 1, 0);
  const auto reason = [&](const Join& join) {
    state.joined(5, join, now_);
    const Outcome refusal = outcome(messages(), 5);
    EXPECT_EQ(refusal.kind, Kind::refused);
    return refusal.reason;
  };
  Join other = request(1, 1);
  other.run_id = "other";
  EXPECT_THAT(reason(other), HasSubstr("no rdzv-id, but the node has 'other'"));
  other = request(1, 1);
  other.max_nodes = 3;
  EXPECT_THAT(reason(other), HasSubstr("nnodes 2, not 2:3"));
  other = request(1, 1);
  other.protocol = 0;
  EXPECT_THAT(reason(other), HasSubstr("another version"));
  EXPECT_THAT(reason(request(1, -1)), HasSubstr("have a node-rank"));
  EXPECT_THAT(reason(request(1, 0)), HasSubstr("node-rank 0 is already used by somewhere"));
  EXPECT_THAT(reason(request(0, 1)), HasSubstr("no processes"));
  EXPECT_THAT(reason(request(5000, 1)), HasSubstr("too many processes"));
  EXPECT_THAT(reason(request(1, 2)), HasSubstr("from 0 to 1"));
}

TEST_F(JobStateTest, ANamedJobRefusesNodesWithoutItsName) {
  Job named = job(1, 2);
  named.named = true;
  JobState& state = start(named);
  Join own = request();
  own.run_id = "job";
  state.joined(0, own, now_);
  for (const char* name : {"", "other"}) {
    Join stranger = request();
    stranger.run_id = name;
    state.joined(5, stranger, now_);
    const Outcome refusal = outcome(messages(), 5);
    EXPECT_EQ(refusal.kind, Kind::refused);
    EXPECT_THAT(refusal.reason, HasSubstr("rdzv-id"));
    // The name serves as the job's key.
    EXPECT_THAT(refusal.reason, ::testing::Not(HasSubstr("'job'")));
  }
  state.joined(6, own, now_);
  EXPECT_EQ(assignment(messages(), 6).nodes, 2);
}

TEST_F(JobStateTest, AJobWithATokenRefusesNodesWithoutIt) {
  Job secret = job(1, 2);
  secret.token = "correct horse";
  JobState& state = start(secret);
  Join own = request();
  own.token = secret.token;
  state.joined(0, own, now_);
  messages();
  for (const char* token :
       {"", "correct hors", "correct horsf", "Correct horse", "correct horse "}) {
    Join stranger = request();
    stranger.token = token;
    stranger.max_nodes = 9;  // nothing else of the job is revealed
    state.joined(5, stranger, now_);
    const Outcome refusal = outcome(messages(), 5);
    EXPECT_EQ(refusal.kind, Kind::refused);
    EXPECT_EQ(refusal.reason, "this job has another rdzv-token: set the same on every node");
    EXPECT_FALSE(state.has(5));
  }
  state.joined(6, own, now_);
  EXPECT_EQ(assignment(messages(), 6).nodes, 2);
  EXPECT_TRUE(state.has(6));
}

TEST_F(JobStateTest, AJobWithoutATokenRefusesNodesWithOne) {
  JobState& state = start(job(1, 2));
  Join other = request();
  other.token = "x";
  state.joined(5, other, now_);
  EXPECT_THAT(outcome(messages(), 5).reason, HasSubstr("no rdzv-token"));
}

TEST_F(JobStateTest, AnUnnamedJobAcceptsNodesThatRunTheSameCommand) {
  Job plain = job(1, 2);
  plain.program = "train";
  plain.command = digest_of({"train", "--epochs", "3"});
  JobState& state = start(plain);
  const auto asks = [&](const std::string& program, std::vector<std::string> arguments) {
    Join join = request();
    join.program = program;
    arguments.insert(arguments.begin(), program);
    join.command = digest_of(arguments);
    state.joined(5, join, now_);
    return messages();
  };
  EXPECT_THAT(outcome(asks("other", {"--epochs", "3"}), 5).reason,
              HasSubstr("runs 'train', not 'other': set an rdzv-id for each job"));
  EXPECT_THAT(outcome(asks("train", {"--epochs 3"}), 5).reason, HasSubstr("other arguments"));
  EXPECT_TRUE(asks("train", {"--epochs", "3"}).empty());
  // Numbers and names show that several nodes belong together.
  for (const bool numbered : {true, false}) {
    Job told = plain;
    told.numbered = numbered;
    told.named = !numbered;
    start(told);
    Join join = request(1, numbered ? 1 : -1);
    join.run_id = numbered ? "" : "job";
    state_->joined(5, join, now_);
    EXPECT_TRUE(messages().empty());
  }
}

// -------------------------------------------------------------------------------------------------
// standby nodes, for which there is no room

TEST_F(JobStateTest, AStandbyNodeReplacesALostNode) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  messages();
  join(2);
  auto sent = messages();
  ASSERT_TRUE(sent.contains(2) && std::holds_alternative<StandBy>(sent.at(2)));
  EXPECT_EQ(std::get<StandBy>(sent.at(2)).reason, "this job already has 2 nodes");
  state.lost(1, "silence", now_);
  sent = messages();
  EXPECT_EQ(outcome(sent, 0).kind, Kind::restart);
  EXPECT_FALSE(sent.contains(2));
  join(0);
  sent = messages();
  EXPECT_EQ(assignment(sent, 2).node, 1);
  EXPECT_EQ(assignment(sent, 2).restarts, 1);
}

TEST_F(JobStateTest, AReplacementStandsByUntilItsPredecessorIsLost) {
  Job numbered = job(2, 2, 1);
  numbered.numbered = true;
  JobState& state = start(numbered);
  join(0, 1, 0);
  join(1, 1, 1);
  messages();
  join(2, 1, 1);
  EXPECT_EQ(std::get<StandBy>(messages().at(2)).reason, "node-rank 1 is already used by somewhere");
  state.lost(1, "no message from it for 30 s", now_);
  messages();
  join(0, 1, 0);
  EXPECT_EQ(assignment(messages(), 2).node, 1);
}

TEST_F(JobStateTest, RefusesNodesBeyondALimitOfStandbys) {
  start(job(1, 1));
  join(0);
  messages();
  for (JobState::Id id = 1; id <= 64; ++id) join(id);
  for (const auto& [id, message] : messages())
    EXPECT_TRUE(std::holds_alternative<StandBy>(message)) << id;
  join(65);
  const Outcome refusal = outcome(messages(), 65);
  EXPECT_EQ(refusal.kind, Kind::refused);
  EXPECT_EQ(refusal.reason, "this job already has 1 nodes, and 64 nodes wait for room");
}

TEST_F(JobStateTest, StandbyNodesReceiveTheOutcome) {
  JobState& state = start(job(1, 1));
  join(0);
  join(1);
  messages();
  state.succeeded(0);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::succeeded);
}

TEST_F(JobStateTest, AStandbyNodeThatLeavesIsNotALoss) {
  JobState& state = start(job(1, 1));
  join(0);
  join(1);
  messages();
  state.lost(1, "it was stopped", now_);
  EXPECT_TRUE(messages().empty());
  EXPECT_FALSE(state.is_over());
}

TEST_F(JobStateTest, KeepsARoomForNodeZero) {
  start(job(2, 2));
  join(1);
  join(2);
  EXPECT_EQ(std::get<StandBy>(messages().at(2)).reason, "this job already has 2 nodes");
  join(0);
  const auto sent = messages();
  EXPECT_EQ(assignment(sent, 0).node, 0);
  EXPECT_EQ(assignment(sent, 1).node, 1);
}

TEST_F(JobStateTest, AJoinTimeoutNamesTheStandbyNodes) {
  Job numbered = job(3, 3);
  numbered.numbered = true;
  JobState& state = start(numbered);
  join(0, 1, 0);
  join(1, 1, 1);
  join(2, 1, 1);
  messages();
  state.tick(now_ += 100s);
  EXPECT_EQ(
      outcome(messages(), 0).reason,
      "2 of 3 nodes joined within 100 s; somewhere waits for room: node-rank 1 is already used by "
      "somewhere");
}

TEST_F(JobStateTest, WaitsForTheLastCallOnceTheMinimumHasJoined) {
  JobState& state = start(job(2, 4));
  join(0);
  state.tick(now_ += 50s);
  join(1);
  EXPECT_TRUE(messages().empty());
  EXPECT_EQ(state.deadline(), now_ + 5s);
  join(2);
  state.tick(now_ += 4s);
  EXPECT_TRUE(messages().empty());
  state.tick(now_ += 1s);
  const auto sent = messages();
  EXPECT_EQ(sent.size(), 3U);
  EXPECT_EQ(assignment(sent, 2).nodes, 3);
}

TEST_F(JobStateTest, TheMaximumOfNodesNeedsNoLastCall) {
  start(job(1, 2));
  join(0);
  join(1);
  EXPECT_EQ(messages().size(), 2U);
}

TEST_F(JobStateTest, BeginsWithNodeZeroOnly) {
  Job impatient = job(1, 2);
  impatient.last_call = 0s;
  JobState& state = start(impatient);
  join(1);
  EXPECT_TRUE(messages().empty());
  EXPECT_EQ(state.deadline(), Time::max());
  join(0);
  const auto sent = messages();
  EXPECT_EQ(assignment(sent, 0).node, 0);
  EXPECT_EQ(assignment(sent, 1).node, 1);
}

// They may belong to the next job, and would take the outcome for their own.
TEST_F(JobStateTest, DoesNotAnswerLaunchersThatComeAfterTheEnd) {
  JobState& state = start(job(1, 1));
  join(0);
  messages();
  state.failed(0, failure(0), now_);
  EXPECT_EQ(outcome(messages(), 0).kind, Kind::failed);
  join(1);
  EXPECT_TRUE(messages().empty());
  EXPECT_FALSE(state.has(1));
}

TEST_F(JobStateTest, ANodeThatStopsReceivesTheOutcomeOnce) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  messages();
  state.failed(1, failure(1), now_);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::restart);
  state.lost(0, "it was stopped", now_);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::lost);
  // Sent before it received the outcome.
  join(1);
  EXPECT_TRUE(messages().empty());
}

// The launcher that is node 0 decides, and joins a moment after it began to.
TEST_F(JobStateTest, TheJoinTimeoutMayBeZero) {
  Job alone = job(1, 1);
  alone.join_timeout = 0s;
  JobState& state = start(alone);
  state.tick(now_);
  EXPECT_FALSE(state.is_over());
  EXPECT_EQ(state.deadline(), Time::max());
  join(0);
  EXPECT_EQ(assignment(messages(), 0).world_size, 1);
  Job two = job(2, 2);
  two.join_timeout = 0s;
  start(two).tick(now_);
  join(0);
  EXPECT_EQ(outcome(messages(), 0).reason, "1 of 2 nodes joined within 0 s");
}

TEST_F(JobStateTest, EndsIfTooFewNodesJoin) {
  JobState& state = start(job(3, 3));
  join(0);
  join(1);
  EXPECT_EQ(state.deadline(), now_ + 100s);
  state.tick(now_ += 100s);
  const auto sent = messages();
  EXPECT_EQ(outcome(sent, 0).kind, Kind::lost);
  EXPECT_EQ(outcome(sent, 1).reason, "2 of 3 nodes joined within 100 s");
  EXPECT_TRUE(state.is_over());
}

TEST_F(JobStateTest, ANodeLostBeforeTheAttemptIsNotCounted) {
  JobState& state = start(job(2, 2));
  join(0);
  join(1);
  messages();
  start(job(3, 3));
  join(0);
  join(1);
  state.lost(1, "", now_);
  join(2);
  EXPECT_TRUE(messages().empty());
  join(3);
  EXPECT_EQ(messages().size(), 3U);
}

TEST_F(JobStateTest, TheFirstFailureEndsTheJobForAll) {
  JobState& state = start(job(2, 2));
  join(0);
  join(1);
  messages();
  state.failed(1, failure(1), now_);
  state.failed(0, failure(0), now_);
  const auto sent = messages();
  for (const int id : {0, 1}) {
    EXPECT_EQ(outcome(sent, id).kind, Kind::failed);
    EXPECT_EQ(outcome(sent, id).failure->rank, 1);
    EXPECT_EQ(outcome(sent, id).reason, "rank 1 failed: exit code 3");
  }
}

TEST_F(JobStateTest, RestartsAfterAFailureUntilNoneIsLeft) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  const int port = assignment(messages(), 0).master_port;
  state.failed(1, failure(1), now_);
  auto sent = messages();
  EXPECT_EQ(outcome(sent, 0).kind, Kind::restart);
  EXPECT_EQ(outcome(sent, 1).failure->rank, 1);
  // The outcome of the previous attempt says nothing about the next.
  state.failed(0, failure(0), now_);
  state.succeeded(0);
  join(0);
  EXPECT_TRUE(messages().empty());
  join(1);
  sent = messages();
  EXPECT_EQ(assignment(sent, 0).restarts, 1);
  EXPECT_EQ(assignment(sent, 0).attempt, 1);
  EXPECT_EQ(assignment(sent, 0).max_restarts, 1);
  EXPECT_NE(assignment(sent, 0).master_port, port);
  state.failed(0, failure(0), now_);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::failed);
}

TEST_F(JobStateTest, EndsWhenEveryNodeIsDone) {
  JobState& state = start(job(2, 2));
  join(0);
  join(1);
  messages();
  state.succeeded(1);
  EXPECT_FALSE(state.is_over());
  EXPECT_TRUE(messages().empty());
  state.succeeded(0);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::succeeded);
}

TEST_F(JobStateTest, ANodeThatIsDoneRunsAgainWithTheOthers) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  messages();
  state.succeeded(1);
  state.failed(0, failure(0), now_);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::restart);
}

TEST_F(JobStateTest, ALostNodeEndsTheJob) {
  JobState& state = start(job(2, 2));
  join(0, 2);
  join(1, 3);
  messages();
  state.lost(1, "silence", now_);
  const Outcome lost = outcome(messages(), 0);
  EXPECT_EQ(lost.kind, Kind::lost);
  EXPECT_FALSE(lost.failure.has_value());
  EXPECT_EQ(lost.reason, "node 1 (somewhere, ranks 2 to 4) is lost: silence");
}

TEST_F(JobStateTest, ANodeLostAfterItIsDoneIsNotALoss) {
  JobState& state = start(job(2, 2));
  join(0);
  join(1);
  messages();
  state.succeeded(1);
  state.lost(1, "", now_);
  EXPECT_FALSE(state.is_over());
  state.succeeded(0);
  EXPECT_EQ(outcome(messages(), 0).kind, Kind::succeeded);
}

TEST_F(JobStateTest, ContinuesWithFewerNodesAfterALoss) {
  JobState& state = start(job(1, 3, 1));
  join(0);
  join(1);
  join(2);
  messages();
  state.lost(2, "", now_);
  EXPECT_EQ(outcome(messages(), 0).kind, Kind::restart);
  join(0);
  join(1);
  EXPECT_TRUE(messages().empty());
  state.tick(now_ += 5s);
  EXPECT_EQ(assignment(messages(), 1).world_size, 2);
}

TEST_F(JobStateTest, WaitsForAReplacementOfALostNode) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  messages();
  state.lost(1, "silence", now_);
  messages();
  join(0);
  state.tick(now_ += 99s);
  EXPECT_TRUE(messages().empty());
  join(2);
  EXPECT_EQ(assignment(messages(), 2).node, 1);
  state.lost(2, "silence", now_);
  EXPECT_EQ(outcome(messages(), 0).kind, Kind::lost);
}

TEST_F(JobStateTest, AJoinTimeoutStatesWhyThePreviousAttemptEnded) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  messages();
  state.lost(1, "silence", now_);
  messages();
  join(0);
  state.tick(now_ += 100s);
  EXPECT_EQ(outcome(messages(), 0).reason,
            "1 of 2 nodes joined within 100 s, after node 1 (somewhere, rank 1) is lost: silence");
}

TEST_F(JobStateTest, ALateNodeRestartsAllWithoutUsingARestart) {
  JobState& state = start(job(1, 2, 0));
  join(0);
  state.tick(now_ += 5s);
  messages();
  join(1);
  auto sent = messages();
  EXPECT_EQ(sent.size(), 1U);
  EXPECT_EQ(outcome(sent, 0).kind, Kind::restart);
  join(0);
  sent = messages();
  EXPECT_EQ(assignment(sent, 0).nodes, 2);
  EXPECT_EQ(assignment(sent, 1).node, 1);
  EXPECT_EQ(assignment(sent, 1).restarts, 0);
  EXPECT_EQ(assignment(sent, 1).attempt, 1);
}

TEST_F(JobStateTest, SuccessiveArrivalsCostOneRestart) {
  JobState& state = start(job(1, 8));
  join(0);
  state.tick(now_ += 5s);
  EXPECT_EQ(assignment(messages(), 0).nodes, 1);
  for (const int id : {1, 2, 3}) {
    join(id);
    EXPECT_EQ(state.deadline(), now_ + 5s);
    state.tick(now_ += 4s);
    EXPECT_TRUE(messages().empty()) << "node 0 continues while others are on their way";
  }
  state.tick(now_ += 1s);
  auto sent = messages();
  EXPECT_EQ(sent.size(), 1U);
  EXPECT_EQ(outcome(sent, 0).reason, "somewhere and somewhere and somewhere joined");
  join(0);
  sent = messages();
  EXPECT_EQ(assignment(sent, 0).nodes, 4);
  EXPECT_EQ(assignment(sent, 3).attempt, 1);
  EXPECT_EQ(assignment(sent, 3).restarts, 0);
}

TEST_F(JobStateTest, ANodeThatArrivesDuringARestartGetsALastCall) {
  JobState& state = start(job(1, 8));
  join(0);
  state.tick(now_ += 5s);
  messages();
  join(1);
  state.tick(now_ += 5s);
  messages();
  join(2);
  join(0);
  EXPECT_TRUE(messages().empty());
  state.tick(now_ += 5s);
  EXPECT_EQ(assignment(messages(), 2).nodes, 3);
}

TEST_F(JobStateTest, ANewNodeThatLeavesAgainCausesNoRestart) {
  JobState& state = start(job(1, 8));
  join(0);
  state.tick(now_ += 5s);
  messages();
  join(1);
  state.lost(1, "it was stopped", now_);
  EXPECT_EQ(state.deadline(), Time::max());
  state.tick(now_ += 5s);
  EXPECT_TRUE(messages().empty());
}

TEST_F(JobStateTest, HasNoDeadlineWhileNodesStop) {
  JobState& state = start(job(2, 2, 1));
  join(0);
  join(1);
  messages();
  state.failed(1, failure(1), now_);
  messages();
  // Longer than the join timeout, as a grace period may be.
  now_ += 200s;
  EXPECT_EQ(state.deadline(), Time::max());
  join(0);
  EXPECT_EQ(state.deadline(), Time::max());
  state.lost(1, "silence", now_);
  // From here on, another node has its time to join.
  EXPECT_EQ(state.deadline(), now_ + 100s);
  EXPECT_FALSE(state.is_over());
}

TEST_F(JobStateTest, ANodeThatArrivesWhenSomeAreDoneWaitsForTheEnd) {
  JobState& state = start(job(2, 3, 0));
  join(0);
  join(1);
  state.tick(now_ += 5s);
  messages();
  state.succeeded(1);
  join(2);
  EXPECT_TRUE(messages().empty());
  state.succeeded(0);
  EXPECT_EQ(outcome(messages(), 2).kind, Kind::succeeded);
}

TEST_F(JobStateTest, LosingNodeZeroEndsTheJob) {
  JobState& state = start(job(2, 2, 9));
  join(0);
  join(1);
  messages();
  state.lost(0, "it was stopped", now_);
  EXPECT_EQ(outcome(messages(), 1).kind, Kind::lost);
  EXPECT_TRUE(state.is_over());
}

}  // namespace
}  // namespace semitone::launch
