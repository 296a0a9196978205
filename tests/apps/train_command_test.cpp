// `semitone train` in one process: output, files, exit codes, signals.

#include "src/launch/process.h"
#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/environment.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train_command_test {
namespace {

using launch::Process;
using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::semitone_command;
using test::Words;
using test::write_text;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string two_digits(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f", value);
  return text.data();
}

TEST_F(CliTest, TrainWarnsOfFlagsWithoutEffect) {
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "O0", "--dtype", "bf16", "--sync-bn", "--quiet"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(
      finished.err,
      AllOf(HasSubstr("--dtype has no effect at --opt-level O0, which trains in fp32"),
            HasSubstr("--sync-bn has no effect in one process"), Not(HasSubstr("--compress"))));
  const ProcessResult all =
      run_semitone(train({"--opt-level", "all", "--dtype", "bf16", "--quiet"}));
  ASSERT_TRUE(all.status.success()) << all.err;
  EXPECT_EQ(all.err, "");
}

TEST_F(CliTest, TrainSaysWhatItDoesAndEndsWithATable) {
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "O2", "--dtype", "fp16", "--epochs", "2"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  for (const char* text : {"device        CPU, 1 threads", "16 bits       float16: requested",
                           "memory        nhwc: default", "400 training and 100 test images",
                           "sgd lr 0.05 momentum 0.9, cosine, seed 0",
                           "level  dtype      accuracy     loss  images/s  ms/step  speed     time",
                           "  RSS   tensors  skipped  loss scale", "\nO2     float16 "})
    EXPECT_THAT(finished.out, HasSubstr(text));
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("O2 float16   epoch 1/2  loss "), HasSubstr("epoch 2/2"),
                    HasSubstr("test accuracy"), Not(HasSubstr("\r")), Not(HasSubstr("\033"))));
  EXPECT_THAT(finished.out, Not(HasSubstr("\033")));
}

TEST_F(CliTest, TrainsInFp8AtEachLevelButO0) {
  const std::string file = (folder_ / "fp8.json").string();
  std::vector<bool> fp8;  // what the results say
  const auto losses = [&](const Words& more) {
    fp8.clear();
    Words words{"--opt-level", "all", "--dtype", "bf16", "--epochs", "3", "--json", file};
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult finished = run_semitone(train(words));
    EXPECT_TRUE(finished.status.success()) << finished.err;
    std::vector<double> all;
    for (const json& result : json::parse(read_text(file))) {
      EXPECT_GT(result.at("test_accuracy"), 0.95);
      all.push_back(result.at("train_loss"));
      fp8.push_back(result.at("fp8"));
    }
    return all;
  };
  const auto in_bf16 = losses({});
  EXPECT_THAT(fp8, ElementsAre(false, false, false, false));
  const auto in_fp8 = losses({"--fp8"});
  EXPECT_THAT(fp8, ElementsAre(false, true, true, true));
  ASSERT_EQ(in_fp8.size(), 4U);
  EXPECT_EQ(in_fp8[0], in_bf16[0]);
  for (std::size_t i = 1; i < 4; ++i) {
    EXPECT_NE(in_fp8[i], in_bf16[i]) << i;
    EXPECT_NEAR(in_fp8[i], in_bf16[i], 0.1) << i;
  }
  EXPECT_EQ(losses({"--policy", "semitone"}), in_bf16);
  expect_failure(run_semitone(train({"--opt-level", "O0", "--fp8"})), 2, "got O0");
}

TEST_F(CliTest, QuietTrainsWithATableOnly) {
  const ProcessResult finished = run_semitone(train({"--quiet"}));
  EXPECT_TRUE(finished.status.success());
  EXPECT_EQ(finished.err, "");
  EXPECT_THAT(finished.out, StartsWith("level"));
}

