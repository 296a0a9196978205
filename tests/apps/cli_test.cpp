// The program on the command line and on a terminal: help, wrong usage, width and colours.

#include "src/launch/process.h"
#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/terminal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace semitone::cli_test {
namespace {

using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::Words;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(CliTest, HelpHasExamplesAndExitCodes) {
  for (const Words& arguments :
       {Words{"--help"}, Words{"train", "--help"}, Words{"ops", "--help"}}) {
    const ProcessResult help = run_semitone(arguments);
    EXPECT_TRUE(help.status.success());
    EXPECT_EQ(help.err, "");
    EXPECT_THAT(help.out, HasSubstr("Exit codes: 0 success"));
    if (arguments.size() == 2) {
      EXPECT_THAT(help.out,
                  AllOf(HasSubstr("Examples:\n  semitone " + arguments[0]), HasSubstr("--json")));
    }
  }
  EXPECT_THAT(run_semitone({"train", "--help"}).out, Not(HasSubstr("--as-part")));
}

// Otherwise the next file or socket would be standard error, and get what is printed there.
TEST_F(CliTest, NothingIsPrintedIntoFilesIfStandardErrorIsClosed) {
  const auto without_errors = [&](const Words& more) {
    Words words{"-c", "exec \"$0\" \"$@\" 2>&-", SEMITONE_PROGRAM};
    const Words command = train(more);
    words.insert(words.end(), command.begin(), command.end());
    return launch::run(launch::ProcessOptions("sh").arguments(words).out(launch::Output::capture));
  };
  const std::string run = (folder_ / "run").string();
  EXPECT_TRUE(without_errors(
                  {"--checkpoint-dir", run, "--save-every", "1", "--keep", "0", "--log-every", "1"})
                  .status.success());
  int saved = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(run)) {
    if (!entry.is_regular_file()) continue;
    ++saved;
    EXPECT_THAT(read_text(entry.path()), Not(HasSubstr("images/s"))) << entry.path();
  }
  EXPECT_GT(saved, 60);  // 20 steps
}

