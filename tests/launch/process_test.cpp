#include "src/launch/process.h"

#include "semitone/core/error.h"
#include "src/launch/child.h"
#include "src/launch/descriptor.h"
#include "tests/support/environment.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/terminal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ProcessOptions shell(const std::string& script) {
  return ProcessOptions("sh").arguments({"-c", script});
}

ProcessOptions captured(const std::string& script) {
  return shell(script).out(Output::capture).err(Output::capture);
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// Runs in a separate process, which must return 0.
void expect_success_in_fork(const std::function<bool()>& act) {
  const pid_t id = ::fork();
  if (id == 0) ::_exit(act() ? 0 : 1);
  int status = 0;
  ASSERT_EQ(::waitpid(id, &status, 0), id);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ExitStatus, NamesTheSignalOfAShellsExitCode) {
  EXPECT_EQ((ExitStatus{3, 0}.to_string()), "exit code 3");
  EXPECT_EQ((ExitStatus{128 + SIGUSR1, 0}.to_string()), "exit code 138 (128 + SIGUSR1)");
  EXPECT_EQ((ExitStatus{255, 0}.to_string()), "exit code 255");
  EXPECT_THAT((ExitStatus{0, SIGTERM}.to_string()), testing::HasSubstr("signal 15 ("));
}

TEST(Process, TellsHowItEnded) {
  EXPECT_TRUE(run(shell("exit 0")).status.success());
  const ExitStatus three = run(shell("exit 3")).status;
  EXPECT_FALSE(three.success());
  EXPECT_EQ(three.code, 3);
  EXPECT_EQ(three.signal, 0);
  EXPECT_EQ(three.to_string(), "exit code 3");
  const ExitStatus killed = run(shell("kill -9 $$")).status;
  EXPECT_FALSE(killed.success());
  EXPECT_EQ(killed.signal, SIGKILL);
  EXPECT_EQ(killed.to_string(), "signal 9 (Killed)");
}

TEST(Process, CapturesEachStreamForItself) {
  const ProcessResult finished = run(captured("echo one; echo two >&2; echo three"));
  EXPECT_EQ(finished.out, "one\nthree\n");
  EXPECT_EQ(finished.err, "two\n");
  const ProcessResult only_out = run(captured("echo one; echo two >&2").err(Output::discard));
  EXPECT_EQ(only_out.out, "one\n");
  EXPECT_EQ(only_out.err, "");
}

TEST(Process, CapturesMoreThanAPipeHoldsOnBothStreams) {
  const ProcessResult finished =
      run(captured("head -c 3000000 /dev/zero >&2; head -c 2000000 /dev/zero"));
  EXPECT_TRUE(finished.status.success());
  EXPECT_EQ(finished.out.size(), 2000000U);
  EXPECT_EQ(finished.err.size(), 3000000U);
}

TEST(Process, PassesArgumentsAsTheyAre) {
  const auto options = ProcessOptions("printf")
                           .arguments({"%s|%s|%s", "two words", "", "$HOME *"})
                           .out(Output::capture);
  EXPECT_EQ(run(options).out, "two words||$HOME *");
}

TEST(Process, AddsToTheEnvironmentAndReplacesInIt) {
  setenv("SEMITONE_TEST_KEPT", "kept", 1);
  setenv("SEMITONE_TEST_OLD", "old", 1);
  const auto options = captured("echo $SEMITONE_TEST_KEPT $SEMITONE_TEST_OLD $SEMITONE_TEST_NEW")
                           .environment("SEMITONE_TEST_OLD", "first")
                           .environment("SEMITONE_TEST_OLD", "replaced")
                           .environment("SEMITONE_TEST_NEW", "a=b c");
  EXPECT_EQ(run(options).out, "kept replaced a=b c\n");
  EXPECT_STREQ(std::getenv("SEMITONE_TEST_OLD"), "old");
  unsetenv("SEMITONE_TEST_KEPT");
  unsetenv("SEMITONE_TEST_OLD");
  EXPECT_THROW(ProcessOptions("sh").environment("a=b", "c"), Error);
  EXPECT_THROW(ProcessOptions("sh").environment("", "c"), Error);
}

TEST(Process, ThatCannotBeRunIsAnErrorWithTheReason) {
  EXPECT_THAT(message_of([] { run(ProcessOptions("/no/such/program")); }),
              AllOf(HasSubstr("[launch.process]"), HasSubstr("'/no/such/program'"),
                    HasSubstr("No such file or directory")));
  {
    // A folder that this user may not read would be "Permission denied".
    const test::Environment environment({"PATH"});
    ::setenv("PATH", "/usr/bin:/bin", 1);
    EXPECT_THAT(message_of([] { run(ProcessOptions("semitone-no-such-program")); }),
                HasSubstr("No such file or directory"));
  }
  const test::TemporaryFolder folder;
  test::write_text(folder / "data", "no program");
  EXPECT_THAT(message_of([&] { run(ProcessOptions(folder / "data")); }),
              HasSubstr("Permission denied"));
  EXPECT_THROW(run(ProcessOptions(folder.path())), Error);
}

TEST(Process, GetsSignals) {
  Process process(
      captured("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.01; done"));
  // Before the trap is set, the signal would end the shell.
  ::usleep(200000);
  process.send(SIGUSR1);
  const ProcessResult finished = process.wait();
  EXPECT_EQ(finished.out, "ready\ncaught\n");
  EXPECT_EQ(finished.status.code, 5);
}

TEST(Process, IsKilledWithTheObject) {
  pid_t id = 0;
  {
    Process process(shell("trap '' TERM; exec sleep 1000"));
    id = process.id();
    EXPECT_EQ(::kill(id, 0), 0);
    const Process moved = std::move(process);
    EXPECT_EQ(moved.id(), id);
  }
  EXPECT_NE(::kill(id, 0), 0);
}

TEST(Process, IsWaitedForOnce) {
  Process process(shell("exit 0"));
  process.wait();
  EXPECT_THROW(process.wait(), Error);
  process.send(SIGTERM);
}

TEST(Process, DiesWithItsParentHoweverThatDies) {
  for (const int signal : {SIGTERM, SIGKILL}) {
    // Orphans become children of this process, so that it can see how they end.
    ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    const pid_t parent = ::fork();
    if (parent == 0) {
      const Process child(ProcessOptions("sleep").arguments({"1000"}));
      const pid_t id = child.id();
      if (::write(pipe[1], &id, sizeof id) != sizeof id) ::_exit(1);
      while (true) ::pause();
    }
    pid_t child = 0;
    ASSERT_EQ(::read(pipe[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
    ::close(pipe[0]);
    ::close(pipe[1]);
    ASSERT_EQ(::kill(parent, signal), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(parent, &status, 0), parent);
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
    ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
  }
}

// As the processes of a job do: their groups are not in the terminal's foreground.
TEST(Child, InAGroupOfItsOwnMayWriteToATerminalWithTostop) {
  const std::string output = test::on_terminal([] {
    ::alarm(60);  // a child that the terminal stops does not end
    termios settings{};
    ::tcgetattr(STDOUT_FILENO, &settings);
    settings.c_lflag |= TOSTOP;
    ::tcsetattr(STDOUT_FILENO, TCSANOW, &settings);
    ChildOptions child;
    child.argv = {"echo", "hello"};
    child.own_group = true;
    child.death_signal = SIGKILL;
    return wait_for(start_child(child)).success() ? 0 : 1;
  });
  EXPECT_EQ(output, "hello\r\n");
}

std::vector<pid_t> numbers_in(const Descriptor& socket) {
  std::vector<pid_t> numbers;
  for (pid_t number = 0; ::read(socket.number(), &number, sizeof number) == sizeof number;)
    numbers.push_back(number);
  return numbers;
}

// Whoever starts it may be killed while it runs already.
TEST(Child, IsRegisteredBeforeItsProgramRuns) {
  auto [registry, reader] = socket_pair();
  ChildOptions child;
  // A program that cannot be run has been registered, and is no longer.
  child.argv = {"/no/such/program"};
  child.registry = registry.number();
  EXPECT_THROW(start_child(child), Error);
  const auto failed = numbers_in(reader);
  ASSERT_EQ(failed.size(), 2U);
  EXPECT_GT(failed[0], 0);
  EXPECT_EQ(failed[1], -failed[0]);

  child.argv = {"true"};
  const pid_t id = start_child(child);
  EXPECT_THAT(numbers_in(reader), ::testing::ElementsAre(id));
  EXPECT_TRUE(wait_for(id).success());
}

TEST(Process, CapturesWhereThisProcessHasClosedItsOwnStreams) {
  expect_success_in_fork([] {
    ::close(STDIN_FILENO);
    ::close(STDOUT_FILENO);
    ::close(STDERR_FILENO);
    const ProcessResult finished = run(captured("echo one; echo two >&2"));
    return finished.out == "one\n" && finished.err == "two\n";
  });
}

}  // namespace
}  // namespace semitone::launch
