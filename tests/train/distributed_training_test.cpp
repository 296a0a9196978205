// Trainings of several processes.

#include "tests/train/distributed_training.h"

#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "src/train/diverged_elsewhere.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/toy_nets.h"
#include "tests/train/bits.h"
#include "tests/train/spiky_net.h"
#include "tests/train/text_training.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace semitone::train {
namespace distributed {
namespace {

using amp::OptLevel;
using test::Rank;
using test::run_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// All ranks have rank 0's weights and buffers.
void expect_same_everywhere(const test::DropNet& model, const comm::Group& group) {
  const std::string mine = bits(*model);
  EXPECT_TRUE(group.broadcast(mine) == mine);
}

class DistributedTraining : public ::testing::TestWithParam<OptLevel> {};

TEST_P(DistributedTraining, LearnsTheSameModelOnEveryRank) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Models models(0.2);
    Losses losses;
    const TrainResult result = train_classifier(models.factory(), data(),
                                                options_for(GetParam(), group).epochs(2), losses);
    EXPECT_GT(result.test_accuracy, 0.95);
    EXPECT_EQ(result.steps, 80);
    EXPECT_EQ(result.processes, 2);
    EXPECT_EQ(losses.epochs.back().train_loss, result.train_loss);
    expect_same_everywhere(models.last, group);
    const auto said = [](const TrainResult& of) {
      return std::to_string(of.test_accuracy) + " " + std::to_string(of.test_loss) + " " +
             std::to_string(of.train_loss) + " " + std::to_string(of.skipped_steps);
    };
    EXPECT_EQ(group.broadcast(said(result)), said(result));
    // Each has images of its own.
    const std::string first = std::to_string(losses.values[0]);
    const std::string of_rank_0 = group.broadcast(first);
    if (group.rank() == 1) {
      EXPECT_NE(first, of_rank_0);
    }
  });
}

// Two ranks with batches of 8 are one process with batches of 16.
TEST_P(DistributedTraining, DoesWhatOneProcessWithTheWholeBatchDoes) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Models alone(0);
    Losses whole;
    train_classifier(alone.factory(), data(),
                     options_for(GetParam(), comm::Group()).batch_size(16).max_steps(20), whole);
    Models shared(0);
    Losses mine;
    train_classifier(shared.factory(), data(),
                     options_for(GetParam(), group).sync_batch_norm(true).max_steps(20), mine);
    at::Tensor means = torch::tensor(mine.values, torch::kDouble);
    group.all_reduce(means, comm::ReduceOp::mean);
    // Rounding differs, at O0 that of fp32 sums, else of bf16; 20 steps of it.
    const double tolerance = GetParam() == OptLevel::O0 ? 1e-4 : 0.05;
    for (std::size_t i = 0; i < whole.values.size(); ++i) {
      const double difference =
          means[static_cast<std::int64_t>(i)].item<double>() - whole.values[i];
      EXPECT_TRUE(std::abs(difference) <= tolerance) << "step " << i << ": " << difference;
    }
  });
}

TEST_P(DistributedTraining, AResumedRunGoesOnBitForBit) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto options = [&] { return options_for(GetParam(), group).epochs(2); };
    Models models(0.2);
    Losses whole;
    const auto expected =
        train_classifier(models.factory(), data(), options().max_steps(60), whole);
    const std::string expected_bits = bits(models.last->parameters());
    const auto resumable = [&](std::int64_t steps) {
      return options().max_steps(steps).checkpoint_dir(rank.folder() / "run").resume_auto(true);
    };
    train_classifier(models.factory(), data(), resumable(30));
    torch::manual_seed(12345);  // what a new process would not have
    Losses second;
    const auto resumed = train_classifier(models.factory(), data(), resumable(60), second);
    EXPECT_EQ(second.values, std::vector<double>(whole.values.begin() + 30, whole.values.end()));
    EXPECT_EQ(resumed.train_loss, expected.train_loss);
    EXPECT_EQ(resumed.test_loss, expected.test_loss);
    EXPECT_TRUE(bits(models.last->parameters()) == expected_bits);
  });
}

INSTANTIATE_TEST_SUITE_P(Levels, DistributedTraining,
                         ::testing::Values(OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3),
                         [](const auto& level) { return std::string(amp::name_of(level.param)); });

