// Checkpoints of several ranks.

#include "semitone/checkpoint.h"
#include "semitone/comm/init.h"
#include "tests/checkpoint/data_parallel_training.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::checkpoint::test {
namespace {

namespace fs = std::filesystem;
using semitone::test::CapturedLog;
using semitone::test::message_of;
using semitone::test::Rank;
using semitone::test::run_ranks;
using semitone::test::same_bits;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CheckpointOfRanks, ContinuesBitForBitWithAndWithoutSharding) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE(sharded ? "sharded" : "whole");
      const fs::path folder = rank.folder() / (sharded ? "sharded" : "whole");
      DataParallelTraining whole(group, 1, {.sharded = sharded});
      whole.train_to(10);
      {
        DataParallelTraining half(group, 1, {.sharded = sharded});
        half.train_to(6);
        half.checkpoint(folder).save(6);
      }
      DataParallelTraining resumed(group, 2, {.sharded = sharded});
      EXPECT_EQ(resumed.checkpoint(folder).resume(), 6);
      resumed.step = 6;
      resumed.train_to(10);
      EXPECT_TRUE(same_bits(resumed.state(), whole.state()));
    }
  });
}

// A number that is equal on all ranks, and one that is not.
struct Values {
  std::int64_t common = 0;
  std::int64_t own = 0;
  Checkpoint checkpoint(const fs::path& folder, const comm::Group& group) {
    Checkpoint made(folder, options_of(group));
    made.add("common", common).add("own", own, PerRank::yes);
    return made;
  }
};

TEST(CheckpointOfRanks, IsWrittenWhileTheyTrain) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool in_background : {false, true}) {
      DataParallelTraining run(group, 1, {.sharded = true});
      auto checkpoint =
          run.checkpoint(rank.folder() / (in_background ? "background" : "run"), in_background);
      if (in_background) run.before_step = [&] { checkpoint.wait_for_copy(); };
      for (std::int64_t step = 1; step <= 5; ++step) {
        run.train_to(step);
        checkpoint.save_async(step);
      }
      run.train_to(8);
      const std::vector<at::Tensor> undisturbed = run.state();
      EXPECT_EQ(checkpoint.resume(), 5);
      run.step = 5;
      run.train_to(8);
      EXPECT_TRUE(same_bits(run.state(), undisturbed)) << in_background;
    }
  });
}

TEST(CheckpointOfRanks, IsWholeOnlyIfEveryRanksFilesAre) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Values values;
    auto checkpoint = values.checkpoint(rank.folder() / "run", group);
    for (const std::int64_t step : {1, 2}) {
      values = {step, 10 * step + rank.number()};
      checkpoint.save(step);
    }
    if (rank.number() == 0) {
      EXPECT_TRUE(fs::exists(checkpoint.path_of(2) / "own.rank1.pt"));
      EXPECT_TRUE(fs::exists(checkpoint.path_of(2) / "common.pt"));
      semitone::test::write_text(checkpoint.path_of(2) / "own.rank1.pt", "damaged");
    }
    group.barrier();
    EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(2); }), HasSubstr("own.rank1.pt"));
    const CapturedLog log;
    EXPECT_EQ(checkpoint.resume(), 1);
    EXPECT_EQ(values.common, 1);
    EXPECT_EQ(values.own, 10 + rank.number());
    values = {};
    checkpoint.resume(1);
    EXPECT_EQ(values.own, 10 + rank.number());
    if (rank.number() == 0) {
      EXPECT_THAT(log.text(), HasSubstr("own.rank1.pt"));
    }
  });
}

// Meanwhile this thread can start no other. Root has no such limit, so it becomes another user.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    EXPECT_EQ(::getrlimit(RLIMIT_NPROC, &before_), 0);
    const rlimit none{0, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NPROC, &none), 0);
    // Not by setresuid(), which changes all threads.
    EXPECT_TRUE(!was_root_ || ::syscall(SYS_setresuid, 65534, 65534, 0) == 0);
  }
  ~NoMoreThreads() {
    EXPECT_TRUE(!was_root_ || ::syscall(SYS_setresuid, 0, 0, 0) == 0);
    EXPECT_EQ(::setrlimit(RLIMIT_NPROC, &before_), 0);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

 private:
  bool was_root_ = ::geteuid() == 0;
  rlimit before_{};
};

