// One run for each fault that the report shall find, and one next to it that is in order.

#include "semitone/report/precision_report.h"
#include "semitone/report/verdict.h"
#include "tests/report/made_up_verdicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace semitone::report::made_up {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double kFloat16Scale = 65536;

TEST(Verdicts, NameALayerWhoseGradientsUnderflow) {
  MadeUpRun run;
  // 2^-26 in float16 without a loss scale; the other layer is well above.
  run.add({sample(1, 1,
                  {tensor("gradient", "good.weight", "Float", -8, {90}),
                   tensor("gradient", "bad.weight", "Float", -26, {10})})});
  const Verdict verdict = verdict_of(run, "underflow");
  EXPECT_EQ(verdict.severity, Severity::problem);
  EXPECT_EQ(verdict.figure, 10);
  EXPECT_EQ(verdict.unit, "%");
  EXPECT_THAT(verdict.where, ElementsAre("bad.weight"));
  EXPECT_THAT(verdict.title, AllOf(HasSubstr("10 %"), HasSubstr("'bad.weight'")));
  // 2^-8 times this is below 65504 / 2.
  EXPECT_THAT(verdict.remedy, HasSubstr("raise the loss scale to 4194304"));
}

TEST(Verdicts, TakeTheLossScaleIntoAccount) {
  MadeUpRun run;
  run.add({sample(1, kFloat16Scale, {tensor("gradient", "w", "Float", -26, {10})})});
  EXPECT_EQ(verdict_of(run, "underflow").severity, Severity::good);
  EXPECT_EQ(verdict_of(run, "underflow").figure, 0);
}

TEST(Verdicts, AdviseBFloat16WhereALargerScaleWouldOverflow) {
  MadeUpRun run;
  run.add({sample(
      1, 1024,
      {tensor("gradient", "a", "Float", 4, {10}), tensor("gradient", "b", "Float", -60, {10})})});
  EXPECT_THAT(verdict_of(run, "underflow").remedy, HasSubstr("bfloat16"));
}

TEST(Verdicts, CountZerosOfGradientsAtTheEdgeAsLost) {
  MadeUpRun at_the_edge;
  at_the_edge.add({sample(1, 1, {tensor("gradient", "w", "Half", -24, {10}, /*zeros=*/90)})});
  EXPECT_EQ(verdict_of(at_the_edge, "underflow").severity, Severity::problem);
  EXPECT_EQ(verdict_of(at_the_edge, "underflow").figure, 90);
  MadeUpRun far_from_it;  // such as the rows of an embedding that a batch does not have
  far_from_it.add({sample(1, 1, {tensor("gradient", "w", "Half", -8, {10}, /*zeros=*/90)})});
  EXPECT_EQ(verdict_of(far_from_it, "underflow").severity, Severity::good);
}

TEST(Verdicts, JudgeNoFormatThatTheRunDoesNotHave) {
  MadeUpRun run("float32");
  run.add({sample(1, 1, {tensor("gradient", "w", "Float", -40, {10})})});
  EXPECT_FALSE(has(run, "underflow"));
  EXPECT_THAT(verdict_of(run, "formats").title, AllOf(HasSubstr("between 2^-40 and 2^-39"),
                                                      HasSubstr("needs a loss scale from 2^15")));
}

TEST(Verdicts, WarnOfSubnormalGradients) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("gradient", "w", "Float", -16, {10, 0, 0, 10})})});
  const Verdict verdict = verdict_of(run, "subnormals");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_EQ(verdict.figure, 50);
  EXPECT_THAT(verdict.where, ElementsAre("w"));
}