TEST_F(CliTest, AllLevelsTrainInProcessesOfTheirOwnAndCompare) {
  const std::string file = (folder_ / "all.json").string();
  const ProcessResult finished = run_semitone(train(
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
    const ProcessResult finished = run_semitone(train(arguments));
    EXPECT_EQ(json::parse(finished.out).at(0).at("opt_level"), "O1");
    EXPECT_THAT(finished.err, AllOf(HasSubstr("device"), HasSubstr("level  dtype")));
  }
}

TEST_F(CliTest, TheSameSeedGivesTheSameResult) {
  const auto result = [&](const std::string& seed) {
    const json all = json::parse(run_semitone(train({"--json", "--seed", seed})).out);
    return std::pair(all.at(0).at("train_loss").get<double>(),
                     all.at(0).at("test_loss").get<double>());
  };
  EXPECT_EQ(result("3"), result("3"));
  EXPECT_NE(result("3"), result("4"));
}

TEST_F(CliTest, OtherOptimizersAndTheTutorialsSettingRun) {
  for (const Words& arguments :
       {Words{"--optimizer", "adam"}, Words{"--optimizer", "adamw", "--schedule", "constant"},
        Words{"--lr", "1e-4", "--momentum", "0", "--batch-size", "100"},
        Words{"--memory-format", "nchw", "--limit-batches", "3", "--loss-scale", "128"}}) {
    Words words{"train", "--data", data_.path().string(), "--threads", "1"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const ProcessResult finished = run_semitone(words);
    EXPECT_TRUE(finished.status.success()) << finished.err;
  }
}

TEST_F(CliTest, TheDataFolderCanComeFromTheEnvironment) {
  const Words arguments{"train", "--max-steps", "2", "--batch-size", "20", "--threads", "1"};
  const ProcessResult finished = launch::run(
      semitone_command(arguments).environment("SEMITONE_DATA_DIR", data_.path().string()));
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr(data_.path().string()));
  expect_failure(
      launch::run(semitone_command(arguments).environment("SEMITONE_DATA_DIR", "/no/such")), 1,
      "[cli.train] expected a folder with the data at '/no/such', got none — give --data "
      "DIR or set SEMITONE_DATA_DIR");
}

// On the data that come with the sources, 60 of the 600 steps of an epoch.
TEST_F(CliTest, TrainsOnTheRealMnist) {
  const ProcessResult finished =
      run_semitone({"train", "--limit-batches", "60", "--json", "--threads", "1"});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("60000 training and 10000 test images"));
  EXPECT_GT(json::parse(finished.out).at(0).at("test_accuracy"), 0.85);
}

TEST_F(CliTest, MissingCorruptAndTruncatedDataAreCode1) {
  const auto images = data_ / "train-images-idx3-ubyte.gz";
  const std::string bytes = read_text(images);
  write_text(images, bytes.substr(0, bytes.size() / 2));
  expect_failure(run_semitone(train()), 1, "one that ends early");
  std::string corrupt = bytes;
  corrupt[bytes.size() / 2] = static_cast<char>(corrupt[bytes.size() / 2] ^ 0xff);
  write_text(images, corrupt);
  expect_failure(run_semitone(train({"--opt-level", "all"})), 1, images.string());
  write_text(images, "nonsense");
  expect_failure(run_semitone(train()), 1, "the magic number");
  std::filesystem::remove(images);
  expect_failure(run_semitone(train()), 1, "train-images-idx3-ubyte[.gz]");
  write_text(images, bytes);
  write_text(data_ / "t10k-labels-idx1-ubyte",
             test::idx_bytes(torch::full({100}, 11, torch::kByte)));
  expect_failure(run_semitone(train()), 1, "labels from 0 to 9");
}

TEST_F(CliTest, OutputThatCannotBeWrittenIsSaidBeforeTraining) {
  for (const Words& arguments :
       {Words{"--json", "/no/such/folder/x.json"}, Words{"--json", folder_.path().string()},
        Words{"--save-weights", "/no/such/folder/x.pt", "--quiet"}}) {
    const ProcessResult finished = run_semitone(train(arguments));
    EXPECT_EQ(finished.status.code, 1);
    EXPECT_THAT(finished.err, AllOf(HasSubstr("expected to write"), Not(HasSubstr("epoch"))));
  }
}

TEST_F(CliTest, AFullDiskIsSaidAndLeavesTheTable) {
  const ProcessResult finished = run_semitone(train({"--json", "/dev/full"}));
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err,
              HasSubstr("[cli.json] expected to write '/dev/full', got No space left"));
  EXPECT_THAT(finished.out, HasSubstr("level  dtype"));
}

