#include "semitone/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
                     .images_per_second = 6300.4,
                     .seconds_left = 72};
const EpochDone kEpoch{.epoch = 2,
                       .epochs = 3,
                       .train_loss = 0.25,
                       .loss_scale = 32768,
                       .skipped_steps = 4,
                       .images_per_second = 6300,
                       .seconds = 9.52};

TEST(Progress, WithoutATerminalSaysALineAnEpochAndOneForTheTest) {
  std::ostringstream out;
  {
    Progress progress(out, "O1 float16", 0);
    progress.on(kStep);
    progress.on(kEpoch);
    progress.on(Tested{0.9871, 0.05});
  }
  EXPECT_EQ(out.str(),
            "O1 float16  epoch 2/3  loss 0.2500  scale 32768 (4 skipped)  6300 images/s  9.5 s\n"
            "O1 float16  test accuracy 98.71 %  loss 0.0500\n");
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

TEST(Progress, StaysWithinTheTerminal) {
  std::ostringstream out;
  Progress progress(out, "O1 float16", 40);
  progress.on(kStep);
  EXPECT_EQ(out.str().size(), std::string("\r").size() + 39 + std::string("\033[K").size());
}

TEST(Progress, TheBarIsFullAtTheLastBatch) {
  std::ostringstream out;
  Progress progress(out, "O0", 100);
  StepDone last = kStep;
  last.batch = last.batches;
  progress.on(last);
  EXPECT_THAT(out.str(), HasSubstr("[====================]"));
}

}  // namespace
}  // namespace semitone::train
