#include "src/train/trainer.h"

#include "semitone/core/error.h"
#include "semitone/zoo/convnet.h"
#include "src/train/models.h"
#include "src/train/optimizers.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
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

Classifier drop_net() {
  return test::DropNet();
}

const DataSet& data() {
  static const DataSet data{test::made_up_images(640, 1), test::made_up_images(200, 2)};
  return data;
}

// Every loss and scale.
struct Recorder : Observer {
  using Observer::on;
  void on(const StepDone& step) override {
    steps.push_back(step);
    losses.push_back(step.loss);
  }
  void on(const EpochDone& epoch) override { epochs.push_back(epoch); }
  void on(const Tested& tested) override { tests.push_back(tested); }
  std::vector<StepDone> steps;
  std::vector<double> losses;
  std::vector<EpochDone> epochs;
  std::vector<Tested> tests;
};

TrainOptions options_for(OptLevel level, c10::ScalarType dtype) {
  return TrainOptions().opt_level(level).dtype(dtype).batch_size(8).epochs(2).lr(0.05);
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// -------------------------------------------------------------------------------------------------
// at every level and dtype

using LevelAndDtype = std::tuple<OptLevel, c10::ScalarType>;

class TrainerAtEveryLevel : public ::testing::TestWithParam<LevelAndDtype> {
 protected:
  TrainOptions options() const {
    return options_for(std::get<0>(GetParam()), std::get<1>(GetParam()));
  }
  test::TemporaryFolder folder_;
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
  EXPECT_GT(result.images_per_second, 0);
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

// Fifty steps, a break and fifty more, over an epoch's end, are a hundred steps bit for bit.
TEST_P(TrainerAtEveryLevel, AResumedRunGoesOnBitForBit) {
  test::DropNet kept{nullptr};
  const auto keep = [&kept] {
    kept = test::DropNet();
    return Classifier(kept);
  };
  Recorder whole;
  const TrainResult expected =
      train_classifier(keep, data(), options().max_steps(100).save(folder_ / "whole"), whole);
  const test::DropNet expected_model = kept;

  Recorder first;
  train_classifier(drop_net, data(), options().max_steps(50).save(folder_ / "half"), first);
  // State that a new process would not have.
  torch::manual_seed(12345);
  Recorder second;
  const TrainResult resumed = train_classifier(
      keep, data(), options().max_steps(100).resume(folder_ / "half").save(folder_ / "resumed"),
      second);

  ASSERT_EQ(first.losses.size(), 50U);
  ASSERT_EQ(second.losses.size(), 50U);
  std::vector<double> joined = first.losses;
  joined.insert(joined.end(), second.losses.begin(), second.losses.end());
  EXPECT_EQ(joined, whole.losses);
  EXPECT_EQ(resumed.train_loss, expected.train_loss);
  EXPECT_EQ(resumed.test_loss, expected.test_loss);
  EXPECT_EQ(resumed.skipped_steps, expected.skipped_steps);
  EXPECT_EQ(resumed.final_loss_scale, expected.final_loss_scale);
  EXPECT_EQ(resumed.steps, 100);
  const auto expect_equal = [](const torch::nn::Module& here, const torch::nn::Module& there) {
    for (const auto& tensor : there.named_parameters())
      EXPECT_TRUE(torch::equal(here.named_parameters()[tensor.key()], tensor.value()))
          << tensor.key();
    for (const auto& tensor : there.named_buffers())
      EXPECT_TRUE(torch::equal(here.named_buffers()[tensor.key()], tensor.value())) << tensor.key();
  };
  expect_equal(*kept, *expected_model);

  // The fp32 weights in the two files: the masters, if there are some.
  const auto saved_weights = [this](const char* name) {
    torch::serialize::InputArchive archive;
    archive.load_from((folder_ / name).string());
    torch::serialize::InputArchive weights;
    archive.read("model", weights);
    test::DropNet model;
    model->load(weights);
    return model;
  };
  const test::DropNet whole_weights = saved_weights("whole");
  EXPECT_EQ(whole_weights->conv->weight.scalar_type(), torch::kFloat);
  expect_equal(*saved_weights("resumed"), *whole_weights);
}

std::string name_of_case(const ::testing::TestParamInfo<LevelAndDtype>& info) {
  return std::string(amp::name_of(std::get<0>(info.param))) +
         (std::get<1>(info.param) == torch::kHalf ? "Fp16" : "Bf16");
}

INSTANTIATE_TEST_SUITE_P(Levels, TrainerAtEveryLevel,
                         ::testing::Combine(::testing::Values(OptLevel::O0, OptLevel::O1,
                                                              OptLevel::O2, OptLevel::O3),
                                            ::testing::Values(torch::kBFloat16, torch::kHalf)),
                         name_of_case);

// -------------------------------------------------------------------------------------------------
// options

TEST(Trainer, ResumesWithEveryOptimizerBitForBit) {
  const test::TemporaryFolder folder;
  for (const OptimizerChoice& choice : optimizers()) {
    const auto options = [&choice] {
      return options_for(OptLevel::O2, torch::kHalf).optimizer(std::string(choice.name)).lr(0.002);
    };
    Recorder whole;
    Recorder second;
    train_classifier(drop_net, data(), options().max_steps(20), whole);
    train_classifier(drop_net, data(), options().max_steps(10).save(folder / "half"));
    train_classifier(drop_net, data(), options().max_steps(20).resume(folder / "half"), second);
    EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + 10, whole.losses.end()))
        << choice.name;
  }
}

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

