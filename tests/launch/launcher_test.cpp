#include "semitone/launch/launcher.h"

#include "semitone/core/error.h"
#include "src/launch/channel.h"
#include "src/launch/polling.h"
#include "src/launch/sockets.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <future>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

// Jobs of real processes, most of them shells, on one node and on several.
namespace semitone::launch {
namespace {

using test::eventually;
using test::expect_error;
using test::ids_in;
using test::is_running;
using test::read_text;
using test::words_of;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Seconds = LaunchOptions::Seconds;

class LauncherTest : public ::testing::Test {
 protected:
  // A shell script. $DIR is the test's folder.
  LaunchOptions shell(const std::string& script, int processes = 1) const {
    return LaunchOptions("/bin/sh")
        .arguments({"-c", "DIR='" + folder_.path().string() + "'\n" + script})
        .nproc_per_node(processes);
  }

  // The variables that a process wrote with `env`.
  std::map<std::string, std::string> environment_of(const std::string& file) const {
    std::ifstream stream(folder_ / file);
    std::map<std::string, std::string> result;
    for (std::string line; std::getline(stream, line);) {
      const auto equals = line.find('=');
      result[line.substr(0, equals)] = line.substr(equals + 1);
    }
    return result;
  }

  // Checks that no process is left whose id the workers wrote to the file.
  void expect_all_gone(const std::string& file, std::size_t count) const {
    const auto ids = ids_in(folder_ / file);
    EXPECT_EQ(ids.size(), count);
    for (const pid_t id : ids) EXPECT_FALSE(is_running(id)) << id;
  }

  test::TemporaryFolder folder_;
};

LaunchResult run(const LaunchOptions& options) {
  return Launcher(options).run();
}

// -------------------------------------------------------------------------------------------------
// one node

TEST_F(LauncherTest, TellsEachProcessWhoItIs) {
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
        {"TORCHELASTIC_MAX_RESTARTS", "3"},
        {"TORCHELASTIC_RUN_ID", "my-job"},
        {"TORCHELASTIC_USE_AGENT_STORE", "False"},
    };
    for (const auto& [name, value] : expected) EXPECT_EQ(environment[name], value) << name;
    EXPECT_EQ(environment["PATH"], std::getenv("PATH"));
    EXPECT_EQ(environment["MASTER_PORT"], environment_of("0")["MASTER_PORT"]);
    std::string problem;
    EXPECT_TRUE(is_port_free(std::stoi(environment["MASTER_PORT"]), problem)) << problem;
  }
}

TEST_F(LauncherTest, SharesTheCoresOutUnlessToldOtherwise) {
  const std::string script = "echo ${OMP_NUM_THREADS-unset} > $DIR/threads";
  unsetenv("OMP_NUM_THREADS");
  run(shell(script, 1));
  EXPECT_EQ(words_of(folder_ / "threads").at(0), "unset");
  run(shell(script, 2));
  const int threads = std::stoi(words_of(folder_ / "threads").at(0));
  EXPECT_GE(threads, 1);
  EXPECT_LE(threads * 2, std::max(2, ProcessCount::parse("cpu").count));
  setenv("OMP_NUM_THREADS", "7", 1);
  run(shell(script, 2));
  EXPECT_EQ(words_of(folder_ / "threads").at(0), "7");
  unsetenv("OMP_NUM_THREADS");
}

TEST_F(LauncherTest, TakesAGivenAddressAndPort) {
  const int port = free_port();
  run(shell("env > $DIR/$RANK").master_addr("localhost").master_port(port));
  EXPECT_EQ(environment_of("0")["MASTER_ADDR"], "localhost");
  EXPECT_EQ(environment_of("0")["MASTER_PORT"], std::to_string(port));
  run(shell("env > $DIR/$RANK").rdzv_endpoint("localhost:0").local_addr("127.0.0.1"));
  EXPECT_EQ(environment_of("0")["MASTER_ADDR"], "127.0.0.1");
}

