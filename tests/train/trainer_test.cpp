#include "src/train/trainer.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/zoo/convnet.h"
#include "src/train/models.h"
#include "src/train/optimizers.h"
#include "src/train/step_count.h"
#include "tests/optim/against_torch.h"
#include "tests/support/image_files.h"
#include "tests/support/recorded_events.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/every_level.h"
#include "tests/train/small_training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::train {
namespace {

using amp::OptLevel;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Trainer, AStepIsInTheseParts) {
  const DataSet one_batch = image_data(test::made_up_images(8, 1), test::made_up_images(8, 2));
  const test::RecordedEvents events;
  train_classifier(drop_net, one_batch, options_for(OptLevel::O1, torch::kBFloat16).epochs(1));
  EXPECT_THAT(events.phases(), ::testing::StartsWith("data() forward(forward()) backward() "
                                                     "optimizer() unscale() optimizer("));
  EXPECT_EQ(events.gradients().size(), 1);
}

// -------------------------------------------------------------------------------------------------
// at every level and dtype

class TrainerAtEveryLevel : public ::testing::TestWithParam<LevelAndDtype> {
 protected:
  TrainOptions options() const {
    return options_for(std::get<0>(GetParam()), std::get<1>(GetParam()));
  }
};

TEST_P(TrainerAtEveryLevel, LearnsAndSaysWhatItDid) {
  Recorder recorder;
  const TrainResult result = train_classifier(drop_net, data(), options(), recorder);
  EXPECT_GT(result.test_accuracy, 0.95);
  EXPECT_LT(result.train_loss, 0.5);
  EXPECT_EQ(result.opt_level, std::get<0>(GetParam()));
  EXPECT_EQ(result.dtype, training_dtype(options()));
  EXPECT_EQ(result.memory_format, MemoryFormat::nhwc);
  EXPECT_EQ(result.epochs, 2);
  EXPECT_EQ(result.steps, 160);
  EXPECT_GT(result.items_per_second, 0);
  EXPECT_GT(result.ms_per_step, 0);
  EXPECT_GT(result.peak_rss_bytes, result.peak_tensor_bytes);
  EXPECT_GT(result.peak_tensor_bytes, 10'000);
  EXPECT_EQ(result.threads, at::get_num_threads());
  ASSERT_EQ(recorder.steps.size(), 160U);
  EXPECT_EQ(recorder.steps.front().batches, 80);
  EXPECT_EQ(recorder.steps.back().epoch, 2);
  EXPECT_EQ(recorder.steps.back().batch, 80);
  EXPECT_EQ(recorder.steps.back().step, 160);
  EXPECT_EQ(recorder.steps.back().loss_scale, result.final_loss_scale);
  ASSERT_EQ(recorder.epochs.size(), 2U);
  EXPECT_EQ(recorder.epochs.back().train_loss, result.train_loss);
  ASSERT_EQ(recorder.tests.size(), 1U);
  EXPECT_EQ(recorder.tests.front().accuracy, result.test_accuracy);
  EXPECT_EQ(recorder.tests.front().loss, result.test_loss);
}

TEST_P(TrainerAtEveryLevel, TheSameSeedGivesTheSameLosses) {
  Recorder first;
  Recorder second;
  train_classifier(drop_net, data(), options().max_steps(30), first);
  train_classifier(drop_net, data(), options().max_steps(30), second);
  EXPECT_EQ(first.losses, second.losses);
  Recorder other;
  train_classifier(drop_net, data(), options().max_steps(30).seed(1), other);
  EXPECT_NE(first.losses, other.losses);
}

INSTANTIATE_TEST_SUITE_P(Levels, TrainerAtEveryLevel, every_level_and_dtype(), name_of_case);

// -------------------------------------------------------------------------------------------------
// options

TEST(Trainer, EveryOptimizerTrains) {
  // NovoGrad divides a gradient by its norm, so an element's update is small.
  const std::map<std::string_view, double> rates{
      {"sgd", 0.05}, {"fused-sgd", 0.05}, {"fused-adagrad", 0.05}, {"fused-novograd", 0.3}};
  for (const OptimizerChoice& choice : optimizers()) {
    const auto rate = rates.find(choice.name);
    const double lr = rate == rates.end() ? 0.01 : rate->second;
    const TrainResult result = train_classifier(
        drop_net, data(),
        options_for(OptLevel::O2, torch::kBFloat16).optimizer(std::string(choice.name)).lr(lr));
    EXPECT_GT(result.test_accuracy, 0.9) << choice.name;
  }
}

// The weights before the first step, and after each of five on the same gradients, with the
// settings that the program gives.
std::vector<at::Tensor> weights_with(std::string_view optimizer) {
  const auto generator = at::detail::createCPUGenerator(1);
  const at::Tensor weight = torch::randn({1000}, generator).requires_grad_();
  const auto steps = find_optimizer(optimizer).make({weight}, {.lr = 0.01, .momentum = 0.9});
  std::vector<at::Tensor> weights{weight.detach().clone()};
  for (int step = 0; step < 5; ++step) {
    weight.mutable_grad() = torch::randn({1000}, generator);
    steps->step();
    weights.push_back(weight.detach().clone());
  }
  return weights;
}

TEST(Trainer, FusedAdamWDecaysWeightsAsAdamWDoesAndFusedAdamDoesNot) {
  const auto adamw = weights_with("adamw");
  const auto fused_adamw = weights_with("fused-adamw");
  // The operations of FusedAdam.IsTorchsAdamW.
  test::Apart apart({.of_weight = 2, .of_update = 13}, {adamw.front()});
  for (std::size_t step = 1; step < adamw.size(); ++step)
    apart.expect_near({fused_adamw[step]}, {adamw[step]});
  // Five steps of 0.01 with a decay of 0.01 take 5e-4 of each weight. The largest is above 1.
  const at::Tensor apart_from_adam = (weights_with("fused-adam").back() - adamw.back()).abs();
  EXPECT_GT(apart_from_adam.max().item<double>(), 4e-4);
}

TEST(Trainer, FusedAdamWTakesTheDecayThatIsSet) {
  const auto optimizer =
      find_optimizer("fused-adamw").make({torch::ones({2}).requires_grad_()}, {.weight_decay = 0});
  const auto& options =
      static_cast<const optim::FusedAdamOptions&>(optimizer->param_groups().at(0).options());
  EXPECT_EQ(options.weight_decay(), 0);
  EXPECT_TRUE(options.adam_w_mode());
}

TEST(Trainer, AugmentedImagesChangeFromEpochToEpochAndCanBeRepeated) {
  const DataSet few = image_data(test::made_up_images(16, 1), test::made_up_images(16, 2));
  const auto make = [] {
    return test::ToyNet(test::ToyNetOptions{.inputs = 28 * 28, .hidden = 8, .outputs = 10});
  };
  const auto losses = [&](bool augment) {
    Recorder recorder;
    // The rate is too small to change a weight, so the loss of the only batch tells its images.
    train_classifier(make, few,
                     options_for(OptLevel::O0, torch::kBFloat16)
                         .batch_size(16)
                         .epochs(3)
                         .lr(1e-30)
                         .augment(augment),
                     recorder);
    EXPECT_EQ(recorder.losses.size(), 3U);
    return recorder.losses;
  };
  const auto plain = losses(false);
  const auto augmented = losses(true);
  EXPECT_EQ(losses(true), augmented);
  // Fp32 sums of 16 losses, in the order of each epoch.
  EXPECT_NEAR(plain.at(0), plain.at(1), 1e-5);
  EXPECT_NEAR(plain.at(1), plain.at(2), 1e-5);
  EXPECT_GT(std::abs(augmented.at(0) - plain.at(0)), 5e-4);
  EXPECT_GT(std::abs(augmented.at(0) - augmented.at(1)), 5e-4);
  EXPECT_GT(std::abs(augmented.at(1) - augmented.at(2)), 5e-4);
}

TEST(Trainer, AdamTrainsWithFp16WeightsWithoutMasters) {
  const TrainResult result = train_classifier(
      drop_net, data(), options_for(OptLevel::O3, torch::kHalf).optimizer("adam").lr(0.002));
  EXPECT_GT(result.test_accuracy, 0.9);
}

// Not with dropout, which draws its numbers in the order of memory.
TEST(Trainer, MemoryFormatsGiveTheSameUpToRounding) {
  const auto conv_net = [] { return Classifier(zoo::ConvNet()); };
  Recorder nchw;
  Recorder nhwc;
  const auto options = options_for(OptLevel::O0, torch::kBFloat16).max_steps(5);
  train_classifier(conv_net, data(), TrainOptions(options).memory_format(MemoryFormat::nchw), nchw);
  train_classifier(conv_net, data(), TrainOptions(options).memory_format(MemoryFormat::nhwc), nhwc);
  ASSERT_EQ(nchw.losses.size(), nhwc.losses.size());
  // The first loss is before any update, the others are after updates that differ by rounding.
  EXPECT_TRUE(std::abs(nchw.losses[0] - nhwc.losses[0]) <= 1e-5) << nchw.losses[0];
  for (std::size_t i = 1; i < nchw.losses.size(); ++i)
    EXPECT_TRUE(std::abs(nchw.losses[i] - nhwc.losses[i]) <= 1e-3) << i;
}

TEST(Trainer, LevelsSeeTheSameBatchesFromTheSameWeights) {
  Recorder fp32;
  Recorder bf16;
  train_classifier(drop_net, data(), options_for(OptLevel::O0, torch::kBFloat16).max_steps(1),
                   fp32);
  train_classifier(drop_net, data(), options_for(OptLevel::O2, torch::kBFloat16).max_steps(1),
                   bf16);
  EXPECT_TRUE(std::abs(fp32.losses[0] - bf16.losses[0]) <= 0.02)
      << fp32.losses[0] << " " << bf16.losses[0];
}

TEST(Trainer, StepsAreCountedBeforeTraining) {
  const auto options = options_for(OptLevel::O0, torch::kBFloat16).batch_size(600).epochs(3);
  const StepCount whole = count_steps(data(), options);
  EXPECT_EQ(whole.examples, 640);
  EXPECT_EQ(whole.all_batches, 2);
  EXPECT_EQ(whole.batches, 2);
  EXPECT_EQ(whole.last_batch, 40);
  EXPECT_EQ(whole.steps, 6);
  EXPECT_EQ(whole.end, 6);
  const StepCount limited =
      count_steps(data(), TrainOptions(options).batch_size(8).limit_batches(5).max_steps(11));
  EXPECT_EQ(limited.all_batches, 80);
  EXPECT_EQ(limited.batches, 5);
  EXPECT_EQ(limited.last_batch, 8);
  EXPECT_EQ(limited.steps, 15);
  EXPECT_EQ(limited.end, 11);
  require_steps(data(), options, 6, "train.test");
  EXPECT_THAT(message_of([&] { require_steps(data(), options, 7, "train.test"); }),
              HasSubstr("[train.test] expected at least 7 steps, got 6 steps in 3 epochs of 2 "
                        "batches — raise --epochs, or lower --batch-size"));
  EXPECT_THAT(message_of([&] {
                require_steps(data(), TrainOptions(options).max_steps(2), 3, "train.test");
              }),
              HasSubstr("got 2 — raise --max-steps"));
}

TEST(Trainer, LimitsBatchesAndKeepsThePartialOne) {
  Recorder recorder;
  const auto options = options_for(OptLevel::O0, torch::kBFloat16);
  EXPECT_EQ(train_classifier(drop_net, data(), TrainOptions(options).limit_batches(3)).steps, 6);
  train_classifier(drop_net, data(), TrainOptions(options).batch_size(600).epochs(1), recorder);
  EXPECT_EQ(recorder.steps.size(), 2U);
  EXPECT_EQ(train_classifier(drop_net, data(), TrainOptions(options).batch_size(10'000)).steps, 2);
}

// -------------------------------------------------------------------------------------------------
// batches that are too small for BatchNorm

// With a BatchNorm that has no variance for a batch of one image.
Classifier normalised_net() {
  return {test::ToyNet(test::ToyNetOptions{
              .inputs = 28 * 28, .hidden = 8, .outputs = 10, .normalised = true}),
          /*smallest_batch=*/2};
}

DataSet ten_images() {
  return image_data(test::made_up_images(10, 1), test::made_up_images(1, 2));
}

// The message of a training that does no step.
std::string refusal(const TrainOptions& options, const DataSet& images = ten_images()) {
  Recorder recorder;
  const std::string message =
      message_of([&] { train_classifier(normalised_net, images, options, recorder); });
  EXPECT_EQ(recorder.losses.size(), 0U);
  return message;
}

TEST(Trainer, ABatchThatIsTooSmallForBatchNormIsRefusedBeforeTheFirstStep) {
  const auto options = options_for(OptLevel::O0, torch::kBFloat16);
  EXPECT_THAT(refusal(TrainOptions(options).batch_size(9)),
              AllOf(HasSubstr("[train.trainer] expected batches of at least 2 images for the "
                              "model's BatchNorm layers, got 10 in batches of 9, of which the last "
                              "has 1"),
                    HasSubstr("use another --batch-size, or leave that batch out with "
                              "--limit-batches 1")));
  EXPECT_THAT(refusal(TrainOptions(options).batch_size(1)),
              HasSubstr("got 1 — raise --batch-size"));
  EXPECT_THAT(refusal(TrainOptions(options).batch_size(1).max_steps(1)), HasSubstr("got 1 "));
  EXPECT_THAT(refusal(options, image_data(test::made_up_images(1, 1), test::made_up_images(1, 2))),
              HasSubstr("got 1 — train on more images"));
}

TEST(Trainer, BatchesThatBatchNormTakesAreTrained) {
  const auto steps = [](const TrainOptions& options) {
    return train_classifier(normalised_net, ten_images(), options).steps;
  };
  const auto options = options_for(OptLevel::O0, torch::kBFloat16).batch_size(9);
  EXPECT_EQ(steps(TrainOptions(options).batch_size(8)), 4);
  // It never gets to the small batch.
  EXPECT_EQ(steps(TrainOptions(options).limit_batches(1)), 2);
  EXPECT_EQ(steps(TrainOptions(options).max_steps(1)), 1);
}

TEST(Trainer, AResumedTrainingRefusesTheSmallBatchAhead) {
  const test::TemporaryFolder folder;
  const auto options = options_for(OptLevel::O0, torch::kBFloat16)
                           .batch_size(9)
                           .checkpoint_dir(folder / "run")
                           .resume_auto(true);
  train_classifier(normalised_net, ten_images(), TrainOptions(options).max_steps(1));
  EXPECT_THAT(refusal(TrainOptions(options).max_steps(2)), HasSubstr("of which the last has 1"));
  EXPECT_EQ(steps_in(folder / "run"), std::vector<std::int64_t>{1});
  // A finished training is only tested.
  EXPECT_EQ(
      train_classifier(normalised_net, ten_images(), TrainOptions(options).max_steps(1)).steps, 1);
}

TEST(Trainer, ModelsSayTheSmallestBatchOnWhichTheyTrain) {
  const torch::NoGradGuard no_grad;
  const auto shapes = {ImageShape{1, 28, 28, 10}, ImageShape{3, 32, 32, 10},
                       ImageShape{3, 33, 32, 10}, ImageShape{3, 8, 33, 10}, ImageShape{1, 4, 4, 2}};
  for (const ModelChoice& choice : models()) {
    if (choice.make_for_images == nullptr) continue;
    for (const ImageShape& shape : shapes) {
      const Classifier model = choice.make_for_images(shape);
      torch::optim::SGD optimizer(model.module()->parameters(), 0.1);
      amp::Model handle(model.module());
      auto mixed = amp::initialize(handle, optimizer, amp::Options(OptLevel::O0).verbosity(0));
      const auto trains = [&](std::int64_t batch_size) {
        try {
          model.forward(mixed,
                        torch::rand({batch_size, shape.channels, shape.height, shape.width}));
          return true;
        } catch (const c10::Error&) {
          return false;
        }
      };
      EXPECT_EQ(trains(1), model.smallest_batch() == 1)
          << choice.name << " " << shape.height << " x " << shape.width;
      EXPECT_TRUE(trains(2)) << choice.name;
    }
  }
}

// -------------------------------------------------------------------------------------------------
// the loss scale, and names

TEST(Trainer, TheLossScaleMovesAndSkipsAreCounted) {
  Recorder recorder;
  const TrainResult result = train_classifier(
      drop_net, data(), options_for(OptLevel::O2, torch::kHalf).growth_interval(5), recorder);
  EXPECT_GT(result.skipped_steps, 0);
  std::int64_t skipped = 0;
  double highest = 0;
  for (const StepDone& step : recorder.steps) {
    skipped += step.skipped ? 1 : 0;
    highest = std::max(highest, step.loss_scale);
  }
  EXPECT_EQ(skipped, result.skipped_steps);
  EXPECT_GT(highest, 65536);
  EXPECT_GT(result.test_accuracy, 0.95);
}

TEST(Trainer, AFixedLossScaleStays) {
  const TrainResult result = train_classifier(
      drop_net, data(), options_for(OptLevel::O1, torch::kHalf).loss_scale(128.0).max_steps(10));
  EXPECT_EQ(result.final_loss_scale, 128);
}

TEST(Trainer, NonsenseIsRefusedByName) {
  const auto message = [](const TrainOptions& options) {
    return message_of([&] { train_classifier(drop_net, data(), options); });
  };
  EXPECT_THAT(message(TrainOptions().epochs(0)),
              AllOf(HasSubstr("[train.trainer]"), HasSubstr("epochs above 0"), HasSubstr("got 0")));
  EXPECT_THAT(message(TrainOptions().batch_size(-1)), HasSubstr("batch size"));
  EXPECT_THAT(message(TrainOptions().lr(0)), HasSubstr("learning rate"));
  EXPECT_THAT(message(TrainOptions().lr(std::nan(""))), HasSubstr("learning rate"));
  EXPECT_THAT(message(TrainOptions().momentum(1)), HasSubstr("momentum"));
  EXPECT_THAT(message(TrainOptions().momentum(std::nan(""))), HasSubstr("momentum"));
  EXPECT_THAT(message(TrainOptions().limit_batches(-1)), HasSubstr("batch limit"));
  EXPECT_THAT(message(TrainOptions().max_steps(-1)), HasSubstr("step limit"));
  EXPECT_THAT(message(TrainOptions().growth_interval(-1)), HasSubstr("growth interval"));
  EXPECT_THAT(message(TrainOptions().max_consecutive_skips(-1)), HasSubstr("skips"));
  EXPECT_THAT(message(TrainOptions().dtype(torch::kFloat)), HasSubstr("float16 or bfloat16"));
}

TEST(Trainer, OptimizersHaveNames) {
  for (const OptimizerChoice& choice : optimizers())
    EXPECT_EQ(&find_optimizer(choice.name), &choice);
  EXPECT_THAT(message_of([] {
                train_classifier(drop_net, data(),
                                 options_for(OptLevel::O1, torch::kHalf).optimizer("lion"));
              }),
              AllOf(HasSubstr("[train.optimizer] expected one of sgd, adam, adamw, fused-sgd"),
                    HasSubstr("'lion'")));
}

TEST(Trainer, EveryModelTrainsOnImagesOfMnist) {
  // Always on the same eight images.
  const zoo::ImageSet images = test::made_up_images(8, 1);
  const DataSet set = image_data(images, test::made_up_images(1, 2));
  for (const ModelChoice& choice : models()) {
    if (choice.make_for_images == nullptr) continue;
    Recorder recorder;
    const auto options = options_for(OptLevel::O1, torch::kBFloat16).epochs(8).lr(0.01);
    train_classifier([&] { return choice.make_for_images(shape_of(images)); }, set, options,
                     recorder);
    EXPECT_EQ(recorder.losses.size(), 8U) << choice.name;
    EXPECT_LT(recorder.losses.back(), recorder.losses.front()) << choice.name;
    EXPECT_EQ(&find_model(choice.name), &choice);
  }
  EXPECT_THAT(message_of([] { find_model("lenet"); }),
              HasSubstr("one of convnet, resnet18, resnet50, vit, gpt"));
}

TEST(Trainer, EveryModelTrainsOnColourImages) {
  const zoo::ImageSet images = test::made_up_colours(8, 1);
  const DataSet set = image_data(images, test::made_up_colours(1, 2));
  const ImageShape shape = shape_of(images);
  EXPECT_EQ(shape, (ImageShape{.channels = 3, .height = 32, .width = 32, .classes = 10}));
  for (const ModelChoice& choice : models()) {
    if (choice.make_for_images == nullptr) continue;
    Recorder recorder;
    const auto options = options_for(OptLevel::O0, torch::kBFloat16).epochs(8).lr(0.01);
    train_classifier([&] { return choice.make_for_images(shape); }, set, options, recorder);
    ASSERT_EQ(recorder.losses.size(), 8U) << choice.name;
    EXPECT_LT(recorder.losses.back(), recorder.losses.front()) << choice.name;
  }
}

TEST(Trainer, EveryModelFitsImagesOfAnySize) {
  const torch::NoGradGuard no_grad;
  for (const ModelChoice& choice : models()) {
    if (choice.make_for_images == nullptr) continue;
    for (const ImageShape& shape : {ImageShape{1, 5, 40, 3}, ImageShape{3, 36, 7, 2}}) {
      const Classifier model = choice.make_for_images(shape);
      torch::optim::SGD optimizer(model.module()->parameters(), 0.1);
      amp::Model handle(model.module());
      auto mixed = amp::initialize(handle, optimizer, amp::Options(OptLevel::O0).verbosity(0));
      const at::Tensor images = torch::zeros({2, shape.channels, shape.height, shape.width});
      EXPECT_EQ(model.forward(mixed, images).sizes(), (std::vector<int64_t>{2, shape.classes}))
          << choice.name;
    }
  }
}

TEST(Trainer, ImagesThatDoNotFitAModelAreAnError) {
  EXPECT_THAT(message_of([] { find_model("resnet18").make_for_images({.channels = 4}); }),
              HasSubstr("[train.model] expected images of 1 or 3 channels for a ResNet, got 4"));
  EXPECT_THAT(message_of([] { find_model("convnet").make_for_images({.height = 3}); }),
              HasSubstr("height of at least 4"));
}

TEST(Trainer, EnumsHaveNames) {
  for (const auto format : {MemoryFormat::automatic, MemoryFormat::nchw, MemoryFormat::nhwc})
    EXPECT_EQ(parse_memory_format(name_of(format)), format);
  EXPECT_THROW(parse_memory_format("NCHW"), Error);
}

// -------------------------------------------------------------------------------------------------
// divergence

TEST(Trainer, AStepOnALossThatIsNotFiniteEndsTheTraining) {
  const test::TemporaryFolder folder;
  // O0 steps on any values.
  const auto options = options_for(OptLevel::O0, torch::kBFloat16)
                           .lr(1e30)
                           .checkpoint_dir(folder / "run")
                           .save_weights(folder / "weights.pt");
  EXPECT_THROW(train_classifier(drop_net, data(), options), DivergedError);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Trainer, TooManySkipsInARowEndTheTraining) {
  const auto options =
      options_for(OptLevel::O2, torch::kHalf).loss_scale(0x1p100).max_consecutive_skips(7);
  Recorder recorder;
  EXPECT_THROW(train_classifier(drop_net, data(), options, recorder), DivergedError);
  EXPECT_LE(recorder.steps.size(), 7U);
}

TEST(Trainer, ATestLossThatIsNotFiniteIsADivergence) {
  // The last step ruins the weights, and no later training step notices it.
  const auto options = options_for(OptLevel::O0, torch::kBFloat16)
                           .lr(1e38)
                           .schedule(Schedule::constant)
                           .max_steps(1);
  EXPECT_THAT(message_of([&] { train_classifier(drop_net, data(), options); }),
              HasSubstr("a finite test loss"));
}

TEST(Trainer, ALearningRateThatFloat16WeightsCannotTakeIsRefused) {
  EXPECT_THAT(message_of([&] {
                train_classifier(drop_net, data(), options_for(OptLevel::O3, torch::kHalf).lr(1e5));
              }),
              HasSubstr("at most 65504 with float16 weights"));
}

}  // namespace
}  // namespace semitone::train