TEST(CheckpointOfRanks, IsNotWrittenIfOneRankCannotStartItsThread) {
  run_ranks(2, [](Rank& rank) {
    at::set_num_threads(1);
    const auto group = comm::init();
    Values values;
    auto checkpoint = values.checkpoint(rank.folder() / "run", group);
    checkpoint.save_async(1);
    checkpoint.wait();
    {
      std::optional<NoMoreThreads> limit;
      if (rank.number() == 1) limit.emplace();
      EXPECT_THAT(message_of<Error>([&] { checkpoint.save_async(2); }),
                  HasSubstr("expected a thread that writes the files"));
    }
    values = {3, rank.number()};
    checkpoint.save_async(3);
    checkpoint.wait();
    EXPECT_THAT(checkpoint.steps(), ElementsAre(1, 3));
    values = {};
    EXPECT_EQ(checkpoint.resume(), 3);
    EXPECT_EQ(values.own, rank.number());
  });
}

TEST(CheckpointOfRanks, IsNotWrittenIfOneRankFails) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    struct Failing {
      bool fails;
      void save(torch::serialize::OutputArchive&) const {
        if (fails) throw std::runtime_error("no such state");
      }
      void load(torch::serialize::InputArchive&) {}
    } failing{rank.number() == 1};
    Values values{1, 1};
    auto checkpoint = values.checkpoint(rank.folder() / "run", group);
    checkpoint.add("failing", failing, PerRank::yes);
    const std::string message = message_of<std::runtime_error>([&] { checkpoint.save(1); });
    EXPECT_THAT(message, HasSubstr("no such state"));
    if (rank.number() == 0) {
      EXPECT_THAT(message, AllOf(HasSubstr("[checkpoint.save]"), HasSubstr("rank 1")));
      EXPECT_TRUE(fs::is_empty(checkpoint.directory()));
    }
    group.barrier();
    failing.fails = false;
    checkpoint.save(2);
    EXPECT_EQ(checkpoint.resume(), 2);
  });
}

TEST(CheckpointOfRanks, OfAnotherNumberOfRanksRestoresWhatIsEqualOnAll) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    std::int64_t common = 5;
    std::int64_t own = rank.number();
    Checkpoint(rank.folder() / "common", options_of(group)).add("common", common).save(1);
    Checkpoint(rank.folder() / "own", options_of(group)).add("own", own, PerRank::yes).save(1);
    common = 0;
    if (rank.number() == 0) {
      Checkpoint alone(rank.folder() / "common");
      alone.add("common", common);
      EXPECT_EQ(alone.resume(), 1);
      EXPECT_EQ(common, 5);
      Checkpoint refused(rank.folder() / "own");
      refused.add("own", own, PerRank::yes);
      EXPECT_THAT(message_of<FileError>([&] { refused.resume(); }),
                  AllOf(HasSubstr("1 ranks"), HasSubstr("'own'"), HasSubstr("got 2")));
    }
    group.barrier();
  });
}

// A sum over the samples of a rank, of which rank 0 gets all if the number of ranks changes.
struct Sum {
  double value = 0;
  bool is_first = true;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("value", c10::IValue(value));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue loaded;
    archive.read("value", loaded);
    value = loaded.toDouble();
  }
  void load_resharded(std::span<torch::serialize::InputArchive> saved) {
    double sum = 0;
    for (torch::serialize::InputArchive& archive : saved) {
      load(archive);
      if (is_first) sum += value;
    }
    value = sum;
  }
};

// A run that sums up the samples of a pass.
struct Summing {
  Summing(const fs::path& folder, const comm::Group& group)
      : sampler(30, group.size(), group.rank(), parallel::DistributedSamplerOptions().seed(1)),
        sum{0, group.rank() == 0},
        checkpoint(folder, options_of(group)) {
    checkpoint.add("sampler", sampler).add("sum", sum);
  }
  void take(std::size_t batch_size) {
    const std::optional<std::vector<std::size_t>> indices = sampler.next(batch_size);
    for (const std::size_t index : indices.value()) sum.value += static_cast<double>(index);
  }
  parallel::DistributedSampler sampler;
  Sum sum;
  Checkpoint checkpoint;
};

TEST(CheckpointOfRanks, IsResumedByAnotherNumberOfRanksWithinAPass) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const fs::path folder = rank.folder() / "run";
    Summing run(folder, group);
    run.take(4);
    run.checkpoint.save(1);
    if (rank.number() == 0) {
      Summing alone(folder, group.split(1));
      EXPECT_EQ(alone.checkpoint.resume(), 1);
      alone.take(6);
      alone.checkpoint.save(2);
    } else {
      group.split(1);
    }
    group.barrier();
    // And the other way round: three go on with what one has saved.
    EXPECT_EQ(run.checkpoint.resume(), 2);
    run.take(4);
    EXPECT_EQ(run.sampler.next(1), std::nullopt);
    at::Tensor sum = torch::tensor(run.sum.value, torch::kDouble);
    group.all_reduce(sum);
    EXPECT_EQ(sum.item<double>(), 29 * 30 / 2);
  });
}

