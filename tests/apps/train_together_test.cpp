#include "src/core/libtorch_release.h"
#include "src/launch/ports.h"
#include "src/launch/process.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

// `semitone train` with several processes, from the command line.
namespace semitone {
namespace {

using launch::Process;
using launch::ProcessResult;
using nlohmann::json;
using test::read_text;
using test::run_semitone;
using test::semitone_command;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainTogether : public ::testing::Test {
 protected:
  TrainTogether() { test::write_data_set(data_.path(), 401, 101); }

  Words words(const Words& more) const {
    Words all{"train", "--data", data_.path().string(), "--batch-size", "20"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  ProcessResult train(const Words& more) const { return run_semitone(words(more)); }
  // The one level in the file.
  json result(const std::string& file) const {
    const json results = json::parse(read_text(file));
    EXPECT_EQ(results.size(), 1U);
    return results.at(0);
  }
  static std::ptrdiff_t count(const std::string& text, const std::string& part) {
    std::ptrdiff_t times = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
    return times;
  }

  test::TemporaryFolder data_;
  test::TemporaryFolder folder_;
};

TEST_F(TrainTogether, OneProcessSpeaksForAll) {
  const std::string file = (folder_ / "two.json").string();
  const ProcessResult finished =
      train({"--nproc", "2", "--sync-bn", "--compress", "bf16", "--epochs", "3", "--json", file});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.out,
              AllOf(HasSubstr("processes     2, BatchNorm over all processes, gradients "
                              "sent in bf16"),
                    HasSubstr("\nO1     bfloat16")));
  EXPECT_EQ(count(finished.out, "\nO1 "), 1);
  EXPECT_EQ(count(finished.err, "epoch 3/3"), 1);
  const json two = result(file);
  EXPECT_EQ(two.at("processes"), 2);
  EXPECT_EQ(two.at("steps"), 33);  // of 201 images for each
  EXPECT_GT(two.at("test_accuracy"), 0.9);
}

TEST_F(TrainTogether, OneRankSaysWhichOperatorWasNotFinite) {
  const ProcessResult finished =
      train({"--nproc", "2", "--opt-level", "O0", "--lr", "1e30", "--check-nonfinite"});
  EXPECT_EQ(finished.status.code, 3) << finished.err;
  EXPECT_EQ(count(finished.err, "[train.trainer] expected finite results of all operators"), 1)
      << finished.err;
  EXPECT_THAT(finished.err, HasSubstr(" on rank "));
}

// As for `--nproc gpu` where there is one GPU.
TEST_F(TrainTogether, OneProcessMayHaveTheFlagsOfAJob) {
  for (const Words& flags : {Words{"-n", "1", "-g", "1", "-nr", "0"},
                             Words{"--nproc", "1", "--grace", "5", "--master-port", "29501"}}) {
    Words all = flags;
    all.insert(all.end(), {"--max-steps", "2"});
    const ProcessResult finished = train(all);
    EXPECT_TRUE(finished.status.success()) << finished.err;
  }
  const ProcessResult refused = train({"--nproc", "1", "--node-rank", "1"});
  EXPECT_EQ(refused.status.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("expected node-rank from 0 to 0"));
}

TEST_F(TrainTogether, EveryLevelIsAJobOfItsOwn) {
  const std::string file = (folder_ / "all.json").string();
  const ProcessResult finished =
      train({"-g", "2", "--opt-level", "all", "--limit-batches", "3", "--json", file});
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const json results = json::parse(read_text(file));
  ASSERT_EQ(results.size(), 4U);
  for (const json& level : results) EXPECT_EQ(level.at("processes"), 2);
}

TEST_F(TrainTogether, ALauncherMayStartTheProcesses) {
  const std::string here = (folder_ / "here.json").string();
  const std::string there = (folder_ / "there.json").string();
  ASSERT_TRUE(train({"--nproc", "2", "--limit-batches", "5", "--json", here}).status.success());
  Words launch{"launch", "--nproc-per-node", "2", SEMITONE_PROGRAM};
  const Words train = words({"--limit-batches", "5", "--json", there});
  launch.insert(launch.end(), train.begin(), train.end());
  const ProcessResult finished = run_semitone(launch);
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(count(finished.out, "\nO1 "), 1);
  for (const char* key : {"test_accuracy", "test_loss", "train_loss", "processes", "steps"})
    EXPECT_EQ(result(here).at(key), result(there).at(key)) << key;
}

// As from two machines with other command lines, or other copies of the data.
TEST_F(TrainTogether, ProcessesWithOtherFlagsOrDataAreRefused) {
  test::TemporaryFolder incomplete;
  test::write_data_set(incomplete.path(), 381, 101);
  // Rank 0 has the first flags, and rank 1 the others.
  const auto error_of = [&](const std::string& first, const std::string& other) {
    const std::string line =
        "[ $RANK = 0 ] && exec \"$0\" \"$@\" " + first + "; exec \"$0\" \"$@\" " + other;
    const ProcessResult finished =
        run_semitone({"launch", "--nproc-per-node", "2", "sh", "-c", line, SEMITONE_PROGRAM,
                      "train", "--threads", "1", "--max-steps", "2"});
    EXPECT_EQ(finished.status.code, 1);
    EXPECT_EQ(count(finished.out, "\nO1 "), 0);
    return finished.err;
  };
  const std::string whole = "--data " + data_.path().string();
  EXPECT_THAT(error_of(whole + " --lr 0.05", whole + " --lr 0.1"),
              HasSubstr("expected the same settings and data on all ranks, got --lr 0.05 on rank 0 "
                        "and --lr 0.1 on rank 1 — give all processes the same flags"));
  EXPECT_THAT(error_of(whole, "--data " + incomplete.path().string()),
              HasSubstr("got training images 401 on rank 0 and training images 381 on rank 1"));
}

// A job on several simulated machines; tests/hosts has real network hosts.
TEST_F(TrainTogether, LaunchersOfOneMachineMayMeetOnTheLoopbackInterface) {
  const std::string one = (folder_ / "one.json").string();
  const std::string two = (folder_ / "two.json").string();
  ASSERT_TRUE(train({"--nproc", "2", "--limit-batches", "5", "--json", one}).status.success());
  const std::string port = std::to_string(launch::free_port());
  const auto node = [&](const char* number) {
    return semitone_command(
        words({"-n", "2", "-g", "1", "-nr", number, "--master-addr", "127.0.0.1", "--master-port",
               port, "--threads", "1", "--limit-batches", "5", "--json", two}));
  };
  Process other(node("1"));
  const ProcessResult first = launch::run(node("0"));
  const ProcessResult second = other.wait();
  ASSERT_TRUE(first.status.success()) << first.err;
  ASSERT_TRUE(second.status.success()) << second.err;
  EXPECT_THAT(first.out, HasSubstr("processes     1 on this machine, in a job of 2 machines"));
#if SEMITONE_LIBTORCH_SINCE(2, 10)
  EXPECT_EQ(second.out, "");
#else  // Gloo says how many it is connected to
  EXPECT_THAT(second.out, testing::MatchesRegex("(\\[Gloo\\][^\n]*\n)?"));
#endif
  for (const char* key : {"test_accuracy", "test_loss", "train_loss", "processes", "steps"})
    EXPECT_EQ(result(one).at(key), result(two).at(key)) << key;
}

// No machine knows how many processes the others have.
TEST_F(TrainTogether, MachinesWithOtherNumbersOfProcessesDivideTheGlobalBatchSize) {
  // Machine 0 with one process, and machine 1 with two.
  const auto train_with = [&](const std::string& batch_size) {
    const std::string port = std::to_string(launch::free_port());
    const auto machine = [&](const char* number, const char* processes) {
      return semitone_command({"train", "--data", data_.path().string(), "-n", "2", "-nr", number,
                               "-g", processes, "--master-addr", "127.0.0.1", "--master-port", port,
                               "--threads", "1", "--max-steps", "2", "--global-batch-size",
                               batch_size});
    };
    Process other(machine("1", "2"));
    const ProcessResult first = launch::run(machine("0", "1"));
    return std::pair(first, other.wait());
  };
  const auto [first, second] = train_with("6");
  ASSERT_TRUE(first.status.success()) << first.err << second.err;
  EXPECT_TRUE(second.status.success()) << second.err;
  EXPECT_THAT(first.out, AllOf(HasSubstr("processes     1 on this machine, in a job of 2 machines"),
                               HasSubstr("in batches of 6 for all processes together, sgd")));
  const auto [refused, too] = train_with("4");
  EXPECT_FALSE(refused.status.success());
  EXPECT_FALSE(too.status.success());
  EXPECT_THAT(refused.err + too.err,
              HasSubstr("expected --global-batch-size that is a multiple of 3 processes, got 4"));
}

TEST_F(TrainTogether, TheMasterMayComeFromTheEnvironment) {
  const Words here{"-n", "2", "-g", "1", "-nr", "1", "--threads", "1", "--quiet"};
  const ProcessResult finished =
      launch::run(semitone_command(words(here)).environment("MASTER_PORT", "x"));
  EXPECT_EQ(finished.status.code, 2);
  EXPECT_THAT(finished.err, HasSubstr("[cli.train] expected MASTER_PORT from 1 to 65535"));
  // The address as the data-parallel tutorials export it. One that no host can have ends the
  // program at once. It waits for a name that a server may know later, as without a network.
  const ProcessResult unknown = launch::run(semitone_command(words(here))
                                                .environment("MASTER_ADDR", "no such host")
                                                .environment("MASTER_PORT", "29400"));
  EXPECT_EQ(unknown.status.code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("no such host"));
}

TEST_F(TrainTogether, WrongUsageIsOneClearMessageAndCode2) {
  const std::vector<std::pair<Words, std::string>> cases{
      {{"--nproc", "three"},
       "expected nproc-per-node to be a number, auto, cpu or gpu, got 'three'"},
      {{"--nproc", "0", "--global-batch-size", "8"},
       "expected nproc-per-node from 1 to 4096, got '0'"},
      {{"--nproc", "0"}, "expected nproc-per-node from 1"},
      {{"-n", "2"}, "master-addr for several nodes, got neither"},
      {{"-n", "2", "-nr", "2", "--master-addr", "x"}, "expected node-rank from 0 to 1"},
      {{"--compress", "fp8"}, "expected --compress to be one of none, bf16, fp16, got 'fp8'"},
      {{"--master-port", "65536"}, "expected --master-port from 0 to 65535"}};
  for (const auto& [more, message] : cases) {
    SCOPED_TRACE(message);
    const ProcessResult finished = train(more);
    EXPECT_EQ(finished.status.code, 2);
    EXPECT_THAT(finished.err, HasSubstr(message));
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
    EXPECT_EQ(finished.out, "");
  }
  const ProcessResult launched = launch::run(semitone_command(words({"--nproc", "2"}))
                                                 .environment("RANK", "1")
                                                 .environment("WORLD_SIZE", "2")
                                                 .environment("MASTER_ADDR", "127.0.0.1")
                                                 .environment("MASTER_PORT", "1"));
  EXPECT_EQ(launched.status.code, 2);
  EXPECT_THAT(launched.err,
              HasSubstr("[cli.train] expected no --nproc in a process that was launched, "
                        "got --nproc as rank 1 of 2"));
}

TEST_F(TrainTogether, UnderALauncherALevelThatFailsLeavesTheResultsOfThoseBefore) {
  const std::string file = (folder_ / "x.json").string();
  Words launch{"launch", "--nproc-per-node", "2", SEMITONE_PROGRAM};
  const Words all = words({"--opt-level", "all", "--dtype", "fp16", "--loss-scale", "1e20",
                           "--epochs", "12", "--json", file});
  launch.insert(launch.end(), all.begin(), all.end());
  const ProcessResult diverged = run_semitone(launch);
  EXPECT_EQ(diverged.status.code, 3) << diverged.err;
  EXPECT_THAT(diverged.err, AllOf(HasSubstr("consecutive"), HasSubstr("not trained: O2, O3\n")));
  EXPECT_THAT(diverged.out, HasSubstr("level  dtype"));
  const json results = json::parse(read_text(file));
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].at("opt_level"), "O0");
}

TEST_F(TrainTogether, AProcessThatFailsEndsAllWithItsCode) {
  const std::string file = (folder_ / "x.json").string();
  const ProcessResult diverged =
      train({"--nproc", "2", "--opt-level", "O0", "--lr", "1e30", "--json", file});
  EXPECT_EQ(diverged.status.code, 3);
  EXPECT_THAT(diverged.err, AllOf(HasSubstr("[train.trainer] expected a finite"),
                                  HasSubstr("[launch] rank "), HasSubstr("failed: exit code 3")));
  EXPECT_THAT(diverged.out, Not(HasSubstr("level  dtype")));
  // Noticed before any process starts.
  const ProcessResult unreadable = train({"--nproc", "2", "--resume", (folder_ / "none").string()});
  EXPECT_EQ(unreadable.status.code, 1);
  EXPECT_THAT(unreadable.err, AllOf(HasSubstr("expected checkpoints to resume from at"),
                                    Not(HasSubstr("[launch]"))));
}

}  // namespace
}  // namespace semitone
