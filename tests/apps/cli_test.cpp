#include "src/launch/process.h"
#include "tests/support/image_files.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <pty.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

// The program from the command line: output, files, exit codes.
namespace semitone {
namespace {

using launch::Output;
using launch::Process;
using launch::ProcessOptions;
using launch::ProcessResult;
using nlohmann::json;
using test::read_text;
using test::write_text;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Words = std::vector<std::string>;

ProcessOptions options_for(const Words& arguments) {
  return ProcessOptions(SEMITONE_PROGRAM)
      .arguments(arguments)
      .out(Output::capture)
      .err(Output::capture);
}

ProcessResult semitone(const Words& arguments) {
  return launch::run(options_for(arguments));
}

std::string two_digits(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f", value);
  return text.data();
}

void expect_failure(const ProcessResult& finished, int code, const std::string& message) {
  EXPECT_EQ(finished.status.code, code) << finished.err;
  EXPECT_EQ(finished.status.signal, 0);
  EXPECT_THAT(finished.err, HasSubstr(message));
  EXPECT_EQ(finished.out, "");
}

// A folder with a small data set, and short trainings on it.
class CliTest : public ::testing::Test {
 protected:
  CliTest() { test::write_data_set(data_.path(), 400, 100); }

  Words train(const Words& more = {}) const {
    Words words{"train", "--data", data_.path().string(), "--batch-size", "20", "--threads", "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  test::TemporaryFolder data_;
  test::TemporaryFolder folder_;
};

// -------------------------------------------------------------------------------------------------
// help and usage

TEST_F(CliTest, HelpHasExamplesAndExitCodes) {
  for (const Words& arguments :
       {Words{"--help"}, Words{"train", "--help"}, Words{"ops", "--help"}}) {
    const ProcessResult help = semitone(arguments);
    EXPECT_TRUE(help.status.success());
    EXPECT_EQ(help.err, "");
    EXPECT_THAT(help.out, HasSubstr("Exit codes: 0 success"));
    if (arguments.size() == 2) {
      EXPECT_THAT(help.out,
                  AllOf(HasSubstr("Examples:\n  semitone " + arguments[0]), HasSubstr("--json")));
    }
  }
  EXPECT_THAT(semitone({"train", "--help"}).out, Not(HasSubstr("--as-part")));
}

TEST_F(CliTest, VersionNamesTheLibraries) {
  const ProcessResult version = semitone({"--version"});
  EXPECT_TRUE(version.status.success());
  EXPECT_THAT(version.out, AllOf(StartsWith("semitone 0."), HasSubstr("LibTorch 2.")));
}

TEST_F(CliTest, WrongUsageIsOneClearMessageAndCode2) {
  const std::vector<std::pair<Words, std::string>> cases{
      {{}, "[cli] expected a command, got none — see semitone --help"},
      {{"tarin"}, "[cli] expected a command, got 'tarin' — did you mean 'train'?"},
      {{"help"}, "got 'help' — did you mean '--help'?"},
      {{"do-something"}, "got 'do-something' — see semitone --help"},
      {{"train", "--epoch", "1"}, "got '--epoch 1' — did you mean '--epochs'?"},
      {{"train", "--optlevel=O2"}, "got '--optlevel=O2' — did you mean '--opt-level'?"},
      {{"ops", "--polcy", "apex"}, "did you mean '--policy'?"},
      {{"train", "--fo", "3"}, "[cli.train] expected flags of this command, got '--fo 3'"},
      {{"train", "extra"}, "[cli.train] expected flags of this command, got 'extra'"},
      {{"train", "--epochs"}, "--epochs: 1 required N missing"},
      {{"train", "--epochs", "1", "--epochs", "2"}, "--epochs"},
      {{"train", "--epochs", "three"},
       "[cli.train] expected --epochs from 1 to 1000000, got 'three'"},
      {{"train", "--epochs", "1.5"}, "expected --epochs from 1"},
      {{"train", "--epochs", "99999999999999999999"}, "expected --epochs from 1"},
      {{"train", "--batch-size", "0"}, "expected --batch-size from 1"},
      {{"train", "--lr", "-0.1"}, "expected --lr above 0 that float32 holds, got '-0.1'"},
      {{"train", "--lr", "nan"}, "expected --lr above 0"},
      {{"train", "--lr", "0.1x"}, "expected --lr above 0"},
      {{"train", "--momentum", "1"}, "expected --momentum from 0 to below 1"},
      {{"train", "--opt-level", "01"},
       "expected --opt-level to be one of O0, O1, O2, O3, all, got '01' — the first character is "
       "the letter O, not the digit zero"},
      {{"train", "--optimizer", "adamv"}, "got 'adamv' — did you mean 'adam' or 'adamw'?"},
      {{"train", "--save-every", "5"}, "expected --save with --save-every, got none"},
      {{"train", "--dtype", "fp8"}, "expected --dtype to be one of auto, bf16, fp16"},
      {{"train", "--optimizer", "lion"}, "expected --optimizer to be one of sgd, adam, adamw"},
      {{"train", "--schedule", "step"}, "expected --schedule to be one of constant, cosine"},
      {{"train", "--loss-scale", "0"}, "expected --loss-scale to be auto, dynamic or a number"},
      {{"train", "--seed", "-1"}, "expected --seed from 0"},
      {{"train", "--threads", "-2"}, "expected --threads from 0"},
      {{"train", "--memory-format", "NCHW"}, "expected --memory-format to be one of"},
      {{"train", "--limit-batches", "-1"}, "expected --limit-batches from 0"},
      {{"train", "--max-steps", "-1"}, "expected --max-steps from 0"},
      {{"train", "--growth-interval", "-1"}, "expected --growth-interval from 0"},
      {{"train", "--model", "resnet"}, "expected --model to be one of convnet, resnet50"},
      {{"train", "--data", ""}, "expected --data DIR"},
      {{"train", "--optimizer", "adam", "--momentum", "0.9"},
       "expected --momentum with --optimizer sgd or fused-sgd only"},
      {{"train", "--loss-scale", "1e39"}, "or a number that float32 holds, above 0, got '1e39'"},
      {{"train", "--loss-scale", "1e-320"}, "or a number that float32 holds, above 0"},
      {{"train", "--lr", "1e39"}, "expected --lr above 0 that float32 holds, got '1e39'"},
      {{"train", "--save", "/tmp/./x", "--json", "/tmp/x"},
       "[cli.train] expected two files for --save and --json, got '/tmp/./x' for both"},
      {{"train", "--opt-level", "all", "--save", "x"}, "expected one level with --save"},
      {{"train", "--opt-level", "all", "--resume", "x"}, "expected one level with --resume"},
      {{"ops", "--policy", "mine"}, "[cli.ops] expected --policy to be one of semitone, torch"},
      {{"ops", "--device", "tpu"}, "expected --device to be one of cpu, cuda"},
      {{"ops", "--op", "sofmax"},
       "[cli.ops] expected --op to name an operator, got 'sofmax' — did you mean 'softmax'"},
  };
  for (const auto& [arguments, message] : cases) {
    const ProcessResult finished = semitone(arguments);
    SCOPED_TRACE(message);
    expect_failure(finished, 2, message);
    EXPECT_THAT(finished.err, StartsWith("[cli"));
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1);
  }
}

// -------------------------------------------------------------------------------------------------
// ops

TEST_F(CliTest, OpsPrintsEveryPolicy) {
  for (const char* policy : {"semitone", "torch", "apex", "paddle", "paddle-o2"}) {
    for (const char* device : {"cpu", "cuda"}) {
      const ProcessResult ops = semitone({"ops", "--policy", policy, "--device", device});
      EXPECT_TRUE(ops.status.success()) << ops.err;
      EXPECT_THAT(ops.out, AllOf(HasSubstr(std::string("policy ") + policy), HasSubstr("lower"),
                                 HasSubstr("conv2d"), HasSubstr("reason")));
    }
  }
  EXPECT_THAT(semitone({"ops", "--policy", "none"}).out, HasSubstr("nothing is listed"));
  EXPECT_THAT(semitone({"ops"}).out,
              HasSubstr("Semitone's own kernels: add.Tensor, add_.Tensor, batch_norm, "));
  EXPECT_THAT(semitone({"ops", "--device", "cuda"}).out, Not(HasSubstr("Semitone's own")));
}

TEST_F(CliTest, OpsShowsOneOperatorWithItsOverloads) {
  const ProcessResult ops = semitone({"ops", "--op", "prod"});
  EXPECT_THAT(ops.out, AllOf(HasSubstr("prod "), HasSubstr("prod.dim_int"), HasSubstr("fp32"),
                             Not(HasSubstr("conv3d")), Not(HasSubstr("cumprod"))));
  EXPECT_EQ(semitone({"ops", "--op", "aten::prod"}).out, ops.out);
  EXPECT_THAT(semitone({"ops", "--op", "mm."}).out, HasSubstr("lower"));
  EXPECT_THAT(semitone({"ops", "--op", "relu"}).out, HasSubstr("relu is not listed"));
}

TEST_F(CliTest, OpsWritesJson) {
  const ProcessResult ops = semitone({"ops", "--json", "--dtype", "fp16"});
  const json object = json::parse(ops.out);
  EXPECT_EQ(object.at("policy"), "semitone");
  EXPECT_EQ(object.at("device"), "cpu");
  EXPECT_EQ(object.at("dtype"), "float16");
  EXPECT_THAT(object.at("fast_kernels"), testing::Contains("layer_norm"));
  EXPECT_GT(object.at("ops").size(), 100U);
  for (const json& row : object.at("ops")) {
    EXPECT_NE(row.at("op"), "");
    EXPECT_NE(row.at("action"), "");
    EXPECT_NE(row.at("reason"), "");
  }
  const std::string file = (folder_ / "ops.json").string();
  EXPECT_TRUE(semitone({"ops", "--policy", "apex", "--json", file}).status.success());
  EXPECT_EQ(json::parse(read_text(file)).at("policy"), "apex");
  expect_failure(semitone({"ops", "--quiet"}), 2, "[cli.ops]");
}

// As on a processor without 16-bit instructions: everything is emulated, and the output says so.
TEST_F(CliTest, WhatIsEmulatedIsSaid) {
  const std::string limit = "ONEDNN_MAX_CPU_ISA";
  const Words words{"products", "convolutions", "grouped convolutions", "transposed convolutions",
                    "LSTM",     "attention"};
  for (const char* dtype : {"bf16", "fp16"}) {
    const auto ops = [&](const Words& more) {
      Words arguments{"ops", "--dtype", dtype};
      arguments.insert(arguments.end(), more.begin(), more.end());
      return launch::run(options_for(arguments).environment(limit, "AVX2"));
    };
    EXPECT_EQ(json::parse(ops({"--json"}).out).at("emulated").get<Words>(), words);
    EXPECT_THAT(ops({}).out, HasSubstr("float16 on this CPU: emulated\nemulated: computed in "));
  }
  const ProcessResult head = launch::run(
      options_for(train({"--opt-level", "O1", "--dtype", "fp16", "--limit-batches", "1"}))
          .environment(limit, "AVX2"));
  EXPECT_THAT(head.out, AllOf(HasSubstr("bf16 emulated; fp16 emulated\n"),
                              HasSubstr("float16: requested; emulated here (emulated: computed")));
  EXPECT_EQ(json::parse(semitone({"ops", "--device", "cuda", "--json"}).out).at("emulated"),
            json::array());
}

TEST_F(CliTest, OpsMeasuresEveryKindOfOperator) {
  const ProcessResult ops = semitone({"ops", "--speed", "--json"});
  ASSERT_TRUE(ops.status.success()) << ops.err;
  const json object = json::parse(ops.out);
  EXPECT_THAT(object.at("device").get<std::string>(), HasSubstr("oneDNN up to"));
  std::map<std::string, int> rows;
  for (const json& row : object.at("speed")) {
    ++rows[row.at("kind").get<std::string>() + ", " + row.at("pass").get<std::string>()];
    EXPECT_GT(row.at("fp32_ms"), 0);
    EXPECT_GT(row.at("emulated_ms"), 0);
    EXPECT_GT(row.at("gflop"), 0);
    EXPECT_TRUE(row.at("native_ms").is_null() || row.at("native_ms") > 0) << row;
    EXPECT_TRUE(row.at("chosen") == "native" || row.at("chosen") == "emulated") << row;
    if (row.at("chosen") == "native") {
      EXPECT_FALSE(row.at("native_ms").is_null()) << row;
    }
  }
  EXPECT_EQ(rows.size(), 12U) << "6 kinds, forward and in training";
  for (const auto& [name, count] : rows) EXPECT_EQ(count, 2) << name;
  expect_failure(semitone({"ops", "--speed", "--op", "mm"}), 2, "--speed or --op");
  expect_failure(semitone({"ops", "--speed", "--device", "cuda"}), 2, "--speed for the CPU");
}

TEST_F(CliTest, AFullDiskBehindStandardOutputIsAnError) {
  const ProcessResult finished =
      launch::run(ProcessOptions("sh")
                      .arguments({"-c", "\"$0\" ops > /dev/full", SEMITONE_PROGRAM})
                      .err(Output::capture));
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("expected to write to standard output"));
}

// -------------------------------------------------------------------------------------------------
// train

TEST_F(CliTest, TrainSaysWhatItDoesAndEndsWithATable) {
  const ProcessResult finished =
      semitone(train({"--opt-level", "O2", "--dtype", "fp16", "--epochs", "2"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  for (const char* text : {"device        CPU, 1 threads", "16 bits       float16: requested",
                           "memory        nhwc: default", "400 training and 100 test images",
                           "sgd lr 0.05 momentum 0.9, cosine, seed 0",
                           "level  dtype      accuracy     loss  images/s  ms/step  speed     time "
                           "      RSS   tensors  skipped  loss scale",
                           "\nO2     float16 "})
    EXPECT_THAT(finished.out, HasSubstr(text));
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("O2 float16   epoch 1/2  loss "), HasSubstr("epoch 2/2"),
                    HasSubstr("test accuracy"), Not(HasSubstr("\r")), Not(HasSubstr("\033"))));
  EXPECT_THAT(finished.out, Not(HasSubstr("\033")));
}

TEST_F(CliTest, QuietTrainsWithATableOnly) {
  const ProcessResult finished = semitone(train({"--quiet"}));
  EXPECT_TRUE(finished.status.success());
  EXPECT_EQ(finished.err, "");
  EXPECT_THAT(finished.out, StartsWith("level"));
}

TEST_F(CliTest, AllLevelsTrainInProcessesOfTheirOwnAndCompare) {
  const std::string file = (folder_ / "all.json").string();
  const ProcessResult finished = semitone(train(
      {"--opt-level", "all", "--dtype", "fp16", "--epochs", "3", "--seed", "7", "--json", file}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const json results = json::parse(read_text(file));
  ASSERT_EQ(results.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    const json& result = results[i];
    const std::string level = "O" + std::to_string(i);
    EXPECT_EQ(result.at("opt_level"), level);
    EXPECT_EQ(result.at("dtype"), i == 0 ? "float32" : "float16");
    EXPECT_EQ(result.at("epochs"), 3);
    EXPECT_EQ(result.at("steps"), 60);
    EXPECT_GT(result.at("test_accuracy"), 0.95);
    EXPECT_LE(result.at("test_accuracy"), 1.0);
    EXPECT_LT(result.at("train_loss"), 0.5);
    EXPECT_GT(result.at("images_per_second"), 0);
    EXPECT_GT(result.at("ms_per_step"), 0);
    EXPECT_GT(result.at("train_seconds"), 0);
    // Of several steps one may take long; the median is that of the others.
    const double speed =
        results[0].at("ms_per_step").get<double>() / result.at("ms_per_step").get<double>();
    EXPECT_THAT(finished.out, ContainsRegex("\n" + level + " .* " + two_digits(speed) + "x "));
    EXPECT_GT(result.at("peak_rss_mb"), result.at("peak_tensor_mb"));
    EXPECT_GT(result.at("peak_tensor_mb"), 0.5);
    EXPECT_GE(result.at("skipped_steps"), 0);
    EXPECT_GE(result.at("final_loss_scale"), 1);
    EXPECT_EQ(result.at("seed"), 7);
    EXPECT_EQ(result.at("threads"), 1);
    EXPECT_EQ(result.at("memory_format"), "nhwc");
    for (const char* name : {"semitone", "libtorch", "compiler"})
      EXPECT_NE(result.at("versions").at(name), "");
    EXPECT_THAT(finished.out, HasSubstr("\n" + level + " "));
    EXPECT_THAT(finished.err, HasSubstr(level + " float"));
  }
  EXPECT_THAT(finished.out, AllOf(HasSubstr(" 1.00x "), HasSubstr("O3 in float16 keeps nothing")));
  // 16 bits take less memory than 32.
  EXPECT_LT(results[1].at("peak_tensor_mb"), results[0].at("peak_tensor_mb"));
}

TEST_F(CliTest, JsonOnStandardOutputIsNothingButJson) {
  for (const Words& arguments : {Words{"--json"}, Words{"--json", "-"}}) {
    const ProcessResult finished = semitone(train(arguments));
    EXPECT_EQ(json::parse(finished.out).at(0).at("opt_level"), "O1");
    EXPECT_THAT(finished.err, AllOf(HasSubstr("device"), HasSubstr("level  dtype")));
  }
}

TEST_F(CliTest, TheSameSeedGivesTheSameResult) {
  const auto result = [&](const std::string& seed) {
    const json all = json::parse(semitone(train({"--json", "--seed", seed})).out);
    return std::pair(all.at(0).at("train_loss").get<double>(),
                     all.at(0).at("test_loss").get<double>());
  };
  EXPECT_EQ(result("3"), result("3"));
  EXPECT_NE(result("3"), result("4"));
}

TEST_F(CliTest, AResumedRunEndsLikeAWholeOne) {
  const std::string state = (folder_ / "state").string();
  const Words common{"--opt-level", "O2", "--dtype", "fp16", "--epochs", "2", "--json"};
  const auto result = [&](const Words& more) {
    Words words = common;
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult finished = semitone(train(words));
    EXPECT_TRUE(finished.status.success()) << finished.err;
    return json::parse(finished.out).at(0);
  };
  const json whole = result({});
  EXPECT_EQ(result({"--max-steps", "25", "--save", state}).at("steps"), 25);
  const json resumed = result({"--resume", state});
  for (const char* key :
       {"steps", "train_loss", "test_loss", "test_accuracy", "skipped_steps", "final_loss_scale"})
    EXPECT_EQ(resumed.at(key), whole.at(key)) << key;
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(CliTest, OneCommandLineStartsAndGoesOn) {
  const std::string state = (folder_ / "state").string();
  const auto result = [&](const Words& more) {
    Words words{"--save", state, "--resume", state, "--epochs", "2", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult finished = semitone(train(words));
    EXPECT_TRUE(finished.status.success()) << finished.err;
    return std::pair(json::parse(finished.out).at(0), finished.err);
  };
  const auto [first, said] = result({"--max-steps", "25"});
  EXPECT_EQ(first.at("steps"), 25);
  EXPECT_THAT(said, HasSubstr("state         '" + state + "' does not exist yet: a new training"));
  const auto [rest, said_then] = result({});
  EXPECT_THAT(said_then, Not(HasSubstr("a new training")));
  const json whole = json::parse(semitone(train({"--epochs", "2", "--json"})).out).at(0);
  for (const char* key : {"steps", "train_loss", "test_loss", "test_accuracy"})
    EXPECT_EQ(rest.at(key), whole.at(key)) << key;
  // A launcher may restart a finished training.
  EXPECT_EQ(result({}).first.at("test_loss"), whole.at("test_loss"));
}

TEST_F(CliTest, ASignalEndsATrainingWhoseStateIsSaved) {
  const std::filesystem::path state = folder_ / "state";
  const auto written = [&] {
    std::error_code none_yet;
    const auto time = std::filesystem::last_write_time(state, none_yet);
    return none_yet ? std::filesystem::file_time_type::min() : time;
  };
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const auto before = written();
    Process process(
        options_for(train({"--save", state.string(), "--resume", state.string(), "--schedule",
                           "constant", "--save-every", "3", "--epochs", "100000"})));
    ASSERT_TRUE(test::eventually([&] { return written() != before; }));
    process.send(signal);
    const ProcessResult finished = process.wait();
    EXPECT_EQ(finished.status.code, 128 + signal) << finished.err;
    EXPECT_THAT(finished.err,
                AllOf(HasSubstr("[train] stopped by signal " + std::to_string(signal)),
                      HasSubstr("the state is in '" + state.string() + "'"),
                      Not(HasSubstr("test accuracy"))));
    EXPECT_THAT(finished.out, Not(HasSubstr("level  dtype")));
  }
  // The saved state is complete, and from after the first step.
  const ProcessResult resumed =
      semitone(train({"--resume", state.string(), "--schedule", "constant", "--epochs", "100000",
                      "--max-steps", "1", "--quiet"}));
  EXPECT_EQ(resumed.status.code, 1);
  EXPECT_THAT(resumed.err, HasSubstr("a state with fewer than 1 steps"));
}

TEST_F(CliTest, OtherOptimizersAndTheTutorialsSettingRun) {
  for (const Words& arguments :
       {Words{"--optimizer", "adam"}, Words{"--optimizer", "adamw", "--schedule", "constant"},
        Words{"--lr", "1e-4", "--momentum", "0", "--batch-size", "100"},
        Words{"--memory-format", "nchw", "--limit-batches", "3", "--loss-scale", "128"}}) {
    Words words{"train", "--data", data_.path().string(), "--threads", "1"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const ProcessResult finished = semitone(words);
    EXPECT_TRUE(finished.status.success()) << finished.err;
  }
}

TEST_F(CliTest, TheDataFolderCanComeFromTheEnvironment) {
  const Words arguments{"train", "--max-steps", "2", "--batch-size", "20", "--threads", "1"};
  const ProcessResult finished =
      launch::run(options_for(arguments).environment("SEMITONE_DATA_DIR", data_.path().string()));
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr(data_.path().string()));
  expect_failure(
      launch::run(options_for(arguments).environment("SEMITONE_DATA_DIR", "/no/such")), 1,
      "[cli.train] expected a folder with the data at '/no/such', got none — give --data "
      "DIR or set SEMITONE_DATA_DIR");
}

// On the data that come with the sources, 60 of the 600 steps of an epoch.
TEST_F(CliTest, TrainsOnTheRealMnist) {
  const ProcessResult finished =
      semitone({"train", "--limit-batches", "60", "--json", "--threads", "1"});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("60000 training and 10000 test images"));
  EXPECT_GT(json::parse(finished.out).at(0).at("test_accuracy"), 0.85);
}

// -------------------------------------------------------------------------------------------------
// files that are not as they should be

TEST_F(CliTest, MissingCorruptAndTruncatedDataAreCode1) {
  const auto images = data_ / "train-images-idx3-ubyte.gz";
  const std::string bytes = read_text(images);
  write_text(images, bytes.substr(0, bytes.size() / 2));
  expect_failure(semitone(train()), 1, "one that ends early");
  std::string corrupt = bytes;
  corrupt[bytes.size() / 2] = static_cast<char>(corrupt[bytes.size() / 2] ^ 0xff);
  write_text(images, corrupt);
  expect_failure(semitone(train({"--opt-level", "all"})), 1, images.string());
  write_text(images, "nonsense");
  expect_failure(semitone(train()), 1, "the magic number");
  std::filesystem::remove(images);
  expect_failure(semitone(train()), 1, "train-images-idx3-ubyte[.gz]");
  write_text(images, bytes);
  write_text(data_ / "t10k-labels-idx1-ubyte",
             test::idx_bytes(torch::full({100}, 11, torch::kByte)));
  expect_failure(semitone(train()), 1, "labels from 0 to 9");
}

TEST_F(CliTest, OutputThatCannotBeWrittenIsSaidBeforeTraining) {
  for (const Words& arguments :
       {Words{"--json", "/no/such/folder/x.json"}, Words{"--json", folder_.path().string()},
        Words{"--save", "/no/such/folder/x", "--quiet"}}) {
    const ProcessResult finished = semitone(train(arguments));
    EXPECT_EQ(finished.status.code, 1);
    EXPECT_THAT(finished.err, AllOf(HasSubstr("expected to write"), Not(HasSubstr("epoch"))));
  }
}

TEST_F(CliTest, AFullDiskIsSaidAndLeavesTheTable) {
  const ProcessResult finished = semitone(train({"--json", "/dev/full"}));
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err,
              HasSubstr("[cli.json] expected to write '/dev/full', got No space left"));
  EXPECT_THAT(finished.out, HasSubstr("level  dtype"));
}

TEST_F(CliTest, AStateThatDoesNotFitIsCode1) {
  // Before the data are read and the head is written.
  expect_failure(semitone(train({"--resume", "/no/such"})), 1, "no such file");
  write_text(folder_ / "state", "nonsense");
  expect_failure(semitone(train({"--quiet", "--resume", (folder_ / "state").string()})), 1,
                 "written by another program?");
}

// -------------------------------------------------------------------------------------------------
// when it goes wrong

TEST_F(CliTest, DivergenceIsCode3) {
  const ProcessResult finished =
      semitone({"train", "--data", data_.path().string(), "--opt-level", "O0", "--batch-size", "20",
                "--lr", "1e30", "--threads", "1"});
  EXPECT_EQ(finished.status.code, 3);
  EXPECT_THAT(finished.err, HasSubstr("[train.trainer] expected a finite"));
  EXPECT_THAT(finished.out, Not(HasSubstr("level  dtype")));
}

TEST_F(CliTest, ANumberThatIsNoneHasNoSign) {
  // Of an epoch all of whose steps were skipped, the mean loss is 0/0.
  const ProcessResult finished =
      semitone(train({"--opt-level", "O1", "--dtype", "fp16", "--loss-scale", "1e20",
                      "--limit-batches", "3", "--log-every", "1"}));
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr(" nan "), Not(HasSubstr("-nan"))));
  EXPECT_THAT(finished.err, AllOf(HasSubstr("loss nan"), Not(HasSubstr("-nan"))));
}

TEST_F(CliTest, ALevelThatFailsFailsAllWithItsCodeAndName) {
  const std::string file = (folder_ / "x.json").string();
  // A scale that fp32 gradients can represent, and fp16 ones cannot.
  const ProcessResult finished =
      semitone(train({"--opt-level", "all", "--dtype", "fp16", "--loss-scale", "1e20", "--epochs",
                      "9", "--json", file}));
  EXPECT_EQ(finished.status.code, 3);
  EXPECT_THAT(
      finished.err,
      AllOf(HasSubstr("O0 float32   test accuracy"), HasSubstr("consecutive skipped steps"),
            HasSubstr("[cli.train] expected O1 to train, got exit code 3"), Not(HasSubstr("O2 "))));
  // The result of the finished level is not lost.
  EXPECT_THAT(finished.out, HasSubstr("O0     float32"));
  const json results = json::parse(read_text(file));
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].at("opt_level"), "O0");
}

