// Ranks that die, stop, arrive late, never arrive, or disagree: every other rank gets an error that
// names them, within bounded time, and ends by itself.
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "src/comm/gpu.h"
#include "src/comm/introduction.h"
#include "src/comm/machine.h"
#include "src/comm/network.h"
#include "src/comm/process_group.h"
#include "src/comm/rendezvous.h"
#include "src/comm/store.h"
#include "src/comm/watch.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

namespace semitone::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Rank;
using test::RankOptions;
using test::RankResult;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

// More frequent heartbeats than usual; a timeout so long that a test which needs it fails.
InitOptions quick() {
  return InitOptions()
      .heartbeat(milliseconds(50))
      .heartbeat_timeout(seconds(3))
      .timeout(std::chrono::minutes(10));
}

// Passes the message and the ranks of the CommError that a call throws to the test.
template <typename Function>
void report_error(const Rank& rank, Function&& function) {
  try {
    function();
    ADD_FAILURE() << "no error on rank " << rank.number();
  } catch (const CommError& error) {
    std::string ranks;
    for (const int each : error.ranks()) ranks += std::to_string(each) + ";";
    rank.report(ranks);
    rank.report(error.what());
  }
}

// Checks that all ranks except the casualties got one error, which names these ranks and contains
// this text.
void expect_errors(const std::vector<RankResult>& results, const std::vector<int>& casualties,
                   const std::string& ranks, const std::string& part) {
  for (int rank = 0; rank < static_cast<int>(results.size()); ++rank) {
    if (std::count(casualties.begin(), casualties.end(), rank) > 0) continue;
    SCOPED_TRACE(rank);
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    ASSERT_EQ(result.reports.size(), 2u) << result.output;
    EXPECT_EQ(result.reports[0], ranks) << result.reports[1];
    EXPECT_THAT(result.reports[1], HasSubstr(part));
  }
}

void reduce_something(const Group& group) {
  at::Tensor tensor = torch::ones({1000});
  group.all_reduce(tensor);
}

// Which rank is lost, and in which call the others wait.
struct Casualty {
  int rank;
  int signal;
};
class LostRank : public ::testing::TestWithParam<Casualty> {};

TEST_P(LostRank, IsNamedByAllOthers) {
  const Casualty casualty = GetParam();
  RankOptions options;
  options.casualties = {casualty.rank};
  const auto results = run_ranks(
      4,
      [&](Rank& rank) {
        const Group group = init("env://", quick());
        reduce_something(group);
        rank.meet();
        if (rank.number() == casualty.rank) std::raise(casualty.signal);
        report_error(rank, [&] {
          for (;;) reduce_something(group);
        });
        // From now on at once.
        EXPECT_THROW(group.barrier(), CommError);
        EXPECT_THROW(group.monitored_barrier(std::chrono::minutes(10)), CommError);
      },
      options);
  const std::string number = std::to_string(casualty.rank);
  expect_errors(
      results, {casualty.rank}, number + ";",
      "rank " + number + " lost: " +
          (casualty.signal == SIGKILL ? "its process has ended" : "no sign of life for 3 s"));
}

INSTANTIATE_TEST_SUITE_P(Each, LostRank,
                         ::testing::Values(Casualty{0, SIGKILL}, Casualty{0, SIGSTOP},
                                           Casualty{2, SIGKILL}, Casualty{2, SIGSTOP}));

TEST(Loss, IsNoticedInEveryKindOfWaiting) {
  RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      4,
      [](Rank& rank) {
        const Group group = init("env://", quick());
        const Group pair = group.subgroup({0, 3});
        rank.meet();
        if (rank.number() == 1) {
          // Time for the others to wait.
          std::this_thread::sleep_for(milliseconds(500));
          std::raise(SIGKILL);
        }
        report_error(rank, [&] {
          if (rank.number() == 0) group.monitored_barrier(std::chrono::minutes(10));
          if (rank.number() == 2) group.barrier();
          // In a group that the lost rank is not in.
          at::Tensor tensor = torch::ones({1});
          if (rank.number() == 3) pair.all_reduce(tensor);
        });
      },
      options);
  expect_errors(results, {1}, "1;", "rank 1 lost");
}