TEST(Trainer, LimitsBatchesAndKeepsThePartialOne) {
  Recorder recorder;
  const auto options = options_for(OptLevel::O0, torch::kBFloat16);
  EXPECT_EQ(train_classifier(drop_net, data(), TrainOptions(options).limit_batches(3)).steps, 6);
  train_classifier(drop_net, data(), TrainOptions(options).batch_size(600).epochs(1), recorder);
  EXPECT_EQ(recorder.steps.size(), 2U);
  EXPECT_EQ(train_classifier(drop_net, data(), TrainOptions(options).batch_size(10'000)).steps, 2);
}

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

TEST(Trainer, DataOfTheWrongKindAreRefused) {
  const auto message = [](const DataSet& wrong) {
    return message_of([&] { train_classifier(drop_net, wrong, TrainOptions()); });
  };
  EXPECT_THAT(message({{}, data().test}), AllOf(HasSubstr("training set"), HasSubstr("none")));
  EXPECT_THAT(message({data().train, {}}), HasSubstr("test set"));
  DataSet floats = data();
  floats.train.images = floats.train.images.to(torch::kFloat);
  EXPECT_THAT(message(floats), HasSubstr("float32 of sizes [640, 28, 28]"));
  DataSet unlabelled = data();
  unlabelled.test.labels = unlabelled.test.labels.slice(0, 1);
  EXPECT_THAT(message(unlabelled), HasSubstr("200 int64 labels"));
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
  for (const ModelChoice& choice : models()) {
    Recorder recorder;
    const auto options = options_for(OptLevel::O1, torch::kBFloat16).max_steps(8).lr(0.01);
    train_classifier(choice.make, data(), options, recorder);
    EXPECT_EQ(recorder.losses.size(), 8U) << choice.name;
    EXPECT_LT(recorder.losses.back(), recorder.losses.front()) << choice.name;
    EXPECT_EQ(&find_model(choice.name), &choice);
  }
  EXPECT_THAT(message_of([] { find_model("lenet"); }), HasSubstr("one of convnet, resnet50"));
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
  const auto options = options_for(OptLevel::O0, torch::kBFloat16).lr(1e30).save(folder / "state");
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

// -------------------------------------------------------------------------------------------------
// saved states

class SavedStateTest : public ::testing::Test {
 protected:
  static TrainOptions options() { return options_for(OptLevel::O2, torch::kHalf).max_steps(3); }

  void SetUp() override { train_classifier(drop_net, data(), options().save(state_)); }

  std::string message(const TrainOptions& options) {
    Recorder recorder;
    const std::string message = message_of([&] {
      train_classifier(drop_net, data(), TrainOptions(options).resume(state_), recorder);
    });
    EXPECT_TRUE(recorder.steps.empty());
    return message;
  }

  test::TemporaryFolder folder_;
  std::filesystem::path state_ = folder_ / "state";
};

TEST_F(SavedStateTest, WithOtherOptionsIsRefusedByTheFlagThatDiffers) {
  const auto more = options().max_steps(6);
  EXPECT_NO_THROW(train_classifier(drop_net, data(), TrainOptions(more).resume(state_)));
  EXPECT_THAT(message(TrainOptions(more).opt_level(OptLevel::O1)),
              AllOf(HasSubstr("[train.checkpoint]"), HasSubstr("--opt-level O1"),
                    HasSubstr("got O2"), HasSubstr(state_.string())));
  EXPECT_THAT(message(TrainOptions(more).dtype(torch::kBFloat16)), HasSubstr("--dtype bfloat16"));
  EXPECT_THAT(message(TrainOptions(more).batch_size(16)), HasSubstr("--batch-size 16"));
  EXPECT_THAT(message(TrainOptions(more).seed(5)), HasSubstr("--seed 5"));
  EXPECT_THAT(message(TrainOptions(more).optimizer("adam")), HasSubstr("--optimizer adam"));
  EXPECT_THAT(message(TrainOptions(more).lr(0.1)), HasSubstr("--lr 0.1"));
  EXPECT_THAT(message(TrainOptions(more).momentum(0.5)), HasSubstr("--momentum 0.5"));
  EXPECT_THAT(message(TrainOptions(more).schedule(Schedule::constant)),
              HasSubstr("--schedule constant"));
  EXPECT_THAT(message(TrainOptions(more).epochs(3)), HasSubstr("--epochs 3"));
  EXPECT_THAT(message(TrainOptions(more).loss_scale(8.0)), HasSubstr("--loss-scale 8"));
  EXPECT_THAT(message(TrainOptions(more).growth_interval(9)), HasSubstr("--growth-interval 9"));
  EXPECT_THAT(message(TrainOptions(more).limit_batches(9)), HasSubstr("--limit-batches 9"));
  EXPECT_THAT(message(TrainOptions(more).memory_format(MemoryFormat::nchw)),
              HasSubstr("--memory-format nchw"));
}

TEST_F(SavedStateTest, OfOtherDataIsRefused) {
  DataSet fewer = data();
  fewer.train = test::made_up_images(600, 1);
  EXPECT_THAT(
      message_of([&] { train_classifier(drop_net, fewer, options().max_steps(6).resume(state_)); }),
      HasSubstr("training images 600"));
}

TEST_F(SavedStateTest, ThatIsAlreadyThereCannotGoOn) {
  EXPECT_THAT(message(options()),
              AllOf(HasSubstr("fewer than 3 steps"), HasSubstr("raise epochs or max_steps")));
}

TEST_F(SavedStateTest, WithAConstantRateMayTakeMoreEpochs) {
  const auto constant = [] {
    return options().schedule(Schedule::constant).epochs(1).max_steps(0);
  };
  train_classifier(drop_net, data(), constant().save(state_));
  Recorder whole;
  Recorder rest;
  train_classifier(drop_net, data(), constant().epochs(2), whole);
  train_classifier(drop_net, data(), constant().epochs(2).resume(state_), rest);
  EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 80, whole.losses.end()));
}

TEST_F(SavedStateTest, MissingForeignAndDamagedFilesAreFileErrors) {
  const auto more = options().max_steps(6);
  const std::string bytes = test::read_text(state_);
  std::filesystem::remove(state_);
  EXPECT_THAT(message(more), AllOf(HasSubstr("no such file"), HasSubstr(state_.string())));
  test::write_text(state_, "");
  EXPECT_THAT(message(more), HasSubstr("bytes that do not match the checksum"));
  test::write_text(state_, "no archive");
  EXPECT_THAT(message(more), HasSubstr("bytes that do not match the checksum"));
  for (const double part : {0.1, 0.5, 0.9, 0.999}) {
    test::write_text(
        state_,
        bytes.substr(0, static_cast<std::size_t>(part * static_cast<double>(bytes.size()))));
    EXPECT_THAT(message(more), HasSubstr("[train.checkpoint]")) << part;
  }
  // One flipped bit anywhere: in a weight it would train on, unseen.
  for (std::size_t at = 0; at < bytes.size(); at += 997) {
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ 1);
    test::write_text(state_, flipped);
    EXPECT_THAT(message(more), HasSubstr("bytes that do not match the checksum")) << at;
  }
  torch::save(test::DropNet(), state_.string());
  EXPECT_THAT(message(more), HasSubstr("written by another program?"));
}

TEST(Trainer, AFinishedCosineScheduleCannotBeExtended) {
  const test::TemporaryFolder folder;
  const auto options = options_for(OptLevel::O0, torch::kBFloat16).epochs(1).limit_batches(2);
  train_classifier(drop_net, data(), TrainOptions(options).save(folder / "state"));
  EXPECT_THAT(message_of([&] {
                train_classifier(drop_net, data(), TrainOptions(options).resume(folder / "state"));
              }),
              HasSubstr("cannot be extended"));
}

TEST(Trainer, ALearningRateThatFloat16WeightsCannotTakeIsRefused) {
  EXPECT_THAT(message_of([&] {
                train_classifier(drop_net, data(), options_for(OptLevel::O3, torch::kHalf).lr(1e5));
              }),
              HasSubstr("at most 65504 with float16 weights"));
}

TEST_F(SavedStateTest, OfAnotherModelIsAFileError) {
  const auto conv_net = [] { return Classifier(zoo::ConvNet()); };
  EXPECT_THAT(message_of([&] {
                train_classifier(conv_net, data(), options().max_steps(6).resume(state_));
              }),
              HasSubstr("[train.checkpoint]"));
}

// The same names and options, so that only the shapes differ.
test::ToyNet two_layers(std::int64_t width) {
  return test::ToyNet(test::ToyNetOptions{.inputs = 28 * 28, .hidden = width, .outputs = 10});
}

TEST(SavedStates, OfAModelOfOtherShapesAreFileErrorsAndChangeNothing) {
  const test::TemporaryFolder folder;
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
    for (const char* const kind : {"sgd", "adam"}) {
      const auto options = options_for(level, torch::kBFloat16).optimizer(kind).max_steps(2);
      const auto state = folder / "state";
      train_classifier([] { return Classifier(two_layers(16)); }, data(),
                       TrainOptions(options).save(state));
      test::ToyNet wide{nullptr};
      at::Tensor first;
      const auto make = [&] {
        wide = two_layers(24);
        first = wide->first->weight.detach().clone();
        return Classifier(wide);
      };
      Recorder recorder;
      EXPECT_THAT(message_of([&] {
                    train_classifier(make, data(), TrainOptions(options).resume(state), recorder);
                  }),
                  AllOf(HasSubstr("[train.checkpoint]"), HasSubstr("'first.weight' [24, 784]"),
                        HasSubstr("got [16, 784]"), HasSubstr(state.string())));
      EXPECT_TRUE(recorder.steps.empty());
      EXPECT_EQ(wide->first->weight.sizes(), first.sizes());
      EXPECT_TRUE(
          torch::equal(wide->first->weight.detach(), first.to(wide->first->weight.scalar_type())));
    }
  }
}

TEST_F(SavedStateTest, ThatCannotBeWrittenIsSaidBeforeTraining) {
  Recorder recorder;
  EXPECT_THROW(
      train_classifier(drop_net, data(), options().save(folder_ / "no" / "state"), recorder),
      FileError);
  EXPECT_TRUE(recorder.steps.empty());
  EXPECT_THAT(message_of([&] { train_classifier(drop_net, data(), options().save("/dev/full")); }),
              HasSubstr("No space left on device"));
}

}  // namespace
}  // namespace semitone::train