// Such as those of a layer that the policy keeps in fp32.
TEST(Verdicts, JudgeNoGradientThatHasNotBeenInTheFormat) {
  for (const char* const dtype : {"Float", "Half"}) {
    MadeUpRun run;
    run.add({model({parameter("tiny", "Linear", {4, 16})}),
             sample(1, 1,
                    {tensor("output_gradient", "tiny", dtype, -8, {10}),
                     tensor("gradient", "tiny.weight", "Float", -26, {10}, /*zeros=*/5)})});
    const bool was_in_format = std::string(dtype) == "Half";
    EXPECT_EQ(verdict_of(run, "underflow").severity,
              was_in_format ? Severity::problem : Severity::good);
    MadeUpRun subnormal;
    subnormal.add({model({parameter("tiny", "Linear", {4, 16})}),
                   sample(1, 1,
                          {tensor("output_gradient", "tiny", dtype, -8, {10}),
                           tensor("gradient", "tiny.weight", "Float", -16, {10})})});
    EXPECT_EQ(has(subnormal, "subnormals"), was_in_format);
  }
}

// The gradients of parameters are sums of them, and may look healthy.
TEST(Verdicts, WarnOfSubnormalGradientsOfOutputs) {
  MadeUpRun run;
  run.add({sample(1, 1,
                  {tensor("output_gradient", "fc", "Half", -24, {30, 10}),
                   tensor("output_gradient", "wide", "Float", -24, {30, 10}),
                   tensor("gradient", "fc.weight", "Float", -9, {40})})});
  const Verdict verdict = verdict_of(run, "subnormals");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.where, ElementsAre("fc"));
  EXPECT_THAT(verdict.title, HasSubstr("100 % of the values of the gradients of layers' outputs"));
  EXPECT_FALSE(has(run, "underflow")) << "which would be good";
}

TEST(Verdicts, WarnOfGradientsThatAreAlwaysZero) {
  MadeUpRun run;
  for (const std::int64_t step : {1, 2}) {
    run.add({sample(step, 1,
                    {tensor("gradient", "dead", "Half", 0, {}, 10),
                     tensor("gradient", "w", "Half", 0, {1}, 9)})});
  }
  EXPECT_THAT(verdict_of(run, "zero_gradients").where, ElementsAre("dead"));
}

TEST(Verdicts, ReportWeightsThatAreNotFinite) {
  MadeUpRun run;
  Json weight = tensor("weight", "w", "Float", 0, {9});
  weight["nans"] = 1;
  run.add({sample(1, 1, {weight})});
  EXPECT_EQ(verdict_of(run, "nonfinite_weights").severity, Severity::problem);
  EXPECT_THAT(verdict_of(run, "nonfinite_weights").where, ElementsAre("w"));
}

TEST(Verdicts, ReportALossThatIsNotFinite) {
  MadeUpRun run;
  run.add_metric(10, "train/loss", "1").add_metric(20, "train/loss", "nan");
  run.add_metric(30, "train/loss", "inf").add_metric(40, "train/loss", "inf");
  run.add({skipped(40, "w", 8)});  // which has done no harm
  const Verdict verdict = verdict_of(run, "nonfinite_loss");
  EXPECT_EQ(verdict.severity, Severity::problem);
  EXPECT_EQ(verdict.figure, 2);
  EXPECT_THAT(verdict.steps, ElementsAre(20, 30));
}

TEST(Verdicts, ReportUpdatesThat16BitWeightsLose) {
  MadeUpRun run("bfloat16");
  Json one = sample(1, 1,
                    {tensor("weight", "w", "BFloat16", 0, {100}),
                     tensor("gradient", "w", "BFloat16", -8, {100})});
  // Of 100 elements with a gradient, 30 moved.
  one["updates"] = {{{"name", "w"}, {"numel", 100}, {"ratio", 1e-4}, {"changed", 30}}};
  run.add({model({{{"name", "w"}, {"dtype", "BFloat16"}, {"shape", {10, 10}}}}), one});
  const Verdict verdict = verdict_of(run, "lost_updates");
  EXPECT_EQ(verdict.severity, Severity::problem);
  EXPECT_NEAR(verdict.figure.value_or(0), 70, 1e-9);
  EXPECT_THAT(verdict.where, ElementsAre("w"));
  EXPECT_THAT(verdict.remedy, HasSubstr("O2"));
}