TEST(Loss, IsKnownToManyRanks) {
  constexpr int kRanks = 12;
  RankOptions options;
  options.casualties = {7};
  options.timeout = seconds(300);
  const auto results = run_ranks(
      kRanks,
      [](Rank& rank) {
        const Group group = init("env://", quick().heartbeat_timeout(seconds(60)));
        at::Tensor sum = torch::full({1000}, rank.number(), torch::kLong);
        group.all_reduce(sum);
        EXPECT_EQ(sum[999].item<std::int64_t>(), kRanks * (kRanks - 1) / 2);
        // Rank 7 may be done before the others, which still need all ranks.
        rank.meet();
        if (rank.number() == 7) std::raise(SIGKILL);
        report_error(rank, [&] {
          for (;;) reduce_something(group);
        });
      },
      options);
  expect_errors(results, {7}, "7;", "rank 7 lost: its process has ended");
}

TEST(Loss, OfARankThatWakesUpAgainIsToldToIt) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick());
    reduce_something(group);
    rank.meet();
    if (rank.number() == 1) {
      const pid_t self = ::getpid();
      if (::fork() == 0) {
        std::this_thread::sleep_for(seconds(5));
        ::kill(self, SIGCONT);
        ::_exit(0);
      }
      std::raise(SIGSTOP);
    }
    report_error(rank, [&] {
      for (;;) reduce_something(group);
    });
  });
  expect_errors(results, {1}, "1;", "rank 1 lost: no sign of life");
  EXPECT_THAT(results[1].reports.at(1), HasSubstr("rank 1 (this one) lost: no sign of life"));
}

TEST(Loss, LeavesNothingBehindThatWaits) {
  // A collective without a waiting caller is in progress when the group is destroyed.
  RankOptions options;
  options.casualties = {1};
  run_ranks(
      2,
      [](Rank& rank) {
        at::Tensor tensor = torch::ones({1000});
        {
          const Group group = init("env://", quick().check(CheckLevel::none));
          rank.meet();
          if (rank.number() == 1) std::raise(SIGSTOP);
          group.all_reduce_async(tensor);
        }
        rank.report("ended");
      },
      options);
}

TEST(Destruction, EndsWhatIsStillUnderWay) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const auto file = rank.folder() / "destroyed";
    std::optional<Group> group = init("env://", quick());
    if (rank.number() == 1) {
      // Alive, and elsewhere.
      EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(file); }));
      return;
    }
    at::Tensor tensor = torch::ones({1000});
    Work work = group->all_reduce_async(tensor);
    group.reset();
    EXPECT_TRUE(work.done());
    report_error(rank, [&] {
      if (work.done()) work.wait();
    });
    std::ofstream(file) << "done";
  });
  expect_errors(results, {1}, "", "the group was destroyed");
}

TEST(LateRank, IsNamedWhenTheTimeIsUp) {
  const auto results = run_ranks(4, [](Rank& rank) {
    const Group group = init("env://", quick().timeout(seconds(4)));
    reduce_something(group);
    if (rank.number() == 2) {
      // Busy with something else, and alive.
      std::this_thread::sleep_for(seconds(8));
    }
    report_error(rank, [&] { reduce_something(group); });
  });
  expect_errors(results, {2}, "2;", "rank 2 lost: did not call all_reduce in time");
  EXPECT_THAT(results[2].reports.at(1),
              HasSubstr("rank 2 (this one) lost: did not call all_reduce"));
}

TEST(LeavingRank, IsNamedByThoseThatStay) {
  const auto results = run_ranks(3, [](Rank& rank) {
    {
      const Group group = init("env://", quick());
      reduce_something(group);
      if (rank.number() != 1) report_error(rank, [&] { reduce_something(group); });
    }
  });
  expect_errors(results, {1}, "1;", "rank 1 lost: left the group while others are in all_reduce");
}

TEST(MonitoredBarrier, NamesAllThatDoNotCome) {
  const auto results = run_ranks(4, [](Rank& rank) {
    const Group group = init("env://", quick());
    group.monitored_barrier(seconds(60));
    if (rank.number() % 2 == 0) {
      report_error(rank, [&] { group.monitored_barrier(milliseconds(500)); });
    }
    group.barrier();
  });
  for (const int rank : {0, 2}) {
    const auto& reports = results[static_cast<std::size_t>(rank)].reports;
    ASSERT_EQ(reports.size(), 2u);
    EXPECT_EQ(reports[0], "1;3;");
    EXPECT_THAT(reports[1], AllOf(HasSubstr("[comm.monitored_barrier]"), HasSubstr("within 0.5 s"),
                                  HasSubstr("ranks 1, 3")));
  }
}

