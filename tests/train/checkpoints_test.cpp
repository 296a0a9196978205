// When a training saves: steps, times, signals, weights.

#include "src/train/checkpoints.h"

#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "src/train/run_lock.h"
#include "src/train/save_interval.h"
#include "tests/support/another_user.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/toy_nets.h"
#include "tests/train/small_training.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace semitone::train {
namespace checkpoints_test {
namespace {

namespace fs = std::filesystem;
using amp::OptLevel;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Lt;

class SavingTest : public ::testing::Test {
 protected:
  TrainOptions options() const {
    return options_for(OptLevel::O2, torch::kHalf).max_steps(10).checkpoint_dir(run_);
  }
  // In the place of the directory.
  void put_file() const {
    fs::remove_all(run_);
    test::write_text(run_, "");
  }
  test::TemporaryFolder folder_;
  fs::path run_ = folder_ / "run";
};

TEST_F(SavingTest, HappensAtTheEndAndAfterSoManySteps) {
  train_classifier(drop_net, data(), options());
  EXPECT_THAT(steps_in(run_), ElementsAre(10));
  const auto often = options().checkpoint_dir(folder_ / "often").save_every({.steps = 4});
  train_classifier(drop_net, data(), TrainOptions(often).keep(0));
  EXPECT_THAT(steps_in(folder_ / "often"), ElementsAre(4, 8, 10));
  train_classifier(drop_net, data(), TrainOptions(often).keep(2).max_steps(13).resume_auto(true));
  EXPECT_THAT(steps_in(folder_ / "often"), ElementsAre(12, 13));
}

TEST_F(SavingTest, HappensAfterATimeAndUponASignal) {
  Recorder recorder;
  // The first checkpoint is that of the time.
  const auto stop_after_the_first = [&] { return steps_in(run_).empty() ? 0 : SIGUSR1; };
  const TrainResult result = train_classifier(drop_net, data(),
                                              options()
                                                  .max_steps(0)
                                                  .epochs(1'000'000)
                                                  .save_every({.time = std::chrono::seconds(1)})
                                                  .save_weights(folder_ / "weights.pt")
                                                  .stop_signal(stop_after_the_first),
                                              recorder);
  EXPECT_EQ(result.stop_signal, SIGUSR1);
  EXPECT_TRUE(std::isnan(result.test_loss));
  EXPECT_TRUE(recorder.tests.empty());
  ASSERT_GE(result.steps, 2);
  // The signal was seen when the first save was complete, and its step is saved too.
  EXPECT_THAT(steps_in(run_), ElementsAre(Lt(result.steps), result.steps));
  EXPECT_FALSE(fs::exists(folder_ / "weights.pt"));
}

TEST_F(SavingTest, DoesNotChangeTheTraining) {
  Recorder silent;
  Recorder saving;
  train_classifier(drop_net, data(), options().checkpoint_dir("").max_steps(30), silent);
  train_classifier(drop_net, data(), options().save_every({.steps = 1}).max_steps(30), saving);
  EXPECT_EQ(saving.losses, silent.losses);
}

TEST_F(SavingTest, ASaveThatFailsIsLoggedAndTheNextOneTriesAgain) {
  int steps = 0;
  const auto put_a_file_there = [&] {
    ++steps;
    if (steps == 3) put_file();
    if (steps == 9) fs::remove(run_);  // the save of step 8 has waited for that of step 4
    return 0;
  };
  const test::CapturedLog log;
  train_classifier(drop_net, data(),
                   options().save_every({.steps = 4}).stop_signal(put_a_file_there));
  EXPECT_THAT(log.text(), HasSubstr(run_.string() + "', got Not a directory"));
  EXPECT_EQ(steps_in(run_).back(), 10);
}

// Not only of files: those of another run are in the way.
TEST_F(SavingTest, ASaveThatIsRefusedIsLoggedAndTheNextOneTriesAgain) {
  const fs::path later = run_ / "step-00000500";
  int steps = 0;
  const auto put_one_there = [&] {
    ++steps;
    if (steps == 3) fs::create_directories(later);
    if (steps == 9) fs::remove(later);  // the save of step 8 has waited for that of step 4
    return 0;
  };
  const test::CapturedLog log;
  train_classifier(drop_net, data(), options().save_every({.steps = 4}).stop_signal(put_one_there));
  EXPECT_THAT(log.text(), HasSubstr("expected a step after 500"));
  EXPECT_EQ(steps_in(run_).back(), 10);
}

TEST_F(SavingTest, IfTheLastSaveIsRefusedTheResultHasTheError) {
  int steps = 0;
  const auto put_one_there = [&] {
    if (++steps == 3) fs::create_directories(run_ / "step-00000500");
    return 0;
  };
  const test::CapturedLog log;
  Recorder recorder;
  const TrainResult result = train_classifier(
      drop_net, data(), options().save_every({.steps = 4}).stop_signal(put_one_there), recorder);
  EXPECT_THAT(result.not_saved, ElementsAre(HasSubstr("expected a step after 500")));
  EXPECT_EQ(recorder.steps.size(), 10);
  EXPECT_EQ(recorder.tests.size(), 1);
}

TEST_F(SavingTest, IfTheLastSaveFailsTheResultHasTheError) {
  int steps = 0;
  const auto put_a_file_there = [&] {
    if (++steps == 3) put_file();
    return 0;
  };
  const test::CapturedLog log;
  Recorder recorder;
  const TrainResult result = train_classifier(
      drop_net, data(), options().save_every({.steps = 4}).stop_signal(put_a_file_there), recorder);
  EXPECT_THAT(result.not_saved, ElementsAre(HasSubstr(run_.string())));
  EXPECT_EQ(recorder.steps.size(), 10);
  EXPECT_EQ(recorder.tests.size(), 1);
}

TEST_F(SavingTest, AFinishedRunThatStartsAgainIsOnlyTested) {
  const auto again = options().resume_auto(true);
  const TrainResult first = train_classifier(drop_net, data(), again);
  const auto written = fs::last_write_time(step_of(run_, 10) / "manifest.json");
  Recorder recorder;
  const TrainResult second = train_classifier(drop_net, data(), again, recorder);
  EXPECT_TRUE(recorder.steps.empty());
  EXPECT_EQ(second.steps, 10);
  EXPECT_EQ(second.test_loss, first.test_loss);
  EXPECT_EQ(second.train_loss, first.train_loss);
  EXPECT_EQ(fs::last_write_time(step_of(run_, 10) / "manifest.json"), written);
}

TEST_F(SavingTest, MoreEpochsMayFollowIfTheRateIsConstant) {
  const auto constant = [](std::int64_t epochs) {
    return options_for(OptLevel::O2, torch::kHalf).schedule(Schedule::constant).epochs(epochs);
  };
  Recorder whole;
  Recorder rest;
  train_classifier(drop_net, data(), constant(1).checkpoint_dir(run_));
  train_classifier(drop_net, data(), constant(2), whole);
  train_classifier(drop_net, data(), constant(2).resume_from(run_), rest);
  EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 80, whole.losses.end()));
}

