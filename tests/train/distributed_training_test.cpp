// Trainings of several processes.

#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/zoo/convnet.h"
#include "src/train/trainer.h"
#include "tests/support/errors.h"
#include "tests/support/image_files.h"
#include "tests/support/run_ranks.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

using amp::OptLevel;
using test::Rank;
using test::run_ranks;

// Passes each model that it creates to the test.
class Models {
 public:
  explicit Models(double dropout) : dropout_(dropout) {}
  ModelFactory factory() {
    return [this] {
      last = test::DropNet(dropout_);
      return Classifier(last);
    };
  }
  test::DropNet last{nullptr};

 private:
  double dropout_;
};

// 201 test images: no multiple of the ranks.
const DataSet& data() {
  static const DataSet data{test::made_up_images(640, 1), test::made_up_images(201, 2)};
  return data;
}

struct Losses : Observer {
  using Observer::on;
  void on(const StepDone& step) override { values.push_back(step.loss); }
  void on(const EpochDone& epoch) override { epochs.push_back(epoch); }
  std::vector<double> values;
  std::vector<EpochDone> epochs;
};

TrainOptions options_for(OptLevel level, const comm::Group& group) {
  return TrainOptions().opt_level(level).batch_size(8).lr(0.05).group(group);
}

std::string bits(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor bytes = tensor.detach().contiguous();
    text.append(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  }
  return text;
}

// All ranks have rank 0's weights and buffers.
void expect_same_everywhere(const test::DropNet& model, const comm::Group& group) {
  const std::string mine = bits(model->parameters()) + bits(model->buffers());
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
    const auto file = rank.folder() / "half";
    train_classifier(models.factory(), data(), options().max_steps(30).save(file));
    torch::manual_seed(12345);  // what a new process would not have
    Losses second;
    const auto resumed =
        train_classifier(models.factory(), data(), options().max_steps(60).resume(file), second);
    EXPECT_EQ(second.values, std::vector<double>(whole.values.begin() + 30, whole.values.end()));
    EXPECT_EQ(resumed.train_loss, expected.train_loss);
    EXPECT_EQ(resumed.test_loss, expected.test_loss);
    EXPECT_TRUE(bits(models.last->parameters()) == expected_bits);
  });
}

INSTANTIATE_TEST_SUITE_P(Levels, DistributedTraining,
                         ::testing::Values(OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3),
                         [](const auto& level) { return std::string(amp::name_of(level.param)); });

TEST(DistributedTrainer, DropsOtherThingsOnEveryRank) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    // The same images on both ranks: what differs are the dropped values.
    DataSet same = data();
    same.train.images = same.train.images.slice(0, 0, 1).repeat({16, 1, 1});
    same.train.labels = same.train.labels.slice(0, 0, 1).repeat({16});
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

TEST(DistributedTrainer, StatesOfAnotherNumberOfProcessesAreRefused) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto file = rank.folder() / "one";
    Models models(0);
    if (group.rank() == 0) {
      train_classifier(models.factory(), data(),
                       options_for(OptLevel::O0, comm::Group()).max_steps(2).save(file));
    }
    group.barrier();
    test::expect_error(
        [&] {
          train_classifier(models.factory(), data(),
                           options_for(OptLevel::O0, group).max_steps(4).resume(file));
        },
        {"[train.checkpoint]", "--nproc 2", "got 1"});
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
}  // namespace semitone::train
