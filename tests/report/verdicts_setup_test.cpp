// What a report says of threads, eps and batch norm.

#include "tests/report/made_up_verdicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace semitone::report::made_up {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

MadeUpRun& on_machine(MadeUpRun& run, int threads, int cores, int all_cores, int processes = 1) {
  run.add({model({})});
  return run.set("threads", threads)
      .set("cores", cores)
      .set("all_cores", all_cores)
      .set("world_size", processes)
      .set("local_world_size", processes);
}

TEST(ThreadVerdict, MoreThreadsThanCoresAreAWarning) {
  MadeUpRun run;
  const Verdict verdict = verdict_of(on_machine(run, 4, 2, 2), "threads");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_EQ(verdict.title, "LibTorch computes with 4 threads on 2 cores");
  EXPECT_EQ(verdict.figure, 4);
  EXPECT_THAT(verdict.remedy, HasSubstr("OMP_NUM_THREADS=2"));
}

TEST(ThreadVerdict, ProcessesOfAMachineShareItsCores) {
  MadeUpRun run;
  const Verdict verdict = verdict_of(on_machine(run, 4, 4, 4, 2), "threads");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_EQ(verdict.title, "2 processes compute with 4 threads each on 4 cores");
  EXPECT_EQ(verdict.figure, 8);
  EXPECT_THAT(verdict.remedy, HasSubstr("OMP_NUM_THREADS=2"));
}

TEST(ThreadVerdict, ProcessesWithCoresOfTheirOwnDoNotShareThem) {
  MadeUpRun run;
  EXPECT_FALSE(has(on_machine(run, 4, 4, 8, 2), "threads"));
}

TEST(ThreadVerdict, AnUnknownNumberOfProcessesIsNotJudged) {
  MadeUpRun run;
  on_machine(run, 4, 4, 4, 2).set("local_world_size", 0);
  EXPECT_FALSE(has(run, "threads"));
}

TEST(ThreadVerdict, MoreProcessesThanCoresHaveNoBetterNumber) {
  MadeUpRun run;
  EXPECT_FALSE(has(on_machine(run, 1, 2, 2, 3), "threads"));
}

TEST(ThreadVerdict, TheControlGroupLimitsThreads) {
  MadeUpRun run;
  const Verdict verdict = verdict_of(on_machine(run, 8, 8, 8).set("cpu_quota", 2.5), "threads");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.title, HasSubstr("8 threads on the time of 2.5 cores"));
  EXPECT_THAT(verdict.remedy, HasSubstr("OMP_NUM_THREADS=2"));
}

TEST(ThreadVerdict, HalfOfTheCoresIsAnAdvice) {
  MadeUpRun few;
  const Verdict verdict = verdict_of(on_machine(few, 4, 8, 8), "threads");
  EXPECT_EQ(verdict.severity, Severity::advice);
  EXPECT_EQ(verdict.title, "LibTorch computes with 4 threads on 8 cores");
  EXPECT_THAT(verdict.remedy, HasSubstr("OMP_NUM_THREADS=8"));
  MadeUpRun most;
  EXPECT_FALSE(has(on_machine(most, 5, 8, 8), "threads"));
  MadeUpRun hyperthreads;
  EXPECT_FALSE(has(on_machine(hyperthreads, 4, 8, 8).set("physical_cores", 4), "threads"));
}

TEST(ThreadVerdict, AGpuNeedsFewThreads) {
  MadeUpRun run;
  Json line = model({});
  line["device"] = "cuda:0";
  run.add({line}).set("threads", 1).set("cores", 8).set("all_cores", 8);
  EXPECT_FALSE(has(run, "threads"));
}

TEST(ThreadVerdict, ARecordWithoutCoresIsNotJudged) {
  const MadeUpRun run;
  EXPECT_FALSE(has(run, "threads"));
}

Json optimizer(const std::string& type, const std::string& dtype, double eps) {
  return {{"type", type}, {"groups", {{{"dtype", dtype}, {"eps", eps}}}}};
}

// Of another optimizer, such as ZeroRedundancyOptimizer.
Json sharded(const std::string& rule, const std::string& dtype, double eps) {
  return {{"type", "Sharded"}, {"groups", {{{"dtype", dtype}, {"rule", rule}, {"eps", eps}}}}};
}

// A run with two parameters, whose gradients have the given exponents, one value each.
void add_gradients(MadeUpRun& run, const Json& optimizer, const std::vector<int>& of_one,
                   const std::vector<int>& of_other) {
  Json line = model({parameter("one", "Linear", {8, 8}), parameter("other", "Linear", {8, 8})});
  line["optimizers"] = {optimizer};
  const auto gradient = [](const char* name, const std::vector<int>& exponents) {
    std::vector<std::int64_t> counts(40, 0);
    for (const int exponent : exponents) {
      const int place = exponent + 40;
      ++counts[static_cast<std::size_t>(place)];
    }
    return tensor("gradient", name, "Float", -40, counts);
  };
  run.add(
      {line, sample(1, 1, {gradient("one.weight", of_one), gradient("other.weight", of_other)})});
}

