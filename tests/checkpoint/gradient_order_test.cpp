// The order of gradients of DistributedDataParallel in checkpoints: resumed runs of three and more
// ranks round their sums as undisturbed ones.

#include "semitone/checkpoint.h"
#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/checkpoint/data_parallel_training.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace semitone::checkpoint::test {
namespace {

namespace fs = std::filesystem;
using parallel::DistributedDataParallelOptions;
using semitone::test::CapturedLog;
using semitone::test::Rank;
using semitone::test::run_ranks;
using semitone::test::same_bits;
using ::testing::AllOf;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Two for DropNet at O0.
DistributedDataParallelOptions small_buckets() {
  return DistributedDataParallelOptions().bucket_cap_mb(0.001).first_bucket_mb(0.0001);
}

struct Saving {
  std::string level = "O0";
  DistributedDataParallelOptions ddp = small_buckets();
  bool sharded = false;

  DataParallelTraining training(const comm::Group& group, std::uint64_t seed) const {
    return {group, seed, {.level = level, .sharded = sharded, .ddp = ddp}};
  }
};

// Whether a run that is interrupted after some steps, and resumed, ends as an undisturbed one.
bool resumes_bit_for_bit(const comm::Group& group, const fs::path& folder, const Saving& saving,
                         std::int64_t steps, bool with_order = true) {
  const auto checkpoint_of = [&](DataParallelTraining& run) {
    return with_order ? run.checkpoint(folder) : run.checkpoint_without_order(folder);
  };
  DataParallelTraining whole = saving.training(group, 1);
  whole.train_to(steps + 4);
  {
    DataParallelTraining half = saving.training(group, 1);
    half.train_to(steps);
    checkpoint_of(half).save(steps);
  }
  DataParallelTraining resumed = saving.training(group, 2);
  EXPECT_EQ(checkpoint_of(resumed).resume(), steps);
  resumed.step = steps;
  resumed.train_to(steps + 4);
  return static_cast<bool>(same_bits(resumed.state(), whole.state()));
}

void expect_bit_for_bit(int ranks) {
  run_ranks(ranks, [](Rank& rank) {
    const auto group = comm::init();
    int runs = 0;
    const auto resumes = [&](const Saving& saving, std::int64_t steps) {
      return resumes_bit_for_bit(group, rank.folder() / std::to_string(runs++), saving, steps);
    };
    for (const std::int64_t steps : {0, 1, 2, 6}) EXPECT_TRUE(resumes({}, steps)) << steps;
    EXPECT_TRUE(resumes({.level = "O2"}, 3));
    EXPECT_TRUE(resumes({.level = "O2", .sharded = true}, 3));
    EXPECT_TRUE(resumes({.ddp = small_buckets().static_graph(true)}, 1));
    EXPECT_TRUE(resumes({.ddp = small_buckets().gradient_as_bucket_view(true)}, 3));
    EXPECT_TRUE(resumes({.ddp = DistributedDataParallelOptions().find_unused_parameters(true)}, 3));
  });
}

TEST(CheckpointOfGradientOrder, ContinuesBitForBitWithThreeRanks) {
  expect_bit_for_bit(3);
}

TEST(CheckpointOfGradientOrder, ContinuesBitForBitWithFourRanks) {
  expect_bit_for_bit(4);
}

// The tests above can fail: without the order, the sums of the same gradients round differently.
TEST(CheckpointOfGradientOrder, IsNeededForThat) {
  run_ranks(3, [](Rank& rank) {
    EXPECT_FALSE(
        resumes_bit_for_bit(comm::init(), rank.folder() / "run", {}, 6, /*with_order=*/false));
  });
}

TEST(CheckpointOfGradientOrder, PutsTheSavedOrderInForceAtOnce) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    DataParallelTraining saved = Saving().training(group, 1);
    saved.train_to(1);
    saved.checkpoint(rank.folder() / "run").save_async(1);
    const auto order = saved.ddp.gradient_order();
    ASSERT_TRUE(order.has_value());
    EXPECT_THAT(order->buckets, SizeIs(Gt(1U)));
    DataParallelTraining resumed = Saving().training(group, 2);
    EXPECT_EQ(resumed.ddp.gradient_order(), std::nullopt);
    EXPECT_EQ(resumed.checkpoint(rank.folder() / "run").resume(), 1);
    EXPECT_EQ(resumed.ddp.gradient_order(), order);
    resumed.checkpoint(rank.folder() / "copy").save(1);
    resumed.train_to(3);
    EXPECT_EQ(resumed.ddp.gradient_order(), order);
    // Its own checkpoint, again.
    EXPECT_EQ(resumed.checkpoint(rank.folder() / "copy").resume(), 1);
    EXPECT_EQ(resumed.ddp.gradient_order(), order);
  });
}

