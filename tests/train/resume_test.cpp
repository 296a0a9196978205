// Trainings that resume, in one process: bit for bit, and what they refuse.

#include "semitone/weights/file.h"
#include "src/train/optimizers.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/toy_nets.h"
#include "tests/train/every_level.h"
#include "tests/train/small_training.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::train {
namespace resume_test {
namespace {

namespace fs = std::filesystem;
using amp::OptLevel;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Not optimizer.pt: LibTorch writes the state of parameters under their addresses.
void expect_same_files(const fs::path& one, const fs::path& other) {
  for (const char* const name : {"model.pt", "mixed.pt", "loss_sums.pt", "random.rank0.pt"}) {
    const std::string bytes = test::read_text(one / name);
    EXPECT_FALSE(bytes.empty()) << one / name;
    EXPECT_TRUE(bytes == test::read_text(other / name)) << name;
  }
}

class ResumedAtEveryLevel : public ::testing::TestWithParam<LevelAndDtype> {
 protected:
  static TrainOptions options() {
    return options_for(std::get<0>(GetParam()), std::get<1>(GetParam()));
  }
  test::TemporaryFolder folder_;
};

// Fifty steps, a break and fifty more, over an epoch's end, are a hundred steps.
TEST_P(ResumedAtEveryLevel, ARunContinuesBitForBit) {
  Recorder whole;
  const TrainResult expected = train_classifier(
      drop_net, data(), options().max_steps(100).checkpoint_dir(folder_ / "whole"), whole);
  const auto resumable = [&](std::int64_t steps) {
    return options().max_steps(steps).checkpoint_dir(folder_ / "run").resume_auto(true);
  };
  Recorder first;
  train_classifier(drop_net, data(), resumable(50), first);
  // State that a new process would not have.
  torch::manual_seed(12345);
  Recorder second;
  const TrainResult resumed = train_classifier(drop_net, data(), resumable(100), second);

  EXPECT_TRUE(first.resumed.empty());
  ASSERT_EQ(second.resumed.size(), 1U);
  EXPECT_EQ(second.resumed.front().step, 50);
  EXPECT_EQ(second.resumed.front().path, step_of(folder_ / "run", 50));
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
  expect_same_files(step_of(folder_ / "run", 100), step_of(folder_ / "whole", 100));
}

INSTANTIATE_TEST_SUITE_P(Levels, ResumedAtEveryLevel, every_level_and_dtype(), name_of_case);

TEST(Resumed, ARunWithEveryOptimizerContinuesBitForBit) {
  const test::TemporaryFolder folder;
  for (const OptimizerChoice& choice : optimizers()) {
    const std::string name(choice.name);
    const auto options = [&] {
      return options_for(OptLevel::O2, torch::kHalf).optimizer(name).lr(0.002);
    };
    Recorder whole;
    Recorder second;
    train_classifier(drop_net, data(), options().max_steps(20), whole);
    train_classifier(drop_net, data(), options().max_steps(10).checkpoint_dir(folder / name));
    train_classifier(drop_net, data(), options().max_steps(20).resume_from(folder / name), second);
    EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + 10, whole.losses.end()))
        << name;
  }
}

class ResumingTest : public ::testing::Test {
 protected:
  static TrainOptions options() { return options_for(OptLevel::O2, torch::kHalf).max_steps(3); }

  void SetUp() override {
    train_classifier(drop_net, data(), options().checkpoint_dir(run_).save_every({.steps = 1}));
  }

  // Of a run that does not begin.
  std::string message(const TrainOptions& options, const ModelFactory& make = drop_net,
                      const DataSet& set = data()) {
    Recorder recorder;
    const std::string message =
        test::message_of<Error>([&] { train_classifier(make, set, options, recorder); });
    EXPECT_TRUE(recorder.steps.empty());
    return message;
  }

  test::TemporaryFolder folder_;
  fs::path run_ = folder_ / "run";
};

