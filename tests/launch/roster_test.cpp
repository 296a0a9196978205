#include "src/launch/roster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>

// The decisions of node 0, without sockets, processes or real time.
namespace semitone::launch {
namespace {

using namespace std::chrono_literals;
using Kind = Verdict::Kind;
using ::testing::HasSubstr;

class RosterTest : public ::testing::Test {
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

  Roster& start(Job job) {
    job_ = job;
    roster_.emplace(std::move(job), now_);
    return *roster_;
  }

  void join(Roster::Id id, int processes = 1, int node_rank = -1) {
    roster_->joined(id, request(processes, node_rank), now_);
  }

  WorkerFailure failure(int rank) const {
    WorkerFailure result;
    result.rank = rank;
    result.status = {3, 0};
    return result;
  }

  // The messages to each node since the last call.
  std::map<Roster::Id, Message> mail() {
    std::map<Roster::Id, Message> result;
    for (auto& [id, message] : roster_->take_mail()) {
      EXPECT_FALSE(result.contains(id)) << "two messages to " << id;
      result.emplace(id, std::move(message));
    }
    return result;
  }

  Assignment assignment(const std::map<Roster::Id, Message>& mail, Roster::Id id) {
    const auto found = mail.find(id);
    if (found != mail.end() && std::holds_alternative<Assignment>(found->second))
      return std::get<Assignment>(found->second);
    ADD_FAILURE() << "no assignment for " << id;
    return {};
  }

  Verdict verdict(const std::map<Roster::Id, Message>& mail, Roster::Id id) {
    const auto found = mail.find(id);
    if (found != mail.end() && std::holds_alternative<Verdict>(found->second))
      return std::get<Verdict>(found->second);
    ADD_FAILURE() << "no verdict for " << id;
    return {};
  }

