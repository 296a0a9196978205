#include "semitone/launch/launcher.h"

#include "src/launch/ports.h"
#include "src/launch/process_count.h"
#include "tests/launch/launcher_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <string>
#include <string_view>
#include <utility>

// Jobs on one node.
namespace semitone::launch {
namespace {

using test::eventually;
using test::expect_error;
using test::ids_in;
using test::read_text;
using test::read_words;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Seconds = LaunchOptions::Seconds;

TEST_F(LauncherTest, SetsTheEnvironmentOfEachProcess) {
  const LaunchResult result =
      run(shell("env > $DIR/$RANK", 2).rdzv_id("my-job").max_restarts(3).role("trainer"));
  EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(result.exit_code(), 0);
  EXPECT_EQ(result.run_id, "my-job");
  EXPECT_EQ(result.restarts, 0);
  EXPECT_EQ(result.reason, "");
  ASSERT_EQ(result.workers.size(), 2U);
  for (const std::string rank : {"0", "1"}) {
    auto environment = environment_of(rank);
    const std::map<std::string, std::string> expected{
        {"RANK", rank},
        {"LOCAL_RANK", rank},
        {"ROLE_RANK", rank},
        {"GROUP_RANK", "0"},
        {"WORLD_SIZE", "2"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"ROLE_WORLD_SIZE", "2"},
        {"GROUP_WORLD_SIZE", "1"},
        {"ROLE_NAME", "trainer"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"TORCHELASTIC_RESTART_COUNT", "0"},
        {"SEMITONE_ATTEMPT", "0"},
        {"TORCHELASTIC_MAX_RESTARTS", "3"},
        {"TORCHELASTIC_RUN_ID", "my-job"},
        {"TORCHELASTIC_USE_AGENT_STORE", "False"},
    };
    for (const auto& [name, value] : expected) EXPECT_EQ(environment[name], value) << name;
    EXPECT_EQ(environment["PATH"], std::getenv("PATH"));
    EXPECT_EQ(environment["MASTER_PORT"], environment_of("0")["MASTER_PORT"]);
    const auto free = net::listen_on({"0.0.0.0", std::stoi(environment["MASTER_PORT"])});
    EXPECT_TRUE(free.ok()) << free.problem;
  }
}

TEST_F(LauncherTest, DividesTheCoresUnlessOmpNumThreadsIsSet) {
  const std::string script = "echo ${OMP_NUM_THREADS-unset} > $DIR/threads";
  unsetenv("OMP_NUM_THREADS");
  run(shell(script, 1));
  EXPECT_EQ(read_words(folder_ / "threads").at(0), "unset");
  run(shell(script, 2));
  const int threads = std::stoi(read_words(folder_ / "threads").at(0));
  EXPECT_GE(threads, 1);
  EXPECT_LE(threads * 2, std::max(2, ProcessCount::parse("cpu").count));
  setenv("OMP_NUM_THREADS", "7", 1);
  run(shell(script, 2));
  EXPECT_EQ(read_words(folder_ / "threads").at(0), "7");
  unsetenv("OMP_NUM_THREADS");
}

TEST_F(LauncherTest, UsesAGivenAddressAndPort) {
  const int port = free_port();
  run(shell("env > $DIR/$RANK").master_addr("localhost").master_port(port));
  EXPECT_EQ(environment_of("0")["MASTER_ADDR"], "localhost");
  EXPECT_EQ(environment_of("0")["MASTER_PORT"], std::to_string(port));
  run(shell("env > $DIR/$RANK").rdzv_endpoint("localhost:0").local_addr("127.0.0.1"));
  EXPECT_EQ(environment_of("0")["MASTER_ADDR"], "127.0.0.1");
}

TEST_F(LauncherTest, ReplacesTheLocalRankInArguments) {
  const auto options = LaunchOptions("sh")
                           .arguments({"-c", "printf '%s|' \"$@\" > $0/$RANK", folder_.path(), "",
                                       "two words", "$HOME", "gpu${local_rank}-${local_rank}"})
                           .nproc_per_node(2);
  EXPECT_EQ(run(options).outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(read_text(folder_ / "1"), "|two words|$HOME|gpu1-1|");
}

TEST_F(LauncherTest, StandardInputIsEmpty) {
  EXPECT_EQ(run(shell("cat > $DIR/input", 1)).exit_code(), 0);
  EXPECT_EQ(read_text(folder_ / "input"), "");
}

TEST_F(LauncherTest, AFailureStopsAllProcessesAndIsNamed) {
  const LaunchResult result =
      run(shell("echo $$ >> $DIR/ids\n"
                "while [ $(wc -l < $DIR/ids) -lt 3 ]; do sleep 0.01; done\n"
                "[ $RANK = 1 ] && exit 7\n"
                "exec sleep 1000",
                3));
  EXPECT_EQ(result.outcome, LaunchOutcome::failed);
  EXPECT_EQ(result.exit_code(), 7);
  EXPECT_EQ(result.reason, "rank 1 failed: exit code 7");
  ASSERT_TRUE(result.first_failure.has_value());
  EXPECT_EQ(result.first_failure->rank, 1);
  EXPECT_EQ(result.first_failure->local_rank, 1);
  EXPECT_EQ(result.first_failure->node, 0);
  EXPECT_EQ(result.first_failure->status.code, 7);
  EXPECT_THAT(result.first_failure->host, Not(IsEmpty()));
  EXPECT_EQ(result.first_failure->pid, result.workers.at(1).pid);
  EXPECT_FALSE(result.workers.at(1).stopped);
  for (const int other : {0, 2}) {
    EXPECT_TRUE(result.workers.at(static_cast<std::size_t>(other)).stopped);
    EXPECT_EQ(result.workers.at(static_cast<std::size_t>(other)).status.signal, SIGTERM);
  }
  expect_all_gone("ids", 3);
}

TEST_F(LauncherTest, ASignalIsAFailureToo) {
  const LaunchResult result = run(shell("[ $RANK = 0 ] && kill -9 $$; exec sleep 1000", 2));
  EXPECT_EQ(result.outcome, LaunchOutcome::failed);
  EXPECT_EQ(result.first_failure->status.signal, SIGKILL);
  EXPECT_EQ(result.exit_code(), 128 + SIGKILL);
  EXPECT_THAT(result.first_failure->to_string(),
              AllOf(HasSubstr("rank 0 failed: signal 9 (Killed)\n"), HasSubstr("out of memory")));
}

TEST_F(LauncherTest, ProcessesThatIgnoreSigtermAreKilledAfterTheGrace) {
  const LaunchResult result = run(shell("echo $$ >> $DIR/ids\n"
                                        "[ $RANK = 1 ] || trap '' TERM\n"
                                        "echo ready > $DIR/ready$RANK\n"
                                        "[ $RANK = 0 ] && exec sleep 1000\n"
                                        "while [ ! -e $DIR/ready0 ]; do sleep 0.01; done; exit 1",
                                        2)
                                      .grace(Seconds(0.2)));
  EXPECT_EQ(result.first_failure->rank, 1);
  EXPECT_EQ(result.workers.at(0).status.signal, SIGKILL);
  expect_all_gone("ids", 2);
}

TEST_F(LauncherTest, ProcessesThatHandleSigtermMayFinish) {
  const LaunchResult result =
      run(shell("trap 'sleep 0.3; echo saved > $DIR/saved; exit 0' TERM\n"
                "[ $RANK = 1 ] && while [ ! -e $DIR/ready ]; do sleep 0.01; done && exit 1\n"
                "echo ready > $DIR/ready\n"
                "while :; do sleep 0.01; done",
                2));
  EXPECT_EQ(result.first_failure->rank, 1);
  EXPECT_TRUE(result.workers.at(0).status.success());
  EXPECT_TRUE(result.workers.at(0).stopped);
  EXPECT_EQ(read_text(folder_ / "saved"), "saved\n");
}

TEST_F(LauncherTest, ProcessesThatWorkersStartedAreStoppedToo) {
  // The second process ignores signals: SIGKILL must reach the group although its leader has ended.
  const std::string children =
      "sleep 1000 & echo $! >> $DIR/ids\n"
      "sh -c \"trap '' TERM; echo ready > $DIR/ready; sleep 1000\" & echo $! >> $DIR/ids\n"
      "while [ ! -e $DIR/ready ]; do sleep 0.01; done\n";
  const auto options = [&](const std::string& end) {
    return shell("echo $$ >> $DIR/ids\n" + children + end).grace(Seconds(0.2));
  };
  EXPECT_EQ(run(options("exit 5")).exit_code(), 5);
  expect_all_gone("ids", 3);
  EXPECT_EQ(run(options("exit 0")).exit_code(), 0);
  expect_all_gone("ids", 6);
}

TEST_F(LauncherTest, StopEndsTheJob) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    write_text(folder_ / "ids", "");
    Launcher launcher(shell("echo $$ >> $DIR/ids; exec sleep 1000", 2));
    auto result = std::async(std::launch::async, [&] { return launcher.run(); });
    ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 2; }));
    launcher.stop(signal);
    const LaunchResult stopped = result.get();
    EXPECT_EQ(stopped.outcome, LaunchOutcome::interrupted);
    EXPECT_EQ(stopped.signal, signal);
    EXPECT_EQ(stopped.exit_code(), 128 + signal);
    EXPECT_FALSE(stopped.first_failure.has_value());
    for (const WorkerStatus& worker : stopped.workers) {
      EXPECT_TRUE(worker.stopped);
      EXPECT_EQ(worker.status.signal, signal == SIGHUP ? SIGTERM : signal);
    }
    expect_all_gone("ids", 2);
  }
}