TEST_F(CliTest, VersionNamesTheLibraries) {
  const ProcessResult version = run_semitone({"--version"});
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
      {{"train", "--checkpoint-dir=", "--augment"}, "expected --checkpoint-dir DIR, got ''"},
      {{"train", "--grace", "5"}, "expected --nodes or --nproc with --grace, got neither"},
      {{"ops", "--speed", "--dtype", "fp16"}, "expected --speed or --dtype, got both"},
      {{"bench", "resnet50", "--batch-size", "1", "--image-size", "32"},
       "expected --batch-size from 2 for images of 32 x 32, got 1"},
      {{"train", "--lr", "0.1x"}, "expected --lr above 0"},
      {{"train", "--momentum", "1"}, "expected --momentum from 0 to below 1"},
      {{"train", "--opt-level", "01"},
       "expected --opt-level to be one of O0, O1, O2, O3, all, got '01' — the first character is "
       "the letter O, not the digit zero"},
      {{"train", "--optimizer", "adamv"}, "got 'adamv' — did you mean 'adam' or 'adamw'?"},
      {{"train", "--save-every", "5"}, "expected --checkpoint-dir with --save-every, got none"},
      {{"train", "--keep", "5"}, "expected --checkpoint-dir with --keep, got none"},
      {{"train", "--resume", "auto"}, "expected --checkpoint-dir with --resume auto, got none"},
      {{"train", "--max-loss-ratio", "1"},
       "[cli.train] expected --max-loss-ratio of 0 (no limit) or above 1, got '1'"},
      {{"train", "--max-loss-ratio", "inf"}, "expected --max-loss-ratio of 0"},
      {{"train", "--on-spike", "retry"},
       "expected --on-spike to be one of none, skip, lower-scale, rollback, got 'retry'"},
      {{"train", "--on-spike", "skip"},
       "[cli.train] expected --max-loss-ratio with --on-spike skip, got none"},
      {{"train", "--max-loss-ratio", "3", "--on-spike", "rollback"},
       "[cli.train] expected --checkpoint-dir with --on-spike rollback, got none — name"},
      {{"train", "--max-loss-ratio", "3", "--on-spike", "rollback", "--checkpoint-dir", "x"},
       "expected --save-every with --on-spike rollback, got none"},
      {{"train", "--max-loss-ratio", "3", "--on-spike", "lower-scale", "--dtype", "bf16"},
       "expected a dynamic loss scale with --on-spike lower-scale, got a constant one at O1"},
      {{"train", "--max-loss-ratio", "3", "--on-spike", "lower-scale", "--dtype", "fp16",
        "--opt-level", "all"},
       "a constant one at O0 — add --loss-scale dynamic"},
      {{"train", "--checkpoint-dir", "x", "--save-every", "5m"},
       "expected --save-every to be a number of steps, or 5min or 90s, got '5m'"},
      {{"train", "--checkpoint-dir", "x", "--keep", "-1"}, "expected --keep from 0"},
      {{"train", "--checkpoint-dir", ""}, "expected --checkpoint-dir DIR"},
      {{"train", "--save-weights", "x.onnx"},
       "expected --save-weights that ends in .safetensors, .pt, .pth or .bin, got 'x.onnx'"},
      {{"train", "--dtype", "fp8"}, "expected --dtype to be one of auto, bf16, fp16"},
      {{"train", "--optimizer", "lion"}, "expected --optimizer to be one of sgd, adam, adamw"},
      {{"train", "--schedule", "step"}, "expected --schedule to be one of constant, cosine"},
      {{"train", "--loss-scale", "0"}, "expected --loss-scale to be auto, dynamic or a number"},
      {{"train", "--seed", "-1"}, "expected --seed from 0"},
      {{"train", "--threads", "-2"}, "expected --threads from 0"},
      {{"train", "--memory-format", "NCHW"}, "expected --memory-format to be one of"},
      {{"train", "--device", "gpu"},
       "expected --device to be one of auto|cpu|cuda|cuda:N, got 'gpu'"},
      {{"train", "--device", "cuda:1", "--nproc", "2"},
       "expected --device cuda with several processes, each of which uses its own GPU, got "
       "--device cuda:1"},
      {{"bench", "mnist", "--device", "cuda:-1"}, "expected --device to be one of auto|cpu"},
      {{"train", "--limit-batches", "-1"}, "expected --limit-batches from 0"},
      {{"train", "--max-steps", "-1"}, "expected --max-steps from 0"},
      {{"train", "--growth-interval", "-1"}, "expected --growth-interval from 0"},
      {{"train", "--model", "resnet"},
       "expected --model to be one of convnet, resnet18, resnet50, vit"},
      {{"train", "--data", ""}, "expected --data DIR"},
      {{"train", "--optimizer", "adam", "--momentum", "0.9"},
       "expected --momentum with --optimizer sgd or fused-sgd only"},
      {{"tune", "--optimizer", "adamw", "--momentum", "0.5"},
       "[cli.tune] expected --momentum with --optimizer sgd or fused-sgd only"},
      {{"whatif", "--model", "gpt", "--momentum", "0.5"},
       "[cli.whatif] expected --momentum with --optimizer sgd or fused-sgd only"},
      {{"train", "--node-rank", "1"}, "expected --nodes or --nproc with --node-rank, got neither"},
      {{"train", "--master-addr", "h"}, "expected --nodes or --nproc with --master-addr"},
      {{"train", "--loss-scale", "1e39"}, "or a number that float32 holds, above 0, got '1e39'"},
      {{"train", "--loss-scale", "1e-320"}, "or a number that float32 holds, above 0"},
      {{"train", "--lr", "1e39"}, "expected --lr above 0 that float32 holds, got '1e39'"},
      {{"train", "--save-weights", "/tmp/./x.pt", "--json", "/tmp/x.pt"},
       "[cli.train] expected two files for --save-weights and --json, got '/tmp/./x.pt' for both"},
      {{"train", "--opt-level", "all", "--checkpoint-dir", "x"},
       "expected one level with --checkpoint-dir"},
      {{"train", "--opt-level", "all", "--save-weights", "x.pt"},
       "expected one level with --save-weights"},
      {{"train", "--opt-level", "all", "--resume", "x"}, "expected one level with --resume"},
      {{"train", "--threads", "1023"}, "[cli.train] expected --threads from 0 to "},
      {{"bench", "mnist", "--threads", "1023"}, "[cli.bench] expected --threads from 0 to "},
      {{"train", "--data", "a\"b'c", "--print-config"},
       "expected values without control characters or both kinds of quotes"},
      {{"train", "--data", "a\nb", "--print-config"}, "expected values without control"},
      {{"convert", "w.pt", ""}, "expected OUT to name a file"},
      {{"ops", "--op", "aten::"}, "expected --op to name an operator"},
      {{"ops", "--policy", "mine"}, "[cli.ops] expected --policy to be one of semitone, torch"},
      {{"ops", "--device", "tpu"}, "expected --device to be one of cpu, cuda"},
      {{"ops", "--op", "sofmax"},
       "[cli.ops] expected --op to name an operator, got 'sofmax' — did you mean 'softmax'"},
  };
  for (const auto& [arguments, message] : cases) {
    const ProcessResult finished = run_semitone(arguments);
    SCOPED_TRACE(message);
    expect_failure(finished, 2, message);
    EXPECT_THAT(finished.err, StartsWith("[cli"));
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1);
  }
}

std::string on_a_terminal(const Words& arguments, bool no_color, int columns = 120) {
  const auto run = [&] {
    ::setenv("TERM", "xterm", 1);
    if (no_color) ::setenv("NO_COLOR", "1", 1);
    std::vector<char*> words{const_cast<char*>(SEMITONE_PROGRAM)};
    for (const std::string& argument : arguments)
      words.push_back(const_cast<char*>(argument.c_str()));
    words.push_back(nullptr);
    ::execv(SEMITONE_PROGRAM, words.data());
    return 127;
  };
  return test::on_terminal(run, columns);
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

TEST_F(CliTest, ANarrowTerminalGetsTheFirstColumn) {
  const std::string output =
      on_a_terminal(train({"--opt-level", "O1", "--limit-batches", "2", "--quiet"}), true, 1);
  EXPECT_THAT(output, HasSubstr("level \r\nO1 "));
}

TEST_F(CliTest, HelpIsMadeOfWholeSentencesAndFitsAPage) {
  for (const char* command : {"train", "bench", "ops", "launch"}) {
    const std::string help = run_semitone({command, "--help"}).out;
    for (const std::string& line : shown_lines(help)) EXPECT_LE(line.size(), 80U) << line;
    EXPECT_THAT(help, Not(ContainsRegex("  Of [a-z]")));
  }
}

TEST_F(CliTest, NoColorIsObeyedAndQuietDrawsNothing) {
  const std::string output = on_a_terminal(train({"--quiet"}), true);
  EXPECT_THAT(output, AllOf(StartsWith("level"), Not(HasSubstr("\033"))));
}

}  // namespace
}  // namespace semitone::cli_test
