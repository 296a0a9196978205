#include "tests/report/made_up_verdicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace semitone::report::made_up {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Json report_json_of(const MadeUpRun& run) {
  return Json::parse(PrecisionReport(run.path()).to_json());
}

// A sample with an operator that takes the whole step.
Json timed_sample(std::int64_t step, double seconds) {
  Json one = sample(step, 1, {});
  one["seconds"] = seconds;
  one["phases"] = {{"forward", seconds}};
  one["operators"] = {op("linear", "Half", seconds)};
  return one;
}

TEST(SpeedVerdicts, TimesOfTheFirstSampleOfAStartAreLeftOut) {
  MadeUpRun run;
  run.add({model({}), timed_sample(1, 5), timed_sample(101, 0.5), timed_sample(201, 0.5),
           restart(201, 2000), model({}), timed_sample(201, 7), timed_sample(301, 0.25)});
  const Json json = report_json_of(run);
  EXPECT_DOUBLE_EQ(json.at("operators").at(0).at("seconds").get<double>(), 0.75);
  EXPECT_EQ(json.at("operators").at(0).at("calls"), 2);
  EXPECT_DOUBLE_EQ(json.at("step_seconds").get<double>(), 0.375);
  EXPECT_DOUBLE_EQ(json.at("phases").at("forward").get<double>(), 0.375);
}

TEST(SpeedVerdicts, TimesOfTheOnlySampleCount) {
  MadeUpRun run;
  run.add({model({}), timed_sample(1, 5)});
  EXPECT_DOUBLE_EQ(report_json_of(run).at("step_seconds").get<double>(), 5);
  EXPECT_EQ(report_json_of(run).at("operators").size(), 1U);
}

TEST(SpeedVerdicts, ProductsInFloat32DoTheWorkOfEmulatedOnes) {
  const auto operators = [](const char* kernel) {
    return std::vector<Json>{
        op("conv2d", "Half", 0.1, kernel), op("mkldnn_convolution", "Float", 0.3),
        op("convolution_backward", "Float", 0.3, "native", "backward"), op("relu", "Half", 0.3)};
  };
  MadeUpRun emulated;
  add_operators(emulated, operators("emulated"));
  EXPECT_DOUBLE_EQ(verdict_of(emulated, "emulated").figure.value(), 70);
  EXPECT_FALSE(has(emulated, "wide_operator"));
  MadeUpRun native;
  add_operators(native, operators("native"));
  EXPECT_FALSE(has(native, "emulated"));
  EXPECT_TRUE(has(native, "wide_operator"));
}

// The host's calls only queue the work.
TEST(SpeedVerdicts, OperatorsOfAGpuAreNotJudgedByTheirTimes) {
  const std::vector<Json> operators = {op("softmax", "Float", 0.5), op("_to_copy", "Float", 0.2),
                                       op("conv2d", "Half", 0.1, "emulated"),
                                       op("linear", "Half", 0.2, "emulated")};
  for (const char* const device : {"cpu", "cuda:0"}) {
    MadeUpRun run;
    Json line = model({});
    line["device"] = device;
    run.add({line});
    add_operators(run, operators);
    const bool is_cpu = line["device"] == "cpu";
    for (const char* const id : {"wide_operator", "casts", "products", "emulated"})
      EXPECT_EQ(has(run, id), is_cpu) << id << " on " << device;
    EXPECT_EQ(
        PrecisionReport(run.path()).to_text().find("time of the host's calls") == std::string::npos,
        is_cpu);
  }
}

// The line `model` of a start.
Json model_line(std::int64_t step, const char* dtype) {
  Json line = model({});
  line["step"] = step;
  line["settings"] = {{"dtype", dtype}};
  return line;
}

// As of a training in fp32 that was resumed at O1.
TEST(SpeedVerdicts, LeaveOutStartsWithOtherSettings) {
  for (const char* const dtype : {"fp32", "bf16"}) {
    MadeUpRun run("bfloat16");
    Json before = sample(1, 1, {});
    before["operators"] = {op("softmax", "Float", 9)};
    Json after = sample(5, 1, {});
    after["operators"] = {op("conv2d", "BFloat16", 0.9), op("relu", "BFloat16", 0.1)};
    run.add({model_line(1, dtype), before, restart(5, 2000), model_line(5, "bf16"), after});
    EXPECT_EQ(has(run, "wide_operator"), std::string(dtype) == "bf16");
    EXPECT_EQ(PrecisionReport(run.path()).to_text().find("without 1 sample of starts at another") !=
                  std::string::npos,
              std::string(dtype) == "fp32");
  }
}

