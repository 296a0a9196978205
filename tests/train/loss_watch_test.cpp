// What a training does about spikes of its loss.

#include "src/train/loss_watch.h"

#include "semitone/core/error.h"
#include "src/train/schedule.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/bits.h"
#include "tests/train/every_level.h"
#include "tests/train/small_training.h"
#include "tests/train/spiky_net.h"

#include <torch/torch.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::train {
namespace loss_watch_test {
namespace {

namespace fs = std::filesystem;
using amp::OptLevel;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Also records the model after each step and each rollback.
struct Watcher : Recorder {
  using Recorder::on;
  void on(const TrainingBegins& begin) override { model = &begin.model; }
  void on(const StepDone& step) override {
    Recorder::on(step);
    bits[step.step] = train::bits(*model);
    skipped[step.step] = step.skipped;
    scales[step.step] = step.loss_scale;
    rates[step.step] = step.lr;
  }
  void on(const RolledBack& rolled_back) override {
    Recorder::on(rolled_back);
    bits[rolled_back.step] = train::bits(*model);
  }
  std::vector<std::int64_t> spike_steps() const {
    std::vector<std::int64_t> result;
    for (const LossSpike& spike : spikes) result.push_back(spike.step);
    return result;
  }
  const torch::nn::Module* model = nullptr;
  std::map<std::int64_t, std::string> bits;
  std::map<std::int64_t, bool> skipped;
  std::map<std::int64_t, double> scales;
  std::map<std::int64_t, double> rates;
};

ModelFactory spiky_net(const std::set<std::int64_t>& bad_steps, double factor = kSpike) {
  return [=] { return Classifier(SpikyNet(bad_steps, factor)); };
}

// Losses fall from 2.3, and a spike of SpikyNet is above 30.
amp::DivergenceGuardOptions limit() {
  return amp::DivergenceGuardOptions().max_loss_ratio(5).warmup_steps(10);
}

TrainOptions options_with(OnSpike action, OptLevel level = OptLevel::O0,
                          c10::ScalarType dtype = torch::kBFloat16) {
  return options_for(level, dtype).max_steps(40).divergence_guard(limit()).on_spike(action);
}

TEST(LossSpikes, AreReportedAndChangeNothing) {
  Watcher plain;
  Watcher watched;
  train_classifier(spiky_net({20, 30}), data(),
                   options_with(OnSpike::none).divergence_guard(amp::DivergenceGuardOptions()),
                   plain);
  const TrainResult result =
      train_classifier(spiky_net({20, 30}), data(), options_with(OnSpike::none), watched);
  EXPECT_TRUE(plain.spikes.empty());
  EXPECT_THAT(watched.spike_steps(), ElementsAre(20, 30));
  EXPECT_EQ(result.loss_spikes, 2);
  EXPECT_GT(watched.spikes[0].loss, 5 * watched.spikes[0].mean_loss);
  EXPECT_EQ(watched.spikes[0].loss, watched.losses[19]);
  EXPECT_TRUE(watched.bits == plain.bits);
}

class LossSpikesAtEveryLevel : public ::testing::TestWithParam<LevelAndDtype> {};

TEST_P(LossSpikesAtEveryLevel, AreSkippedAndTheModelStaysAsItWas) {
  for (const double factor : {kSpike, kNan}) {
    Watcher watcher;
    const TrainResult result = train_classifier(
        spiky_net({20, 21, 30}, factor), data(),
        options_with(OnSpike::skip, std::get<0>(GetParam()), std::get<1>(GetParam())), watcher);
    EXPECT_THAT(watcher.spike_steps(), ElementsAre(20, 21, 30));
    EXPECT_EQ(result.loss_spikes, 3);
    EXPECT_EQ(result.steps, 40);
    for (const std::int64_t step : {20, 21, 30}) {
      EXPECT_TRUE(watcher.skipped[step]);
      EXPECT_TRUE(watcher.bits[step] == watcher.bits[step - 1]) << step;
      EXPECT_EQ(watcher.scales[step], watcher.scales[step - 1]) << step;
    }
    EXPECT_FALSE(watcher.bits[22] == watcher.bits[21]);
    EXPECT_LT(result.train_loss, 5);  // the mean without the spikes
    EXPECT_TRUE(std::isfinite(result.test_loss));
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, LossSpikesAtEveryLevel, every_level_and_dtype(), name_of_case);

TEST(LossSpikes, InARowEndTheTraining) {
  for (const OnSpike action : {OnSpike::none, OnSpike::skip}) {
    Watcher watcher;
    const std::string message = test::message_of<DivergedError>([&] {
      train_classifier(spiky_net({20, 21, 22, 23, 24}), data(), options_with(action), watcher);
    });
    EXPECT_THAT(message,
                AllOf(HasSubstr("[amp.divergence_guard] expected finite losses of at most"),
                      HasSubstr("5 consecutive others"), HasSubstr("in step 24")));
    EXPECT_EQ(watcher.steps.size(), 23U);
  }
}

TEST(LossSpikes, LowerTheLossScale) {
  Watcher watcher;
  const TrainResult result = train_classifier(
      spiky_net({20, 30}), data(),
      options_with(OnSpike::lower_scale, OptLevel::O2, torch::kHalf).growth_interval(0), watcher);
  EXPECT_THAT(watcher.spike_steps(), ElementsAre(20, 30));
  for (const std::int64_t step : {20, 30}) {
    EXPECT_FALSE(watcher.skipped[step]);
    EXPECT_EQ(watcher.scales[step], watcher.scales[step - 1] / 2) << step;
  }
  EXPECT_EQ(watcher.spikes[1].loss_scale, watcher.scales[30]);
  EXPECT_EQ(result.final_loss_scale, 65536 * std::pow(0.5, 2 + result.skipped_steps));
}

TEST(LossSpikes, ThatAreSkippedLeaveAResumeBitForBit) {
  const test::TemporaryFolder folder;
  const auto skipping = [&](const char* name, std::int64_t steps) {
    return options_with(OnSpike::skip, OptLevel::O2, torch::kHalf)
        .checkpoint_dir(folder / name)
        .max_steps(steps)
        .resume_auto(true);
  };
  Watcher whole;
  Watcher second;
  train_classifier(spiky_net({20, 25, 33}), data(), skipping("whole", 40), whole);
  train_classifier(spiky_net({20}), data(), skipping("parts", 22));
  torch::manual_seed(12345);
  train_classifier(spiky_net({3, 11}), data(), skipping("parts", 40), second);
  EXPECT_THAT(second.spike_steps(), ElementsAre(25, 33));
  EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + 22, whole.losses.end()));
  EXPECT_TRUE(second.bits[40] == whole.bits[40]);
  const auto guard_of = [&](const char* name) {
    return test::read_text(step_of(folder / name, 40) / "divergence_guard.pt");
  };
  EXPECT_FALSE(guard_of("whole").empty());
  EXPECT_TRUE(guard_of("parts") == guard_of("whole"));
}

class RollingBack : public ::testing::Test {
 protected:
  TrainOptions options(OptLevel level = OptLevel::O0,
                       c10::ScalarType dtype = torch::kBFloat16) const {
    return options_with(OnSpike::rollback, level, dtype)
        .checkpoint_dir(run_)
        .save_every({.steps = 10})
        .keep(0);
  }
  test::TemporaryFolder folder_;
  fs::path run_ = folder_ / "run";
};

TEST_F(RollingBack, LoadsTheNewestCheckpointAndGoesOnWithTheNextBatch) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O2}) {
    fs::remove_all(run_);
    Watcher watcher;
    const TrainResult result = train_classifier(spiky_net({21, 22, 23, 24, 25}), data(),
                                                options(level, torch::kHalf), watcher);
    EXPECT_THAT(watcher.spike_steps(), ElementsAre(21, 22, 23, 24));
    ASSERT_EQ(watcher.rollbacks.size(), 1U);
    EXPECT_EQ(watcher.rollbacks[0].step, 25);
    EXPECT_EQ(watcher.rollbacks[0].saved, 20);
    EXPECT_THAT(watcher.rollbacks[0].reason, HasSubstr("5 consecutive others"));
    EXPECT_FALSE(watcher.bits[24] == watcher.bits[20]);  // momentum
    EXPECT_TRUE(watcher.bits[25] == watcher.bits[20]);
    EXPECT_FALSE(watcher.bits[26] == watcher.bits[25]);
    EXPECT_EQ(watcher.rates[26], learning_rate(Schedule::cosine, 0.05, 25, 160));
    EXPECT_EQ(watcher.steps.size(), 39U);
    EXPECT_EQ(result.steps, 40);
    EXPECT_EQ(result.rollbacks, 1);
    EXPECT_THAT(steps_in(run_), ElementsAre(10, 20, 30, 40));
  }
}

