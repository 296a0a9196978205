#include "src/train/run_recorder.h"

#include "semitone/core/events.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/small_training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::train::run_recorder_test {
namespace {

using test::read_text;
using test::TemporaryFolder;
using ::testing::Contains;
using ::testing::ElementsAre;

// The lines of metrics.csv without the time: "10,train/loss,0.5".
std::vector<std::string> metrics_in(const std::filesystem::path& directory) {
  std::istringstream text(read_text(directory / "metrics.csv"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    const auto first = line.find(',');
    lines.push_back(line.erase(first, line.find(',', first + 1) - first));
  }
  lines.erase(lines.begin());
  return lines;
}

StepDone done(std::int64_t step) {
  StepDone event{};
  event.step = step;
  event.loss = 0.5;
  event.lr = 0.25;
  event.items_per_second = 1000;
  return event;
}

events::StepSkipped skip(std::int64_t total) {
  return {
      .parameter = "fc.weight", .non_finite = 1, .consecutive = 1, .total = total, .loss_scale = 8};
}

TEST(RunRecorder, RecordsEveryTenthStepAndEpochs) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Recorder next;
  RunRecorder recorder(log, next);
  for (std::int64_t step = 1; step <= 12; ++step) {
    recorder.on(StepBegins{step});
    recorder.on(done(step));
  }
  recorder.on(EpochDone{.epoch = 1,
                        .epochs = 1,
                        .train_loss = 0.75,
                        .loss_scale = 8,
                        .skipped_steps = 2,
                        .items_per_second = 1000,
                        .seconds = 1.5});
  recorder.on(Tested{.accuracy = 0.875, .loss = 0.125});
  log.close();
  EXPECT_THAT(
      metrics_in(folder.path()),
      ElementsAre("10,train/loss,0.5", "10,train/lr,0.25", "10,train/images_per_second,1000",
                  "12,train/epoch,1", "12,train/epoch_loss,0.75", "12,train/epoch_seconds,1.5",
                  "12,amp/loss_scale,8", "12,amp/skipped_steps,2", "12,test/accuracy,0.875",
                  "12,test/loss,0.125"));
  EXPECT_EQ(next.steps.size(), 12U);
  EXPECT_EQ(next.epochs.size(), 1U);
  EXPECT_EQ(next.tests.size(), 1U);
}

TEST(RunRecorder, GivesEventsTheStepInWhichTheyHappen) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Observer none;
  RunRecorder recorder(log, none);
  recorder.on(Resumed{.step = 30, .path = "checkpoint"});
  for (std::int64_t step = 31; step <= 33; ++step) {
    recorder.on(StepBegins{step});
    events::emit(skip(step - 30));
    recorder.on(done(step));
  }
  log.close();
  EXPECT_THAT(
      metrics_in(folder.path()),
      ElementsAre("31,amp/skipped_steps,1", "32,amp/skipped_steps,2", "33,amp/skipped_steps,3"));
}

TEST(RunRecorder, GivesEventsTheStepOfANewTrainingToo) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Observer none;
  RunRecorder recorder(log, none);
  recorder.on(StepBegins{1});
  events::emit(skip(1));
  recorder.on(done(1));
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("1,amp/skipped_steps,1"));
}

TEST(RunRecorder, RecordsSpikesAndRollbacks) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Recorder next;
  RunRecorder recorder(log, next);
  recorder.on(StepBegins{31});
  recorder.on(LossSpike{
      .step = 31, .loss = 7.5, .mean_loss = 0.5, .action = OnSpike::rollback, .loss_scale = 1});
  recorder.on(done(31));
  recorder.on(StepBegins{32});
  recorder.on(RolledBack{.step = 32, .saved = 20, .reason = "diverged"});
  log.close();
  EXPECT_THAT(metrics_in(folder.path()),
              ElementsAre("31,train/loss_spike,7.5", "32,train/rollback_to,20"));
  EXPECT_THAT(read_text(folder.path() / "texts.jsonl"), ::testing::HasSubstr("diverged"));
  EXPECT_EQ(next.spikes.size(), 1U);
  EXPECT_EQ(next.rollbacks.size(), 1U);
}

// The batch trains nothing: its loss is no loss of the training.
TEST(RunRecorder, LeavesOutTheLossOfABatchThatWasLeftOut) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Recorder next;
  RunRecorder recorder(log, next);
  for (const std::int64_t step : {10, 20}) {
    recorder.on(StepBegins{step});
    if (step == 10)
      recorder.on(LossSpike{
          .step = 10, .loss = NAN, .mean_loss = 0.5, .action = OnSpike::skip, .loss_scale = 1});
    recorder.on(done(step));
  }
  log.close();
  const auto metrics = metrics_in(folder.path());
  EXPECT_THAT(metrics, ::testing::Contains("10,train/loss_spike,nan"));
  EXPECT_THAT(metrics,
              ::testing::Not(::testing::Contains(::testing::StartsWith("10,train/loss,"))));
  EXPECT_THAT(metrics, ::testing::Contains(::testing::StartsWith("20,train/loss,")));
}

TEST(RunRecorder, RecordsTheLearningRateOfEachStep) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Recorder next;
  RunRecorder recorder(log, next);
  train_classifier(drop_net, data(),
                   options_for(amp::OptLevel::O0, torch::kBFloat16)
                       .limit_batches(10)
                       .epochs(1)
                       .schedule(Schedule::constant),
                   recorder);
  log.close();
  for (const StepDone& step : next.steps) EXPECT_EQ(step.lr, 0.05);
  EXPECT_THAT(metrics_in(folder.path()), Contains("10,train/lr,0.05"));
}

// The steps of the lines of a kind in samples.jsonl.
std::vector<std::int64_t> samples_in(const std::filesystem::path& directory) {
  std::istringstream text(read_text(directory / "samples.jsonl"));
  std::vector<std::int64_t> steps;
  for (std::string line; std::getline(text, line);) {
    const auto sample = nlohmann::json::parse(line);
    if (sample.at("kind") == "sample") steps.push_back(sample.at("step"));
  }
  return steps;
}

TEST(RunRecorder, SamplesStepsWithoutAnEffectOnThem) {
  const TrainOptions options =
      options_for(amp::OptLevel::O2, torch::kHalf).limit_batches(10).epochs(1);
  Recorder plain;
  train_classifier(drop_net, data(), options, plain);
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Recorder next;
  RunRecorder recorder(log, next, /*sample_every=*/4);
  train_classifier(drop_net, data(), options, recorder);
  log.close();
  EXPECT_THAT(samples_in(folder.path()), ElementsAre(1, 5, 9));
  EXPECT_EQ(next.losses, plain.losses);
}

TEST(RunRecorder, AStepThatFailsIsNoSample) {
  const TemporaryFolder folder;
  report::RunLog log(folder.path());
  Observer none;
  RunRecorder recorder(log, none, /*sample_every=*/1);
  EXPECT_THROW(train_classifier(drop_net, data(),
                                options_for(amp::OptLevel::O0, torch::kHalf).lr(1e30), recorder),
               DivergedError);
  log.close(report::Outcome::failed, "diverged");
  EXPECT_FALSE(samples_in(folder.path()).empty());
}

}  // namespace
}  // namespace semitone::train::run_recorder_test