#if !defined(__SANITIZE_THREAD__)  // which maps a file that is larger when the program starts
// The weights are larger than a file may be here, and the results smaller.
TEST_F(CliTest, WeightsThatCannotBeWrittenLeaveTheResults) {
  const std::string file = (folder_ / "results.json").string();
  Words limited{"-c", "trap '' XFSZ; ulimit -f 40; exec \"$0\" \"$@\"", SEMITONE_PROGRAM};
  const Words words = train({"--json", file, "--save-weights", (folder_ / "w.pt").string()});
  limited.insert(limited.end(), words.begin(), words.end());
  const ProcessResult finished = launch::run(launch::ProcessOptions("sh")
                                                 .arguments(limited)
                                                 .out(launch::Output::capture)
                                                 .err(launch::Output::capture));
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("w.pt"));
  EXPECT_THAT(finished.out, HasSubstr("level  dtype"));
  EXPECT_EQ(json::parse(read_text(file)).size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "w.pt"));
}
#endif

TEST_F(CliTest, ResultsDoNotReplaceWhatTheTrainingReads) {
  const std::string file = (folder_ / "file").string();
  const std::string text = "# A file of flags without any.\n";
  write_text(file, text);
  for (const Words& arguments :
       {Words{"--policy", file, "--json", file}, Words{"--config", file, "--json", file}}) {
    expect_failure(run_semitone(train(arguments)), 2,
                   "expected two files for " + arguments.front());
    EXPECT_EQ(read_text(file), text);
  }
  const std::string record = (folder_ / "run").string();
  for (const std::string name : {"run.json", "../run/metrics.csv", "O1/run-2.json"}) {
    expect_failure(run_semitone(train({"--log-dir", record, "--json", record + "/" + name})), 2,
                   "expected --json beside the record in --log-dir");
  }
}

TEST_F(CliTest, OtherResultsDoNotReplaceWhatIsRead) {
  const std::string file = (folder_ / "file").string();
  write_text(file, "{}");
  for (const Words& command : {Words{"ops", "--policy", file}, Words{"tune", "--policy", file},
                               Words{"tune", "--model", "gpt", "--data", file},
                               Words{"whatif", "--model", "gpt", "--data", file}}) {
    Words arguments = command;
    arguments.insert(arguments.end(), {"--json", file});
    expect_failure(run_semitone(arguments), 2, "expected two files for ");
    EXPECT_EQ(read_text(file), "{}");
  }
}

// As oneDNN does with ONEDNN_VERBOSE=1, in the processes of the levels.
TEST_F(CliTest, LinesOfLibrariesOnStandardOutputAreNoResults) {
  const test::Environment restored({"ONEDNN_VERBOSE"});
  ASSERT_EQ(::setenv("ONEDNN_VERBOSE", "1", 1), 0);
  const std::string file = (folder_ / "all.json").string();
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "all", "--max-steps", "1", "--json", file}));
  EXPECT_EQ(finished.status.code, 0) << finished.err;
  EXPECT_EQ(json::parse(read_text(file)).size(), 4U);
}

TEST_F(CliTest, DivergenceIsCode3) {
  const ProcessResult finished =
      run_semitone({"train", "--data", data_.path().string(), "--opt-level", "O0", "--batch-size",
                    "20", "--lr", "1e30", "--threads", "1"});
  EXPECT_EQ(finished.status.code, 3);
  EXPECT_THAT(finished.err, HasSubstr("[train.trainer] expected a finite"));
  EXPECT_THAT(finished.out, Not(HasSubstr("level  dtype")));
}

TEST_F(CliTest, TheFirstNonFiniteOperatorIsNamed) {
  const ProcessResult finished =
      run_semitone({"train", "--data", data_.path().string(), "--opt-level", "O0", "--batch-size",
                    "20", "--lr", "1e30", "--threads", "1", "--check-nonfinite"});
  EXPECT_EQ(finished.status.code, 3);
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("[train.trainer] expected finite results of all operators, got "
                              "operator '"),
                    ContainsRegex("made [0-9]+ (nan|inf|-inf)"), HasSubstr(" in layer 'bn1'"),
                    HasSubstr(", at step ")));
}