// "Never", in all options: additions of it to the current time do not overflow.
TEST(Durations, CanBeTheLargestOnes) {
  const auto results = run_ranks(3, [](Rank& rank) {
    const auto never = milliseconds::max();
    const Group group = init("env://", InitOptions().timeout(never).heartbeat_timeout(never));
    reduce_something(group);
    reduce_something(group.subgroup({0, 1, 2}));
    // The others wait for rank 1.
    if (rank.number() == 1) std::this_thread::sleep_for(seconds(1));
    group.monitored_barrier(never);
    reduce_something(group);
    group.barrier();
    rank.report("done");
  });
  for (const RankResult& result : results)
    EXPECT_THAT(result.reports, testing::ElementsAre("done"));
}

TEST(MonitoredBarrier, TakesANegativeTimeoutForNone) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick());
    if (rank.number() == 0) {
      const auto before = milliseconds::min();
      EXPECT_THAT(test::error_of([&] { group.monitored_barrier(before); }),
                  AllOf(HasSubstr("within 0 s"), HasSubstr("no sign of rank 1")));
    }
    rank.meet();
    group.barrier();
  });
}

TEST(Check, TellsWhatEachRankCallsIfTheyDiffer) {
  const auto results = run_ranks(4, [](Rank& rank) {
    const Group group = init("env://", quick());
    for (int round = 0; round < 3; ++round) reduce_something(group);
    report_error(rank, [&] {
      at::Tensor tensor = torch::ones({rank.number() == 3 ? 500 : 4});
      if (rank.number() == 2) tensor = tensor.to(torch::kDouble);
      if (rank.number() == 1) {
        group.broadcast(tensor, 1);
      } else {
        group.all_reduce(tensor);
      }
    });
    // The group is still usable.
    at::Tensor one = torch::ones({1});
    group.all_reduce(one);
    EXPECT_EQ(one.item<float>(), 4.f);
  });
  for (const RankResult& result : results) {
    ASSERT_EQ(result.reports.size(), 2u) << result.output;
    EXPECT_THAT(result.reports[1], AllOf(HasSubstr("rank 0: all_reduce float32[4]"),
                                         HasSubstr("rank 1: broadcast float32[4] from rank 1"),
                                         HasSubstr("rank 2: all_reduce float64[4]"),
                                         HasSubstr("rank 3: all_reduce float32[500]")));
  }
}

TEST(Check, SeesDifferencesBeyondTheTextThatItShows) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick().check(CheckLevel::full));
    std::vector<at::Tensor> tensors(200, torch::zeros({1}));
    if (rank.number() == 1) tensors.back() = torch::zeros({2});
    EXPECT_THROW(group.broadcast(tensors), CommError);
    // Named by the ranks of all, in a subgroup.
    reduce_something(group.split(2));
  });
}

TEST(Check, CanBeLeftOut) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick().check(CheckLevel::none));
    // The same bytes under another name, which is not noticed.
    at::Tensor tensor = torch::ones({4}).view({rank.number() == 0 ? 4 : 1, -1});
    group.all_reduce(tensor);
    EXPECT_EQ(tensor.sum().item<float>(), 8.f);
  });
}

TEST(Rendezvous, NamesTheRanksThatDoNotCome) {
  const auto results = run_ranks(3, [](Rank& rank) {
    if (rank.number() == 1) return;
    report_error(rank, [] { init("env://", quick().timeout(seconds(3))); });
  });
  // The store is lost with rank 0: rank 2 notices one or the other.
  ASSERT_EQ(results[0].reports.size(), 2u);
  EXPECT_EQ(results[0].reports[0], "1;");
  EXPECT_THAT(results[0].reports[1], AllOf(HasSubstr("[comm.init]"), HasSubstr("3 ranks"),
                                           HasSubstr("no sign of rank 1")));
  EXPECT_EQ(results[2].reports.size(), 2u);
}

TEST(Rendezvous, MakesABrokenPipeAnErrorAndNoSignal) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick());
    std::raise(SIGPIPE);
    rank.report("alive");
  });
  EXPECT_THAT(results[0].reports, testing::ElementsAre("alive"));
  EXPECT_THAT(results[1].reports, testing::ElementsAre("alive"));
}

TEST(Rendezvous, NamesTheMasterThatDoesNotAnswer) {
  const auto results = run_ranks(2, [](Rank& rank) {
    if (rank.number() == 0) return;
    report_error(rank, [] { init("env://", quick().timeout(seconds(2))); });
  });
  expect_errors(results, {0}, "0;", "rank 0 to answer at 127.0.0.1:");
  EXPECT_THAT(results[1].reports.at(1), HasSubstr("within 2 s"));
}

