// Checkpoints of optimizers of which each rank has, and saves, a share.

#include "semitone/amp/initialize.h"
#include "semitone/checkpoint.h"
#include "semitone/comm/init.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "tests/checkpoint/data_parallel_training.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::checkpoint::test {
namespace {

namespace fs = std::filesystem;
using parallel::ZeroRedundancyOptimizer;
using semitone::test::message_of;
using semitone::test::Rank;
using semitone::test::run_ranks;
using semitone::test::same_bits;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Factory = ZeroRedundancyOptimizer::Factory;
using Groups = ZeroRedundancyOptimizer::ParamGroups;

Factory adamw() {
  return [](Groups groups) {
    return std::make_unique<torch::optim::AdamW>(std::move(groups),
                                                 torch::optim::AdamWOptions(0.1));
  };
}

// Of LibTorch: one that makes its state in the first step, and one that makes it in its
// constructor. Of Semitone: one whose load() checks and replaces all.
std::vector<std::pair<std::string, Factory>> factories() {
  return {
      {"AdamW", adamw()},
      {"Adagrad",
       [](Groups groups) {
         return std::make_unique<torch::optim::Adagrad>(std::move(groups),
                                                        torch::optim::AdagradOptions(0.1));
       }},
      {"FusedAdam",
       [](Groups groups) {
         return std::make_unique<optim::FusedAdam>(std::move(groups), optim::FusedAdamOptions(0.1));
       }},
  };
}

// The gradients depend on the step only, so that any number of ranks trains alike.
struct Training {
  Training(const Factory& make, const comm::Group* group) {
    torch::manual_seed(1);
    for (const std::int64_t size : {7, 5, 3, 2, 1})
      parameters.push_back(torch::randn({size}).requires_grad_());
    Groups groups;
    groups.emplace_back(std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 3));
    groups.emplace_back(std::vector<at::Tensor>(parameters.begin() + 3, parameters.end()));
    if (group == nullptr) {
      optimizer = make(std::move(groups));
    } else {
      optimizer = std::make_unique<ZeroRedundancyOptimizer>(std::move(groups), make, *group);
    }
  }

  void train_to(std::int64_t end) {
    for (; step < end; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(100 + step));
      for (at::Tensor& p : parameters) p.mutable_grad() = torch::randn_like(p);
      optimizer->step();
    }
  }

  Checkpoint checkpoint(const fs::path& folder, const comm::Group& group) {
    Checkpoint made(folder, options_of(group));
    for (std::size_t i = 0; i < parameters.size(); ++i)
      made.add("parameter" + std::to_string(i), parameters[i]);
    made.add("optimizer", *optimizer).add("step", step);
    return made;
  }

  std::vector<at::Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::int64_t step = 0;
};

// The parameters of an undisturbed training after 6 steps.
std::vector<at::Tensor> undisturbed(const Factory& make) {
  Training run(make, nullptr);
  run.train_to(6);
  return run.parameters;
}

// The parameters of a training that continues from a checkpoint of step 3.
std::vector<at::Tensor> continued(Training run, const fs::path& folder, const comm::Group& group) {
  run.train_to(1);  // the loaded state replaces this one
  EXPECT_EQ(run.checkpoint(folder, group).resume(), 3);
  EXPECT_EQ(run.step, 3);
  run.train_to(6);
  return run.parameters;
}

void save(Training run, const fs::path& folder, const comm::Group& group) {
  run.train_to(3);
  run.checkpoint(folder, group).save(3);
}

TEST(CheckpointOfShards, HasAFileOfEachRankWithItsShareOnly) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const fs::path folder = rank.folder() / "run";
    save(Training(adamw(), &group), folder, group);
    const fs::path step = folder / "step-00000003";
    EXPECT_FALSE(fs::exists(step / "optimizer.pt"));
    const Training other(adamw(), &group);
    auto& zero = dynamic_cast<ZeroRedundancyOptimizer&>(*other.optimizer);
    std::size_t own = 0;
    for (const std::vector<int>& owners : zero.owners())
      own += static_cast<std::size_t>(std::ranges::count(owners, rank.number()));
    for (const int saved : {0, 1}) {
      const fs::path file = step / ("optimizer.rank" + std::to_string(saved) + ".pt");
      Training whole(adamw(), nullptr);
      torch::load(*whole.optimizer, file.string());
      const std::size_t states = whole.optimizer->state().size();
      EXPECT_EQ(states, saved == rank.number() ? own : 5 - own) << file;
    }
  });
}

TEST(CheckpointOfShards, ContinuesShardedAsItWas) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, make] : factories()) {
      const fs::path folder = rank.folder() / name;
      save(Training(make, &group), folder, group);
      EXPECT_TRUE(same_bits(continued({make, &group}, folder, group), undisturbed(make))) << name;
    }
  });
}

