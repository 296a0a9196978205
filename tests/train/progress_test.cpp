#include "src/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

namespace semitone::train {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const StepDone kStep{.epoch = 2,
                     .epochs = 3,
                     .batch = 350,
                     .batches = 600,
                     .step = 950,
                     .loss = 0.03451,
                     .skipped = false,
                     .loss_scale = 32768,
                     .items_per_second = 6300.4,
                     .seconds_left = 72};
const EpochDone kEpoch{.epoch = 2,
                       .epochs = 3,
                       .train_loss = 0.25,
                       .loss_scale = 32768,
                       .skipped_steps = 4,
                       .items_per_second = 6300,
                       .seconds = 9.52};

TEST(Progress, WithoutATerminalSaysALineForTheResumeForAnEpochAndForTheTest) {
  std::ostringstream out;
  {
    Progress progress(out, "O1 float16", 0);
    progress.on(Resumed{949, "runs/7/step-00000949"});
    progress.on(kStep);
    progress.on(kEpoch);
    progress.on(Tested{0.9871, 0.05});
  }
  EXPECT_EQ(out.str(),
            "O1 float16  resumed from step 949, 'runs/7/step-00000949'\n"
            "O1 float16  epoch 2/3  loss 0.2500  scale 32768 (4 skipped)  6300 images/s  9.5 s\n"
            "O1 float16  test accuracy 98.71 %  loss 0.0500\n");
}

TEST(Progress, SaysWhatWasDoneAboutSpikesOfTheLoss) {
  std::ostringstream out;
  Progress progress(out, "O2 float16", 0);
  LossSpike spike{
      .step = 131, .loss = 9.25, .mean_loss = 0.5, .action = OnSpike::none, .loss_scale = 32768};
  progress.on(spike);
  spike.action = OnSpike::skip;
  spike.loss = -std::numeric_limits<double>::quiet_NaN();
  progress.on(spike);
  spike.action = OnSpike::lower_scale;
  spike.loss = 7;
  progress.on(spike);
  progress.on(RolledBack{.step = 140, .saved = 100, .reason = "[amp.divergence_guard] …"});
  EXPECT_EQ(out.str(),
            "O2 float16  loss spike in step 131: loss 9.2500, running mean 0.5000\n"
            "O2 float16  left out the batch of step 131: loss nan, running mean 0.5000\n"
            "O2 float16  loss spike in step 131: loss 7.0000, running mean 0.5000; scale 32768\n"
            "O2 float16  rolled back from step 140 to the checkpoint of step 100: "
            "[amp.divergence_guard] …\n");
}

TEST(Progress, WithoutATerminalSaysALineEverySoManySteps) {
  std::ostringstream out;
  Progress progress(out, "O1 float16", 0, 50);
  StepDone step = kStep;
  for (const std::int64_t batch : {349, 350, 351, 600}) {
    step.batch = batch;
    progress.on(step);
  }
  EXPECT_EQ(out.str(),
            "O1 float16  epoch 2/3  step 350/600  loss 0.0345  scale 32768  6300 images/s  1:12 "
            "left\n");
  std::ostringstream silent;
  Progress none(silent, "O1 float16", 0, 0);
  none.on(kStep);
  EXPECT_EQ(silent.str(), "");
}

TEST(Progress, ALossThatIsNoNumberHasNoSign) {
  std::ostringstream out;
  Progress progress(out, "O0", 0, 50);
  StepDone step = kStep;
  step.loss = -std::numeric_limits<double>::quiet_NaN();
  progress.on(step);
  EpochDone epoch = kEpoch;
  epoch.train_loss = step.loss;
  progress.on(epoch);
  progress.on(Tested{0, step.loss});
  EXPECT_THAT(out.str(), AllOf(HasSubstr("loss nan"), Not(HasSubstr("-nan"))));
}

TEST(Progress, OnATerminalDrawsALineThatItTakesAwayAgain) {
  std::ostringstream out;
  {
    Progress progress(out, "O1 float16", 200);
    progress.on(kStep);
    EXPECT_THAT(out.str(),
                AllOf(StartsWith("\r"), HasSubstr("epoch 2/3 [===========>"), HasSubstr("350/600"),
                      HasSubstr("loss 0.0345"), HasSubstr("scale 32768"),
                      HasSubstr("6300 images/s"), HasSubstr("1:12 left"), Not(HasSubstr("\n"))));
    const std::string once = out.str();
    progress.on(kStep);
    EXPECT_EQ(out.str(), once) << "drawn again within a tenth of a second";
    progress.on(kEpoch);
    EXPECT_THAT(out.str(),
                AllOf(HasSubstr("\r\033[KO1 float16  epoch 2/3  loss 0.25"), EndsWith("s\n")));
    progress.on(kStep);
  }
  EXPECT_THAT(out.str(), EndsWith("\r\033[K"));
}

// The text of the step on a terminal of this width.
std::string moving_line(int columns, StepDone step = kStep) {
  std::ostringstream out;
  Progress progress(out, "O1 bfloat16", columns);
  progress.on(step);
  const std::string text = out.str();
  EXPECT_THAT(text, AllOf(StartsWith("\r"), EndsWith("\033[K")));
  return text.substr(1, text.size() - 4);
}

TEST(Progress, LeavesWholeFieldsOutOnANarrowTerminal) {
  StepDone step = kStep;
  step.items_per_second = 12297;
  EXPECT_EQ(moving_line(120, step),
            "O1 bfloat16  epoch 2/3 [===========>        ] 350/600  loss 0.0345  scale 32768  "
            "12297 images/s  1:12 left");
  EXPECT_EQ(moving_line(80, step),
            "O1 bfloat16  epoch 2/3 [===>  ] 350/600  loss 0.0345  12297 images/s  1:12 left");
  EXPECT_EQ(moving_line(71, step),
            "O1 bfloat16  epoch 2/3 350/600  loss 0.0345  12297 images/s  1:12 left");
  EXPECT_EQ(moving_line(70, step),
            "O1 bfloat16  epoch 2/3 350/600  loss 0.0345  scale 32768  1:12 left");
  EXPECT_EQ(moving_line(40, step), "[==>  ] 350/600  loss 0.0345  1:12 left");
  EXPECT_EQ(moving_line(20, step), "350/600  1:12 left");
  EXPECT_EQ(moving_line(12, step), "1:12 left");
  EXPECT_EQ(moving_line(8, step), "350/600");
}

TEST(Progress, NoWidthIsEverExceeded) {
  for (int columns = 1; columns < 150; ++columns)
    EXPECT_LT(moving_line(columns).size(), static_cast<std::size_t>(columns));
  for (int columns = 30; columns < 150; ++columns) {
    std::ostringstream out;
    Progress progress(out, "O1 bfloat16", columns);
    progress.on(kEpoch);
    progress.on(Tested{0.9871, 0.05});
    std::istringstream lines(out.str());
    for (std::string line; std::getline(lines, line);)
      EXPECT_LT(line.size(), static_cast<std::size_t>(columns)) << line;
  }
}

TEST(Progress, TheBarIsFullAtTheLastBatch) {
  std::ostringstream out;
  Progress progress(out, "O0", 120);
  StepDone last = kStep;
  last.batch = last.batches;
  progress.on(last);
  EXPECT_THAT(out.str(), HasSubstr("[====================]"));
}

}  // namespace
}  // namespace semitone::train
