#include "semitone/launch/launcher.h"
#include "src/launch/clock.h"
#include "src/launch/descriptor.h"
#include "src/launch/interrupt.h"
#include "src/launch/output_relay.h"
#include "tests/launch/launcher_fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <future>
#include <string>
#include <utility>

// The output of jobs, on the console and in files.
namespace semitone::launch {
namespace {

using test::error_of;
using test::eventually;
using test::expect_error;
using test::ids_in;
using test::read_text;
using test::write_text;

using LauncherOutput = LauncherTest;

// Replaces this process's standard output by a file until the end of its scope. Nothing is checked
// before that, since failed checks are printed.
class FileAsConsole {
 public:
  explicit FileAsConsole(const char* file)
      : before_(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)) {
    std::fflush(stdout);
    const Descriptor opened(::open(file, O_WRONLY | O_CLOEXEC));
    ::dup2(opened.number(), STDOUT_FILENO);
  }
  ~FileAsConsole() {
    std::fflush(stdout);
    ::dup2(before_.number(), STDOUT_FILENO);
  }
  FileAsConsole(const FileAsConsole&) = delete;
  FileAsConsole& operator=(const FileAsConsole&) = delete;

 private:
  Descriptor before_;
};

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

TEST_F(LauncherOutput, AFailureShowsNoLinesOfAnEarlierJob) {
  const auto run_script = [&](const std::string& script) {
    return run(shell(script).rdzv_id("job").log_dir(folder_.path()).redirects(Streams::both));
  };
  const auto folder = folder_ / "job" / "attempt_0" / "0";
  EXPECT_EQ(run_script("echo old >&2; exit 1").first_failure->last_lines, "old");
  EXPECT_EQ(run_script("kill -9 $$").first_failure->last_lines, "");
  // Nor do they hide what this job wrote.
  const LaunchResult result = run_script("echo new; exit 1");
  EXPECT_EQ(result.first_failure->last_lines, "new");
  EXPECT_EQ(result.first_failure->log, (folder / "stdout.log").string());
  EXPECT_EQ(run_script("echo newer >&2; exit 1").first_failure->last_lines, "newer");
  EXPECT_EQ(read_text(folder / "stderr.log"), "old\nnewer\n");
}

TEST_F(LauncherOutput, AFailureShowsTheLinesOfALogThatWasTruncatedMeanwhile) {
  const auto options = shell(": > $DIR/job/attempt_0/0/stdout.log; echo new; exit 1")
                           .rdzv_id("job")
                           .log_dir(folder_.path())
                           .redirects(Streams::out);
  std::filesystem::create_directories(folder_ / "job" / "attempt_0" / "0");
  write_text(folder_ / "job" / "attempt_0" / "0" / "stdout.log", "the output of an earlier job\n");
  EXPECT_EQ(run(options).first_failure->last_lines, "new");
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

TEST_F(LauncherOutput, DoesNotFollowProcessesThatLeftTheirGroupAndWriteWithoutPause) {
  const LaunchOptions options = shell(
                                    "setsid sh -c \"echo \\$\\$ > $DIR/ids; exec yes\" &\n"
                                    "while [ ! -s $DIR/ids ]; do sleep 0.01; done; exit 0")
                                    .tee(Streams::out);
  bool has_ended = false;
  int exit_code = -1;
  {
    const FileAsConsole console("/dev/null");
    auto result = std::async(std::launch::async, [&] { return run(options); });
    has_ended = eventually(
        [&] { return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
    if (!has_ended) {
      // Otherwise a failed test would not end.
      for (const pid_t id : ids_in(folder_ / "ids")) ::kill(id, SIGKILL);
    }
    exit_code = result.get().exit_code();
  }
  EXPECT_TRUE(has_ended);
  EXPECT_EQ(exit_code, 0);
}

TEST_F(LauncherOutput, IsCompleteAlthoughARestartFails) {
  const auto program = folder_ / "program";
  write_text(program, "#!/bin/sh\nseq 1 5000\nrm \"$0\"\nexit 1\n");
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const auto options = LaunchOptions(program)
                           .rdzv_id("job")
                           .log_dir(folder_ / "logs")
                           .tee(Streams::out)
                           .max_restarts(1);
  UnreadConsole console;
  auto error = std::async(std::launch::async, [&] { return error_of([&] { run(options); }); });
  // The console is read only after the restart has failed.
  const bool restarted = eventually(
      [&] { return std::filesystem::exists(folder_ / "logs" / "job" / "attempt_1" / "0"); });
  error.wait_for(std::chrono::milliseconds(500));
  auto text = console.read();
  error.wait();
  console.restore();
  EXPECT_TRUE(restarted);
  EXPECT_THAT(error.get(), ::testing::HasSubstr("expected to run"));
  EXPECT_EQ(text.get(), relayed_numbers(0, 5000));
}

TEST_F(LauncherOutput, EndsAlthoughAPipeStaysOpen) {
  UnreadConsole console;
  auto text = console.read();
  std::string expected;
  bool has_ended = true;
  // The thread may notice a source, its output and its retirement together.
  for (int i = 0; i < 200 && has_ended; ++i) {
    const Interrupt interrupt;
    OutputRelay relay;
    Pipe pipe = make_pipe();
    const std::string line = std::to_string(i) + "\n";
    write_all(pipe.write.number(), line);
    relay.add({std::move(pipe.read), STDOUT_FILENO, "", Descriptor()});
    auto end = std::async(std::launch::async, [&] { relay.finish(interrupt); });
    has_ended = end.wait_for(std::chrono::minutes(1)) == std::future_status::ready;
    pipe.write.close();
    expected += line;
  }
  console.restore();
  EXPECT_TRUE(has_ended);
  EXPECT_EQ(text.get(), expected);
}

TEST_F(LauncherOutput, IsDroppedAtTheGivenTimeIfNothingReadsIt) {
  UnreadConsole console;
  std::string numbers;
  {
    const Interrupt interrupt;
    OutputRelay relay;
    Pipe pipe = make_pipe();
    for (int i = 1; i <= 5000; ++i) numbers += std::to_string(i) + "\n";
    write_all(pipe.write.number(), numbers);
    relay.add({std::move(pipe.read), STDOUT_FILENO, "", Descriptor()});
    relay.finish(interrupt, Clock::now());
  }
  auto text = console.read();
  console.restore();
  EXPECT_LT(text.get().size(), numbers.size());
}

TEST_F(LauncherOutput, ContinuesWhenAFullDiskHasRoomAgain) {
  const test::CapturedLog log;
  UnreadConsole console;
  bool was_tried = false;
  {
    const Interrupt interrupt;
    OutputRelay relay;
    Pipe pipe = make_pipe();
    const OutputRelay::Id id = relay.add({std::move(pipe.read), STDOUT_FILENO, "", Descriptor()});
    const auto is_tried = [&](const std::string& line, const std::string& lines) {
      write_all(pipe.write.number(), line + "\n");
      return eventually([&] { return relay.last_lines(id) == lines; });
    };
    {
      const FileAsConsole full("/dev/full");
      was_tried = is_tried("one", "one") && is_tried("two", "one\ntwo");
    }
    write_all(pipe.write.number(), "three\n");
    relay.finish(interrupt);
  }
  auto text = console.read();
  console.restore();
  EXPECT_TRUE(was_tried);
  EXPECT_EQ(text.get(), "three\n");
  const std::string warning = log.text();
  const auto place = warning.find(reason_of(ENOSPC));
  EXPECT_NE(place, std::string::npos) << warning;
  EXPECT_EQ(warning.find(reason_of(ENOSPC), place + 1), std::string::npos) << warning;
}

TEST_F(LauncherOutput, ALogFolderThatCannotBeCreatedIsAnError) {
  write_text(folder_ / "file", "");
  expect_error([&] { Launcher launcher(shell("exit 0").log_dir(folder_ / "file" / "logs")); },
               {"[launch.logs] expected to make the folder", "--log-dir"});
}

}  // namespace
}  // namespace semitone::launch
