#include "src/launch/process.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

// `semitone bench` from the command line, at sizes that take little time.
namespace semitone {
namespace {

using launch::Output;
using launch::ProcessOptions;
using launch::ProcessResult;
using nlohmann::json;
using test::lines_of;
using test::read_text;
using test::run_semitone;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

ProcessResult run(const Words& arguments) {
  Words words{"bench"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_semitone(words);
}

// With lines on standard input.
ProcessResult run_with_input(const Words& arguments, const std::string& lines) {
  Words words{"-c", "printf '" + lines + "' | \"$0\" bench \"$@\"", SEMITONE_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return launch::run(
      ProcessOptions("sh").arguments(words).out(Output::capture).err(Output::capture));
}

Words mnist(const Words& more = {}) {
  Words words{"mnist", "--batch-size", "50", "--threads", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

Words encoder(const Words& more = {}) {
  Words words{"encoder", "--batch-size", "2", "--layers",     "1",   "--width",   "32", "--heads",
              "4",       "--length",     "8", "--vocabulary", "100", "--threads", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(BenchCommand, HelpHasExamplesAndExitCodes) {
  const ProcessResult help = run({"--help"});
  EXPECT_TRUE(help.status.success());
  EXPECT_EQ(help.err, "");
  EXPECT_THAT(help.out, AllOf(HasSubstr("Examples:\n  semitone bench"), HasSubstr("--json"),
                              HasSubstr("Exit codes: 0 success"), HasSubstr("step N")));
}

TEST(BenchCommand, SaysWhatItMeasures) {
  const ProcessResult finished = run(mnist({"--rounds", "3"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  for (const char* text :
       {"device    CPU, 1 threads", "workload  mnist at O1, fused optimizer, seed 0",
        "step      50 images in bfloat16, nhwc", "check     4 losses from ", "of the first (",
        "memory    ", "time      ", " ms per step over 3; ", " images/s"})
    EXPECT_THAT(finished.out, HasSubstr(text));
  EXPECT_THAT(run(encoder()).out,
              AllOf(HasSubstr("16 tokens in bfloat16\n"), HasSubstr(" tokens/s")));
}

TEST(BenchCommand, ComparesAStepWithItsProducts) {
  const ProcessResult finished = run(encoder({"--floor", "--rounds", "2", "--json", "-"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("products and convolutions alone "));
  const json result = json::parse(finished.out);
  EXPECT_EQ(result.at("losses").size(), 2U);
  const json& floor = result.at("floor");
  double sum = floor.at("attention_seconds");
  for (const json& product : floor.at("products"))
    sum += product.at("calls").get<double>() * product.at("seconds").get<double>();
  EXPECT_NEAR(floor.at("seconds"), sum, 1e-9);
  EXPECT_GT(floor.at("step_seconds"), 0);
  EXPECT_FALSE(floor.at("products").empty());
}

TEST(BenchCommand, WritesJson) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    const ProcessResult finished =
        run(encoder({"--opt-level", level, "--dtype", "fp16", "--optimizer", "torch", "--seed", "3",
                     "--rounds", "4", "--json"}));
    ASSERT_TRUE(finished.status.success()) << finished.err;
    const json result = json::parse(finished.out);
    EXPECT_THAT(finished.err, HasSubstr("tokens/s"));
    EXPECT_EQ(result.at("workload"), "encoder");
    EXPECT_EQ(result.at("opt_level"), level);
    EXPECT_EQ(result.at("dtype"), std::string(level) == "O0" ? "float32" : "float16");
    EXPECT_EQ(result.at("memory_format"), nullptr);
    EXPECT_EQ(result.at("optimizer"), "torch");
    EXPECT_EQ(result.at("batch_size"), 2);
    EXPECT_EQ(result.at("items"), "tokens");
    EXPECT_EQ(result.at("items_per_step"), 16);
    EXPECT_EQ(result.at("seed"), 3);
    EXPECT_EQ(result.at("threads"), 1);
    EXPECT_EQ(result.at("losses").size(), 4U);
    EXPECT_LE(result.at("check").at("difference"), result.at("check").at("tolerance"));
    EXPECT_EQ(result.at("check").at("losses").size(), 4U);
    const auto seconds = result.at("step_seconds").get<std::vector<double>>();
    ASSERT_EQ(seconds.size(), 4U);
    EXPECT_EQ(result.at("min_step_seconds"), *std::min_element(seconds.begin(), seconds.end()));
    EXPECT_GE(result.at("median_step_seconds"), result.at("min_step_seconds"));
    EXPECT_NEAR(result.at("items_per_second").get<double>() *
                    result.at("median_step_seconds").get<double>(),
                16, 1e-6);
    const json& memory = result.at("tensor_mb");
    double sum = 0;
    for (const char* kind : {"parameters", "masters", "gradients", "optimizer_state", "rest"})
      sum += memory.at(kind).get<double>();
    EXPECT_NEAR(memory.at("peak").get<double>(), sum, 1e-6);
    EXPECT_EQ(memory.at("masters").get<double>() > 0, std::string(level) == "O2");
    for (const char* name : {"semitone", "libtorch", "compiler"})
      EXPECT_NE(result.at("versions").at(name), "");
  }
}

TEST(BenchCommand, JsonGoesToAFile) {
  const test::TemporaryFolder folder;
  const std::string file = (folder / "x.json").string();
  const ProcessResult finished =
      run(mnist({"--memory-format", "nchw", "--rounds", "1", "--json", file}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("images/s"));
  EXPECT_EQ(json::parse(read_text(file)).at("memory_format"), "nchw");
  const ProcessResult failed = run(mnist({"--json", "/no/such/folder/x.json"}));
  EXPECT_EQ(failed.status.code, 1);
  EXPECT_THAT(failed.err, HasSubstr("expected to write"));
  EXPECT_EQ(failed.out, "") << "before it measures";
}

TEST(BenchCommand, TrainsResNet50) {
  const ProcessResult finished =
      run({"resnet50", "--opt-level", "O0", "--image-size", "64", "--batch-size", "8", "--rounds",
           "1", "--check-steps", "2", "--warm-up", "1", "--threads", "1", "--json"});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const json result = json::parse(finished.out);
  EXPECT_EQ(result.at("items_per_step"), 8);
  EXPECT_GT(result.at("tensor_mb").at("peak"), 3 * 97) << "weights, gradients, momentum";
}

// The check runs without dropout, on the same batch and weights.
TEST(BenchCommand, WithoutDropoutTheMeasuredStepsContinueThoseOfTheCheck) {
  const auto losses = [](const Words& more) {
    Words words = encoder({"--warm-up", "2", "--rounds", "2", "--json"});
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult finished = run(words);
    EXPECT_TRUE(finished.status.success()) << finished.err;
    const json result = json::parse(finished.out);
    return std::pair{result.at("losses"), result.at("check").at("losses")};
  };
  const auto [without, check] = losses({"--dropout", "0"});
  EXPECT_EQ(without, json({check.at(2), check.at(3)}));
  const auto [by_default, same_check] = losses({});
  EXPECT_EQ(same_check, check);
  EXPECT_NE(by_default, without);
  EXPECT_EQ(losses({"--dropout", "0.1"}).first, by_default);
  EXPECT_NE(losses({"--dropout", "0.5"}).first, by_default);
}

TEST(BenchCommand, TrainsTheDecoder) {
  const ProcessResult finished =
      run({"decoder", "--batch-size", "2", "--layers",     "1",   "--width",     "96", "--heads",
           "4",       "--length",     "8", "--vocabulary", "100", "--opt-level", "O0", "--threads",
           "1",       "--rounds",     "1", "--json"});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const json result = json::parse(finished.out);
  EXPECT_EQ(result.at("items"), "tokens");
  EXPECT_EQ(result.at("items_per_step"), 16);
  // 8/3 of the width is a multiple of 256.
  const double weights = 100 * 96 + 4 * 96 * 96 + 3 * 96 * 256 + 3 * 96;
  EXPECT_NEAR(result.at("tensor_mb").at("parameters").get<double>(), 4 * weights / (1 << 20), 1e-9);
}

TEST(BenchCommand, RunsUnderEveryPolicy) {
  for (const char* policy : {"torch", "apex", "paddle", "none"}) {
    const ProcessResult finished = run(encoder({"--policy", policy, "--rounds", "1", "--json"}));
    ASSERT_TRUE(finished.status.success()) << finished.err;
    EXPECT_EQ(json::parse(finished.out).at("policy"), policy);
  }
}

TEST(BenchCommand, RunsWithoutSomeKernels) {
  const auto losses = [](const std::string& names) {
    const ProcessResult finished =
        run(encoder({"--without-kernels", names, "--rounds", "2", "--json"}));
    EXPECT_TRUE(finished.status.success()) << finished.err;
    const json result = json::parse(finished.out);
    EXPECT_EQ(result.at("without_kernels"), names);
    return result.at("losses");
  };
  const json two = losses("gelu,dropout");
  EXPECT_EQ(two, losses("dropout,gelu"));
  // LibTorch's dropout draws other numbers.
  EXPECT_NE(two, losses("gelu"));
  EXPECT_NO_THROW(losses("all"));
  const ProcessResult unknown = run(encoder({"--without-kernels", "gelu,softmax"}));
  EXPECT_EQ(unknown.status.code, 2);
  EXPECT_THAT(unknown.err, AllOf(HasSubstr("'softmax'"), HasSubstr("gelu, ")));
}

TEST(BenchCommand, RunsTheStepsThatStandardInputAsksFor) {
  const test::TemporaryFolder folder;
  const std::string file = (folder / "x.json").string();
  const ProcessResult finished =
      run_with_input(mnist({"--steps-from-stdin", "--json", file}), "step 3\\nstep 1\\n");
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const auto lines = lines_of(finished.out);
  ASSERT_EQ(lines.size(), 3U) << finished.out;
  EXPECT_EQ(lines[0], "ready");
  const json first = json::parse(lines[1]);
  EXPECT_EQ(first.at("steps"), 3);
  EXPECT_GT(first.at("seconds"), 0);
  const json second = json::parse(lines[2]);
  EXPECT_EQ(second.at("steps"), 1);
  EXPECT_LT(second.at("loss"), first.at("loss"));
  EXPECT_THAT(finished.err, AllOf(HasSubstr("check "), HasSubstr(" ms per step over 2;")));
  const json result = json::parse(read_text(file));
  EXPECT_EQ(result.at("losses").size(), 4U);
  EXPECT_EQ(result.at("step_seconds").size(), 2U);
  EXPECT_DOUBLE_EQ(result.at("step_seconds").at(0), first.at("seconds").get<double>() / 3);
}

TEST(BenchCommand, StandardInputMayAskForNothing) {
  const test::TemporaryFolder folder;
  const std::string file = (folder / "x.json").string();
  const ProcessResult finished = run_with_input(mnist({"--steps-from-stdin", "--json", file}), "");
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(finished.out, "ready\n");
  EXPECT_EQ(json::parse(read_text(file)).at("min_step_seconds"), nullptr);
}

TEST(BenchCommand, AnythingElseOnStandardInputIsCode2) {
  for (const char* line : {"step", "step 0", "step -1", "step 1x", "step 1000001", "stop",
                           "step  1", "step 99999999999999999999"}) {
    const ProcessResult finished =
        run_with_input(mnist({"--steps-from-stdin"}), std::string(line) + "\\n");
    EXPECT_EQ(finished.status.code, 2) << line;
    EXPECT_EQ(finished.out, "ready\n");
    EXPECT_THAT(finished.err, HasSubstr("[cli.bench] expected 'step N' with N from 1 to 1000000 "
                                        "on standard input, got '" +
                                        std::string(line) + "'"));
  }
}

TEST(BenchCommand, WrongUsageIsOneClearMessageAndCode2) {
  const std::vector<std::pair<Words, std::string>> cases{
      {{}, "[cli.bench] expected a workload: mnist|resnet50|encoder|decoder, got none"},
      {{"bert"}, "expected workload to be one of mnist, resnet50, encoder, decoder, got 'bert'"},
      {{"mnist", "encoder"}, "expected flags of this command, got 'encoder'"},
      {{"mnist", "--opt-level", "all"}, "expected --opt-level to be one of O0, O1, O2, O3"},
      {{"mnist", "--dtype", "fp8"}, "expected --dtype to be one of auto, bf16, fp16"},
      {{"mnist", "--optimizer", "sgd"},
       "expected --optimizer to be one of fused, split-masters, bf16-state, torch"},
      {{"mnist", "--policy", "mine"}, "expected --policy to be one of semitone"},
      {{"mnist", "--batch-size", "-1"}, "expected --batch-size from 0"},
      {{"mnist", "--rounds", "0"}, "expected --rounds from 1"},
      {{"mnist", "--warm-up", "0"}, "expected --warm-up from 1"},
      {{"mnist", "--check-steps", "1"}, "expected --check-steps from 2"},
      {{"mnist", "--image-size", "32"}, "expected --image-size with resnet50 only, got mnist"},
      {{"resnet50", "--image-size", "16"}, "expected --image-size from 32"},
      {{"resnet50", "--layers", "2"},
       "expected --layers with encoder or decoder only, got resnet50"},
      {{"decoder", "--layers", "-1"}, "expected --layers from 0"},
      {{"decoder", "--dropout", "0"}, "expected --dropout with encoder only, got decoder"},
      {{"mnist", "--checkpoint-activations"},
       "expected --checkpoint-activations with resnet50, encoder or decoder only, got mnist"},
      {{"mnist", "--dropout", "0"}, "expected --dropout with encoder only, got mnist"},
      {{"encoder", "--dropout", "1"}, "expected --dropout from 0 to below 1, got '1'"},
      {{"encoder", "--dropout", "-0.1"}, "expected --dropout from 0 to below 1, got '-0.1'"},
      {{"encoder", "--memory-format", "nhwc"},
       "expected --memory-format with mnist or resnet50 only, got encoder"},
      {{"mnist", "--opt-level", "O2", "--policy", "torch"},
       "expected --policy with --opt-level O1 only, got O2"},
      {{"mnist", "--opt-level", "O0", "--without-kernels", "all"},
       "expected --without-kernels with --opt-level O1 to O3 only, got O0"},
      {{"mnist", "--steps-from-stdin", "--floor"},
       "expected --floor or --steps-from-stdin, got both"},
      {{"mnist", "--steps-from-stdin", "--rounds", "3"},
       "expected --rounds or --steps-from-stdin, got both"},
      {{"mnist", "--steps-from-stdin", "--json"},
       "expected a file for --json with --steps-from-stdin, got standard output"},
  };
  for (const auto& [arguments, message] : cases) {
    const ProcessResult finished = run(arguments);
    SCOPED_TRACE(message);
    EXPECT_EQ(finished.status.code, 2);
    EXPECT_EQ(finished.out, "");
    EXPECT_THAT(finished.err, AllOf(StartsWith("[cli.bench] "), HasSubstr(message)));
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1);
  }
  // Known only where the model is made.
  for (const char* workload : {"encoder", "decoder"}) {
    const ProcessResult finished = run({workload, "--width", "32", "--heads", "5"});
    EXPECT_EQ(finished.status.code, 2);
    EXPECT_THAT(finished.err, HasSubstr("a width that is a multiple of heads, got 32 and 5"));
  }
}

TEST(BenchCommand, AProofThatFailsIsCode1) {
  const ProcessResult finished = run(
      {"resnet50", "--image-size", "32", "--batch-size", "4", "--rounds", "1", "--threads", "1"});
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("[train.workload] expected the losses of float32, "));
  EXPECT_THAT(finished.out, Not(HasSubstr("time ")));
}

}  // namespace
}  // namespace semitone