TEST_F(SavingTest, AnImpossibleDirectoryIsReportedBeforeTraining) {
  test::write_text(folder_ / "file", "");
  for (const fs::path& directory : {folder_ / "file", folder_ / "file" / "below"}) {
    Recorder recorder;
    EXPECT_THAT(test::message_of<FileError>([&] {
                  train_classifier(drop_net, data(), options().checkpoint_dir(directory), recorder);
                }),
                AllOf(HasSubstr(directory.string()), HasSubstr("Not a directory")));
    EXPECT_TRUE(recorder.steps.empty());
  }
  // A directory that does not exist yet is not created by a run that fails before its first save.
  EXPECT_THROW(train_classifier(drop_net, data(), options().lr(1e30).opt_level(OptLevel::O0)),
               DivergedError);
  EXPECT_FALSE(fs::exists(run_));
}

// A job that is started anew before its earlier start has ended, for example.
TEST_F(SavingTest, ADirectoryHasOneTrainingAtATime) {
  const auto refusal = [&](const TrainOptions& second) {
    Recorder recorder;
    std::string message =
        test::message_of<FileError>([&] { train_classifier(drop_net, data(), second, recorder); });
    EXPECT_TRUE(recorder.steps.empty());
    return message;
  };
  {
    const RunLock first(run_);
    EXPECT_THAT(refusal(options()), AllOf(HasSubstr("one training at a time"), HasSubstr(run_)));
    EXPECT_THAT(refusal(options().resume_auto(true)), HasSubstr("which still runs"));
  }
  EXPECT_FALSE(fs::exists(run_));
  train_classifier(drop_net, data(), options());
  // What a killed one has left is no obstacle.
  test::write_text(run_ / "training.lock", "");
  train_classifier(drop_net, data(), options().max_steps(12).resume_auto(true));
  EXPECT_THAT(steps_in(run_), ElementsAre(10, 12));
  EXPECT_FALSE(fs::exists(run_ / "training.lock"));
}

TEST_F(SavingTest, ADirectoryIsNotSharedWithATrainingOfAnotherUser) {
  fs::permissions(folder_.path(), fs::perms::all);
  const RunLock first(run_);
  fs::permissions(run_, fs::perms::all);
  fs::permissions(run_ / "training.lock",
                  fs::perms::owner_read | fs::perms::group_read | fs::perms::others_read);
  const test::AnotherUser user;
  EXPECT_THAT(test::message_of<FileError>([&] { const RunLock second(run_); }),
              HasSubstr("which still runs"));
}