TEST_F(ResumingTest, OtherOptionsAreRefusedByTheirFlags) {
  const auto more = options().max_steps(6).checkpoint_dir(run_).resume_auto(true);
  EXPECT_THAT(message(TrainOptions(more).batch_size(16)),
              AllOf(HasSubstr("[checkpoint.resume] expected images per step 16 in '"),
                    HasSubstr(step_of(run_, 3).string()), HasSubstr("got images per step 8"),
                    HasSubstr("resume with the settings of the saved run")));
  EXPECT_THAT(message(TrainOptions(more).seed(5)), HasSubstr("--seed 5"));
  const DataSet other = image_data(test::made_up_images(640, 3), test::made_up_images(200, 2));
  EXPECT_THAT(message(more, drop_net, other), HasSubstr("expected data with the checksum "));
  EXPECT_THAT(message(TrainOptions(more).augment(true)), HasSubstr("--augment true"));
  EXPECT_THAT(
      message(TrainOptions(more).optimizer("adam")),
      AllOf(HasSubstr("--optimizer adam"), HasSubstr("got --momentum 0.9, --optimizer sgd")));
  EXPECT_THAT(message(TrainOptions(more).lr(0.1).momentum(0.5)),
              AllOf(HasSubstr("--lr 0.1, --momentum 0.5"), HasSubstr("--lr 0.05, --momentum 0.9")));
  EXPECT_THAT(message(TrainOptions(more).schedule(Schedule::constant)),
              HasSubstr("--schedule constant"));
  EXPECT_THAT(message(TrainOptions(more).epochs(3)), HasSubstr("--epochs 3"));
  EXPECT_THAT(message(TrainOptions(more).loss_scale(8.0)), HasSubstr("--loss-scale 8"));
  EXPECT_THAT(message(TrainOptions(more).growth_interval(9)), HasSubstr("--growth-interval 9"));
  EXPECT_THAT(message(TrainOptions(more).limit_batches(9)), HasSubstr("--limit-batches 9"));
  EXPECT_THAT(message(TrainOptions(more).memory_format(MemoryFormat::nchw)),
              HasSubstr("--memory-format nchw"));
  EXPECT_THAT(message(TrainOptions(more).fp8(true)),
              AllOf(HasSubstr("expected --fp8 true in '"), HasSubstr("got --fp8 not set"),
                    Not(HasSubstr("--policy"))));
  const DataSet fewer = image_data(test::made_up_images(600, 1), test::made_up_images(200, 2));
  EXPECT_THAT(message(more, drop_net, fewer), HasSubstr("training images 600"));
  EXPECT_NO_THROW(train_classifier(drop_net, data(), more));
}

TEST_F(ResumingTest, ModelsOfOtherShapesAreRefusedAndStayUnchanged) {
  const auto two_layers = [](std::int64_t width) {
    return test::ToyNet(test::ToyNetOptions{.inputs = 28 * 28, .hidden = width, .outputs = 10});
  };
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
    const fs::path run = folder_ / std::string(amp::name_of(level));
    const auto options =
        options_for(level, torch::kBFloat16).max_steps(2).checkpoint_dir(run).resume_auto(true);
    train_classifier([&] { return Classifier(two_layers(16)); }, data(), options);
    test::ToyNet wide{nullptr};
    at::Tensor first;
    const auto make = [&] {
      wide = two_layers(24);
      first = wide->first->weight.detach().clone();
      return Classifier(wide);
    };
    EXPECT_THAT(message(options, make),
                AllOf(HasSubstr("'first.weight', float32 [24, 784]"),
                      HasSubstr("got float32 [16, 784]"), HasSubstr(run.string())));
    EXPECT_TRUE(
        torch::equal(wide->first->weight.detach(), first.to(wide->first->weight.scalar_type())));
  }
}