TEST(CheckpointOfGradientOrder, IsOptional) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    DataParallelTraining saved = Saving().training(group, 1);
    saved.train_to(3);
    saved.checkpoint_without_order(rank.folder() / "run").save(3);
    DataParallelTraining resumed = Saving().training(group, 2);
    EXPECT_EQ(resumed.checkpoint(rank.folder() / "run").resume(), 3);
    EXPECT_EQ(resumed.ddp.gradient_order(), std::nullopt);
    EXPECT_TRUE(same_bits(semitone::test::copies(resumed.net->parameters()),
                          semitone::test::copies(saved.net->parameters())));
  });
}

// Neither a change of bucket sizes nor one of the opt level prevents a resume.
TEST(CheckpointOfGradientOrder, ThatDoesNotFitIsAWarning) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    {
      DataParallelTraining saved = Saving().training(group, 1);
      saved.train_to(3);
      saved.checkpoint(rank.folder() / "run").save(3);
    }
    const auto expect_warning = [&](const Saving& saving, const std::string& reason) {
      DataParallelTraining resumed = saving.training(group, 2);
      const CapturedLog log;
      EXPECT_EQ(resumed.checkpoint(rank.folder() / "run").resume(), 3);
      EXPECT_EQ(resumed.ddp.gradient_order(), std::nullopt);
      if (rank.number() == 0) {
        EXPECT_THAT(log.text(), AllOf(HasSubstr("[checkpoint.resume] the order of gradients of "
                                                "'ddp' is not restored"),
                                      HasSubstr(reason)));
      }
      resumed.train_to(2);
    };
    expect_warning({.ddp = DistributedDataParallelOptions()}, "one for buckets of 0.001 MiB");
    expect_warning({.level = "O2"}, "in one bucket");
  });
}

TEST(CheckpointOfGradientOrder, OfOneProcessAndOfSeveralCanBeExchanged) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const comm::Group alone;
    const auto copy = [&](const comm::Group& from, const comm::Group& to, const fs::path& folder) {
      torch::nn::Linear model(3, 2);
      parallel::DistributedDataParallel saved(model, from);
      for (int step = 0; step < 2; ++step) saved.forward(torch::ones({1, 3})).sum().backward();
      if (from.size() > 1 || rank.number() == 0)
        Checkpoint(folder, options_of(from)).add("model", model).add("ddp", saved).save(2);
      group.barrier();
      torch::nn::Linear other(3, 2);
      parallel::DistributedDataParallel resumed(other, to);
      Checkpoint reader(folder, options_of(to));
      EXPECT_EQ(reader.add("model", other).add("ddp", resumed).resume(), 2);
      EXPECT_EQ(resumed.gradient_order(), std::nullopt);
      resumed.forward(torch::ones({1, 3})).sum().backward();
      group.barrier();
    };
    copy(group, alone, rank.folder() / "to one");
    copy(alone, group, rank.folder() / "from one");
  });
}

TEST(CheckpointOfGradientOrder, IsWithdrawnIfTheResumeFails) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Linear model(3, 2);
    parallel::DistributedDataParallel saved(model, group);
    saved.forward(torch::ones({1, 3})).sum().backward();
    std::int64_t number = 300;
    Checkpoint(rank.folder() / "run", options_of(group)).add("ddp", saved).add("n", number).save(1);
    torch::nn::Linear other(3, 2);
    parallel::DistributedDataParallel resumed(other, group);
    std::uint8_t narrow = 0;
    Checkpoint reader(rank.folder() / "run", options_of(group));
    reader.add("ddp", resumed).add("n", narrow);
    EXPECT_THROW(reader.resume(), FileError);
    EXPECT_EQ(resumed.gradient_order(), std::nullopt);
  });
}

}  // namespace
}  // namespace semitone::checkpoint::test