TEST(CheckpointOfRanks, OfAnotherNumberOfRanksIsWholeOrRefused) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const fs::path folder = rank.folder() / "run";
    Summing run(folder, group);
    run.checkpoint.save(1);
    run.take(rank.number() == 0 ? 3 : 4);
    run.checkpoint.save(2);
    run.checkpoint.wait();
    if (rank.number() == 0) {
      Summing alone(folder, group.split(1));
      alone.sum.value = 5;
      EXPECT_THAT(message_of<FileError>([&] { alone.checkpoint.resume(); }),
                  AllOf(HasSubstr("'sampler'"), HasSubstr("sampler.rank0.pt"),
                        HasSubstr("equally many"), HasSubstr("got 3, 4")));
      EXPECT_EQ(alone.sum.value, 5);
      semitone::test::write_text(run.checkpoint.path_of(2) / "sampler.rank1.pt", "damaged");
      const CapturedLog log;
      EXPECT_EQ(alone.checkpoint.resume(), 1);
      EXPECT_THAT(log.text(), HasSubstr("sampler.rank1.pt"));
      EXPECT_EQ(alone.sum.value, 0);
    } else {
      group.split(1);
    }
  });
}

TEST(StopSignalsOfRanks, AreReceivedByAllRanksInTheSameCall) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const StopSignals signals(group);
    EXPECT_EQ(signals.received(), 0);
    if (rank.number() == 1) std::raise(SIGUSR1);
    EXPECT_EQ(signals.received(), SIGUSR1);
    EXPECT_EQ(StopSignals::first(), rank.number() == 1 ? SIGUSR1 : 0);
  });
}

TEST(CheckpointOfRanks, WithWeightsThatAreNaNIsNotWritten) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Linear model(2, 2);
    Checkpoint checkpoint(rank.folder() / "run", CheckpointOptions().group(group));
    checkpoint.add("model", model);
    checkpoint.save(1);
    // One rank is enough, and all get the same error.
    if (rank.number() == 1) {
      const torch::NoGradGuard no_grad;
      model->bias.fill_(std::nan(""));
    }
    EXPECT_THAT(message_of<DivergedError>([&] { checkpoint.save(2); }), HasSubstr("'bias'"));
    EXPECT_EQ(checkpoint.resume(), 1);
  });
}

TEST(CheckpointOfRanks, OfAnotherModelIsAnErrorOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Linear saved(2, 3);
    Checkpoint(rank.folder() / "run", options_of(group)).add("net", saved).save(1);
    torch::nn::Linear other(2, rank.number() == 0 ? 3 : 4);
    const auto before = semitone::test::copies(other->parameters());
    Checkpoint reader(rank.folder() / "run", options_of(group));
    reader.add("net", other);
    const std::string message = message_of<FileError>([&] { reader.resume(); });
    EXPECT_THAT(message,
                AllOf(HasSubstr("'weight', float32 [4, 2]"), HasSubstr("got float32 [3, 2]")));
    EXPECT_TRUE(same_bits(semitone::test::copies(other->parameters()), before));
  });
}

TEST(CheckpointOfRanks, OfOtherObjectsOnARankIsNotWritten) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    double sum = 0;
    double best = 0;
    Checkpoint checkpoint(rank.folder() / "run", options_of(group));
    checkpoint.add("sum", sum);
    if (rank.number() == 0) checkpoint.add("best", best);
    const std::string message = message_of<Error>([&] { checkpoint.save(1); });
    EXPECT_THAT(message, HasSubstr("'best', 'random', 'sum' on rank 0, and 'random', 'sum' on "
                                   "rank 1"));
    EXPECT_THAT(checkpoint.steps(), ElementsAre());
  });
}

// As with a disk of one machine. It is not damaged.
TEST(CheckpointOfRanks, ThatARankDoesNotSeeIsAnErrorOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    double value = 1;
    const auto checkpoint_in = [&](const fs::path& directory) {
      Checkpoint made(directory, options_of(group));
      made.add("value", value);
      return made;
    };
    checkpoint_in(rank.folder() / "run").save(1);
    group.barrier();
    Checkpoint reader = checkpoint_in(rank.folder() / (rank.number() == 0 ? "run" : "away"));
    value = 2;
    EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }),
                AllOf(HasSubstr("on all ranks, got none on rank 1"), HasSubstr("share")));
    EXPECT_EQ(value, 2);
  });
}

}  // namespace
}  // namespace semitone::checkpoint::test
