#include "tests/report/made_up_verdicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace semitone::report::made_up {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A change of another loss's scale.
Json scale_of(std::int64_t loss_id, std::int64_t step, double before, double after) {
  Json line = scale(step, before, after);
  line["loss_id"] = loss_id;
  return line;
}

// In one of the steps up to this one.
Json skipped_up_to(std::int64_t step, double loss_scale) {
  Json line = skipped(step, "w", loss_scale);
  line["exact"] = false;
  return line;
}

TEST(SkipVerdicts, SkipsAtAConstantScaleAreNotNormal) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(1, 128, 128), skipped(2, "w", 128), skipped(3, "w", 128, 2)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::warning);
  EXPECT_THAT(verdict_of(run, "skipped_steps").steps, ElementsAre(2, 3));
}

// Without RunLog::set_step(), as in a record of a loss in every 100th step.
TEST(SkipVerdicts, SkipsOfUnknownStepsAreCountedAndExcuseNoLoss) {
  MadeUpRun run;
  run.add({scale(100, 128, 128)});
  for (std::int64_t step = 100; step <= 1000; step += 100) {
    for (int i = 0; i < 50; ++i) run.add({skipped_up_to(step, 128)});
    run.add_metric(step, "train/loss", step == 700 ? "nan" : "1");
  }
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::problem);
  EXPECT_THAT(verdict.title, HasSubstr("500 of 901 steps were skipped (55"));
  EXPECT_THAT(verdict.detail, HasSubstr("One of the steps up to 1000 was skipped"));
  EXPECT_THAT(verdict_of(run, "nonfinite_loss").steps, ElementsAre(700));
}

TEST(SkipVerdicts, AGrowthAndAFallOfUnknownStepsAreNormal) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(100, 1024, 1024), scale(300, 1024, 2048), skipped_up_to(300, 2048),
           scale(300, 2048, 1024)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::good);
}

// As where values are added once an epoch.
TEST(SkipVerdicts, MoreSkipsThanStepsAreNoShare) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(3, "train/loss", "1");
  for (int i = 0; i < 20; ++i) run.add({skipped_up_to(3, 128)});
  run.add({scale(1, 128, 128)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.title, HasSubstr("20 skipped steps although"));
}

// Several optimizers skip one step.
TEST(SkipVerdicts, SkipsOfOneStepAreOne) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(1, 128, 128), skipped(2, "w", 128), skipped(2, "v", 128)});
  EXPECT_THAT(verdict_of(run, "skipped_steps").title, HasSubstr("Step 2 was skipped"));
}

TEST(SkipVerdicts, AScaleThatFallsAfterASecondSkipIsBeingFound) {
  MadeUpRun run;  // hysteresis 2
  run.add_metric(400, "train/loss", "1");
  run.add(
      {scale(1, 1024, 1024), skipped(2, "w", 1024), skipped(3, "w", 1024, 2), scale(3, 1024, 512)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::good);
  EXPECT_THAT(verdict_of(run, "skipped_steps").title, HasSubstr("the loss scale was being found"));
}

TEST(SkipVerdicts, ALongStartIsNoProblemOnceItIsOver) {
  MadeUpRun run;
  double now = 4294967296;  // 2^32
  run.add({scale(1, now, now)});
  for (std::int64_t step = 1; step <= 17; ++step, now /= 2)
    run.add({skipped(step, "w", now, step), scale(step, now, now / 2)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::problem);
  run.add_metric(10000, "train/loss", "1");
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::good);
}

TEST(SkipVerdicts, AScaleIsStuckOnlyIfTheRunEndsSo) {
  MadeUpRun run;
  run.add({scale(1, 1, 1)});
  for (std::int64_t step = 1; step <= 3; ++step) run.add({skipped(step, "w", 1, step)});
  EXPECT_THAT(verdict_of(run, "low_scale").detail,
              HasSubstr("The scale is constant or at its minimum, and the last 3 steps were "
                        "skipped."));
  run.add_metric(4, "train/loss", "1");
  EXPECT_FALSE(has(run, "low_scale"));
}

TEST(SkipVerdicts, GrowthOfAnotherLossIsNone) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale_of(0, 1, 1024, 1024), scale_of(1, 1, 8, 8), scale_of(1, 200, 8, 16),
           skipped(312, "w", 1024), scale_of(0, 312, 1024, 512)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::warning);
}