TEST(Verdicts, MastersKeepUpdates) {
  MadeUpRun run("bfloat16");
  Json one = sample(1, 1, {tensor("gradient", "w", "BFloat16", -8, {100})});
  one["updates"] = {
      {{"name", "w"}, {"numel", 100}, {"changed", 100}, {"lost", {{"BFloat16", 80}}}}};
  one["memory"]["masters"] = 400;
  run.add({model({{{"name", "w"}, {"dtype", "BFloat16"}, {"shape", {10, 10}}}}), one});
  EXPECT_EQ(verdict_of(run, "lost_updates").severity, Severity::good);
  EXPECT_THAT(verdict_of(run, "lost_updates").detail, HasSubstr("80 %"));
}

TEST(Verdicts, MastersKeepUpdatesBesideFrozenWeights) {
  MadeUpRun run("bfloat16");
  Json one = sample(1, 1, {tensor("gradient", "w", "BFloat16", -8, {100})});
  one["updates"] = {{{"name", "w"}, {"numel", 100}, {"changed", 100}, {"master", true}}};
  std::vector<Json> parameters;
  for (const char* const name : {"w", "frozen.w"})
    parameters.push_back({{"name", name}, {"dtype", "BFloat16"}, {"shape", {10, 10}}});
  run.add({model(parameters), one});
  EXPECT_EQ(verdict_of(run, "lost_updates").severity, Severity::good);
}

// Of another model, or of another start.
TEST(Verdicts, MastersOfOthersKeepNoUpdates) {
  MadeUpRun run("bfloat16");
  Json one = sample(1, 1,
                    {tensor("gradient", "w", "BFloat16", -8, {100}),
                     tensor("gradient", "critic.w", "BFloat16", -8, {100})});
  one["updates"] = {{{"name", "w"}, {"numel", 100}, {"changed", 60}, {"master", true}},
                    {{"name", "critic.w"}, {"numel", 100}, {"changed", 30}, {"master", false}}};
  one["memory"]["masters"] = 400;
  std::vector<Json> parameters;
  for (const char* const name : {"w", "critic.w"})
    parameters.push_back({{"name", name}, {"dtype", "BFloat16"}, {"shape", {10, 10}}});
  run.add({model(parameters), one});
  const Verdict verdict = verdict_of(run, "lost_updates");
  EXPECT_EQ(verdict.severity, Severity::problem);
  EXPECT_THAT(verdict.where, ElementsAre("critic.w"));
  EXPECT_NEAR(verdict.figure.value_or(0), 70, 1e-9);
}

TEST(Verdicts, WarnOfOutputsNearTheLargestNumber) {
  MadeUpRun near;
  near.add({sample(1, 1, {tensor("output", "fc", "Half", 15, {1})})});
  EXPECT_EQ(verdict_of(near, "large_outputs").severity, Severity::warning);
  EXPECT_THAT(verdict_of(near, "large_outputs").title, HasSubstr("'fc' reach 75 % of float16"));
  MadeUpRun beyond;
  Json output = tensor("output", "fc", "Half", 3, {1});
  output["infs"] = 1;
  beyond.add({sample(1, 1, {output})});
  EXPECT_THAT(verdict_of(beyond, "large_outputs").title, HasSubstr("exceed"));
  MadeUpRun below;
  below.add({sample(1, 1, {tensor("output", "fc", "Half", 12, {1})})});
  EXPECT_FALSE(has(below, "large_outputs"));
}

TEST(Verdicts, ASkipAfterGrowthIsNormal) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add(
      {scale(200, 65536, 131072), skipped(312, "fc.weight", 131072), scale(312, 131072, 65536)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::good);
  EXPECT_THAT(verdict.title, HasSubstr("Step 312 was skipped, which is normal"));
  EXPECT_THAT(
      verdict.detail,
      AllOf(HasSubstr("The gradient of 'fc.weight' was not finite at loss scale 131072; the scale "
                      "fell to 65536. The loss scale grew at step 200. A dynamic scale"),
            HasSubstr("Nothing needs to change")));
  EXPECT_EQ(verdict.remedy, "");
  EXPECT_THAT(verdict.steps, ElementsAre(312));
}

