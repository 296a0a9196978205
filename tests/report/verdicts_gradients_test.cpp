#include "tests/report/made_up_verdicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace semitone::report::made_up {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(GradientVerdicts, ZerosOfEmbeddingsAreNotLost) {
  MadeUpRun run;  // rows that the batch does not have, beside small gradients
  run.add({model({parameter("table", "Embedding", {100, 1}, "Half")}),
           sample(1, 1, {tensor("gradient", "table.weight", "Half", -24, {10}, /*zeros=*/90)})});
  EXPECT_EQ(verdict_of(run, "underflow").severity, Severity::good);
}

// One value of a thousand is below 2^-25: it never was in float16.
TEST(GradientVerdicts, ZerosOfWiderGradientsAreNotLost) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("gradient", "w", "Float", -26, {1, 0, 999}, /*zeros=*/9000)})});
  EXPECT_EQ(verdict_of(run, "underflow").severity, Severity::good);
}

// As those of fp32 weights at O1.
TEST(GradientVerdicts, ZerosOfGradientsThatWereCastFromTheFormatAreLost) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("gradient", "w", "Float", -24, {10}, /*zeros=*/90)})});
  EXPECT_EQ(verdict_of(run, "underflow").severity, Severity::problem);
  EXPECT_NEAR(verdict_of(run, "underflow").figure.value_or(0), 90, 1e-9);
  MadeUpRun large;
  large.add({sample(1, 1, {tensor("gradient", "w", "Float", -8, {10}, /*zeros=*/90)})});
  EXPECT_EQ(verdict_of(large, "underflow").severity, Severity::good);
}

TEST(GradientVerdicts, WarnOfASingleParameterThatLosesItsGradient) {
  MadeUpRun run;
  run.add({sample(1, 1,
                  {tensor("gradient", "w", "Float", -8, {1000}),
                   tensor("gradient", "key.bias", "Float", -30, {8}),
                   tensor("gradient", "key.bias", "Float", -8, {2})})});
  const Verdict verdict = verdict_of(run, "underflow");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_EQ(verdict.title, "'key.bias' loses 80 % of its gradient's values in float16");
  EXPECT_NEAR(verdict.figure.value_or(0), 80, 1e-9);
  EXPECT_THAT(verdict.where, ElementsAre("key.bias"));
  EXPECT_THAT(verdict.detail, HasSubstr("A bias before a normalisation, or of an attention's keys, "
                                        "has no gradient but rounding errors"));
}

TEST(GradientVerdicts, TheProposedScaleFitsTheGradientsOfOutputs) {
  MadeUpRun run;
  run.add({sample(1, 1,
                  {tensor("gradient", "w", "Float", -30, {10}),
                   tensor("output_gradient", "fc", "Half", 4, {10})})});
  // 2^4 times 2^10 is below 65504 / 2.
  EXPECT_THAT(verdict_of(run, "underflow").remedy, HasSubstr("raise the loss scale to 1024 "));
}

TEST(GradientVerdicts, TheProposedScaleIsBelowThoseThatWereSkipped) {
  MadeUpRun run;
  run.add({skipped(1, "w", 256), skipped(2, "w", 128),
           sample(3, 1, {tensor("gradient", "w", "Float", -30, {10})})});
  EXPECT_THAT(verdict_of(run, "underflow").remedy, HasSubstr("raise the loss scale to 64 "));
}

TEST(GradientVerdicts, ClaimNoOverflowAtTheLargestScale) {
  MadeUpRun run;
  run.add({sample(1, 0x1p24, {tensor("gradient", "w", "Float", -60, {10})})});
  EXPECT_THAT(verdict_of(run, "underflow").remedy,
              AllOf(HasSubstr("bfloat16"), Not(HasSubstr("overflow"))));
}

// `semitone train` writes a scale of 1 at the end of each epoch of a training without any.
TEST(GradientVerdicts, JudgeATrainingWithoutALossScale) {
  Json without = sample(10, 1, {tensor("gradient", "w", "Float", -30, {10})});
  without.erase("loss_scale");
  MadeUpRun run;
  run.add({without}).add_metric(20, "amp/loss_scale", "1");
  EXPECT_EQ(verdict_of(run, "underflow").severity, Severity::problem);
  EXPECT_THAT(PrecisionReport(run.path()).to_text(), Not(HasSubstr("several loss scales")));
  MadeUpRun scaled;  // with a scale, it is not known whether these gradients had it
  scaled.add({without}).add_metric(20, "amp/loss_scale", "1024");
  EXPECT_FALSE(has(scaled, "underflow"));
}

TEST(GradientVerdicts, DoNotJudgeGradientsOfWhichTheScaleIsUnknown) {
  const auto small = [](double loss_scale) {
    return sample(1, loss_scale, {tensor("gradient", "w", "Float", -30, {10})});
  };
  MadeUpRun two_losses;
  Json other = scale(1, 65536, 65536);
  other["loss_id"] = 1;
  two_losses.add({scale(1, 8, 8), other, small(8)});
  EXPECT_FALSE(has(two_losses, "underflow"));
  // The scale changes within the step, so the sample has none.
  MadeUpRun changing;
  Json without = small(1);
  without.erase("loss_scale");
  changing.add({scale(1, 8, 16), without});
  EXPECT_FALSE(has(changing, "underflow"));
  MadeUpRun unscaled;
  unscaled.add({without});
  EXPECT_TRUE(has(unscaled, "underflow"));
}

// Two samples in which a gradient is zero.
void add_zero_gradients(MadeUpRun& run) {
  for (const std::int64_t step : {1, 2}) {
    run.add({sample(step, 1,
                    {tensor("gradient", "dead", "Float", 0, {}, 10),
                     tensor("gradient", "w", "Float", 0, {1}, 9)})});
  }
}

TEST(GradientVerdicts, OneSampleDoesNotShowThatAGradientIsAlwaysZero) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("gradient", "dead", "Half", 0, {}, 10)})});
  EXPECT_FALSE(has(run, "zero_gradients"));
}

TEST(GradientVerdicts, ZeroGradientsInFloat32HaveOtherReasons) {
  MadeUpRun run("float32");
  add_zero_gradients(run);
  const Verdict verdict = verdict_of(run, "zero_gradients");
  EXPECT_EQ(verdict.detail,
            "Nothing that the loss depends on uses the parameter, or its branch is multiplied by "
            "zero.");
  EXPECT_EQ(verdict.remedy, "freeze the parameter, or check that forward uses it");
}

TEST(GradientVerdicts, ZeroGradientsInBFloat16NeedNoLossScale) {
  MadeUpRun run("bfloat16");
  add_zero_gradients(run);
  EXPECT_THAT(verdict_of(run, "zero_gradients").remedy,
              AllOf(HasSubstr("keep the layer in float32"), Not(HasSubstr("loss scale"))));
}

TEST(GradientVerdicts, GradientsAreNotPraisedBesideThoseThatAreZero) {
  MadeUpRun run;
  add_zero_gradients(run);
  EXPECT_TRUE(has(run, "zero_gradients"));
  EXPECT_FALSE(has(run, "underflow"));
}

}  // namespace
}  // namespace semitone::report::made_up