// It may not have saved its work.
TEST_F(LauncherTest, AProcessThatOutlastsTheGraceCountsAsKilled) {
  Launcher launcher(
      shell("trap '' TERM; echo $$ >> $DIR/ids; while :; do sleep 0.01; done").grace(Seconds(0.1)));
  auto result = std::async(std::launch::async, [&] { return launcher.run(); });
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 1; }));
  launcher.stop(SIGTERM);
  const LaunchResult stopped = result.get();
  EXPECT_EQ(stopped.outcome, LaunchOutcome::interrupted);
  EXPECT_EQ(stopped.signal, SIGTERM);
  EXPECT_EQ(stopped.exit_code(), 128 + SIGKILL);
  expect_all_gone("ids", 1);
}

// A disk may be full when it saves its work.
TEST_F(LauncherTest, AProcessThatFailsAfterSigtermGivesItsExitCode) {
  for (const int signal : {SIGTERM, SIGHUP}) {
    for (const auto& [code, expected] :
         {std::pair{0, 128 + signal}, std::pair{128 + SIGTERM, 128 + signal},
          std::pair{128 + signal, 128 + signal}, std::pair{3, 3}}) {
      write_text(folder_ / "ids", "");
      const std::string trap = "trap 'exit " + std::to_string(code) + "' TERM; ";
      Launcher launcher(shell(
          "[ $RANK = 1 ] && " + trap + "echo $$ >> $DIR/ids; while :; do sleep 0.01; done", 2));
      auto result = std::async(std::launch::async, [&] { return launcher.run(); });
      ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 2; }));
      launcher.stop(signal);
      const LaunchResult stopped = result.get();
      EXPECT_EQ(stopped.outcome, LaunchOutcome::interrupted);
      EXPECT_EQ(stopped.exit_code(), expected) << code;
      expect_all_gone("ids", 2);
    }
  }
}

