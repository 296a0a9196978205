#include "tests/report/made_up_verdicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace semitone::report::made_up {
namespace {

using ::testing::ElementsAre;

// A sample of a parameter in bfloat16, all of whose 100 elements have a gradient.
Json sample_of_update(std::int64_t step, std::int64_t changed, std::int64_t lost = 0) {
  Json one = sample(step, 1, {tensor("gradient", "w", "BFloat16", -8, {100})});
  one["updates"] = {
      {{"name", "w"}, {"numel", 100}, {"changed", changed}, {"lost", {{"BFloat16", lost}}}}};
  return one;
}

Json sixteen_bit_model() {
  return model({{{"name", "w"}, {"dtype", "BFloat16"}, {"shape", {10, 10}}}});
}

TEST(ValueVerdicts, WeightsInTwoHalvesLoseNoUpdates) {
  MadeUpRun run("bfloat16");  // their exact values moved, and no tensor is a master
  run.add({sixteen_bit_model(), sample_of_update(1, 100, 80)});
  EXPECT_EQ(verdict_of(run, "lost_updates").severity, Severity::good);
  EXPECT_EQ(verdict_of(run, "lost_updates").title,
            "0 % of the weights' updates are lost, which is little");
}

TEST(ValueVerdicts, StepsWithoutAnUpdateLoseNone) {
  MadeUpRun run("bfloat16");  // step 1 only accumulates gradients
  run.add({sixteen_bit_model(), sample_of_update(1, 0), sample_of_update(2, 100)});
  EXPECT_EQ(verdict_of(run, "lost_updates").severity, Severity::good);
}

TEST(ValueVerdicts, AnOptimizerThatMovesNothingLosesAll) {
  MadeUpRun run("bfloat16");
  Json one = sample_of_update(1, 0);
  one["phases"]["optimizer"] = 0.01;
  run.add({sixteen_bit_model(), one});
  EXPECT_EQ(verdict_of(run, "lost_updates").severity, Severity::problem);
  EXPECT_EQ(verdict_of(run, "lost_updates").figure, 100);
}

TEST(ValueVerdicts, UpdatesThatNoSampleHasAreNotJudged) {
  MadeUpRun run("bfloat16");
  run.add({sixteen_bit_model(), sample_of_update(1, 0), sample_of_update(2, 0)});
  EXPECT_FALSE(has(run, "lost_updates"));
}

TEST(ValueVerdicts, NameOnlyTheLayersThatOverflow) {
  MadeUpRun run;
  Json beyond = tensor("output", "beyond", "Half", 3, {1});
  beyond["infs"] = 1;
  run.add({sample(1, 1, {tensor("output", "near", "Half", 15, {1}), beyond})});
  const Verdict verdict = verdict_of(run, "large_outputs");
  EXPECT_EQ(verdict.title, "Outputs of 'beyond' exceed float16's largest number");
  EXPECT_THAT(verdict.where, ElementsAre("beyond"));
  EXPECT_EQ(verdict.figure, 100);
}

TEST(ValueVerdicts, OutputsOfLayersInFloat32MayBeLarge) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("output", "logits", "Float", 20, {1})})});
  EXPECT_FALSE(has(run, "large_outputs"));
}

}  // namespace
}  // namespace semitone::report::made_up