TEST_F(LauncherTest, PassesArgumentsAsTheyAreButForTheLocalRank) {
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

TEST_F(LauncherTest, OneFailsAllStopAndTheFirstIsNamed) {
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

TEST_F(LauncherTest, ThoseThatDoNotHearSigtermAreKilledAfterTheGrace) {
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

TEST_F(LauncherTest, ThoseThatHearItMayFinishWhatTheyDo) {
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

TEST_F(LauncherTest, WhatProcessesHaveStartedGoesWithThem) {
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

TEST_F(LauncherTest, StopsWhenToldTo) {
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

TEST_F(LauncherTest, ASecondInterruptKillsAtOnce) {
  Launcher launcher(shell("trap 'echo heard > $DIR/heard' INT; echo $$ > $DIR/ids\n"
                          "while :; do sleep 0.01; done")
                        .grace(Seconds(100'000)));
  auto result = std::async(std::launch::async, [&] { return launcher.run(); });
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 1; }));
  launcher.stop(SIGINT);
  ASSERT_TRUE(eventually([&] { return !words_of(folder_ / "heard").empty(); }));
  launcher.stop(SIGINT);
  EXPECT_EQ(result.get().workers.at(0).status.signal, SIGKILL);
  expect_all_gone("ids", 1);
}

TEST_F(LauncherTest, HandsSignalsOnAndTheJobGoesOn) {
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
  EXPECT_TRUE(eventually([&] { return words_of(folder_ / "heard").size() == 2; }));
  write_text(folder_ / "go", "");
  EXPECT_EQ(result.get().outcome, LaunchOutcome::succeeded);
  EXPECT_THAT(words_of(folder_ / "heard"), ::testing::UnorderedElementsAre("0", "1"));
}

TEST_F(LauncherTest, ASignalThatNoProcessCouldHearIsDropped) {
  Launcher launcher(shell("exit 0"));
  launcher.forward(SIGUSR1);
  EXPECT_EQ(launcher.run().outcome, LaunchOutcome::succeeded);
}

TEST_F(LauncherTest, ThatWasToldToStopBeforeStartsNothing) {
  Launcher launcher(shell("echo $$ >> $DIR/ids"));
  launcher.stop(SIGTERM);
  EXPECT_EQ(launcher.run().outcome, LaunchOutcome::interrupted);
  EXPECT_THAT(words_of(folder_ / "ids"), IsEmpty());
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
  const auto words = words_of(folder_ / "starts0");
  ASSERT_EQ(words.size(), 9U);
  EXPECT_EQ(words[1], "0");
  EXPECT_EQ(words[4], "1");
  EXPECT_EQ(words[7], "2");
  EXPECT_NE(words[2], words[5]);
}

TEST_F(LauncherTest, GivesUpAfterTheLastRestart) {
  const LaunchResult result = run(shell("echo $$ >> $DIR/ids; exit 4", 1).max_restarts(2));
  EXPECT_EQ(result.outcome, LaunchOutcome::failed);
  EXPECT_EQ(result.restarts, 2);
  EXPECT_EQ(result.exit_code(), 4);
  expect_all_gone("ids", 3);
}

// -------------------------------------------------------------------------------------------------
// output

TEST_F(LauncherTest, WritesLogsByJobAttemptAndRank) {
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

TEST_F(LauncherTest, RedirectsTheStreamsThatAreAskedFor) {
  const auto logs = folder_ / "logs";
  run(shell("exit 0", 2).rdzv_id("job").log_dir(logs).redirects(StreamsByRank::parse("0:1,1:2")));
  const auto folder = logs / "job" / "attempt_0";
  EXPECT_TRUE(std::filesystem::exists(folder / "0" / "stdout.log"));
  EXPECT_FALSE(std::filesystem::exists(folder / "0" / "stderr.log"));
  EXPECT_FALSE(std::filesystem::exists(folder / "1" / "stdout.log"));
  EXPECT_TRUE(std::filesystem::exists(folder / "1" / "stderr.log"));
}

TEST_F(LauncherTest, AJobOfTheSameNameAddsToItsLogs) {
  const auto options =
      shell("echo line").rdzv_id("job").log_dir(folder_.path()).redirects(Streams::out);
  run(options);
  run(options);
  EXPECT_EQ(read_text(folder_ / "job" / "attempt_0" / "0" / "stdout.log"), "line\nline\n");
}

TEST_F(LauncherTest, KeepsTheLastTwentyLinesOfAFailure) {
  const LaunchResult result =
      run(shell("for i in $(seq 1 100000); do echo line $i; done >&2; exit 1").tee(Streams::err));
  std::string expected = "line 99981";
  for (int i = 99982; i <= 100000; ++i) expected += "\nline " + std::to_string(i);
  EXPECT_EQ(result.first_failure->last_lines, expected);
  EXPECT_EQ(result.first_failure->log, "");
  EXPECT_THAT(result.first_failure->to_string(), ::testing::EndsWith("\n    line 100000"));
}

TEST_F(LauncherTest, ShowsTheOutputOfAFailureThatSaidNothingOnStandardError) {
  const LaunchResult result = run(shell("echo it is the disk; exit 1").tee(Streams::both));
  EXPECT_EQ(result.first_failure->last_lines, "it is the disk");
}

TEST_F(LauncherTest, DoesNotWaitForOutputOfProcessesThatLeftTheirGroup) {
  const LaunchResult result =
      run(shell("setsid sleep 1000 & echo $! > $DIR/ids; exit 0").tee(Streams::both));
  EXPECT_EQ(result.exit_code(), 0);
  for (const pid_t id : ids_in(folder_ / "ids")) ::kill(id, SIGKILL);
}

// -------------------------------------------------------------------------------------------------
// what cannot be launched

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

TEST_F(LauncherTest, ALogFolderThatCannotBeMadeIsAnError) {
  write_text(folder_ / "file", "");
  expect_error([&] { Launcher launcher(shell("exit 0").log_dir(folder_ / "file" / "logs")); },
               {"[launch.logs] expected to make the folder", "--log-dir"});
}

TEST_F(LauncherTest, APortInUseIsAnError) {
  const int port = free_port();
  const OpenedSocket taken = listen_at({"127.0.0.1", port});
  ASSERT_TRUE(taken.is_open()) << taken.problem;
  expect_error(
      [&] { run(shell("exit 0").master_port(port)); },
      {"[launch.rendezvous] expected master-port", "to be free", "Address already in use"});
  const auto two = shell("exit 0").nnodes({2, 2}).master_addr("127.0.0.1");
  expect_error([&] { run(LaunchOptions(two).master_port(port)); }, {"to be free"});
  expect_error([&] { run(LaunchOptions(two).master_port(port - 1)); },
               {"expected to listen at 127.0.0.1:" + std::to_string(port)});
}

TEST_F(LauncherTest, ANodeZeroThatIsElsewhereIsAnError) {
  expect_error(
      [&] {
        run(shell("exit 0").nnodes({2, 2}).master_addr("192.0.2.1").master_port(free_port()));
      },
      {"expected to listen at 192.0.2.1", "node 0 must run on the machine"});
  expect_error(
      [&] { run(shell("exit 0").rdzv_endpoint("no-such-host.invalid:29400").nnodes({2, 2})); },
      {"[launch.rendezvous]", "no-such-host.invalid"});
}

// -------------------------------------------------------------------------------------------------
// several nodes: launchers in threads of this process, as if on separate machines

class Nodes : public LauncherTest {
 protected:
  // With a short timeout instead of the long default, and an endpoint.
  LaunchOptions node(const std::string& script, NodeCount nodes, int processes = 1) const {
    return shell(script, processes)
        .nnodes(nodes)
        .rdzv_endpoint("127.0.0.1:" + std::to_string(port_))
        .join_timeout(Seconds(60))
        .last_call(Seconds(0.3));
  }

  std::future<LaunchResult> start(const LaunchOptions& options) {
    return start(launchers_.emplace_back(std::make_unique<Launcher>(options)).get());
  }

  int port_ = free_port();
  std::vector<std::unique_ptr<Launcher>> launchers_;

 private:
  static std::future<LaunchResult> start(Launcher* launcher) {
    return std::async(std::launch::async, [launcher] { return launcher->run(); });
  }
};

TEST_F(Nodes, MeetAtAnEndpointAndShareTheRanks) {
  const std::string script = "env > $DIR/$RANK";
  auto host = start(node(script, {2, 2}, 2));
  auto other = start(node(script, {2, 2}, 3));
  const LaunchResult first = host.get();
  const LaunchResult second = other.get();
  EXPECT_EQ(first.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(second.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(first.run_id, second.run_id);
  EXPECT_THAT(first.run_id, Not(IsEmpty()));
  // The host is decided by a race; it has the first ranks.
  std::map<std::string, int> ranks_of_node;
  for (int rank = 0; rank < 5; ++rank) {
    auto environment = environment_of(std::to_string(rank));
    EXPECT_EQ(environment["WORLD_SIZE"], "5");
    EXPECT_EQ(environment["GROUP_WORLD_SIZE"], "2");
    EXPECT_EQ(environment["MASTER_ADDR"], "127.0.0.1");
    EXPECT_EQ(environment["MASTER_PORT"], environment_of("0")["MASTER_PORT"]);
    EXPECT_EQ(environment["TORCHELASTIC_RUN_ID"], first.run_id);
    EXPECT_EQ(environment["LOCAL_RANK"],
              std::to_string(ranks_of_node[environment["GROUP_RANK"]]++));
  }
  for (int rank = 0; rank < 5; ++rank) {
    auto environment = environment_of(std::to_string(rank));
    EXPECT_EQ(environment["LOCAL_WORLD_SIZE"],
              std::to_string(ranks_of_node[environment["GROUP_RANK"]]));
  }
}

TEST_F(Nodes, WithNumbersMeetBesideTheMasterPort) {
  const auto numbered = [&](int number) {
    return start(shell("env > $DIR/$RANK", number + 1)
                     .nnodes({2, 2})
                     .master_addr("localhost")
                     .master_port(port_)
                     .node_rank(number));
  };
  // The one that comes first waits for node 0.
  auto second = numbered(1);
  auto first = numbered(0);
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(second.get().exit_code(), 0);
  EXPECT_EQ(environment_of("0")["GROUP_RANK"], "0");
  EXPECT_EQ(environment_of("0")["LOCAL_WORLD_SIZE"], "1");
  EXPECT_EQ(environment_of("2")["GROUP_RANK"], "1");
  EXPECT_EQ(environment_of("2")["LOCAL_RANK"], "1");
  EXPECT_EQ(environment_of("2")["MASTER_ADDR"], "localhost");
  EXPECT_EQ(environment_of("2")["MASTER_PORT"], std::to_string(port_));
}

TEST_F(Nodes, AFailureOnOneStopsTheOthersAndEachNamesIt) {
  for (const std::string failing : {"0", "3"}) {
    write_text(folder_ / "ids", "");
    const std::string script =
        "echo $$ >> $DIR/ids\n"
        "while [ $(wc -l < $DIR/ids) -lt 4 ]; do sleep 0.01; done\n"
        "[ $RANK = " +
        failing +
        " ] && { echo it broke >&2; exit 9; }\n"
        "exec sleep 1000";
    auto first = start(node(script, {2, 2}, 2).tee(Streams::err));
    auto second = start(node(script, {2, 2}, 2).tee(Streams::err));
    for (const LaunchResult& result : {first.get(), second.get()}) {
      EXPECT_EQ(result.outcome, LaunchOutcome::failed);
      EXPECT_EQ(result.exit_code(), 9);
      ASSERT_TRUE(result.first_failure.has_value());
      EXPECT_EQ(std::to_string(result.first_failure->rank), failing);
      EXPECT_EQ(result.first_failure->node, failing == "0" ? 0 : 1);
      EXPECT_EQ(result.first_failure->last_lines, "it broke");
    }
    expect_all_gone("ids", 4);
  }
}

TEST_F(Nodes, RestartTogether) {
  const std::string script =
      "echo $$ >> $DIR/ids\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0\n"
      "while [ $(wc -l < $DIR/ids) -lt 2 ]; do sleep 0.01; done\n"
      "[ $RANK = 1 ] && exit 1\n"
      "exec sleep 1000";
  // The host's value counts.
  auto first = start(node(script, {2, 2}).max_restarts(1));
  auto second = start(node(script, {2, 2}).max_restarts(1));
  for (const LaunchResult& result : {first.get(), second.get()}) {
    EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
    EXPECT_EQ(result.restarts, 1);
  }
  expect_all_gone("ids", 4);
}

TEST_F(Nodes, OneThatIsDoneWaitsForTheOthers) {
  const std::string script = "[ $RANK = 1 ] && { sleep 0.5; echo late > $DIR/late; }; exit 0";
  auto first = start(node(script, {2, 2}));
  auto second = start(node(script, {2, 2}));
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(read_text(folder_ / "late"), "late\n");
  EXPECT_EQ(second.get().exit_code(), 0);
}

TEST_F(Nodes, OneThatIsStoppedEndsTheJobOfAll) {
  const std::string script = "echo $$ >> $DIR/ids; exec sleep 1000";
  auto first = start(node(script, {2, 2}));
  auto second = start(node(script, {2, 2}));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 2; }));
  launchers_[1]->stop(SIGTERM);
  EXPECT_EQ(second.get().outcome, LaunchOutcome::interrupted);
  const LaunchResult result = first.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::lost);
  EXPECT_EQ(result.exit_code(), 1);
  EXPECT_THAT(result.reason,
              AllOf(HasSubstr("is lost: it was stopped by signal 15"), HasSubstr("node ")));
  expect_all_gone("ids", 2);
}

TEST_F(Nodes, BeginWithFewerThanTheMostAfterALastCall) {
  const std::string script = "echo $WORLD_SIZE >> $DIR/sizes";
  auto first = start(node(script, {2, 4}));
  auto second = start(node(script, {2, 4}));
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(second.get().exit_code(), 0);
  EXPECT_THAT(words_of(folder_ / "sizes"), ::testing::ElementsAre("2", "2"));
}

TEST_F(Nodes, TakeInOneThatComesLater) {
  const std::string script =
      "echo $$ >> $DIR/ids$WORLD_SIZE\n"
      "[ $WORLD_SIZE = 2 ] && exit 0; exec sleep 1000";
  auto first = start(node(script, {1, 2}));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids1").size() == 1; }));
  auto second = start(node(script, {1, 2}));
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(second.get().exit_code(), 0);
  expect_all_gone("ids1", 1);
  expect_all_gone("ids2", 2);
}

TEST_F(Nodes, GoOnWithoutOneThatWasStopped) {
  const std::string script =
      "echo $$ >> $DIR/ids$WORLD_SIZE\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && echo $WORLD_SIZE > $DIR/size && exit 0\n"
      "exec sleep 1000";
  auto host = start(node(script, {1, 2}).max_restarts(1));
  ASSERT_TRUE(eventually(
      [&] { return connect_to({"127.0.0.1", port_}, std::chrono::seconds(1)).is_open(); }));
  auto other = start(node(script, {1, 2}).max_restarts(1));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids2").size() == 2; }));
  launchers_[1]->stop(SIGINT);
  EXPECT_EQ(other.get().outcome, LaunchOutcome::interrupted);
  const LaunchResult result = host.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(result.restarts, 1);
  EXPECT_EQ(read_text(folder_ / "size"), "1\n");
  expect_all_gone("ids2", 2);
}

TEST_F(Nodes, TooFewIsAnEndWithAReason) {
  const LaunchResult result = run(node("echo $$ >> $DIR/ids", {2, 2}).join_timeout(Seconds(0.2)));
  EXPECT_EQ(result.outcome, LaunchOutcome::lost);
  EXPECT_EQ(result.reason, "1 of 2 nodes joined within 0.2 s");
  EXPECT_EQ(result.exit_code(), 1);
  EXPECT_THAT(words_of(folder_ / "ids"), IsEmpty());
}

TEST_F(Nodes, AnEndpointThatDoesNotAnswerIsAnError) {
  const auto options = shell("exit 0")
                           .nnodes({2, 2})
                           .node_rank(1)
                           .master_addr("127.0.0.1")
                           .master_port(port_)
                           .join_timeout(Seconds(0.2));
  expect_error([&] { run(options); },
               {"[launch.rendezvous] expected node 0's launcher to answer at 127.0.0.1:",
                "within 0.2 s", "Connection refused", "was it started?"});
}

TEST_F(Nodes, AnotherProgramAtTheEndpointIsAnError) {
  // It accepts connections and sends nothing.
  const OpenedSocket other = listen_at({"127.0.0.1", port_});
  ASSERT_TRUE(other.is_open()) << other.problem;
  expect_error(
      [&] { run(node("exit 0", {2, 2}).heartbeat_timeout(Seconds(0.2))); },
      {"[launch.rendezvous] expected node 0's launcher at", "no message", "to another program"});
}

TEST_F(Nodes, APeerThatTakesConnectionsAndClosesThemIsNotNodeZero) {
  // As a cluster's proxy does while node 0 is not there.
  const OpenedSocket proxy = listen_at({"127.0.0.1", port_});
  ASSERT_TRUE(proxy.is_open()) << proxy.problem;
  std::atomic<bool> over = false;
  auto connections = std::async(std::launch::async, [&] {
    int count = 0;
    while (!over) {
      std::vector<pollfd> events{{proxy.socket.number(), POLLIN, 0}};
      poll_until(events, Clock::now() + std::chrono::milliseconds(50));
      if (events[0].revents != 0 && accept_from(proxy.socket).is_open()) ++count;
    }
    return count;
  });
  expect_error(
      [&] { run(node("exit 0", {2, 2}).join_timeout(Seconds(1))); },
      {"[launch.rendezvous] expected node 0's launcher to answer at 127.0.0.1:", "within 1 s"});
  over = true;
  const int count = connections.get();
  EXPECT_GE(count, 1);
  EXPECT_LE(count, 6) << "there is a pause of 250 ms between two attempts";
}

// Answers the first launcher that connects, as node 0 would.
std::future<void> false_host(const OpenedSocket& listener, Assignment given) {
  return std::async(std::launch::async, [&listener, given = std::move(given)] {
    std::vector<pollfd> events{{listener.socket.number(), POLLIN, 0}};
    poll_until(events, Clock::now() + std::chrono::minutes(1));
    Channel channel(accept_from(listener.socket), std::chrono::minutes(1));
    channel.send(given);
    while (channel.is_open()) {
      std::vector<pollfd> more{{channel.descriptor(), channel.events(), 0}};
      poll_until(more, channel.deadline());
      channel.update(Clock::now());
    }
  });
}

TEST_F(Nodes, WhatComesFromTheNetworkNamesNoOtherFolder) {
  Assignment given;
  given.nodes = 2;
  given.world_size = 2;
  given.node = 1;
  given.first_rank = 1;
  given.master_addr = "127.0.0.1";
  given.master_port = 20000;
  const auto expect = [&](const Assignment& assignment, std::string_view part) {
    const OpenedSocket listener = listen_at({"127.0.0.1", port_});
    ASSERT_TRUE(listener.is_open()) << listener.problem;
    const auto host = false_host(listener, assignment);
    expect_error(
        [&] {
          run(node("echo $$ >> $DIR/ids", {2, 2})
                  .rdzv_id("job")
                  .log_dir(folder_ / "logs")
                  .redirects(Streams::both));
        },
        {"[launch.rendezvous] expected", part, "is it a launcher of this job?"});
  };
  for (const char* name : {"../OUTSIDE", "..", "", "a\nb"}) {
    Assignment bad = given;
    bad.run_id = name;
    expect(bad, "name");
  }
  Assignment bad = given;
  bad.run_id = "another";
  expect(bad, "the rdzv-id 'job'");
  bad.run_id = "job";
  bad.first_rank = 2;
  expect(bad, "ranks for this node's processes");
  EXPECT_THAT(words_of(folder_ / "ids"), IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "OUTSIDE"));
}

TEST_F(Nodes, OneTooManyStandsByUntilAnotherIsGone) {
  const std::string script =
      "echo $$ >> $DIR/ids$TORCHELASTIC_RESTART_COUNT\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; exec sleep 1000";
  auto first = start(node(script, {2, 2}).max_restarts(1));
  auto second = start(node(script, {2, 2}).max_restarts(1));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids0").size() == 2; }));
  auto third = start(node(script, {2, 2}).max_restarts(1));
  // It joins, and the others are not affected.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(ids_in(folder_ / "ids0").size(), 2U);
  launchers_[1]->stop(SIGTERM);
  EXPECT_EQ(second.get().outcome, LaunchOutcome::interrupted);
  EXPECT_EQ(first.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(third.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(ids_in(folder_ / "ids1").size(), 2U);
}

TEST_F(Nodes, OfAnotherProgramAreRefused) {
  auto host = start(node("exit 0", {2, 2}));
  ASSERT_TRUE(eventually(
      [&] { return connect_to({"127.0.0.1", port_}, std::chrono::seconds(1)).is_open(); }));
  expect_error([&] { run(node("echo another", {2, 2})); },
               {"refused", "this job runs 'sh', not the same with other arguments", "rdzv-id"});
  launchers_[0]->stop(SIGTERM);
  EXPECT_EQ(host.get().outcome, LaunchOutcome::interrupted);
}

TEST_F(Nodes, OfAnotherJobAreRefused) {
  auto host = start(node("exit 0", {2, 2}).rdzv_id("one"));
  // Until the host listens, the other launcher would become it.
  ASSERT_TRUE(eventually(
      [&] { return connect_to({"127.0.0.1", port_}, std::chrono::seconds(1)).is_open(); }));
  expect_error(
      [&] { run(node("exit 0", {2, 2}).rdzv_id("other")); },
      {"expected to join the job at 127.0.0.1:", "refused", "another rdzv-id than 'other'"});
  launchers_[0]->stop(SIGTERM);
  EXPECT_EQ(host.get().outcome, LaunchOutcome::interrupted);
}

}  // namespace
}  // namespace semitone::launch