TEST(SpeedVerdicts, ScalesOfStartsWithOtherSettingsDoNotCount) {
  Json without = sample(5, 1, {tensor("gradient", "w", "Float", -200, {10})});
  without.erase("loss_scale");
  MadeUpRun run("bfloat16");
  run.add({model_line(1, "fp16"), scale(1, 65536, 32768),
           sample(1, 32768, {tensor("gradient", "w", "Float", -8, {10})}), restart(5, 2000),
           model_line(5, "bf16"), without});
  EXPECT_EQ(verdict_of(run, "underflow").severity, Severity::problem);
}

TEST(SpeedVerdicts, BilinearUpsamplingIsNoProduct) {
  const auto operators = [](const char* kernel) {
    return std::vector<Json>{op("conv2d", "BFloat16", 0.1, kernel),
                             op("upsample_bilinear2d", "Float", 0.6), op("relu", "BFloat16", 0.3)};
  };
  MadeUpRun native("bfloat16");
  add_operators(native, operators("native"));
  EXPECT_NEAR(verdict_of(native, "products").figure.value_or(0), 10, 1e-9);
  MadeUpRun emulated("bfloat16");
  add_operators(emulated, operators("emulated"));
  EXPECT_FALSE(has(emulated, "emulated"));
  EXPECT_THAT(verdict_of(emulated, "wide_operator").where, ElementsAre("upsample_bilinear2d"));
}

TEST(SpeedVerdicts, Float8IsEmulatedEverywhere) {
  MadeUpRun run("bfloat16");
  add_operators(run, {op("conv2d", "Float8_e4m3fn", 0.1, "emulated"),
                      op("mkldnn_convolution", "Float", 0.5), op("relu", "BFloat16", 0.4)});
  const Verdict verdict = verdict_of(run, "emulated");
  EXPECT_THAT(verdict.title, HasSubstr("60 % of the operators' time is emulation of float8"));
  EXPECT_THAT(verdict.remedy, HasSubstr("CastPolicy::fp8"));
  EXPECT_FALSE(has(run, "wide_operator"));
}

TEST(SpeedVerdicts, NormsMayBeWide) {
  MadeUpRun run;
  add_operators(run, {op("conv2d", "Half", 0.5), op("native_layer_norm", "Float", 0.5)});
  EXPECT_FALSE(has(run, "wide_operator"));
}

TEST(SpeedVerdicts, ABackwardOperatorIsLoweredByItsForwardOne) {
  MadeUpRun run;
  add_operators(run, {op("conv2d", "Half", 0.5),
                      op("_softmax_backward_data", "Float", 0.5, "native", "backward")});
  EXPECT_THAT(verdict_of(run, "wide_operator").remedy,
              AllOf(HasSubstr("the forward operator"),
                    Not(HasSubstr("CastPolicy::lower(\"_softmax_backward_data\")"))));
}

TEST(SpeedVerdicts, CastsAtO2HaveAnotherRemedy) {
  MadeUpRun run;
  add_operators(run, {op("conv2d", "Half", 0.5), op("_to_copy", "Half", 0.5)});
  EXPECT_THAT(verdict_of(run, "casts").remedy, HasSubstr("train at O2"));
  semitone::test::write_text(run.path() / "run.json",
                             R"({"config":{"opt-level":"O2","dtype":"float16"}})");
  EXPECT_THAT(verdict_of(run, "casts").remedy,
              AllOf(Not(HasSubstr("train at O2")), HasSubstr("docs/cast_policies.md")));
}

TEST(SpeedVerdicts, NamesOfSizesHaveNoShapes) {
  MadeUpRun run;
  run.add({model({parameter("fc2", "Linear", {10, 24})})});
  EXPECT_THAT(verdict_of(run, "sizes").where, ElementsAre("fc2.weight"));
  EXPECT_THAT(verdict_of(run, "sizes").detail, HasSubstr("fc2.weight [10, 24]"));
}

TEST(SpeedVerdicts, SettingsThatAreNoDtypeAreNotTaken) {
  for (const auto& [setting, dtype] :
       {std::pair{"torch.bfloat16", "bfloat16"}, std::pair{"fp16", "float16"},
        std::pair{"auto", "float32"}, std::pair{"int8", "float32"}}) {
    MadeUpRun run(setting);
    add_operators(run, {op("conv2d", "Float", 1)});
    EXPECT_EQ(report_json_of(run).at("run").at("dtype"), dtype) << setting;
  }
}

TEST(SpeedVerdicts, AFewOperatorsIn16BitsMakeNo16BitRun) {
  MadeUpRun run("auto");
  add_operators(run, {op("linear", "Float", 1), op("linear", "Half", 0.04)});
  EXPECT_EQ(report_json_of(run).at("run").at("dtype"), "float32");
}

}  // namespace
}  // namespace semitone::report::made_up