// The step that ruined the weights has been taken.
TEST_F(RollingBack, RestoresWeightsThatAreNan) {
  Watcher watcher;
  const TrainResult result = train_classifier(spiky_net({25}, kNan), data(), options(), watcher);
  ASSERT_EQ(watcher.rollbacks.size(), 1U);
  EXPECT_THAT(watcher.rollbacks[0].reason, HasSubstr("expected a finite loss, got nan"));
  EXPECT_TRUE(watcher.bits[25] == watcher.bits[20]);
  EXPECT_TRUE(std::isfinite(result.test_loss));
  EXPECT_EQ(result.loss_spikes, 0);
}

TEST_F(RollingBack, HappensAfterTooManySkippedStepsToo) {
  Watcher watcher;
  const TrainResult result = train_classifier(
      spiky_net({23, 24, 25}, kNan), data(),
      options(OptLevel::O2, torch::kHalf).loss_scale(128.0).max_consecutive_skips(3), watcher);
  ASSERT_EQ(watcher.rollbacks.size(), 1U);
  EXPECT_EQ(watcher.rollbacks[0].step, 25);
  EXPECT_THAT(watcher.rollbacks[0].reason,
              HasSubstr("[amp.loss_scaler] expected finite gradients"));
  EXPECT_TRUE(watcher.bits[25] == watcher.bits[20]);
  EXPECT_TRUE(std::isfinite(result.test_loss));
}