TEST(CheckpointOfShards, ContinuesUnshardedAndTheOtherWayRound) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, make] : factories()) {
      const fs::path sharded = rank.folder() / (name + ".sharded");
      save(Training(make, &group), sharded, group);
      EXPECT_TRUE(same_bits(continued({make, nullptr}, sharded, group), undisturbed(make))) << name;
      const fs::path whole = rank.folder() / (name + ".whole");
      save(Training(make, nullptr), whole, group);
      EXPECT_TRUE(same_bits(continued({make, &group}, whole, group), undisturbed(make))) << name;
    }
  });
}

TEST(CheckpointOfShards, ContinuesWithFewerAndMoreRanks) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    const comm::Group pair = group.split(2);
    for (const auto& [name, make] : factories()) {
      const fs::path of_four = rank.folder() / (name + ".four");
      save(Training(make, &group), of_four, group);
      EXPECT_TRUE(same_bits(continued({make, &pair}, of_four, pair), undisturbed(make))) << name;
      const fs::path of_two = rank.folder() / (name + ".two");
      if (rank.number() < 2) save(Training(make, &pair), of_two, pair);
      group.barrier();
      EXPECT_TRUE(same_bits(continued({make, &group}, of_two, group), undisturbed(make))) << name;
    }
  });
}

// With 16-bit weights, masters and loss scales. The same data on all ranks, so that any number of
// them trains alike.
struct MixedTraining {
  MixedTraining(const amp::Options& options, bool split_master, const comm::Group& group)
      : optimizer(optimizer_of(split_master, group)),
        mixed(amp::initialize(*model, *optimizer, options)) {}

  static torch::nn::Sequential made() {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(6, 5), torch::nn::ReLU(),
                                 torch::nn::Linear(5, 3), torch::nn::Linear(3, 1));
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(bool split_master,
                                                        const comm::Group& group) const {
    const Factory make = [split_master](Groups groups) {
      return std::make_unique<optim::FusedAdam>(
          std::move(groups), optim::FusedAdamOptions(0.1).split_master(split_master));
    };
    return std::make_unique<ZeroRedundancyOptimizer>(model->parameters(), make, group);
  }

  void train_to(std::int64_t end) {
    for (; step < end; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(100 + step));
      optimizer->zero_grad();
      const at::Tensor loss = mixed.forward(model, torch::randn({4, 6})).square().mean();
      mixed.scale_loss(loss, *optimizer).backward();
      mixed.step(*optimizer);
    }
  }

  Checkpoint checkpoint(const fs::path& folder, const comm::Group& group) {
    Checkpoint made(folder, options_of(group));
    made.add("model", *model).add("optimizer", *optimizer).add("mixed", mixed).add("step", step);
    return made;
  }

  std::vector<at::Tensor> fp32_weights() {
    const auto fp32 = mixed.fp32_weights(*model);
    return semitone::test::copies(model->parameters());
  }

  torch::nn::Sequential model = made();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  amp::MixedPrecision mixed;
  std::int64_t step = 0;
};

TEST(CheckpointOfShards, OfMixedPrecisionContinuesWithOtherNumbersOfRanks) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    const comm::Group pair = group.subgroup({0, 1});
    const comm::Group three = group.subgroup({0, 1, 2});
    const comm::Group one = group.subgroup({rank.number()});
    int number = 0;
    for (const bool split : {false, true}) {
      for (const auto dtype : {at::kHalf, at::kBFloat16}) {
        SCOPED_TRACE(testing::Message() << "split " << split << ", " << dtype);
        const auto options = amp::Options("O2").dtype(dtype).loss_scale("dynamic").verbosity(0);
        const fs::path folder = rank.folder() / std::to_string(number++);
        if (rank.number() < 2) {
          MixedTraining saved(options, split, pair);
          saved.train_to(3);
          saved.checkpoint(folder, pair).save(3);
        }
        group.barrier();
        MixedTraining undisturbed(options, split, one);
        undisturbed.train_to(3);
        const std::vector<at::Tensor> at_save = undisturbed.fp32_weights();
        undisturbed.train_to(6);
        for (const comm::Group& ranks : {one, pair, three, group}) {
          if (ranks.size() == 2 && rank.number() > 1) continue;
          if (ranks.size() == 3 && rank.number() > 2) continue;
          SCOPED_TRACE(testing::Message() << ranks.size() << " ranks");
          MixedTraining resumed(options, split, ranks);
          EXPECT_EQ(resumed.checkpoint(folder, ranks).resume(), 3);
          resumed.train_to(6);
          EXPECT_TRUE(same_bits(resumed.fp32_weights(), undisturbed.fp32_weights()));
        }
        MixedTraining other(amp::Options("O1").dtype(dtype).verbosity(0), split, group);
        EXPECT_EQ(other.checkpoint(folder, group).resume(), 3);
        EXPECT_TRUE(same_bits(other.fp32_weights(), at_save));
      }
    }
  });
}