  Job job_;
  Time now_ = Clock::now();
  std::optional<Roster> roster_;
};

TEST_F(RosterTest, OneNodeBeginsAtOnceAndEndsWhenItIsDone) {
  Roster& roster = start(job(1, 1));
  join(0, 4);
  const Assignment given = assignment(mail(), 0);
  EXPECT_EQ(given.run_id, "job");
  EXPECT_EQ(given.attempt, 0);
  EXPECT_EQ(given.nodes, 1);
  EXPECT_EQ(given.first_rank, 0);
  EXPECT_EQ(given.world_size, 4);
  EXPECT_EQ(given.master_addr, "node0");
  EXPECT_GT(given.master_port, 0);
  roster.succeeded(0);
  EXPECT_TRUE(roster.is_over());
  EXPECT_EQ(verdict(mail(), 0).kind, Kind::succeeded);
}

TEST_F(RosterTest, NumbersNodesAsTheyComeWithTheHostFirst) {
  start(job(3, 3));
  join(7, 2);
  join(0, 3);
  EXPECT_TRUE(mail().empty());
  join(2, 1);
  const auto sent = mail();
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

TEST_F(RosterTest, TakesTheNumbersThatNodesBring) {
  Job numbered = job(2, 2);
  numbered.numbered = true;
  numbered.master_port = 29500;
  start(numbered);
  join(0, 2, 1);
  join(1, 3, 0);
  const auto sent = mail();
  EXPECT_EQ(assignment(sent, 0).node, 1);
  EXPECT_EQ(assignment(sent, 0).first_rank, 3);
  EXPECT_EQ(assignment(sent, 1).node, 0);
  EXPECT_EQ(assignment(sent, 1).master_port, 29500);
}

TEST_F(RosterTest, RefusesWhoDoesNotFit) {
  Job numbered = job(2, 2);
  numbered.numbered = true;
  Roster& roster = start(numbered);
  join(0, 1, 0);
  const auto reason = [&](const Join& join) {
    roster.joined(5, join, now_);
    const Verdict refusal = verdict(mail(), 5);
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

TEST_F(RosterTest, AJobWithANameTakesNobodyWithoutIt) {
  Job named = job(1, 2);
  named.named = true;
  Roster& roster = start(named);
  Join own = request();
  own.run_id = "job";
  roster.joined(0, own, now_);
  for (const char* name : {"", "other"}) {
    Join stranger = request();
    stranger.run_id = name;
    roster.joined(5, stranger, now_);
    const Verdict refusal = verdict(mail(), 5);
    EXPECT_EQ(refusal.kind, Kind::refused);
    EXPECT_THAT(refusal.reason, HasSubstr("rdzv-id"));
    // The name serves as the job's key.
    EXPECT_THAT(refusal.reason, ::testing::Not(HasSubstr("'job'")));
  }
  roster.joined(6, own, now_);
  EXPECT_EQ(assignment(mail(), 6).nodes, 2);
}

TEST_F(RosterTest, AJobWithoutANameTakesThoseThatRunTheSame) {
  Job plain = job(1, 2);
  plain.program = "train";
  plain.arguments = digest_of({"--epochs", "3"});
  Roster& roster = start(plain);
  const auto asks = [&](const std::string& program, const std::vector<std::string>& arguments) {
    Join join = request();
    join.program = program;
    join.arguments = digest_of(arguments);
    roster.joined(5, join, now_);
    return mail();
  };
  EXPECT_THAT(verdict(asks("other", {"--epochs", "3"}), 5).reason,
              HasSubstr("runs 'train', not 'other': set an rdzv-id for each job"));
  EXPECT_THAT(verdict(asks("train", {"--epochs 3"}), 5).reason, HasSubstr("other arguments"));
  EXPECT_TRUE(asks("train", {"--epochs", "3"}).empty());
  // Numbers and names show that several nodes belong together.
  for (const bool numbered : {true, false}) {
    Job told = plain;
    told.numbered = numbered;
    told.named = !numbered;
    start(told);
    Join join = request(1, numbered ? 1 : -1);
    join.run_id = numbered ? "" : "job";
    roster_->joined(5, join, now_);
    EXPECT_TRUE(mail().empty());
  }
}

// -------------------------------------------------------------------------------------------------
// nodes for which there is no room

TEST_F(RosterTest, OneTooManyStandsByAndTakesThePlaceOfALostOne) {
  Roster& roster = start(job(2, 2, 1));
  join(0);
  join(1);
  mail();
  join(2);
  auto sent = mail();
  ASSERT_TRUE(sent.contains(2) && std::holds_alternative<StandBy>(sent.at(2)));
  EXPECT_EQ(std::get<StandBy>(sent.at(2)).reason, "this job already has 2 nodes");
  roster.gone(1, "silence", now_);
  sent = mail();
  EXPECT_EQ(verdict(sent, 0).kind, Kind::restart);
  EXPECT_FALSE(sent.contains(2));
  join(0);
  sent = mail();
  EXPECT_EQ(assignment(sent, 2).node, 1);
  EXPECT_EQ(assignment(sent, 2).restarts, 1);
}

TEST_F(RosterTest, AReplacementStandsByUntilItsPredecessorIsKnownToBeDead) {
  Job numbered = job(2, 2, 1);
  numbered.numbered = true;
  Roster& roster = start(numbered);
  join(0, 1, 0);
  join(1, 1, 1);
  mail();
  join(2, 1, 1);
  EXPECT_EQ(std::get<StandBy>(mail().at(2)).reason, "node-rank 1 is already used by somewhere");
  roster.gone(1, "no message from it for 30 s", now_);
  mail();
  join(0, 1, 0);
  EXPECT_EQ(assignment(mail(), 2).node, 1);
}

TEST_F(RosterTest, ThoseThatStandByHearHowItEnds) {
  Roster& roster = start(job(1, 1));
  join(0);
  join(1);
  mail();
  roster.succeeded(0);
  EXPECT_EQ(verdict(mail(), 1).kind, Kind::succeeded);
}

TEST_F(RosterTest, OneThatStandsByAndGoesIsNoLoss) {
  Roster& roster = start(job(1, 1));
  join(0);
  join(1);
  mail();
  roster.gone(1, "it was stopped", now_);
  EXPECT_TRUE(mail().empty());
  EXPECT_FALSE(roster.is_over());
}

TEST_F(RosterTest, ThePlaceOfTheHostIsItsOwnWhoeverComesFirst) {
  start(job(2, 2));
  join(1);
  join(2);
  EXPECT_EQ(std::get<StandBy>(mail().at(2)).reason, "this job already has 2 nodes");
  join(0);
  const auto sent = mail();
  EXPECT_EQ(assignment(sent, 0).node, 0);
  EXPECT_EQ(assignment(sent, 1).node, 1);
}

TEST_F(RosterTest, SaysWhoStoodByWhileItWaitedInVain) {
  Job numbered = job(3, 3);
  numbered.numbered = true;
  Roster& roster = start(numbered);
  join(0, 1, 0);
  join(1, 1, 1);
  join(2, 1, 1);
  mail();
  roster.tick(now_ += 100s);
  mail();
  join(3, 1, 2);
  EXPECT_EQ(
      verdict(mail(), 3).reason,
      "2 of 3 nodes joined within 100 s; somewhere waits for room: node-rank 1 is already used by "
      "somewhere");
}

TEST_F(RosterTest, WaitsALastCallOnceTheFewestAreThere) {
  Roster& roster = start(job(2, 4));
  join(0);
  roster.tick(now_ += 50s);
  join(1);
  EXPECT_TRUE(mail().empty());
  EXPECT_EQ(roster.deadline(), now_ + 5s);
  join(2);
  roster.tick(now_ += 4s);
  EXPECT_TRUE(mail().empty());
  roster.tick(now_ += 1s);
  const auto sent = mail();
  EXPECT_EQ(sent.size(), 3U);
  EXPECT_EQ(assignment(sent, 2).nodes, 3);
}

TEST_F(RosterTest, TheMostNodesNeedNoLastCall) {
  start(job(1, 2));
  join(0);
  join(1);
  EXPECT_EQ(mail().size(), 2U);
}

TEST_F(RosterTest, GivesUpIfTooFewCome) {
  Roster& roster = start(job(3, 3));
  join(0);
  join(1);
  EXPECT_EQ(roster.deadline(), now_ + 100s);
  roster.tick(now_ += 100s);
  const auto sent = mail();
  EXPECT_EQ(verdict(sent, 0).kind, Kind::lost);
  EXPECT_EQ(verdict(sent, 1).reason, "2 of 3 nodes joined within 100 s");
  EXPECT_TRUE(roster.is_over());
  join(2);
  EXPECT_EQ(verdict(mail(), 2).kind, Kind::lost);
}

TEST_F(RosterTest, OneThatGoesBeforeItBeginsIsNotCounted) {
  Roster& roster = start(job(2, 2));
  join(0);
  join(1);
  mail();
  start(job(3, 3));
  join(0);
  join(1);
  roster.gone(1, "", now_);
  join(2);
  EXPECT_TRUE(mail().empty());
  join(3);
  EXPECT_EQ(mail().size(), 3U);
}

TEST_F(RosterTest, TheFirstFailureEndsTheJobForAll) {
  Roster& roster = start(job(2, 2));
  join(0);
  join(1);
  mail();
  roster.failed(1, failure(1), now_);
  roster.failed(0, failure(0), now_);
  const auto sent = mail();
  for (const int id : {0, 1}) {
    EXPECT_EQ(verdict(sent, id).kind, Kind::failed);
    EXPECT_EQ(verdict(sent, id).failure->rank, 1);
    EXPECT_EQ(verdict(sent, id).reason, "rank 1 failed: exit code 3");
  }
}

TEST_F(RosterTest, RestartsAfterAFailureUntilNoneIsLeft) {
  Roster& roster = start(job(2, 2, 1));
  join(0);
  join(1);
  const int port = assignment(mail(), 0).master_port;
  roster.failed(1, failure(1), now_);
  auto sent = mail();
  EXPECT_EQ(verdict(sent, 0).kind, Kind::restart);
  EXPECT_EQ(verdict(sent, 1).failure->rank, 1);
  // The outcome of the previous attempt says nothing about the next.
  roster.failed(0, failure(0), now_);
  roster.succeeded(0);
  join(0);
  EXPECT_TRUE(mail().empty());
  join(1);
  sent = mail();
  EXPECT_EQ(assignment(sent, 0).restarts, 1);
  EXPECT_EQ(assignment(sent, 0).attempt, 1);
  EXPECT_EQ(assignment(sent, 0).max_restarts, 1);
  EXPECT_NE(assignment(sent, 0).master_port, port);
  roster.failed(0, failure(0), now_);
  EXPECT_EQ(verdict(mail(), 1).kind, Kind::failed);
}

TEST_F(RosterTest, EndsWhenEveryNodeIsDone) {
  Roster& roster = start(job(2, 2));
  join(0);
  join(1);
  mail();
  roster.succeeded(1);
  EXPECT_FALSE(roster.is_over());
  EXPECT_TRUE(mail().empty());
  roster.succeeded(0);
  EXPECT_EQ(verdict(mail(), 1).kind, Kind::succeeded);
}

TEST_F(RosterTest, ANodeThatIsDoneRunsAgainWithTheOthers) {
  Roster& roster = start(job(2, 2, 1));
  join(0);
  join(1);
  mail();
  roster.succeeded(1);
  roster.failed(0, failure(0), now_);
  EXPECT_EQ(verdict(mail(), 1).kind, Kind::restart);
}

TEST_F(RosterTest, ANodeThatVanishesEndsTheJob) {
  Roster& roster = start(job(2, 2));
  join(0, 2);
  join(1, 3);
  mail();
  roster.gone(1, "silence", now_);
  const Verdict lost = verdict(mail(), 0);
  EXPECT_EQ(lost.kind, Kind::lost);
  EXPECT_FALSE(lost.failure.has_value());
  EXPECT_EQ(lost.reason, "node 1 (somewhere, ranks 2 to 4) is lost: silence");
}

TEST_F(RosterTest, ANodeThatVanishesAfterItIsDoneIsNoLoss) {
  Roster& roster = start(job(2, 2));
  join(0);
  join(1);
  mail();
  roster.succeeded(1);
  roster.gone(1, "", now_);
  EXPECT_FALSE(roster.is_over());
  roster.succeeded(0);
  EXPECT_EQ(verdict(mail(), 0).kind, Kind::succeeded);
}

TEST_F(RosterTest, GoesOnWithFewerNodesAfterALoss) {
  Roster& roster = start(job(1, 3, 1));
  join(0);
  join(1);
  join(2);
  mail();
  roster.gone(2, "", now_);
  EXPECT_EQ(verdict(mail(), 0).kind, Kind::restart);
  join(0);
  join(1);
  EXPECT_TRUE(mail().empty());
  roster.tick(now_ += 5s);
  EXPECT_EQ(assignment(mail(), 1).world_size, 2);
}

TEST_F(RosterTest, WaitsForAnotherNodeInPlaceOfALostOne) {
  Roster& roster = start(job(2, 2, 1));
  join(0);
  join(1);
  mail();
  roster.gone(1, "silence", now_);
  mail();
  join(0);
  roster.tick(now_ += 99s);
  EXPECT_TRUE(mail().empty());
  join(2);
  EXPECT_EQ(assignment(mail(), 2).node, 1);
  roster.gone(2, "silence", now_);
  EXPECT_EQ(verdict(mail(), 0).kind, Kind::lost);
}

TEST_F(RosterTest, SaysWhyItWaitedInVain) {
  Roster& roster = start(job(2, 2, 1));
  join(0);
  join(1);
  mail();
  roster.gone(1, "silence", now_);
  mail();
  join(0);
  roster.tick(now_ += 100s);
  EXPECT_EQ(verdict(mail(), 0).reason,
            "1 of 2 nodes joined within 100 s, after node 1 (somewhere, rank 1) is lost: silence");
}

TEST_F(RosterTest, ANodeThatComesLaterMakesAllBeginAnewWithoutUsingARestart) {
  Roster& roster = start(job(1, 2, 0));
  join(0);
  roster.tick(now_ += 5s);
  mail();
  join(1);
  auto sent = mail();
  EXPECT_EQ(sent.size(), 1U);
  EXPECT_EQ(verdict(sent, 0).kind, Kind::restart);
  join(0);
  sent = mail();
  EXPECT_EQ(assignment(sent, 0).nodes, 2);
  EXPECT_EQ(assignment(sent, 1).node, 1);
  EXPECT_EQ(assignment(sent, 1).restarts, 0);
  EXPECT_EQ(assignment(sent, 1).attempt, 1);
}

TEST_F(RosterTest, NodesThatComeOneAfterAnotherCostOneNewBeginning) {
  Roster& roster = start(job(1, 8));
  join(0);
  roster.tick(now_ += 5s);
  EXPECT_EQ(assignment(mail(), 0).nodes, 1);
  for (const int id : {1, 2, 3}) {
    join(id);
    EXPECT_EQ(roster.deadline(), now_ + 5s);
    roster.tick(now_ += 4s);
    EXPECT_TRUE(mail().empty()) << "node 0 goes on while others are on their way";
  }
  roster.tick(now_ += 1s);
  auto sent = mail();
  EXPECT_EQ(sent.size(), 1U);
  EXPECT_EQ(verdict(sent, 0).reason, "somewhere and somewhere and somewhere joined");
  join(0);
  sent = mail();
  EXPECT_EQ(assignment(sent, 0).nodes, 4);
  EXPECT_EQ(assignment(sent, 3).attempt, 1);
  EXPECT_EQ(assignment(sent, 3).restarts, 0);
}

TEST_F(RosterTest, OneThatComesWhileTheOthersStopGetsALastCallToo) {
  Roster& roster = start(job(1, 8));
  join(0);
  roster.tick(now_ += 5s);
  mail();
  join(1);
  roster.tick(now_ += 5s);
  mail();
  join(2);
  join(0);
  EXPECT_TRUE(mail().empty());
  roster.tick(now_ += 5s);
  EXPECT_EQ(assignment(mail(), 2).nodes, 3);
}

TEST_F(RosterTest, ANewcomerThatGoesAgainCostsNothing) {
  Roster& roster = start(job(1, 8));
  join(0);
  roster.tick(now_ += 5s);
  mail();
  join(1);
  roster.gone(1, "it was stopped", now_);
  EXPECT_EQ(roster.deadline(), Time::max());
  roster.tick(now_ += 5s);
  EXPECT_TRUE(mail().empty());
}

TEST_F(RosterTest, NothingIsDueWhileOthersStop) {
  Roster& roster = start(job(2, 2, 1));
  join(0);
  join(1);
  mail();
  roster.failed(1, failure(1), now_);
  mail();
  // Longer than the join timeout, as a grace period may be.
  now_ += 200s;
  EXPECT_EQ(roster.deadline(), Time::max());
  join(0);
  EXPECT_EQ(roster.deadline(), Time::max());
  roster.gone(1, "silence", now_);
  // From here on, another node has its time to join.
  EXPECT_EQ(roster.deadline(), now_ + 100s);
  EXPECT_FALSE(roster.is_over());
}

TEST_F(RosterTest, ANodeThatComesWhenSomeAreDoneWaitsForTheEnd) {
  Roster& roster = start(job(2, 3, 0));
  join(0);
  join(1);
  roster.tick(now_ += 5s);
  mail();
  roster.succeeded(1);
  join(2);
  EXPECT_TRUE(mail().empty());
  roster.succeeded(0);
  EXPECT_EQ(verdict(mail(), 2).kind, Kind::succeeded);
}

TEST_F(RosterTest, TheHostsOwnLauncherIsNeededAlways) {
  Roster& roster = start(job(2, 2, 9));
  join(0);
  join(1);
  mail();
  roster.gone(0, "it was stopped", now_);
  EXPECT_EQ(verdict(mail(), 1).kind, Kind::lost);
  EXPECT_TRUE(roster.is_over());
}

}  // namespace
}  // namespace semitone::launch