// In several buckets, whose layout a resumed run has from the first step on.
TEST(DistributedTrainer, AResumedRunOfThreeProcessesSumsInTheSameOrder) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const auto options = [&](std::int64_t steps) {
      return options_for(OptLevel::O0, group)
          .ddp(parallel::DistributedDataParallelOptions().bucket_cap_mb(0.001).first_bucket_mb(
              0.0001))
          .max_steps(steps);
    };
    Models models(0.2);
    train_classifier(models.factory(), data(), options(12));
    const std::string expected = bits(models.last->parameters());
    for (const std::int64_t stop : {1, 6}) {
      const auto resumable = [&](std::int64_t steps) {
        return options(steps)
            .checkpoint_dir(rank.folder() / std::to_string(stop))
            .resume_auto(true);
      };
      train_classifier(models.factory(), data(), resumable(stop));
      train_classifier(models.factory(), data(), resumable(12));
      EXPECT_TRUE(bits(models.last->parameters()) == expected) << stop;
    }
  });
}

TEST(DistributedTrainer, DropsOtherThingsOnEveryRank) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    // The same images on both ranks: what differs are the dropped values.
    zoo::ImageSet equal = test::made_up_images(1, 1);
    equal.images = equal.images.repeat({16, 1, 1});
    equal.labels = equal.labels.repeat({16});
    const DataSet same = image_data(equal, test::made_up_images(201, 2));
    Models models(0.5);
    Losses losses;
    train_classifier(models.factory(), same, options_for(OptLevel::O0, group), losses);
    const std::string mine = std::to_string(losses.values.front());
    const std::string first = group.broadcast(mine);
    if (group.rank() == 1) {
      EXPECT_NE(mine, first);
    }
  });
}

// Each rank has its share of the sequences.
TEST(DistributedTrainer, TwoRanksLearnATextAsOneProcessDoes) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto options = [](const comm::Group& of) {
      return text_options(OptLevel::O0, torch::kBFloat16)
          .batch_size(8 / of.size())
          .group(of)
          .epochs(2);
    };
    Losses whole;
    const TrainResult alone = train_classifier(small_gpt, short_text(), options({}), whole);
    Losses mine;
    const TrainResult shared = train_classifier(small_gpt, short_text(), options(group), mine);
    at::Tensor means = torch::tensor(mine.values, torch::kDouble);
    group.all_reduce(means, comm::ReduceOp::mean);
    ASSERT_EQ(mine.values.size(), whole.values.size());
    // Sums in fp32 have another order. The last batch of an epoch has a sequence twice.
    const auto batches = std::ssize(whole.values) / 2;
    for (std::int64_t i = 0; i + 1 < batches; ++i) {
      EXPECT_NEAR(means[i].item<double>(), whole.values[static_cast<std::size_t>(i)], 1e-4) << i;
    }
    EXPECT_NEAR(shared.test_loss, alone.test_loss, 0.02);
    EXPECT_EQ(shared.processes, 2);
  });
}

// They would train something that nobody asked for, or wait for each other.
TEST(DistributedTrainer, OtherSettingsOrDataOfOneRankAreAnErrorOnAll) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const bool differs = rank.number() == 1;
    Models models(0.2);
    const auto options = [&] { return options_for(OptLevel::O0, group).max_steps(2); };
    const auto refuses = [&](const TrainOptions& mine, const DataSet& set,
                             const std::string& difference) {
      test::expect_error(
          [&] { train_classifier(models.factory(), set, mine); },
          {"[train.trainer] expected the same settings and data on all ranks, got " + difference,
           "give all processes the same flags and the same data"});
    };
    refuses(options().lr(differs ? 0.1 : 0.05), data(),
            "--lr 0.05 on rank 0 and --lr 0.1 on rank 1");
    refuses(options().opt_level(differs ? OptLevel::O1 : OptLevel::O0).fp8(true), data(),
            "--opt-level O0 on rank 0 and --opt-level O1 on rank 1");
    refuses(options().optimizer(differs ? "adamw" : "sgd"), data(),
            "--optimizer sgd on rank 0 and --optimizer adamw on rank 1");
    refuses(options().max_steps(differs ? 3 : 2), data(),
            "--max-steps 2 on rank 0 and --max-steps 3 on rank 1");
    refuses(options().schedule(Schedule::constant).epochs(differs ? 1 : 2), data(),
            "--epochs 2 on rank 0 and --epochs 1 on rank 1");
    refuses(options().check_nonfinite(differs), data(),
            "--check-nonfinite false on rank 0 and --check-nonfinite true on rank 1");
    refuses(options().checkpoint_dir(differs ? rank.folder() / "run" : ""), data(),
            "--checkpoint-dir not set on rank 0 and --checkpoint-dir set on rank 1");
    // As if files were missing on a machine, and as if one had another version of them.
    const auto images = [](std::int64_t train, std::uint64_t seed) {
      return image_data(test::made_up_images(train, seed), test::made_up_images(201, 2));
    };
    refuses(options(), images(differs ? 320 : 640, 1),
            "training images 640 on rank 0 and training images 320 on rank 1");
    refuses(options(), images(640, differs ? 3 : 1), "data with the checksum ");
    // The group is as good as before. Each may write another file.
    const auto weights = rank.folder() / (differs ? "b.safetensors" : "a.safetensors");
    EXPECT_EQ(train_classifier(models.factory(), data(), options().save_weights(weights)).steps, 2);
  });
}