TEST(Rendezvous, NamesThePortThatIsTaken) {
  const auto results = run_ranks(2, [](Rank& rank) {
    if (rank.number() == 1) return;
    const Descriptor taken = listen_on("127.0.0.1", std::stoi(std::getenv("MASTER_PORT")));
    report_error(rank, [] { init("env://", quick()); });
  });
  expect_errors(results, {1}, "0;", "Address already in use");
  EXPECT_THAT(results[0].reports.at(1), HasSubstr("MASTER_PORT"));
}

TEST(Rendezvous, NamesTheRankWithAnotherWorldSize) {
  const auto results = run_ranks(3, [](Rank& rank) {
    const std::string size = rank.number() == 1 ? "2" : "3";
    ::setenv("WORLD_SIZE", size.c_str(), 1);
    report_error(rank, [] { init("env://", quick().timeout(seconds(5))); });
  });
  // Rank 1 takes ranks 0 and 1 for all.
  EXPECT_THAT(results[1].reports.at(1),
              HasSubstr("a world size of 2 on all ranks, got 3 on rank 0"));
  EXPECT_THAT(results[0].reports.at(1),
              HasSubstr("a world size of 3 on all ranks, got 2 on rank 1"));
}

// Otherwise the rank at `full` would send comparisons that the others do not answer.
TEST(Rendezvous, NamesTheRanksWithAnotherCheckLevel) {
  const auto results = run_ranks(3, [](Rank& rank) {
    ::setenv("SEMITONE_COMM_CHECK", rank.number() == 1 ? "full" : "calls", 1);
    report_error(rank, [] { init("env://", quick()); });
  });
  for (const RankResult& result : results) ASSERT_EQ(result.reports.size(), 2u) << result.output;
  for (const int rank : {0, 2}) {
    const auto& reports = results[static_cast<std::size_t>(rank)].reports;
    EXPECT_EQ(reports[0], "1;");
    EXPECT_THAT(reports[1],
                AllOf(HasSubstr("[comm.init]"),
                      HasSubstr("the check level calls on all ranks, got full on rank 1"),
                      HasSubstr("SEMITONE_COMM_CHECK")));
  }
  EXPECT_EQ(results[1].reports[0], "0;2;");
  EXPECT_THAT(results[1].reports[1],
              HasSubstr("the check level full on all ranks, got calls on ranks 0, 2"));
}

TEST(Rendezvous, NamesTheRankThatIsThereTwice) {
  const auto results = run_ranks(3, [](Rank& rank) {
    ::setenv("WORLD_SIZE", "2", 1);
    if (rank.number() == 2) {
      ::setenv("RANK", "1", 1);
      std::this_thread::sleep_for(milliseconds(1500));
    }
    if (rank.number() == 0) {
      const Group group = init("env://", quick());
      std::this_thread::sleep_for(seconds(4));
      group.barrier();
    } else if (rank.number() == 1) {
      const Group group = init("env://", quick());
      group.barrier();
    } else {
      report_error(rank, [] { init("env://", quick()); });
    }
  });
  expect_errors(results, {0, 1}, "1;", "one process of rank 1");
}

// A rank that is lost after the rendezvous, before the transports connect: a rank that waits for it
// gets an error, and does not wait for the minute that Gloo gives a connection.
TEST(Loss, WhileRanksConnectIsNoticed) {
  RankOptions options;
  options.casualties = {1};
  options.timeout = seconds(50);
  const auto results = run_ranks(
      2,
      [](Rank& rank) {
        if (rank.number() == 0) {
          report_error(rank, [] { init("env://", quick().check(CheckLevel::calls)); });
          return;
        }
        const auto store = c10::make_intrusive<c10d::PrefixStore>(
            "semitone/0", open_store(parse_rendezvous("env://"), quick()));
        store->add("taken/1", 1);
        put(*store, "rank/1", to_string(Introduction{"2", "gloo", "calls", this_machine()}));
        WatchOptions watch;
        watch.rank = 1;
        watch.size = 2;
        watch.address = "127.0.0.1";
        watch.interval = milliseconds(50);
        watch.silence = seconds(3);
        watch.timeout = seconds(60);
        const Watch member(store, watch);
        std::this_thread::sleep_for(seconds(1));
        std::raise(SIGKILL);
      },
      options);
  expect_errors(results, {1}, "1;", "rank 1 lost: its process has ended");
}

class LostInGpuSelection : public ::testing::TestWithParam<int> {};