// Only node 0 compares names, and one machine may have any.
TEST_F(LauncherTest, AProgramsNameMayHaveAnyBytes) {
  const auto script = folder_ /
                      "entra\xee"
                      "nement";
  write_text(script, "#!/bin/sh\nexit 6\n");
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  EXPECT_EQ(run(LaunchOptions(script)).exit_code(), 6);
}

TEST_F(LauncherTest, ASecondInterruptKillsAtOnce) {
  Launcher launcher(shell("trap 'echo heard > $DIR/heard' INT; echo $$ > $DIR/ids\n"
                          "while :; do sleep 0.01; done")
                        .grace(Seconds(100'000)));
  auto result = std::async(std::launch::async, [&] { return launcher.run(); });
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 1; }));
  launcher.stop(SIGINT);
  ASSERT_TRUE(eventually([&] { return !read_words(folder_ / "heard").empty(); }));
  launcher.stop(SIGINT);
  EXPECT_EQ(result.get().workers.at(0).status.signal, SIGKILL);
  expect_all_gone("ids", 1);
}

TEST_F(LauncherTest, ForwardsSignalsAndTheJobContinues) {
  // Processes that a worker has started do not get them: the sleep would die.
  Launcher launcher(
      shell("trap 'echo $RANK >> $DIR/heard' USR1\n"
            "sleep 1000 & CHILD=$!; echo $$ >> $DIR/ids\n"
            "while [ ! -e $DIR/go ]; do sleep 0.01; done\n"
            "kill -0 $CHILD && kill $CHILD",
            2));
  auto result = std::async(std::launch::async, [&] { return launcher.run(); });
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 2; }));
  launcher.forward(SIGUSR1);
  EXPECT_TRUE(eventually([&] { return read_words(folder_ / "heard").size() == 2; }));
  write_text(folder_ / "go", "");
  EXPECT_EQ(result.get().outcome, LaunchOutcome::succeeded);
  EXPECT_THAT(read_words(folder_ / "heard"), ::testing::UnorderedElementsAre("0", "1"));
}