TEST(DistributedTrainer, EveryRankRefusesABatchThatIsTooSmallForBatchNorm) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto make = [] {
      return Classifier(test::ToyNet(test::ToyNetOptions{
                            .inputs = 28 * 28, .hidden = 8, .outputs = 10, .normalised = true}),
                        /*smallest_batch=*/2);
    };
    const DataSet ten = image_data(test::made_up_images(10, 1), test::made_up_images(2, 2));
    const auto options = options_for(OptLevel::O0, group);
    // LibTorch's layers check the batch of their own process, also with --sync-bn.
    for (const bool synced : {false, true}) {
      Losses losses;
      try {
        train_classifier(make, ten, TrainOptions(options).batch_size(4).sync_batch_norm(synced),
                         losses);
        ADD_FAILURE() << "no Error";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(),
                    HasSubstr("[train.trainer] expected batches of at least 2 images per process "
                              "for the model's BatchNorm layers, got 5 in batches of 4, of which "
                              "the last has 1 — use another --batch-size or --global-batch-size"));
      }
      EXPECT_EQ(losses.values.size(), 0U);
    }
    // The group is as good as before.
    EXPECT_EQ(train_classifier(make, ten, TrainOptions(options).batch_size(5)).steps, 1);
  });
}

// DropNet, whose third forward pass divides 0 by 0 on one rank.
struct FaultyNetImpl : torch::nn::Module {
  explicit FaultyNetImpl(bool is_faulty_) : is_faulty(is_faulty_) {
    register_module("inner", inner);
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor logits = inner->forward(images);
    if (++calls != 3 || !is_faulty) return logits;
    const at::Tensor zeros = torch::zeros_like(logits);
    return logits + zeros.div(zeros);
  }
  test::DropNet inner{0.2};
  bool is_faulty;
  int calls = 0;
};
TORCH_MODULE(FaultyNet);

TEST(DistributedTrainer, TheRankThatMadeANanSaysSoAndAllEnd) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto make = [&] { return Classifier(FaultyNet(rank.number() == 1)); };
    const auto options = options_for(OptLevel::O0, group).check_nonfinite(true).max_steps(10);
    Losses losses;
    try {
      train_classifier(make, data(), options, losses);
      ADD_FAILURE() << "no DivergedError";
    } catch (const DivergedError& error) {
      const bool says = dynamic_cast<const DivergedElsewhere*>(&error) == nullptr;
      EXPECT_EQ(says, rank.number() == 1);
      EXPECT_THAT(error.what(),
                  HasSubstr("operator 'div.Tensor' made 80 nan in result (float32 [8, 10]"));
      EXPECT_THAT(error.what(), HasSubstr("in the forward pass after layer 'inner.fc', at step 3 "
                                          "on rank 1"));
    }
    EXPECT_EQ(losses.values.size(), 2U);
  });
}

// Spikes on rank 1 alone.
SpikyNet net_of(const comm::Group& group, const std::set<std::int64_t>& bad_steps, double factor) {
  return SpikyNet(group.rank() == 1 ? bad_steps : std::set<std::int64_t>{}, factor);
}

