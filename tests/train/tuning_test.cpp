#include "src/train/tuning.h"

#include "semitone/amp/initialize.h"
#include "semitone/zoo/encoder.h"
#include "tests/support/errors.h"
#include "tests/train/small_training.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace semitone::train {
namespace {

// Trains an encoder on a batch, each time from the same weights. Returns the loss of the last step.
class EncoderTraining {
 public:
  EncoderTraining() {
    torch::manual_seed(2);
    tokens_ = torch::randint(64, {4, 16}, torch::kLong);
    labels_ = torch::randint(64, {64}, torch::kLong);
  }

  double operator()(const std::optional<amp::CastPolicy>& policy) {
    torch::manual_seed(3);
    const zoo::Encoder fresh(options_);
    copy(*fresh, *model);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    amp::Options options(policy.has_value() ? amp::OptLevel::O1 : amp::OptLevel::O0);
    options.dtype(torch::kBFloat16).verbosity(0);
    if (policy.has_value()) options.policy(*policy);
    auto mixed = amp::initialize(model, optimizer, options);
    double last = 0;
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = torch::cross_entropy_loss(mixed.forward(model, tokens_), labels_);
      mixed.scale_loss(loss, optimizer).backward();
      mixed.step(optimizer);
      last = loss.item<double>();
    }
    return last;
  }

 private:
  static void copy(const torch::nn::Module& from, const torch::nn::Module& to) {
    const torch::NoGradGuard no_grad;
    const auto source = from.parameters();
    const auto target = to.parameters();
    for (std::size_t i = 0; i < target.size(); ++i) {
      target[i].copy_(source[i]);
      target[i].mutable_grad().reset();
    }
  }

  const zoo::EncoderOptions options_ = zoo::EncoderOptions()
                                           .layers(2)
                                           .width(32)
                                           .heads(4)
                                           .ffn(64)
                                           .vocabulary(64)
                                           .max_positions(16)
                                           .dropout(0);
  at::Tensor tokens_, labels_;

 public:
  zoo::Encoder model{options_};
};

TEST(Tuning, AnEncodersPolicyMeetsItsBand) {
  EncoderTraining training;
  const auto given = amp::CastPolicy::by_name("paddle-o2", {torch::kCPU, torch::kBFloat16});
  // How far rounding moves the loss depends on the processor.
  const double fp32_loss = training(std::nullopt);
  const double band = std::abs(training(given) - fp32_loss) / fp32_loss / 4;
  ASSERT_GT(band, 1e-7);
  const amp::TuneResult result =
      amp::tune(training.model, given, std::ref(training), amp::TuneOptions().band(band));
  EXPECT_FALSE(result.is_unchanged());
  EXPECT_LE(std::abs(result.loss - result.fp32_loss), band * result.fp32_loss)
      << result.to_string();
  EXPECT_EQ(training(result.policy), result.loss);
  // What it keeps is needed.
  for (const std::string& op : result.operators) {
    amp::CastPolicy without = result.policy;
    const auto row = given.find(op);
    without.set(op, row.has_value() ? row->action : amp::CastAction::leave);
    EXPECT_GT(std::abs(training(without) - result.fp32_loss), band * result.fp32_loss) << op;
  }
}

TrainOptions short_training() {
  return options_for(amp::OptLevel::O1, torch::kBFloat16).max_steps(8);
}

amp::TuneResult tuned(const TrainOptions& options) {
  return tune_classifier(&drop_net, data(), options,
                         amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16}),
                         amp::TuneOptions().band(0.5));
}

TEST(Tuning, TrainsAClassifierTheSameWayEachTime) {
  const amp::TuneResult result = tuned(short_training());
  ASSERT_GE(result.trials.size(), 3U);
  EXPECT_EQ(result.trials[0].loss, result.trials[1].loss);
  // The loss is that of the last two steps.
  Recorder recorder;
  train_classifier(&drop_net, data(), short_training().opt_level(amp::OptLevel::O0), recorder);
  ASSERT_EQ(recorder.losses.size(), 8U);
  EXPECT_DOUBLE_EQ(result.fp32_loss, (recorder.losses[6] + recorder.losses[7]) / 2);
}

TEST(Tuning, TakesATrainingThatEndsEarlier) {
  EXPECT_TRUE(std::isfinite(tuned(short_training().limit_batches(2).epochs(2)).fp32_loss));
}

TEST(Tuning, RefusesATrainingThatEndsBeforeFourSteps) {
  const auto make = []() -> Classifier {
    ADD_FAILURE() << "a training began";
    return drop_net();
  };
  const auto refuses = [&](const TrainOptions& options,
                           std::initializer_list<std::string_view> texts) {
    test::expect_error(
        [&] {
          tune_classifier(make, data(), options,
                          amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16}),
                          amp::TuneOptions());
        },
        texts);
  };
  // One batch has all images.
  refuses(short_training().batch_size(640).epochs(1),
          {"[train.tuning] expected at least 4 steps, got 1 step in 1 epoch of 1 batch",
           "raise --epochs, or lower --batch-size"});
  refuses(short_training().limit_batches(1).epochs(3),
          {"got 3 steps in 3 epochs of 1 batch", "raise --epochs or --limit-batches"});
  refuses(short_training().limit_batches(3).epochs(1), {"got 3 steps in 1 epoch of 3 batches"});
}

TEST(Tuning, RefusesWhatItCannotRepeat) {
  test::expect_error([] { tuned(short_training().max_steps(3)); }, {"at least 4 steps", "3"});
  test::expect_error([] { tuned(short_training().checkpoint_dir("there")); },
                     {"no checkpoints", "'there'"});
}

}  // namespace
}  // namespace semitone::train