// 1e-8 lies between 2^-27 and 2^-26.
TEST(EpsVerdict, NamesTheWeightsWhoseGradientsAreBelowIt) {
  MadeUpRun run;
  add_gradients(run, optimizer("Adam", "Float", 1e-8), {-28, -28, -30, -10}, {-28, -5, -5, -5});
  const Verdict verdict = verdict_of(run, "eps");
  EXPECT_EQ(verdict.severity, Severity::advice);
  EXPECT_THAT(verdict.where, ElementsAre("one.weight"));
  EXPECT_EQ(verdict.figure, 50);
  EXPECT_EQ(verdict.title, "Most gradients of 'one.weight' are smaller than Adam's eps of 1e-08");
  EXPECT_THAT(verdict.detail, HasSubstr("50 % of all gradients' values are below it"));
}

TEST(EpsVerdict, HalfOfTheGradientsIsNotMost) {
  MadeUpRun run;
  add_gradients(run, optimizer("FusedAdam", "Float", 1e-8), {-28, -27}, {-5});
  EXPECT_FALSE(has(run, "eps"));
}

TEST(EpsVerdict, OptimizersThatDivideByNoRootOfSquaresAreNotJudged) {
  for (const char* const type : {"SGD", "Adagrad", "FusedNovoGrad", "LBFGS"}) {
    MadeUpRun run;
    add_gradients(run, optimizer(type, "Float", 1e-8), {-30}, {-30});
    EXPECT_FALSE(has(run, "eps")) << type;
  }
}

TEST(EpsVerdict, AnOptimizerThatShardsAnotherIsJudgedByItsOptions) {
  for (const char* const rule : {"Adam", "FusedAdam", "SGD"}) {
    MadeUpRun run;
    add_gradients(run, sharded(rule, "Half", 1e-8), {-5}, {-5});
    const bool divides_in_fp16 = std::string(rule) == "Adam";
    EXPECT_EQ(verdict_of(run, "eps").title,
              divides_in_fp16 ? "Adam's eps of 1e-08 is zero in float16" : "")
        << rule;
  }
}

TEST(EpsVerdict, AnEpsThatFloat16RoundsToZeroIsAProblem) {
  for (const double eps : {1e-8, 0x1p-25}) {
    MadeUpRun run;
    add_gradients(run, optimizer("AdamW", "Half", eps), {-5}, {-5});
    const Verdict verdict = verdict_of(run, "eps");
    EXPECT_EQ(verdict.severity, Severity::problem) << eps;
    EXPECT_THAT(verdict.title, HasSubstr("is zero in float16"));
    EXPECT_THAT(verdict.remedy, HasSubstr("6.1e-05"));
  }
  MadeUpRun larger;
  add_gradients(larger, optimizer("AdamW", "Half", 0x1.8p-25), {-5}, {-5});
  EXPECT_FALSE(has(larger, "eps"));
  MadeUpRun wider;
  add_gradients(wider, optimizer("AdamW", "BFloat16", 1e-8), {-5}, {-5});
  EXPECT_FALSE(has(wider, "eps"));
}

TEST(EpsVerdict, SemitonesOptimizersComputeInFp32) {
  for (const char* const type : {"FusedAdam", "FusedLAMB"}) {
    MadeUpRun run;
    add_gradients(run, optimizer(type, "Half", 1e-8), {-5}, {-5});
    EXPECT_FALSE(has(run, "eps")) << type;
  }
}

Json batch_norm(const std::string& layer, bool training, const std::string& dtype = "Float") {
  return {{"layer", layer}, {"training", training}, {"dtype", dtype}};
}

Json sample_with(std::int64_t step, const std::vector<Json>& batch_norms) {
  Json one = sample(step, 1, {});
  one["batch_norms"] = batch_norms;
  return one;
}

TEST(BatchNormVerdict, NamesTheLayersThatUseRunningStatistics) {
  MadeUpRun run;
  run.add({sample_with(1, {batch_norm("one", true), batch_norm("two", true)}),
           sample_with(2, {batch_norm("one", true), batch_norm("two", false)})});
  const Verdict verdict = verdict_of(run, "batch_norm_eval");
  EXPECT_EQ(verdict.severity, Severity::advice);
  EXPECT_THAT(verdict.where, ElementsAre("two"));
  EXPECT_EQ(verdict.figure, 50);
  EXPECT_EQ(verdict.title,
            "1 of 2 layers of batch norm normalises with running statistics in training steps");
  EXPECT_FALSE(has(run, "running_statistics"));
}

TEST(BatchNormVerdict, ASkippedStepTrainsNothing) {
  MadeUpRun run;
  Json skipped_step = sample_with(1, {batch_norm("one", false)});
  skipped_step["skipped"] = true;
  run.add({skipped_step, sample_with(2, {batch_norm("one", true)})});
  EXPECT_FALSE(has(run, "batch_norm_eval"));
}

TEST(BatchNormVerdict, RunningStatisticsIn16BitsAreAWarning) {
  MadeUpRun run;
  run.add({sample_with(1, {batch_norm("one", true, "BFloat16"), batch_norm("two", true, "BFloat16"),
                           batch_norm("three", true)})});
  const Verdict verdict = verdict_of(run, "running_statistics");
  EXPECT_EQ(verdict.severity, Severity::warning);
  EXPECT_THAT(verdict.where, UnorderedElementsAre("one", "two"));
  EXPECT_EQ(verdict.title, "Running statistics of 'one' and 1 other are in bfloat16");
}

}  // namespace
}  // namespace semitone::report::made_up