TEST(Verdicts, SkipsAtTheStartAreNormal) {
  MadeUpRun run;
  run.add_metric(1000, "train/loss", "1");
  double now = 65536;
  for (std::int64_t step = 1; step <= 6; ++step, now /= 2)
    run.add({skipped(step, "w", now, step), scale(step, now, now / 2)});
  EXPECT_EQ(verdict_of(run, "skipped_steps").severity, Severity::good);
  const Verdict verdict = verdict_of(run, "first_scale");
  EXPECT_EQ(verdict.severity, Severity::advice);
  EXPECT_EQ(verdict.figure, 6);
  EXPECT_THAT(verdict.remedy, HasSubstr("init_scale(1024)"));
}

TEST(Verdicts, ASkipWithoutGrowthIsAWarning) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(400, "train/loss", "1");
  run.add({scale(200, 65536, 131072), skipped(210, "w", 131072), scale(210, 131072, 65536),
           skipped(312, "fc.weight", 65536), scale(312, 65536, 32768)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.title, HasSubstr("Step 312"));
  EXPECT_THAT(verdict.where, ElementsAre("fc.weight"));
  EXPECT_THAT(verdict.steps, ElementsAre(312));
  EXPECT_THAT(verdict.remedy, HasSubstr("the batch of step 312"));
}

TEST(Verdicts, ManySkipsAreAProblem) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "1").add_metric(1000, "train/loss", "1");
  for (std::int64_t step = 201; step <= 400; step += 2) run.add({skipped(step, "w", 8)});
  const Verdict verdict = verdict_of(run, "skipped_steps");
  EXPECT_EQ(verdict.severity, Severity::problem);
  EXPECT_EQ(verdict.figure, 10);
  EXPECT_EQ(verdict.steps.size(), 10U);
  EXPECT_EQ(verdict.steps.back(), 399);
}

TEST(Verdicts, AScaleBelow1IsAProblem) {
  MadeUpRun run;
  double now = 4;
  for (std::int64_t step = 1; step <= 4; ++step, now /= 2)
    run.add({skipped(step, "w", now, step), scale(step, now, now / 2)});
  EXPECT_EQ(verdict_of(run, "low_scale").severity, Severity::problem);
  EXPECT_EQ(verdict_of(run, "low_scale").figure, 0.25);
  EXPECT_FALSE(has(run, "first_scale"));
}

TEST(Verdicts, AScaleThatNoSkipChangesIsAProblem) {
  MadeUpRun run;
  run.add({scale(1, 1, 1)});
  for (std::int64_t step = 1; step <= 3; ++step) run.add({skipped(step, "w", 1, step)});
  EXPECT_THAT(verdict_of(run, "low_scale").title, HasSubstr("stays at 1"));
}

TEST(Verdicts, AdviseALargerFirstScale) {
  MadeUpRun run;
  run.add({scale(100, 1024, 2048), scale(200, 2048, 4096)});
  EXPECT_THAT(verdict_of(run, "growing_scale").remedy, HasSubstr("init_scale(4096)"));
  EXPECT_EQ(verdict_of(run, "skipped_steps").title, "No step was skipped");
  run.add({skipped(250, "w", 4096), scale(250, 4096, 2048)});
  EXPECT_FALSE(has(run, "growing_scale"));
}

TEST(Verdicts, NameAnOperatorThatIsWider) {
  MadeUpRun run;
  add_operators(run,
                {op("conv2d", "Half", 0.5), op("mylib::wide", "Float", 0.2),
                 op("mylib::wide", "Float", 0.2, "native", "backward"),
                 op("sgd", "Float", 0.9, "native", "optimizer"), op("_to_copy", "Float", 0.1)});
  const Verdict verdict = verdict_of(run, "wide_operator");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.where, ElementsAre("mylib::wide"));
  EXPECT_NEAR(verdict.figure.value_or(0), 100 * 0.4 / 1.9, 1e-9);
  EXPECT_THAT(verdict.detail, HasSubstr("4 casts"));
  MadeUpRun wide("float32");
  add_operators(wide, {op("conv2d", "Float", 0.5)});
  EXPECT_FALSE(has(wide, "wide_operator"));
}