TEST_F(CliTest, SkippedStepsWithNonFiniteOperatorsAreSaidAndDoNotEndTheTraining) {
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "O2", "--dtype", "fp16", "--loss-scale", "1e20",
                          "--limit-batches", "3", "--check-nonfinite"}));
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("O2 float16   skipped step 1: "), HasSubstr("skipped step 3: "),
                    HasSubstr(" in the backward pass")));
}

// At such a small rate weights do not change. The losses are those of the first weights, which
// differ from batch to batch, and some are above 1.2 times the mean.
class SpikesOfTheLoss : public CliTest {
 protected:
  ProcessResult train_with(const Words& more) const {
    Words words{"train",
                "--data",
                data_.path().string(),
                "--threads",
                "1",
                "--batch-size",
                "4",
                "--lr",
                "1e-30",
                "--epochs",
                "2",
                "--log-every",
                "0",
                "--json",
                "--max-loss-ratio",
                "1.2",
                "--growth-interval",
                "0"};
    words.insert(words.end(), more.begin(), more.end());
    return run_semitone(words);
  }
};

TEST_F(SpikesOfTheLoss, AreCountedAndTheirBatchesLeftOut) {
  const ProcessResult counted = train_with({"--opt-level", "O0"});
  ASSERT_TRUE(counted.status.success()) << counted.err;
  const json result = json::parse(counted.out).at(0);
  EXPECT_GT(result.at("loss_spikes"), 0);
  EXPECT_EQ(result.at("rollbacks"), 0);
  EXPECT_EQ(result.at("steps"), 200);
  EXPECT_THAT(counted.err, HasSubstr("O0 float32   loss spike in step 1"));
  const ProcessResult skipped = train_with({"--opt-level", "O0", "--on-spike", "skip"});
  ASSERT_TRUE(skipped.status.success()) << skipped.err;
  EXPECT_EQ(json::parse(skipped.out).at(0).at("loss_spikes"), result.at("loss_spikes"));
  EXPECT_THAT(skipped.err, HasSubstr("O0 float32   left out the batch of step 1"));
  EXPECT_LT(json::parse(skipped.out).at(0).at("train_loss"), result.at("train_loss"));
}

TEST_F(SpikesOfTheLoss, LowerTheLossScale) {
  const ProcessResult finished =
      train_with({"--opt-level", "O2", "--dtype", "fp16", "--on-spike", "lower-scale"});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const json result = json::parse(finished.out).at(0);
  EXPECT_GT(result.at("loss_spikes"), 0);
  const int halved = result.at("loss_spikes").get<int>() + result.at("skipped_steps").get<int>();
  EXPECT_EQ(result.at("final_loss_scale"), std::ldexp(65536, -halved));
  EXPECT_THAT(finished.err, ContainsRegex("loss spike in step .*; scale [0-9]+\n"));
}

// The first step ruins the weights but leaves them finite. Every checkpoint has such weights.
TEST_F(CliTest, ATrainingThatStaysDivergedRollsBackAFewTimesAndEndsWithCode3) {
  const auto run = (folder_ / "run").string();
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "O0", "--lr", "1e30", "--max-loss-ratio", "3",
                          "--on-spike", "rollback", "--checkpoint-dir", run, "--save-every", "1"}));
  EXPECT_EQ(finished.status.code, 3);
  EXPECT_THAT(finished.err,
              HasSubstr("O0 float32   rolled back from step 2 to the checkpoint of step 1: "
                        "[amp.divergence_guard] expected a finite loss, got nan in step 2"));
  for (const char* const text :
       {"rolled back from step 3 to the checkpoint of step 1",
        "rolled back from step 4 to the checkpoint of step 1", "no rollback: there were 3 already",
        "\n[amp.divergence_guard] expected a finite loss, got nan in step 5"})
    EXPECT_THAT(finished.err, HasSubstr(text));
  EXPECT_THAT(finished.err, Not(HasSubstr("rolled back from step 5")));
}

TEST_F(CliTest, ANumberThatIsNoneHasNoSign) {
  // Of an epoch all of whose steps were skipped, the mean loss is 0/0.
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "O1", "--dtype", "fp16", "--loss-scale", "1e20",
                          "--limit-batches", "3", "--log-every", "1"}));
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr(" nan "), Not(HasSubstr("-nan"))));
  EXPECT_THAT(finished.err, AllOf(HasSubstr("loss nan"), Not(HasSubstr("-nan"))));
}