TEST_F(LauncherTest, ASignalBeforeTheStartIsDropped) {
  Launcher launcher(shell("exit 0"));
  launcher.forward(SIGUSR1);
  EXPECT_EQ(launcher.run().outcome, LaunchOutcome::succeeded);
}

TEST_F(LauncherTest, StopBeforeRunStartsNothing) {
  Launcher launcher(shell("echo $$ >> $DIR/ids"));
  launcher.stop(SIGTERM);
  EXPECT_EQ(launcher.run().outcome, LaunchOutcome::interrupted);
  EXPECT_THAT(read_words(folder_ / "ids"), IsEmpty());
}

TEST_F(LauncherTest, RestartsAllUntilTheySucceed) {
  const LaunchResult result =
      run(shell("echo $RANK $TORCHELASTIC_RESTART_COUNT $MASTER_PORT >> $DIR/starts$RANK\n"
                "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0\n"
                "[ $RANK = 0 ] && exit 1\n"
                "exec sleep 1000",
                2)
              .max_restarts(5));
  EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(result.restarts, 2);
  const auto words = read_words(folder_ / "starts0");
  ASSERT_EQ(words.size(), 9U);
  EXPECT_EQ(words[1], "0");
  EXPECT_EQ(words[4], "1");
  EXPECT_EQ(words[7], "2");
  EXPECT_NE(words[2], words[5]);
}

TEST_F(LauncherTest, EndsAfterTheLastRestart) {
  const LaunchResult result = run(shell("echo $$ >> $DIR/ids; exit 4", 1).max_restarts(2));
  EXPECT_EQ(result.outcome, LaunchOutcome::failed);
  EXPECT_EQ(result.restarts, 2);
  EXPECT_EQ(result.exit_code(), 4);
  expect_all_gone("ids", 3);
}

// -------------------------------------------------------------------------------------------------
// errors

TEST_F(LauncherTest, AProgramThatCannotBeRunIsAnError) {
  const auto expect = [](const std::string& program, std::string_view part) {
    expect_error([&] { Launcher launcher{LaunchOptions(program)}; },
                 {"[launch.program] expected a program to launch, got", part});
  };
  expect("/no/such/program", "'/no/such/program', which does not exist");
  expect("semitone-no-such-program", "which is not in PATH");
  expect("/tmp", "a folder");
  write_text(folder_ / "data", "text");
  expect(folder_ / "data", "which is not executable — chmod +x");
  // Only the system can detect that the interpreter does not exist.
  const auto script = folder_ / "script";
  write_text(script, "#!/no/such/interpreter\n");
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  expect_error([&] { run(LaunchOptions(script).nproc_per_node(2)); },
               {"[launch.process] expected to run", "No such file or directory"});
}

TEST_F(LauncherTest, APortInUseIsAnError) {
  const int port = free_port();
  const auto taken = listen_at({"127.0.0.1", port});
  ASSERT_TRUE(taken.ok()) << taken.problem;
  expect_error(
      [&] { run(shell("exit 0").master_port(port)); },
      {"[launch.rendezvous] expected master-port", "to be free", "Address already in use"});
  const auto two = shell("exit 0").nnodes({2, 2}).master_addr("127.0.0.1");
  expect_error([&] { run(LaunchOptions(two).master_port(port)); }, {"to be free"});
  expect_error([&] { run(LaunchOptions(two).master_port(port - 1)); },
               {"expected to listen at 127.0.0.1:" + std::to_string(port)});
}

TEST_F(LauncherTest, AnAddressOfAnotherMachineIsAnError) {
  expect_error(
      [&] {
        run(shell("exit 0").nnodes({2, 2}).master_addr("192.0.2.1").master_port(free_port()));
      },
      {"expected to listen at 192.0.2.1", "node 0 must run on the machine"});
  // Without a network, no server says that there is no such host, and the launcher tries again.
  expect_error(
      [&] {
        run(shell("exit 0")
                .rdzv_endpoint("no-such-host.invalid:29400")
                .nnodes({2, 2})
                .join_timeout(LaunchOptions::Seconds(1)));
      },
      {"[launch.rendezvous]", "no-such-host.invalid"});
}

}  // namespace
}  // namespace semitone::launch