TEST_F(CliTest, AParentThatIgnoresItsChildrenDoesNotMatter) {
  const auto handler = std::signal(SIGCHLD, SIG_IGN);  // inherited by what is started
  Process process(options_for(train({"--opt-level", "all", "--limit-batches", "2"})));
  std::signal(SIGCHLD, handler);
  const ProcessResult finished = process.wait();
  EXPECT_TRUE(finished.status.success()) << finished.err;
}

TEST_F(CliTest, AFileBehindStandardOutputIsNotReplaced) {
  const std::string file = (folder_ / "log.txt").string();
  write_text(file, "precious\n");
  const ProcessResult finished = launch::run(ProcessOptions("/bin/sh").arguments(
      {"-c", "exec \"$0\" ops --op mm --json /dev/stdout >> " + file, SEMITONE_PROGRAM}));
  EXPECT_TRUE(finished.status.success());
  EXPECT_THAT(read_text(file), AllOf(StartsWith("precious\n"), HasSubstr("policy semitone for"),
                                     HasSubstr("\"op\": \"mm\"")));
}

// The process of the current level of `semitone train --opt-level all`.
pid_t child_of(pid_t id) {
  const std::string path =
      "/proc/" + std::to_string(id) + "/task/" + std::to_string(id) + "/children";
  for (int i = 0; i < 1000; ++i) {
    pid_t child = 0;
    if (std::ifstream(path) >> child) return child;
    ::usleep(10'000);
  }
  return 0;
}

TEST_F(CliTest, ALevelThatIsKilledIsNamed) {
  Process process(options_for(train({"--opt-level", "all", "--epochs", "100000"})));
  const pid_t child = child_of(process.id());
  ASSERT_GT(child, 0);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  const ProcessResult finished = process.wait();
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("[cli.train] expected O0 to train, got signal 9 (Killed)"));
}