// The others wait for the GPU that it selects, and the store is lost with rank 0.
TEST_P(LostInGpuSelection, IsNamed) {
  const int casualty = GetParam();
  RankOptions options;
  options.casualties = {casualty};
  const auto results = run_ranks(
      3,
      [&](Rank& rank) {
        const Group group = init("env://", quick());
        Rendezvous rendezvous;
        rendezvous.rank = rank.number();
        rendezvous.world_size = rank.count();
        rank.meet();
        report_error(rank, [&] {
          select_distinct_gpus(*group.impl()->store, *group.impl()->watch, rendezvous,
                               std::chrono::minutes(10), [&] {
                                 if (rank.number() == casualty) std::raise(SIGKILL);
                                 return "GPU-" + std::to_string(rank.number());
                               });
        });
      },
      options);
  const std::string number = std::to_string(casualty);
  expect_errors(results, {casualty}, number + ";",
                "rank " + number + " lost: its process has ended");
}

INSTANTIATE_TEST_SUITE_P(Each, LostInGpuSelection, ::testing::Values(0, 1));

TEST(Loss, WhileASubgroupIsMadeIsNoticed) {
  RankOptions options;
  options.casualties = {2};
  options.timeout = seconds(50);
  const auto results = run_ranks(
      3,
      [](Rank& rank) {
        const Group group = init("env://", quick());
        rank.meet();
        if (rank.number() == 2) std::raise(SIGKILL);
        report_error(rank, [&] { group.subgroup({0, 1, 2}); });
      },
      options);
  expect_errors(results, {2}, "2;", "rank 2 lost: its process has ended");
}

// They wait for the timeout of the group, not for the transport's. Named by the ranks of all.
TEST(Subgroups, NameTheRanksThatDoNotCome) {
  const auto results = run_ranks(3, [](Rank& rank) {
    const Group group = init("env://", quick().timeout(seconds(3)));
    if (rank.number() == 1) report_error(rank, [&] { group.subgroup({1, 2}); });
    rank.meet();
  });
  ASSERT_EQ(results[1].reports.size(), 2U);
  EXPECT_EQ(results[1].reports[0], "2;");
  EXPECT_THAT(results[1].reports[1],
              AllOf(HasSubstr("[comm.subgroup] expected all 2 ranks within 3 s"),
                    HasSubstr("no sign of rank 2")));
}

// The other ranks are done and leave; a rank that dies on its way out does not affect them.
TEST(Loss, AtTheVeryEndHarmsNoOther) {
  RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      3,
      [](Rank& rank) {
        {
          const Group group = init("env://", quick());
          reduce_something(group);
          group.barrier();
          rank.meet();
          if (rank.number() == 1) std::raise(SIGKILL);
        }
        rank.report("out");
      },
      options);
  for (const int rank : {0, 2})
    EXPECT_THAT(results[static_cast<std::size_t>(rank)].reports, testing::ElementsAre("out"));
}

// What Kubernetes' services and load balancers do while rank 0 is not up yet.
TEST(Rendezvous, OutlastsAProxyThatClosesConnections) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const int port = std::stoi(std::getenv("MASTER_PORT"));
    if (rank.number() == 0) {
      {
        const Descriptor proxy = listen_on("127.0.0.1", port);
        int connections = 0;
        EXPECT_TRUE(test::eventually([&] {
          const Descriptor closed(::accept(proxy.number(), nullptr, nullptr));
          return (connections += closed.is_open() ? 1 : 0) >= 3;
        }));
      }
    }
    const Group group = init("env://", quick().timeout(seconds(60)));
    reduce_something(group);
    rank.report("met");
  });
  for (const RankResult& result : results) EXPECT_THAT(result.reports, testing::ElementsAre("met"));
}

// One rank to another, past the third.
TEST(Strings, GoFromOneRankToAnother) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init("env://", quick());
    std::string text(70 * 1024 * 1024, 'x');  // in three parts
    text.back() = 'y';
    for (const std::string& each : {text, std::string("short"), std::string()}) {
      if (rank.number() == 1) send_string(group, each, 2);
      if (rank.number() == 2) {
        EXPECT_TRUE(receive_string(group, 1) == each);
      }
    }
    group.barrier();
    EXPECT_TRUE(group.broadcast(rank.number() == 1 ? text : "", 1) == text);
  });
}

class LostSender : public ::testing::TestWithParam<int> {};

TEST_P(LostSender, IsNamed) {
  RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      3,
      [](Rank& rank) {
        const Group group = init("env://", quick());
        rank.meet();
        if (rank.number() == 1) std::raise(GetParam());
        report_error(rank, [&] { receive_string(group, 1); });
      },
      options);
  expect_errors(results, {1}, "1;", "rank 1 lost");
}

INSTANTIATE_TEST_SUITE_P(Each, LostSender, ::testing::Values(SIGKILL, SIGSTOP));

}  // namespace
}  // namespace semitone::comm