TEST(SkipVerdicts, AScaleThatBeganAnewHasGrown) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(1, 1024, 1024), scale(200, 65536, 65536), skipped(201, "w", 65536),
           scale(201, 65536, 32768)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::good);
  EXPECT_THAT(verdict.detail, HasSubstr("The loss scale began anew at step 200."));
}

// The first line after a resume has the scale of the constructor as `before`, in records of 0.1.
Json loaded_scale(std::int64_t step, double before, double after) {
  Json line = scale(step, before, after);
  line["found_inf"] = false;
  return line;
}

TEST(SkipVerdicts, AScaleThatWasLoadedHasNotGrown) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(10000, "train/loss", "1");
  run.add({scale(1, 65536, 65536), skipped(3, "w", 65536), scale(3, 65536, 32768),
           restart(5001, 6000), loaded_scale(5001, 65536, 32768), skipped(5300, "w", 32768),
           scale(5300, 32768, 16384)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.steps, ElementsAre(5300));
  EXPECT_THAT(verdict.title, HasSubstr("although the loss scale had not grown"));
}

TEST(SkipVerdicts, AScaleThatWasLoadedIsNoGrowthOfTheRun) {
  MadeUpRun run;
  run.add({scale(1, 1024, 1024), restart(101, 2000), loaded_scale(101, 65536, 1024),
           loaded_scale(200, 1024, 2048)});
  EXPECT_FALSE(has(run, "growing_scale"));
}

TEST(SkipVerdicts, AScaleThatBeganAnewMayFallToWhatItWas) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(10000, "train/loss", "1");
  run.add({scale(1, 8192, 8192)});
  double now = 65536;
  for (std::int64_t step = 5001; step <= 5003; ++step, now /= 2)
    run.add({skipped(step, "w", now, step - 5000), scale(step, now, now / 2)});
  const Verdict normal = verdict_of(run, "skipped_steps");
  EXPECT_EQ(normal.severity, Severity::good);
  EXPECT_THAT(normal.detail, HasSubstr("The loss scale began anew at step 5001."));
  run.add({skipped(5004, "w", now, 4), scale(5004, now, now / 2)});
  EXPECT_THAT(verdict_of(run, "skipped_steps").steps, ElementsAre(5004));
}

TEST(SkipVerdicts, WithHysteresisTheSecondSkipAfterAGrowthIsNormalToo) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(4000, "train/loss", "1");
  run.add({scale(1, 65536, 65536), scale(1000, 65536, 131072), skipped(1001, "w", 131072),
           skipped(1002, "w", 131072, 2), scale(1002, 131072, 65536)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::good);
  run.add({skipped(1003, "w", 65536, 3), scale(1003, 65536, 32768)});
  EXPECT_THAT(verdict_of(run, "skipped_steps").steps, ElementsAre(1003));
}

TEST(SkipVerdicts, TheFigureIsThatOfTheTitle) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(1, 1024, 1024), skipped(2, "w", 1024), scale(2, 1024, 512), skipped(300, "w", 512),
           scale(300, 512, 256)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.title, "Step 300 was skipped although the loss scale had not grown");
  EXPECT_DOUBLE_EQ(verdict.figure.value(), 0.25);
  EXPECT_THAT(verdict.detail, HasSubstr(" 1 more is normal."));
}

TEST(SkipVerdicts, TheScaleOfTheLossThatWasSkippedIsJudged) {
  MadeUpRun run;
  run.add({scale_of(0, 1, 1024, 1024), scale_of(1, 1, 1, 1), skipped(2, "w", 1),
           scale_of(1, 2, 1, 0.5)});
  EXPECT_EQ(verdict_of(run, "low_scale").figure, 0.5);
}

TEST(SkipVerdicts, DoNotRepeatTheirTitles) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(200, 8, 8), skipped(312, "", 8)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.title, "Step 312 was skipped although the loss scale had not grown");
  EXPECT_EQ(verdict.detail,
            "A gradient on another rank was not finite at loss scale 8; the scale stayed the same. "
            "The gradients became larger, or are not finite at any scale.");
}

TEST(SkipVerdicts, TheScaleGrewWithoutASkip) {
  MadeUpRun run;
  run.add({scale(100, 1024, 2048), scale(200, 2048, 4096)});
  EXPECT_EQ(verdict_of(run, "growing_scale").title, "The loss scale only grew: 2 times, to 4096");
}

}  // namespace
}  // namespace semitone::report::made_up
