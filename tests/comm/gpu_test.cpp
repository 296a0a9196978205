#include "src/comm/gpu.h"

#include "semitone/core/error.h"
#include "src/comm/watch.h"
#include "tests/support/errors.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace semitone::comm {
namespace {

using test::expect_error;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string gpu_of(int rank) {
  return "GPU-" + std::to_string(rank);
}

// Ranks of one process, which share a store.
class GpuSelection : public ::testing::Test {
 protected:
  // What a rank's select_distinct_gpus throws: "" for nothing.
  struct Outcome {
    std::string error;
    std::vector<int> ranks;  // of a CommError
  };

  // Rank 0 is the first to join.
  void join(int rank) {
    WatchOptions options;
    options.rank = rank;
    options.size = kRanks;
    options.address = "127.0.0.1";
    options.interval = std::chrono::milliseconds(50);
    options.silence = std::chrono::minutes(5);
    options.timeout = std::chrono::minutes(1);
    watches_.at(static_cast<std::size_t>(rank)) = std::make_unique<Watch>(store_, options);
  }

  void leave(int rank) { watches_.at(static_cast<std::size_t>(rank)).reset(); }

  Outcome select(int rank, std::chrono::milliseconds timeout,
                 const std::function<std::string(int rank)>& gpu) {
    Rendezvous rendezvous;
    rendezvous.rank = rank;
    rendezvous.world_size = kRanks;
    try {
      select_distinct_gpus(*store_, *watches_.at(static_cast<std::size_t>(rank)), rendezvous,
                           timeout, [&] { return gpu(rank); });
    } catch (const CommError& error) {
      return {error.what(), error.ranks()};
    } catch (const std::exception& error) {
      return {error.what(), {}};
    }
    return {};
  }

  // All ranks at once. Each leaves when it is done, as a rank whose init has failed does.
  std::vector<Outcome> select_all(const std::function<std::string(int rank)>& gpu) {
    for (int rank = 0; rank < kRanks; ++rank) join(rank);
    std::vector<Outcome> outcomes(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        outcomes.at(static_cast<std::size_t>(rank)) = select(rank, std::chrono::minutes(10), gpu);
        leave(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  }

  static constexpr int kRanks = 3;

 private:
  const c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  std::array<std::unique_ptr<Watch>, kRanks> watches_;
};

TEST(Gpu, IsTheOneOfTheLocalRank) {
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(gpu_index(rank, 4, 4), rank);
  EXPECT_EQ(gpu_index(1, 2, 8), 1);
}

TEST(Gpu, IsTheOnlyOneThatTheProcessSees) {
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(gpu_index(rank, 4, 1), 0);
}

TEST(Gpu, OfEachRankIsAnother) {
  expect_error([] { gpu_index(0, 4, 2); }, {"[comm.init]", "each of the 4 ranks", "got 2", "gloo"});
  expect_error([] { gpu_index(0, 1, 0); }, {"each of the 1 ranks", "got 0"});
}

// A single GPU may be the one that the launcher shows to each process, or the machine's only one.
TEST(Gpu, IsNotAnotherRanksToo) {
  require_distinct_gpus({"GPU-a", "GPU-b", "GPU-c"});
  expect_error([] { require_distinct_gpus({"GPU-a", "GPU-b", "GPU-a"}); },
               {"[comm.init]", "GPU-a", "ranks 0 and 2", "LOCAL_RANK", "gloo"});
}

TEST_F(GpuSelection, EndsWhenAllRanksHaveAGpu) {
  for (const Outcome& outcome : select_all(gpu_of)) EXPECT_EQ(outcome.error, "");
}

TEST_F(GpuSelection, FailsOnAllRanksIfTwoHaveTheSameGpu) {
  for (const Outcome& outcome : select_all([](int rank) { return gpu_of(rank % 2); }))
    EXPECT_THAT(outcome.error, HasSubstr("the same one, GPU-0, for ranks 0 and 2"));
}

class FailedGpuSelection : public GpuSelection, public ::testing::WithParamInterface<int> {};

// The other ranks do not wait for the timeout.
TEST_P(FailedGpuSelection, IsAnErrorOnAllRanksThatNamesTheRankAndItsReason) {
  const int failing = GetParam();
  const auto outcomes = select_all([&](int rank) {
    if (rank == failing) throw std::runtime_error("the driver is too old");
    return gpu_of(rank);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    const Outcome& outcome = outcomes.at(static_cast<std::size_t>(rank));
    if (rank == failing) {
      EXPECT_EQ(outcome.error, "the driver is too old");
      continue;
    }
    EXPECT_EQ(outcome.ranks, std::vector<int>{failing});
    EXPECT_THAT(outcome.error,
                AllOf(HasSubstr("[comm.init] expected a GPU for each rank"),
                      HasSubstr("rank " + std::to_string(failing) + ": the driver is too old")));
  }
}

INSTANTIATE_TEST_SUITE_P(Of, FailedGpuSelection, ::testing::Values(0, 2));

TEST_F(GpuSelection, NamesTheRankThatLeaves) {
  for (int rank = 0; rank < kRanks; ++rank) join(rank);
  leave(1);
  for (const int rank : {2, 0}) {
    const Outcome outcome = select(rank, std::chrono::minutes(10), gpu_of);
    EXPECT_EQ(outcome.ranks, std::vector<int>{1}) << rank;
    EXPECT_THAT(outcome.error, HasSubstr("rank 1 lost: left the group while others are in init"));
  }
}

TEST_F(GpuSelection, NamesTheRanksThatAreLate) {
  join(0);
  const Outcome outcome = select(0, std::chrono::milliseconds(100), gpu_of);
  EXPECT_EQ(outcome.ranks, (std::vector<int>{1, 2}));
  EXPECT_THAT(outcome.error, AllOf(HasSubstr("all 3 ranks to select their GPU within 0.1 s"),
                                   HasSubstr("no sign of ranks 1, 2")));
}

TEST(Gpu, IsThereForALocalRankThatIsNotBelowTheirNumber) {
  // The launcher sets LOCAL_RANK and LOCAL_WORLD_SIZE.
  EXPECT_EQ(gpu_index(5, 2, 2), 1);
}

}  // namespace
}  // namespace semitone::comm