TEST(CheckpointOfShards, ContinuesWhereParametersHaveOtherOwners) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Factory make = adamw();
    std::vector<at::Tensor> parameters{torch::ones({2}).requires_grad_(),
                                       torch::ones({9}).requires_grad_()};
    const auto step = [&](torch::optim::Optimizer& optimizer, double gradient) {
      for (at::Tensor& p : parameters) p.mutable_grad() = torch::full_like(p, gradient);
      optimizer.step();
    };
    // The larger one would come first, but the smaller one is there before it.
    ZeroRedundancyOptimizer grown(std::vector{parameters[0]}, make, group);
    grown.param_groups()[0].params().push_back(parameters[1]);
    step(grown, 1);
    ZeroRedundancyOptimizer made(parameters, make, group);
    ASSERT_NE(made.owners(), grown.owners());

    const fs::path folder = rank.folder() / "run";
    Checkpoint(folder, options_of(group)).add("optimizer", grown).save(1);
    const auto before = semitone::test::copies(parameters);
    step(grown, 3);
    const auto expected = semitone::test::copies(parameters);
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(before[i]);
    }
    Checkpoint reader(folder, options_of(group));
    reader.add("optimizer", made);
    EXPECT_EQ(reader.resume(), 1);
    step(made, 3);
    EXPECT_TRUE(same_bits(parameters, expected));
  });
}

TEST(CheckpointOfShards, IsSavedAndLoadedByAllRanksOfTheOptimizer) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Training run(adamw(), &group);
    Checkpoint alone(rank.folder() / std::to_string(rank.number()));
    EXPECT_THAT(message_of<Error>([&] { alone.add("adam", *run.optimizer); }),
                AllOf(HasSubstr("[checkpoint.add]"), HasSubstr("all 2 ranks"), HasSubstr("'adam'"),
                      HasSubstr("a group of 1"), HasSubstr("CheckpointOptions().group(group)")));
  });
}

TEST(CheckpointOfShards, OfGroupsOfDifferentSizesContinues) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const comm::Group part = group.subgroup({0, 1});  // rank 2 is alone
    const Factory make = adamw();
    const fs::path folder = rank.folder() / "run";
    save(Training(make, &part), folder, group);
    EXPECT_TRUE(same_bits(continued({make, &part}, folder, group), undisturbed(make)));
  });
}

TEST(CheckpointOfShards, IsNotSavedWithoutAShare) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    const comm::Group pair = group.split(2);
    const comm::Group even = group.subgroup({0, 2});
    Training run(adamw(), &pair);
    run.train_to(1);
    if (rank.number() % 2 == 1) return;
    auto checkpoint = run.checkpoint(rank.folder() / "run", even);
    for (const bool async : {false, true}) {
      EXPECT_THAT(message_of<Error>([&] { async ? checkpoint.save_async(1) : checkpoint.save(1); }),
                  AllOf(HasSubstr("all shares of 'optimizer'"), HasSubstr("got 1 of 2, 1 of 2")));
    }
  });
}

// Ranks 0 to 2 have all shares of their own.
TEST(CheckpointOfShards, IsNotSavedIfOtherRanksLackAShare) {
  run_ranks(5, [](Rank& rank) {
    const auto group = comm::init();
    const comm::Group three = group.subgroup({0, 1, 2});
    const comm::Group two = group.subgroup({3, 4});
    const comm::Group four = group.subgroup({0, 1, 2, 3});
    Training run(adamw(), rank.number() < 3 ? &three : &two);
    run.train_to(1);
    if (rank.number() == 4) return;
    auto checkpoint = run.checkpoint(rank.folder() / "run", four);
    EXPECT_THAT(message_of<Error>([&] { checkpoint.save(1); }),
                AllOf(HasSubstr("all shares of 'optimizer'"), HasSubstr("3 of 3, 1 of 2")));
  });
}

TEST(CheckpointOfShards, IsNotLoadedInPart) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Factory make = adamw();
    const fs::path folder = rank.folder() / "run";
    save(Training(make, &group), folder, group);
    if (rank.number() == 0) fs::remove(folder / "step-00000003" / "optimizer.rank1.pt");
    group.barrier();
    Training run(make, nullptr);
    run.train_to(2);
    const auto before = semitone::test::copies(run.parameters);
    auto reader = run.checkpoint(folder, group);
    EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }), HasSubstr("optimizer.rank1.pt"));
    EXPECT_EQ(run.step, 2);
    EXPECT_TRUE(same_bits(run.parameters, before));
  });
}

}  // namespace
}  // namespace semitone::checkpoint::test