TEST(Verdicts, WarnOfEmulation) {
  MadeUpRun run;
  add_operators(run, {op("conv2d", "Half", 0.3, "emulated"), op("add", "Half", 0.7)});
  EXPECT_EQ(verdict_of(run, "emulated").figure, 30);
  MadeUpRun native;
  add_operators(native,
                {op("conv2d", "Half", 0.1, "emulated"), op("add", "Half", 0.9, "semitone")});
  EXPECT_FALSE(has(native, "emulated"));
}

TEST(Verdicts, CountCasts) {
  MadeUpRun run;
  add_operators(
      run, {op("conv2d", "Half", 0.8), op("_to_copy", "Half", 0.05), op("copy_", "Float", 0.15)});
  EXPECT_NEAR(verdict_of(run, "casts").figure.value_or(0), 20, 1e-9);
  EXPECT_FALSE(has(run, "wide_operator"));
  MadeUpRun few;  // a copy of 16-bit values is no cast
  add_operators(
      few, {op("conv2d", "Half", 0.8), op("_to_copy", "Half", 0.05), op("copy_", "Half", 0.15)});
  EXPECT_FALSE(has(few, "casts"));
}

TEST(Verdicts, CountProducts) {
  MadeUpRun run;
  add_operators(run, {op("addmm", "Half", 0.1), op("convolution_backward", "Half", 0.1),
                      op("layer_norm", "Half", 0.6), op("add.Tensor", "Half", 0.2)});
  const Verdict verdict = verdict_of(run, "products");
  EXPECT_NEAR(verdict.figure.value_or(0), 20, 1e-9);
  EXPECT_EQ(verdict.where.front(), "layer_norm");
  MadeUpRun many;
  add_operators(many, {op("addmm", "Half", 0.6), op("add.Tensor", "Half", 0.4)});
  EXPECT_FALSE(has(many, "products"));
}

TEST(Verdicts, CountWeightsWithUnevenSizes) {
  MadeUpRun run;
  run.add({model({parameter("conv1", "Conv2d", {16, 3, 3, 3}),  // channels of an image
                  parameter("fc1", "Linear", {24, 16}), parameter("fc2", "Linear", {10, 24}),
                  parameter("table", "Embedding", {1001, 7})})});
  const Verdict verdict = verdict_of(run, "sizes");
  EXPECT_NEAR(verdict.figure.value_or(0), 100.0 * 240 / (432 + 384 + 240), 1e-9);
  EXPECT_THAT(verdict.where, ElementsAre("fc2.weight"));
}

TEST(Verdicts, CountWaits) {
  MadeUpRun run;
  Json one = sample(1, 1, {});
  one["phases"] = {{"communication", 0.02}, {"data", 0.03}, {"backward", 0.05}};
  run.add({one});
  EXPECT_NEAR(verdict_of(run, "communication").figure.value_or(0), 20, 1e-9);
  EXPECT_NEAR(verdict_of(run, "data").figure.value_or(0), 30, 1e-9);
  MadeUpRun short_waits;
  one["phases"] = {{"communication", 0.01}, {"data", 0.005}, {"backward", 0.085}};
  short_waits.add({one});
  EXPECT_FALSE(has(short_waits, "communication"));
  EXPECT_FALSE(has(short_waits, "data"));
}