TEST_F(RollingBack, IsToACheckpointFromBeforeTheSpikes) {
  Watcher watcher;
  train_classifier(spiky_net({29, 30, 31}), data(), options(), watcher);
  EXPECT_TRUE(watcher.rollbacks.empty());
  EXPECT_THAT(steps_in(run_), ElementsAre(10, 20, 32, 40));
}

// Another process then goes on from before the spikes, and has a checkpoint to roll back to.
TEST_F(RollingBack, OfARunThatIsStoppedAmongSpikesIsStillPossible) {
  Watcher watcher;
  const auto stop = [&] { return watcher.steps.size() == 23 ? SIGTERM : 0; };
  const TrainResult stopped = train_classifier(spiky_net({21, 22, 23}), data(),
                                               options().keep(1).stop_signal(stop), watcher);
  EXPECT_EQ(stopped.stop_signal, SIGTERM);
  EXPECT_THAT(steps_in(run_), ElementsAre(20));
  EXPECT_EQ(stopped.last_checkpoint, 20);

  fs::remove_all(run_);
  Watcher early;
  const auto stop_early = [&] { return early.steps.size() == 23 ? SIGTERM : 0; };
  const TrainResult first =
      train_classifier(spiky_net({21, 22, 23}), data(),
                       options().save_every({.steps = 30}).stop_signal(stop_early), early);
  EXPECT_THAT(steps_in(run_), ElementsAre(23));  // better than none
  EXPECT_EQ(first.last_checkpoint, 23);
}

// Takes the directory of checkpoints from its training for a while, as a second one would.
struct Intruder : Watcher {
  explicit Intruder(fs::path directory_) : directory(std::move(directory_)) {}
  void on(const StepDone& step) override {
    Watcher::on(step);
    if (step.step == 14) {
      file = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      EXPECT_EQ(::flock(file, LOCK_EX | LOCK_NB), 0);
    } else if (step.step == 18) {
      ::close(file);
    }
  }
  using Watcher::on;
  fs::path directory;
  int file = -1;
};

// The only save before the spikes has failed.
TEST_F(RollingBack, OfARunThatIsStoppedAmongSpikesNeedsACheckpointThatWasWritten) {
  const test::CapturedLog log;
  Intruder intruder(run_);
  const auto stop = [&] { return intruder.steps.size() == 23 ? SIGTERM : 0; };
  const TrainResult stopped =
      train_classifier(spiky_net({21, 22, 23}), data(),
                       options().save_every({.steps = 15}).stop_signal(stop), intruder);
  EXPECT_THAT(log.text(), HasSubstr("one process at a time"));
  EXPECT_THAT(stopped.not_saved, IsEmpty());
  EXPECT_THAT(steps_in(run_), ElementsAre(23));
  EXPECT_EQ(stopped.last_checkpoint, 23);
}