// The exact fp32 weights continue.
TEST_F(ResumingTest, AnotherLevelAndDtypeContinueWithTheSameWeights) {
  for (const auto& [level, dtype] :
       {std::pair(OptLevel::O0, torch::kBFloat16), std::pair(OptLevel::O1, torch::kBFloat16),
        std::pair(OptLevel::O2, torch::kBFloat16), std::pair(OptLevel::O1, torch::kHalf)}) {
    const fs::path copy = folder_ / "copy.safetensors";
    const auto other = [&, level = level, dtype = dtype] {
      return options().opt_level(level).dtype(dtype).checkpoint_dir(run_);
    };
    const test::CapturedLog log;
    train_classifier(drop_net, data(), other().resume_auto(true).save_weights(copy));
    test::DropNet saved;
    torch::load(saved, (step_of(run_, 3) / "model.pt").string());
    const auto weights = weights::read(copy).tensors;
    for (const auto& parameter : saved->named_parameters())
      EXPECT_TRUE(torch::equal(weights[parameter.key()], parameter.value())) << parameter.key();
    Recorder recorder;
    train_classifier(drop_net, data(),
                     options().opt_level(level).dtype(dtype).resume_from(run_).max_steps(8),
                     recorder);
    EXPECT_EQ(recorder.losses.size(), 5U);
    EXPECT_THAT(log.text(), HasSubstr("loss scales start anew"));
  }
}

// The run of a policy that has fp8 does not change with --fp8.
TEST(Resumed, ARunWithFp8InItsPolicyContinuesWithOrWithoutTheFlag) {
  const test::TemporaryFolder folder;
  const auto options = [&](std::int64_t steps) {
    auto policy = amp::CastPolicy::semitone({c10::DeviceType::CPU, torch::kBFloat16});
    return options_for(OptLevel::O1, torch::kBFloat16)
        .max_steps(steps)
        .checkpoint_dir(folder / "run")
        .resume_auto(true)
        .policy(policy.fp8(amp::Fp8Options().margin(1)));
  };
  Recorder recorder;
  train_classifier(drop_net, data(), options(2), recorder);
  train_classifier(drop_net, data(), options(4).fp8(true), recorder);
  train_classifier(drop_net, data(), options(6), recorder);
  EXPECT_EQ(recorder.steps.size(), 6U);
}