// After each step and each rollback, the parameters' values.
struct Weights : Losses {
  using Losses::on;
  void on(const TrainingBegins& begin) override { model = &begin.model; }
  void on(const StepDone& step) override { after[step.step] = bits(model->parameters()); }
  void on(const LossSpike& spike) override { spikes.push_back(spike.step); }
  void on(const RolledBack& rolled_back) override {
    after[rolled_back.step] = bits(model->parameters());
    rollbacks.push_back(rolled_back.step);
  }
  const torch::nn::Module* model = nullptr;
  std::map<std::int64_t, std::string> after;
  std::vector<std::int64_t> spikes;
  std::vector<std::int64_t> rollbacks;
};

TrainOptions options_on_spike(OnSpike action, OptLevel level, const comm::Group& group) {
  return options_for(level, group)
      .dtype(torch::kBFloat16)
      .max_steps(24)
      .divergence_guard(amp::DivergenceGuardOptions().max_loss_ratio(5).warmup_steps(5))
      .on_spike(action);
}

TEST(DistributedTrainer, EveryRankLeavesOutTheBatchesOfASpike) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    for (const auto level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
      for (const double factor : {kSpike, std::nan("")}) {
        SCOPED_TRACE(std::string(amp::name_of(level)) + " " + std::to_string(factor));
        Weights weights;
        const auto result =
            train_classifier([&] { return Classifier(net_of(group, {12, 13, 18}, factor)); },
                             data(), options_on_spike(OnSpike::skip, level, group), weights);
        EXPECT_THAT(weights.spikes, ElementsAre(12, 13, 18));
        for (const std::int64_t step : {12, 13, 18})
          EXPECT_TRUE(weights.after[step] == weights.after[step - 1]) << step;
        EXPECT_FALSE(weights.after[14] == weights.after[13]);
        EXPECT_EQ(result.loss_spikes, 3);
        EXPECT_TRUE(std::isfinite(result.test_loss));
        EXPECT_TRUE(group.broadcast(weights.after[24]) == weights.after[24]);
      }
    }
  });
}

TEST(DistributedTrainer, EveryRankRollsBackWhenOneHasANan) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {OptLevel::O0, OptLevel::O2}) {
      const std::string name(amp::name_of(level));
      SCOPED_TRACE(name);
      Weights weights;
      // At O2 in bf16 the scale is 1, and the masters' gradients are checked: steps are skipped.
      const auto result = train_classifier(
          [&] { return Classifier(net_of(group, {13, 14}, std::nan(""))); }, data(),
          options_on_spike(OnSpike::rollback, level, group)
              .max_consecutive_skips(2)
              .checkpoint_dir(rank.folder() / name)
              .save_every({.steps = 10}),
          weights);
      EXPECT_EQ(weights.rollbacks.front(), level == OptLevel::O0 ? 13 : 14);
      EXPECT_EQ(result.rollbacks, std::ssize(weights.rollbacks));
      EXPECT_TRUE(weights.after[weights.rollbacks.front()] == weights.after[10]);
      EXPECT_FALSE(weights.after[15] == weights.after[10]);
      EXPECT_TRUE(std::isfinite(result.test_loss));
      EXPECT_TRUE(group.broadcast(weights.after[24]) == weights.after[24]);
    }
  });
}

TEST(DistributedTrainer, LookingForNansChangesNoWeight) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    for (const auto level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
      std::string weights;
      for (const bool check : {false, true}) {
        Models models(0.2);
        train_classifier(models.factory(), data(),
                         options_for(level, group).check_nonfinite(check).max_steps(12));
        const std::string now = bits(*models.last);
        if (check) {
          EXPECT_TRUE(now == weights) << amp::name_of(level);
        }
        weights = now;
      }
    }
  });
}

TEST(DistributedTrainer, CompressedGradientsTrainAsWell) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      Models models(0.2);
      const auto result =
          train_classifier(models.factory(), data(),
                           options_for(OptLevel::O1, group)
                               .epochs(2)
                               .ddp(parallel::DistributedDataParallelOptions().compress(dtype)));
      EXPECT_GT(result.test_accuracy, 0.95);
    }
  });
}

}  // namespace
}  // namespace distributed
}  // namespace semitone::train