TEST_F(RollingBack, HappensAFewTimesOnly) {
  const test::CapturedLog log;
  Watcher watcher;
  EXPECT_THAT(test::message_of<DivergedError>([&] {
                train_classifier(spiky_net({15, 18, 23}, kNan), data(),
                                 options().divergence_guard(limit().max_rollbacks(2)), watcher);
              }),
              HasSubstr("expected a finite loss"));
  ASSERT_EQ(watcher.rollbacks.size(), 2U);
  EXPECT_EQ(watcher.rollbacks[1].step, 18);
  EXPECT_EQ(watcher.rollbacks[1].saved, 10);
  EXPECT_THAT(log.text(), HasSubstr("no rollback: there were 2 already"));
  EXPECT_THAT(steps_in(run_), ElementsAre(10, 20));
}

TEST_F(RollingBack, NeedsACheckpoint) {
  const test::CapturedLog log;
  EXPECT_THAT(test::message_of<DivergedError>(
                  [&] { train_classifier(spiky_net({5}, kNan), data(), options()); }),
              HasSubstr("expected a finite loss"));
  EXPECT_THAT(log.text(), HasSubstr("no rollback: no checkpoint yet in '" + run_.string() + "'"));
}

// The mean loss of the second epoch contains no steps of the first.
TEST_F(RollingBack, MayCrossTheEndOfAnEpoch) {
  Watcher watcher;
  const auto only_nan = limit().max_loss_ratio(1000);
  train_classifier(spiky_net({83}, kNan), data(),
                   options().divergence_guard(only_nan).save_every({.steps = 75}).max_steps(160),
                   watcher);
  ASSERT_EQ(watcher.rollbacks.size(), 1U);
  EXPECT_EQ(watcher.rollbacks[0].saved, 75);
  ASSERT_EQ(watcher.epochs.size(), 2U);
  double sum = 0;
  for (const StepDone& step : watcher.steps) sum += step.step > 83 ? step.loss : 0;
  EXPECT_DOUBLE_EQ(watcher.epochs[1].train_loss, sum / 77);
}

// A run that diverged can go on with other options.
TEST_F(RollingBack, OptionsMayChangeInAResume) {
  train_classifier(drop_net, data(),
                   options_for(OptLevel::O0, torch::kBFloat16).checkpoint_dir(run_).max_steps(10));
  Watcher watcher;
  const TrainResult result =
      train_classifier(drop_net, data(), options().resume_auto(true).max_steps(20), watcher);
  EXPECT_EQ(result.steps, 20);
  ASSERT_EQ(watcher.resumed.size(), 1U);
  EXPECT_EQ(watcher.resumed[0].step, 10);
}

TEST(OnSpikeOptions, ThatContradictEachOtherAreErrors) {
  const auto message = [](const TrainOptions& options) {
    return test::error_of([&] { train_classifier(drop_net, data(), options); });
  };
  EXPECT_THAT(message(options_with(OnSpike::skip).divergence_guard({})),
              HasSubstr("[train.trainer] expected a max_loss_ratio or max_z_score in "
                        "divergence_guard with on_spike skip, got none"));
  EXPECT_THAT(message(options_with(OnSpike::lower_scale, OptLevel::O2, torch::kBFloat16)),
              HasSubstr("expected a dynamic loss scale with on_spike lower-scale, got a constant"));
  EXPECT_THAT(message(options_with(OnSpike::rollback)),
              HasSubstr("expected a checkpoint_dir with on_spike rollback, got none"));
  EXPECT_THAT(message(options_with(OnSpike::rollback).checkpoint_dir("run")),
              HasSubstr("expected save_every with on_spike rollback, got none"));
  EXPECT_THAT(message(options_with(OnSpike::none)
                          .divergence_guard(amp::DivergenceGuardOptions().max_loss_ratio(0.5))),
              HasSubstr("[amp.divergence_guard] expected a max_loss_ratio"));
  EXPECT_THAT(message(options_with(OnSpike::none).divergence_guard(limit().warmup_steps(0))),
              HasSubstr("warmup_steps of at least 2"));
}

TEST(OnSpikeOptions, ActionsHaveNames) {
  for (const OnSpike action :
       {OnSpike::none, OnSpike::skip, OnSpike::lower_scale, OnSpike::rollback})
    EXPECT_EQ(parse_on_spike(name_of(action)), action);
  EXPECT_THAT(test::error_of([] { parse_on_spike("retry"); }),
              HasSubstr("[train.on_spike] expected none, skip, lower-scale or rollback"));
}

}  // namespace
}  // namespace loss_watch_test
}  // namespace semitone::train
