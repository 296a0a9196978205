#include "semitone/launch/launcher.h"
#include "tests/launch/launcher_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <string>

// The output of jobs, on the console and in files.
namespace semitone::launch {
namespace {

using test::expect_error;
using test::ids_in;
using test::read_text;
using test::write_text;

using LauncherOutput = LauncherTest;

TEST_F(LauncherOutput, WritesLogsByJobAttemptAndRank) {
  const auto logs = folder_ / "logs";
  const LaunchResult result = run(shell("echo out$RANK; echo err$RANK >&2; exit 1", 2)
                                      .max_restarts(1)
                                      .rdzv_id("job")
                                      .log_dir(logs)
                                      .redirects(Streams::both));
  for (const std::string attempt : {"attempt_0", "attempt_1"}) {
    const auto folder = logs / "job" / attempt;
    // One of the two may have been stopped before it wrote.
    const std::string rank = std::to_string(result.first_failure->rank);
    EXPECT_TRUE(std::filesystem::is_directory(folder / "0"));
    EXPECT_TRUE(std::filesystem::is_directory(folder / "1"));
    if (attempt == "attempt_0") continue;
    EXPECT_EQ(read_text(folder / rank / "stdout.log"), "out" + rank + "\n");
    EXPECT_EQ(read_text(folder / rank / "stderr.log"), "err" + rank + "\n");
    EXPECT_EQ(result.first_failure->log, (folder / rank / "stderr.log").string());
    EXPECT_EQ(result.first_failure->last_lines, "err" + rank);
  }
}

TEST_F(LauncherOutput, RedirectsTheSelectedStreams) {
  const auto logs = folder_ / "logs";
  run(shell("exit 0", 2).rdzv_id("job").log_dir(logs).redirects(StreamsByRank::parse("0:1,1:2")));
  const auto folder = logs / "job" / "attempt_0";
  EXPECT_TRUE(std::filesystem::exists(folder / "0" / "stdout.log"));
  EXPECT_FALSE(std::filesystem::exists(folder / "0" / "stderr.log"));
  EXPECT_FALSE(std::filesystem::exists(folder / "1" / "stdout.log"));
  EXPECT_TRUE(std::filesystem::exists(folder / "1" / "stderr.log"));
}

TEST_F(LauncherOutput, AJobOfTheSameNameAddsToItsLogs) {
  const auto options =
      shell("echo line").rdzv_id("job").log_dir(folder_.path()).redirects(Streams::out);
  run(options);
  run(options);
  EXPECT_EQ(read_text(folder_ / "job" / "attempt_0" / "0" / "stdout.log"), "line\nline\n");
}

TEST_F(LauncherOutput, KeepsTheLastTwentyLinesOfAFailure) {
  const LaunchResult result =
      run(shell("for i in $(seq 1 100000); do echo line $i; done >&2; exit 1").tee(Streams::err));
  std::string expected = "line 99981";
  for (int i = 99982; i <= 100000; ++i) expected += "\nline " + std::to_string(i);
  EXPECT_EQ(result.first_failure->last_lines, expected);
  EXPECT_EQ(result.first_failure->log, "");
  EXPECT_THAT(result.first_failure->to_string(), ::testing::EndsWith("\n    line 100000"));
}

TEST_F(LauncherOutput, ShowsStandardOutputIfStandardErrorIsEmpty) {
  const LaunchResult result = run(shell("echo it is the disk; exit 1").tee(Streams::both));
  EXPECT_EQ(result.first_failure->last_lines, "it is the disk");
}

TEST_F(LauncherOutput, DoesNotWaitForOutputOfProcessesThatLeftTheirGroup) {
  const LaunchResult result =
      run(shell("setsid sleep 1000 & echo $! > $DIR/ids; exit 0").tee(Streams::both));
  EXPECT_EQ(result.exit_code(), 0);
  for (const pid_t id : ids_in(folder_ / "ids")) ::kill(id, SIGKILL);
}

TEST_F(LauncherOutput, ALogFolderThatCannotBeCreatedIsAnError) {
  write_text(folder_ / "file", "");
  expect_error([&] { Launcher launcher(shell("exit 0").log_dir(folder_ / "file" / "logs")); },
               {"[launch.logs] expected to make the folder", "--log-dir"});
}

}  // namespace
}  // namespace semitone::launch