TEST_F(SavingTest, ADirectoryOfOneStepIsNoPlaceForARun) {
  train_classifier(drop_net, data(), options());
  const auto inside = options().checkpoint_dir(step_of(run_, 10)).max_steps(12);
  for (const TrainOptions& wrong : {inside, TrainOptions(inside).resume_auto(true)}) {
    const std::string want = "which is the checkpoint of step 10";
    EXPECT_THAT(test::message_of<FileError>([&] { train_classifier(drop_net, data(), wrong); }),
                AllOf(HasSubstr(want), HasSubstr("name '" + run_.string() + "'")));
    EXPECT_THAT(test::message_of<FileError>([&] { require_resumable(wrong); }), HasSubstr(want));
  }
}

TEST_F(SavingTest, ADirectoryIsCreatedBesideAFolderOfAnyName) {
  fs::create_directory(folder_ / "checkpoint");
  train_classifier(drop_net, data(), options());
  EXPECT_THAT(steps_in(run_), ElementsAre(10));
}

// Not beside the link, where a file is in its place.
TEST_F(SavingTest, ADirectoryIsFoundThroughALinkAsTheSystemFindsIt) {
  fs::create_directories(folder_ / "there" / "below");
  fs::create_directory_symlink(folder_ / "there" / "below", folder_ / "link");
  test::write_text(run_, "");
  train_classifier(drop_net, data(), options().checkpoint_dir(folder_ / "link" / ".." / "run"));
  EXPECT_THAT(steps_in(folder_ / "there" / "run"), ElementsAre(10));
}

TEST_F(SavingTest, WeightsAreWrittenInFp32) {
  const auto written = [&](const char* name) {
    train_classifier(drop_net, data(), options().resume_auto(true).save_weights(folder_ / name));
    return weights::read(folder_ / name);
  };
  const auto safe = written("weights.safetensors");
  EXPECT_EQ(safe.format, weights::Format::safetensors);
  EXPECT_EQ(written("weights.pt").format, weights::Format::pytorch);
  test::DropNet masters;
  torch::load(masters, (step_of(run_, 10) / "model.pt").string());
  for (const auto& parameter : masters->named_parameters()) {
    const at::Tensor& found = safe.tensors[parameter.key()];
    EXPECT_EQ(found.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(found, parameter.value())) << parameter.key();
  }
  EXPECT_THAT(test::error_of([&] {
                train_classifier(drop_net, data(), options().save_weights(folder_ / "w.onnx"));
              }),
              HasSubstr("save_weights that ends in .safetensors"));
  EXPECT_THAT(test::error_of([&] {
                train_classifier(drop_net, data(), options().save_weights(folder_ / "no" / "w.pt"));
              }),
              HasSubstr("expected to write"));
}

TEST_F(SavingTest, OptionsThatContradictEachOtherAreErrors) {
  const auto message = [](const TrainOptions& options) {
    return test::error_of([&] { train_classifier(drop_net, data(), options); });
  };
  EXPECT_THAT(message(TrainOptions().save_every({.steps = 1})),
              HasSubstr("a checkpoint_dir with save_every"));
  EXPECT_THAT(message(TrainOptions().resume_auto(true)),
              HasSubstr("a checkpoint_dir with resume_auto"));
  EXPECT_THAT(message(options().resume_auto(true).resume_from("x")),
              HasSubstr("resume_auto or resume_from, got both"));
  EXPECT_THAT(message(options().keep(-1)), HasSubstr("to keep 0 (all) checkpoints or more"));
  EXPECT_THAT(message(options().save_every({.steps = -1})), HasSubstr("a number of steps"));
  EXPECT_THAT(message(options().save_every({.steps = 1, .time = std::chrono::seconds(1)})),
              HasSubstr("got 1 steps and 1 s"));
}

TEST(SaveInterval, IsANumberWithAUnit) {
  EXPECT_EQ(parse_save_interval("100")->steps, 100);
  EXPECT_EQ(parse_save_interval("100steps")->steps, 100);
  EXPECT_EQ(parse_save_interval("5min")->time, std::chrono::seconds(300));
  EXPECT_EQ(parse_save_interval("90s")->time, std::chrono::seconds(90));
  EXPECT_FALSE(parse_save_interval("0")->is_set());
  EXPECT_EQ(describe(*parse_save_interval("7")), "every 7 steps");
  EXPECT_EQ(describe(*parse_save_interval("120s")), "every 2 min");
  EXPECT_EQ(describe(*parse_save_interval("90s")), "every 90 s");
  EXPECT_EQ(describe({}), "at the end");
  for (const char* const text : {"", "min", "-1", "+1", "1.5min", "5 min", "5m", "5h", "1000000001",
                                 "99999999999999999999", "0x10", "200000000min"})
    EXPECT_EQ(parse_save_interval(text), std::nullopt) << text;
}

}  // namespace
}  // namespace checkpoints_test
}  // namespace semitone::train