TEST_F(CliTest, ALevelThatFailsFailsAllWithItsCodeAndName) {
  const std::string file = (folder_ / "x.json").string();
  // A scale that fp32 gradients can represent, and fp16 ones cannot.
  const ProcessResult finished =
      run_semitone(train({"--opt-level", "all", "--dtype", "fp16", "--loss-scale", "1e20",
                          "--epochs", "9", "--json", file}));
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
  Process process(semitone_command(train({"--opt-level", "all", "--limit-batches", "2"})));
  std::signal(SIGCHLD, handler);
  const ProcessResult finished = process.wait();
  EXPECT_TRUE(finished.status.success()) << finished.err;
}

TEST_F(CliTest, TrainsOnCifar) {
  const test::TemporaryFolder cifar;
  test::write_cifar10(cifar.path(), 40, 10);
  for (const char* const model : {"convnet", "resnet18", "resnet50", "vit"}) {
    const ProcessResult finished =
        run_semitone({"train", "--data", cifar.path().string(), "--model", model, "--batch-size",
                      "20", "--threads", "1", "--opt-level", "O0", "--lr", "0.01"});
    ASSERT_TRUE(finished.status.success()) << finished.err;
    EXPECT_THAT(finished.out,
                HasSubstr("40 training and 10 test images of 3 x 32 x 32 in 10 classes, from " +
                          cifar.path().string()));
    EXPECT_THAT(finished.out, HasSubstr(std::string(model) + ", 1 epoch in batches of 20"));
  }
  expect_failure(run_semitone({"train", "--data", (cifar / "data_batch_1.bin").string()}), 1,
                 "[cli.train] expected a folder with images at ");
}

TEST_F(CliTest, TrainsOnAFolderOfImages) {
  const test::TemporaryFolder images;
  const zoo::ImageSet set = test::made_up_colours(30, 1);
  for (std::int64_t i = 0; i < set.size(); ++i) {
    const auto folder = images / ("class" + std::to_string(i % 3));
    std::filesystem::create_directories(folder);
    write_text(folder / (std::to_string(i) + ".ppm"), test::ppm_bytes(set.images[i]));
  }
  write_text(images / "train-labels.csv", "");  // no file of MNIST
  const Words words{"train",     "--data", images.path().string(), "--batch-size", "8",
                    "--threads", "1",      "--opt-level",          "O0",           "--lr",
                    "0.01"};
  const ProcessResult finished = run_semitone(words);
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("24 training and 6 test images of 3 x 32 x 32 in 3 classes"));
  // In processes of their own, which get the flags.
  Words scaled = words;
  scaled.insert(scaled.end(), {"--image-size", "16", "--test-share", "0.5", "--nproc", "2"});
  const ProcessResult together = run_semitone(scaled);
  ASSERT_TRUE(together.status.success()) << together.err;
  EXPECT_THAT(together.out, HasSubstr("15 training and 15 test images of 3 x 16 x 16"));
  Words limited = words;
  limited.insert(limited.end(), {"--max-steps", "1", "--max-data", "6e-5"});
  expect_failure(run_semitone(limited), 1,
                 "[zoo.image_folder] expected at most 64425 bytes of images in '" +
                     images.path().string() +
                     "', got 24 images of sizes [3, 32, 32] — set a smaller --image-size, or raise "
                     "--max-data");
  limited.insert(limited.end(), {"--image-size", "16"});
  const ProcessResult smaller = run_semitone(limited);
  EXPECT_TRUE(smaller.status.success()) << smaller.err;
  expect_failure(run_semitone(train({"--image-size", "16"})), 2,
                 "[cli.train] expected --image-size with a folder of images only, got MNIST in '");
  expect_failure(run_semitone(train({"--test-share", "1"})), 2, "expected --test-share above 0");
  write_text(images / "class0/photo.webp", "");
  expect_failure(run_semitone(words), 1,
                 "[zoo.image_folder] expected PNG, JPEG, PPM and PGM images, got");
}