TEST_F(CliTest, StoppingItStopsTheLevelItIsAt) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  Process process(options_for(train({"--opt-level", "all", "--epochs", "100000"})));
  const pid_t child = child_of(process.id());
  ASSERT_GT(child, 0);
  process.send(SIGTERM);
  EXPECT_EQ(process.wait().status.signal, SIGTERM);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << status;
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

// -------------------------------------------------------------------------------------------------
// on a terminal

std::string on_a_terminal(const Words& arguments, bool no_color, int columns = 120) {
  int terminal = -1;
  const winsize size{24, static_cast<unsigned short>(columns), 0, 0};
  const pid_t id = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (id == 0) {
    ::setenv("TERM", "xterm", 1);
    if (no_color) ::setenv("NO_COLOR", "1", 1);
    std::vector<char*> words{const_cast<char*>(SEMITONE_PROGRAM)};
    for (const std::string& argument : arguments)
      words.push_back(const_cast<char*>(argument.c_str()));
    words.push_back(nullptr);
    ::execv(SEMITONE_PROGRAM, words.data());
    ::_exit(127);
  }
  std::string output;
  std::array<char, 4096> buffer{};
  // Ends with an error (EIO) where a pipe would end.
  for (ssize_t count = 0; (count = ::read(terminal, buffer.data(), buffer.size())) > 0;)
    output.append(buffer.data(), static_cast<std::size_t>(count));
  ::close(terminal);
  int status = 0;
  EXPECT_EQ(::waitpid(id, &status, 0), id);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << output;
  return output;
}