TEST(Verdicts, JudgeWhetherFloat8WouldHoldTheValues) {
  MadeUpRun narrow;
  narrow.add({sample(
      1, 1,
      {tensor("weight", "w", "Float", -4, {10}), tensor("gradient", "w", "Float", -30, {10})})});
  EXPECT_THAT(verdict_of(narrow, "float8").title, HasSubstr("The values fit float8's range"));
  MadeUpRun wide;
  wide.add({sample(1, 1,
                   {tensor("weight", "w", "Float", -4, {10}),
                    // 40 powers of two: float8_e5m2 has 32.
                    tensor("gradient", "w", "Float", -40, std::vector<std::int64_t>(40, 1))})});
  EXPECT_THAT(verdict_of(wide, "float8").title, HasSubstr("do not fit"));
  EXPECT_THAT(verdict_of(wide, "float8").where, ElementsAre("w"));
}

TEST(Verdicts, NameATensorOnceThatFloat8DoesNotHoldInEitherPass) {
  MadeUpRun run;
  const std::vector<std::int64_t> counts(40, 1);
  run.add({sample(1, 1,
                  {tensor("weight", "w", "Float", -40, counts),
                   tensor("gradient", "w", "Float", -40, counts)})});
  EXPECT_THAT(verdict_of(run, "float8").where, ElementsAre("w"));
}

// What float16 holds, as the title says, and the remedy do not contradict each other.
TEST(Verdicts, AdviseWhatFloat16CanHold) {
  const auto formats_of = [](int first_exponent, const std::vector<std::int64_t>& counts) {
    MadeUpRun run("float32");
    run.add({sample(1, 1, {tensor("gradient", "w", "Float", first_exponent, counts)})});
    return verdict_of(run, "formats");
  };
  std::vector<std::int64_t> wide(46, 0);
  wide.front() = 10;
  wide.back() = 1000;
  const Verdict none = formats_of(-45, wide);
  EXPECT_THAT(none.title, HasSubstr("does not hold them at any loss scale"));
  EXPECT_EQ(none.remedy, "take bfloat16");
  const Verdict large = formats_of(0, std::vector<std::int64_t>(18, 1));
  EXPECT_THAT(large.title, HasSubstr("float16 needs a loss scale from 2^"));
  EXPECT_EQ(large.remedy, "take bfloat16, or float16 with a dynamic loss scale");
  const Verdict fitting = formats_of(-8, {10});
  EXPECT_THAT(fitting.title, HasSubstr("float16 holds them without a loss scale"));
  EXPECT_THAT(fitting.remedy, HasSubstr("use a dynamic loss scale all the same"));
}

TEST(Verdicts, AreSortedWorstFirst) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "nan");
  add_operators(run, {op("softmax", "Float", 0.9), op("conv2d", "Half", 0.1)});
  std::vector<Severity> severities;
  const PrecisionReport report(run.path());
  for (const Verdict& verdict : report.verdicts()) severities.push_back(verdict.severity);
  EXPECT_TRUE(std::is_sorted(severities.begin(), severities.end()));
  EXPECT_EQ(severities.front(), Severity::problem);
  EXPECT_GT(severities.size(), 2U);
}

TEST(Verdicts, AllButGoodOnesHaveARemedy) {
  MadeUpRun run;
  run.add_metric(1, "train/loss", "nan").add_metric(2, "train/loss", "inf");
  Json one =
      sample(1, 1,
             {tensor("gradient", "w", "Half", -40, {9}), tensor("output", "w", "Half", 15, {9}),
              tensor("gradient", "zero", "Half", 0, {}, 4)});
  one["operators"] = {op("softmax", "Float", 0.5), op("_to_copy", "Half", 0.5, "emulated")};
  one["phases"] = {{"communication", 0.05}, {"data", 0.05}};
  run.add({one, skipped(1, "w", 1, 20)});
  const PrecisionReport report(run.path());
  EXPECT_GT(report.verdicts().size(), 8U);
  for (const Verdict& verdict : report.verdicts()) {
    EXPECT_EQ(verdict.remedy.empty(), verdict.severity == Severity::good) << verdict.id;
    EXPECT_THAT(verdict.title, Not(IsEmpty())) << verdict.id;
    EXPECT_TRUE(verdict.figure.has_value()) << verdict.id;
    EXPECT_LE(verdict.where.size(), 10U);
  }
}

}  // namespace
}  // namespace semitone::report::made_up