// fp16 weights need an eps that fp16 can represent. Others would train with one that is too large.
TEST(Resumed, ARunAtAnotherLevelHasTheEpsOfItsOwnLevel) {
  struct EpsSeen : Observer {
    using Observer::on;
    void on(const TrainingBegins& event) override {
      const auto& options = event.optimizer.param_groups().front().options();
      eps.push_back(dynamic_cast<const torch::optim::AdamOptions&>(options).eps());
    }
    std::vector<double> eps;
  };
  const test::TemporaryFolder folder;
  const test::CapturedLog log;
  EpsSeen seen;
  std::int64_t steps = 0;
  for (const OptLevel level : {OptLevel::O3, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    steps += 2;
    train_classifier(drop_net, data(),
                     options_for(level, torch::kHalf)
                         .optimizer("adam")
                         .lr(0.002)
                         .max_steps(steps)
                         .checkpoint_dir(folder / "run")
                         .resume_auto(true),
                     seen);
  }
  EXPECT_THAT(seen.eps, ElementsAre(0x1p-14, 1e-8, 1e-8, 0x1p-14));
}

TEST_F(ResumingTest, ANewRunAmongTheCheckpointsOfAnotherIsRefused) {
  EXPECT_THAT(message(options().checkpoint_dir(run_)),
              AllOf(HasSubstr("no checkpoint of another run in '" + run_.string()),
                    HasSubstr("got one of step 3"), HasSubstr("--resume auto"),
                    HasSubstr("another --checkpoint-dir")));
  // Also if it resumes from elsewhere.
  EXPECT_THAT(message(options().checkpoint_dir(run_).max_steps(8).resume_from([&] {
                const fs::path other = folder_ / "other";
                train_classifier(drop_net, data(), options().max_steps(5).checkpoint_dir(other));
                return other;
              }())),
              HasSubstr("no checkpoint of another run"));
}

TEST_F(ResumingTest, ADirectoryOrOneStepCanBeNamed) {
  Recorder whole;
  train_classifier(drop_net, data(), options().max_steps(6), whole);
  const auto losses_from = [&](const fs::path& path) {
    Recorder recorder;
    train_classifier(drop_net, data(), options().max_steps(6).resume_from(path), recorder);
    return recorder.losses;
  };
  const auto rest = [&](std::int64_t step) {
    return std::vector<double>(whole.losses.begin() + step, whole.losses.end());
  };
  EXPECT_EQ(losses_from(run_), rest(3));
  EXPECT_EQ(losses_from(run_ / ""), rest(3));
  EXPECT_EQ(losses_from(step_of(run_, 2)), rest(2));
  EXPECT_EQ(losses_from(step_of(run_, 1) / ""), rest(1));
  fs::create_directory_symlink(step_of(run_, 1), folder_ / "best");
  EXPECT_EQ(losses_from(folder_ / "best"), rest(1));
  // Into a directory of its own.
  train_classifier(
      drop_net, data(),
      options().max_steps(6).resume_from(step_of(run_, 2)).checkpoint_dir(folder_ / "branch"));
  EXPECT_THAT(steps_in(folder_ / "branch"), ElementsAre(6));
  EXPECT_THAT(message(options().max_steps(6).resume_from(step_of(run_, 2)).checkpoint_dir(run_)),
              AllOf(HasSubstr("no checkpoint after step 2"), HasSubstr("got one of step 3")));
  train_classifier(drop_net, data(), options().max_steps(6).resume_from(run_).checkpoint_dir(run_));
  EXPECT_THAT(steps_in(run_), ElementsAre(2, 3, 6));
}

TEST_F(ResumingTest, MissingCheckpointsAreErrorsUnlessResumeIsAuto) {
  EXPECT_THAT(message(options().resume_from(folder_ / "none")),
              AllOf(HasSubstr((folder_ / "none").string()), HasSubstr("No such file"),
                    HasSubstr("--resume auto")));
  fs::create_directory(folder_ / "empty");
  EXPECT_THAT(message(options().resume_from(folder_ / "empty")),
              AllOf(HasSubstr("got none"), HasSubstr("step-00000100")));
  test::write_text(folder_ / "file", "");
  EXPECT_THAT(message(options().resume_from(folder_ / "file")), HasSubstr("Not a directory"));
  Recorder recorder;
  train_classifier(drop_net, data(), options().checkpoint_dir(folder_ / "empty").resume_auto(true),
                   recorder);
  EXPECT_EQ(recorder.steps.size(), 3U);
}

TEST_F(ResumingTest, ADamagedCheckpointIsReplacedByThePreviousOne) {
  Recorder whole;
  train_classifier(drop_net, data(), options().max_steps(6), whole);
  test::write_text(step_of(run_, 3) / "optimizer.pt", "damaged");
  EXPECT_THAT(message(options().max_steps(6).resume_from(step_of(run_, 3))),
              HasSubstr("optimizer.pt"));
  Recorder rest;
  const test::CapturedLog log;
  train_classifier(drop_net, data(), options().max_steps(6).checkpoint_dir(run_).resume_auto(true),
                   rest);
  EXPECT_THAT(log.text(), HasSubstr("the checkpoint of step 3 is damaged"));
  ASSERT_EQ(rest.resumed.size(), 1U);
  EXPECT_EQ(rest.resumed.front().step, 2);
  EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 2, whole.losses.end()));
}

TEST_F(ResumingTest, AFinishedRunIsAnErrorUnlessResumeIsAuto) {
  EXPECT_THAT(message(options().resume_from(run_)),
              AllOf(HasSubstr("fewer than 3 steps"), HasSubstr("raise epochs or max_steps")));
  const auto cosine = options_for(OptLevel::O0, torch::kBFloat16).epochs(1).limit_batches(2);
  train_classifier(drop_net, data(), TrainOptions(cosine).checkpoint_dir(folder_ / "cosine"));
  EXPECT_THAT(message(TrainOptions(cosine).resume_from(folder_ / "cosine")),
              HasSubstr("cannot be extended"));
}

}  // namespace
}  // namespace resume_test
}  // namespace semitone::train