TEST_F(CliTest, ATerminalGetsAProgressBarAndBold) {
  const std::string output = on_a_terminal(train({"--opt-level", "O1"}), false);
  EXPECT_THAT(output, AllOf(HasSubstr("\rO1 bfloat16  epoch 1/1 ["), HasSubstr("/20  loss "),
                            HasSubstr(" left\033[K"), HasSubstr("\033[1mlevel")));
}

// The lines that a terminal shows over time, with each drawing of a moving line.
std::vector<std::string> shown_lines(const std::string& output) {
  std::vector<std::string> lines(1);
  for (std::size_t i = 0; i < output.size(); ++i) {
    if (output[i] == '\r' || output[i] == '\n') {
      lines.emplace_back();
    } else if (output[i] == '\033') {
      i = output.find_first_of("Km", i);
    } else if ((static_cast<unsigned char>(output[i]) & 0xC0U) != 0x80U) {
      lines.back() += output[i];  // of each letter the first byte
    }
  }
  return lines;
}

TEST_F(CliTest, NothingIsWiderThanTheTerminal) {
  for (const int columns : {80, 40}) {
    const std::string training = on_a_terminal(
        train({"--opt-level", "all", "--dtype", "fp16", "--limit-batches", "10"}), true, columns);
    const std::string table = training.substr(training.find("\nlevel"));
    std::vector<std::string> lines = shown_lines(table);
    for (const std::string& line : shown_lines(training)) {
      // The header describes the machine and the places of files.
      if (line.find(" left") != std::string::npos || line.find("epoch 1/1") != std::string::npos)
        lines.push_back(line);
    }
    for (const Words& help : {Words{"--help"}, Words{"train", "--help"}, Words{"bench", "--help"},
                              Words{"ops", "--help"}, Words{"launch", "--help"}}) {
      for (const std::string& line : shown_lines(on_a_terminal(help, true, columns)))
        lines.push_back(line);
    }
    for (const std::string& line : lines)
      EXPECT_LE(line.size(), static_cast<std::size_t>(columns)) << line;
    EXPECT_THAT(training, AllOf(HasSubstr(" left"), HasSubstr("\nlevel"), HasSubstr("ms/step"),
                                HasSubstr("not shown at this width: ")));
  }
}

TEST_F(CliTest, HelpIsMadeOfWholeSentencesAndFitsAPage) {
  for (const char* command : {"train", "bench", "ops", "launch"}) {
    const std::string help = semitone({command, "--help"}).out;
    for (const std::string& line : shown_lines(help)) EXPECT_LE(line.size(), 80U) << line;
    EXPECT_THAT(help, Not(ContainsRegex("  Of [a-z]")));
  }
}

TEST_F(CliTest, NoColorIsObeyedAndQuietDrawsNothing) {
  const std::string output = on_a_terminal(train({"--quiet"}), true);
  EXPECT_THAT(output, AllOf(StartsWith("level"), Not(HasSubstr("\033"))));
}

}  // namespace
}  // namespace semitone