TEST_F(CliTest, FoldersOfOtherSizesNeedAnImageSize) {
  for (const auto& [split, size] : {std::pair{"train", "8 8"}, std::pair{"test", "4 4"}}) {
    for (const char* const name : {"a", "b"}) {
      const auto folder = folder_ / split / name;
      std::filesystem::create_directories(folder);
      for (const char* const file : {"0.pgm", "1.pgm"})
        write_text(folder / file, std::string("P5 ") + size + " 255\n" + std::string(64, '\1'));
    }
  }
  expect_failure(run_semitone({"train", "--data", folder_.path().string()}), 1,
                 "[train.images] expected test images of sizes [3, 8, 8], as for training, got [3, "
                 "4, 4] — scale both with --image-size N");
}

TEST_F(CliTest, AnImageThatScalingWouldMakeTooLargeIsNamed) {
  for (const char* const folder : {"a", "b"}) std::filesystem::create_directories(folder_ / folder);
  const auto file = folder_ / "a/0.pgm";
  write_text(file, "P5 20000 1 255\n" + std::string(20000, '\1'));
  write_text(folder_ / "a/1.pgm", "P5 20000 1 255\n" + std::string(20000, '\1'));
  write_text(folder_ / "b/0.pgm", "P5 1 1 255\n\1");
  const ProcessResult finished =
      run_semitone({"train", "--data", folder_.path().string(), "--image-size", "16384"});
  expect_failure(finished, 1, "[zoo.image_folder] expected at most 134217728 pixels in '");
  EXPECT_THAT(finished.err, HasSubstr((folder_ / "a").string()));
}

TEST_F(CliTest, ABatchThatIsTooSmallForBatchNormIsRefusedBeforeTraining) {
  const test::TemporaryFolder ten;
  test::write_data_set(ten.path(), 10, 2);
  const Words words{"train",     "--data", ten.path().string(), "--model", "resnet18", "--quiet",
                    "--threads", "1",      "--batch-size"};
  for (const char* const level : {"O0", "O2"}) {
    Words nine = words;
    nine.insert(nine.end(), {"9", "--opt-level", level});
    expect_failure(run_semitone(nine), 1,
                   "[train.trainer] expected batches of at least 2 images for the model's "
                   "BatchNorm layers, got 10 in batches of 9, of which the last has 1 — use "
                   "another --batch-size");
  }
  Words one = words;
  one.emplace_back("1");
  expect_failure(run_semitone(one), 1, "got 1 — raise --batch-size");
  Words five = words;
  five.emplace_back("5");
  const ProcessResult finished = run_semitone(five);
  EXPECT_TRUE(finished.status.success()) << finished.err;
}

TEST_F(CliTest, AFolderHasOneDataSet) {
  expect_failure(
      run_semitone({"train", "--data", folder_.path().string()}), 1,
      "[cli.train] expected the files of MNIST, CIFAR-10 or CIFAR-100, or folders of images, in '");
  write_text(data_ / "train.bin", "");
  expect_failure(run_semitone(train()), 1,
                 "[cli.train] expected one data set in '" + data_.path().string() +
                     "', got MNIST and CIFAR-100 — give --data");
}

// Permissions and a file system that does not answer have the same effect.
TEST_F(CliTest, AFolderThatTheSystemDoesNotShowIsNotCalledMissing) {
  const auto loop = folder_ / "loop";
  std::filesystem::create_symlink(loop, loop);
  for (const auto& [path, reason] :
       {std::pair(loop.string(), std::string("Too many levels of symbolic links")),
        std::pair((folder_ / std::string(300, 'x')).string(), std::string("File name too long"))}) {
    expect_failure(run_semitone({"train", "--data", path}), 1,
                   "[cli.train] expected to read the folder '" + path + "', got " + reason);
  }
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
  Process process(semitone_command(train({"--opt-level", "all", "--epochs", "100000"})));
  const pid_t child = child_of(process.id());
  ASSERT_GT(child, 0);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  const ProcessResult finished = process.wait();
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("[cli.train] expected O0 to train, got signal 9 (Killed)"));
}

TEST_F(CliTest, StoppingItStopsTheLevelItIsAt) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  Process process(semitone_command(train({"--opt-level", "all", "--epochs", "100000"})));
  const pid_t child = child_of(process.id());
  ASSERT_GT(child, 0);
  process.send(SIGTERM);
  EXPECT_EQ(process.wait().status.signal, SIGTERM);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << status;
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

}  // namespace
}  // namespace semitone::train_command_test
