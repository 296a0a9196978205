#include "src/launch/ports.h"
#include "src/launch/process.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

// `semitone launch` from the command line: flags, output, signals, exit codes.
namespace semitone {
namespace {

using launch::Output;
using launch::Process;
using launch::ProcessOptions;
using launch::ProcessResult;
using nlohmann::json;
using test::eventually;
using test::ids_in;
using test::is_running;
using test::lines_of;
using test::read_text;
using test::read_words;
using test::run_semitone;
using test::semitone_command;
using test::Words;
using test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class LaunchCommandTest : public ::testing::Test {
 protected:
  // `semitone launch FLAGS sh -c SCRIPT`; $DIR is the test's folder.
  ProcessOptions command(Words flags, const std::string& script) const {
    flags.insert(flags.begin(), "launch");
    flags.insert(flags.end(), {"sh", "-c", "DIR='" + folder_.path().string() + "'\n" + script});
    return semitone_command(flags);
  }

  ProcessResult launch(Words flags, const std::string& script) const {
    return launch::run(command(std::move(flags), script));
  }

  bool wait_for_ids(std::size_t count) const {
    return eventually([&] { return ids_in(folder_ / "ids").size() == count; });
  }

  void expect_all_gone(std::size_t count) const {
    const auto ids = ids_in(folder_ / "ids");
    EXPECT_EQ(ids.size(), count);
    for (const pid_t id : ids) EXPECT_TRUE(eventually([&] { return !is_running(id); })) << id;
  }

  test::TemporaryFolder folder_;
};

Words sorted_lines(const std::string& text) {
  Words lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

// -------------------------------------------------------------------------------------------------
// the command line

TEST_F(LaunchCommandTest, HelpShowsEachFlagOnceWithExamples) {
  const ProcessResult help = run_semitone({"launch", "--help"});
  EXPECT_TRUE(help.status.success());
  EXPECT_THAT(help.out,
              AllOf(HasSubstr("[OPTIONS] PROGRAM [ARGUMENTS...]"), HasSubstr("--nproc-per-node"),
                    Not(HasSubstr("--nproc_per_node")), HasSubstr("-t,--tee"),
                    HasSubstr("Examples:\n  semitone launch"), HasSubstr("Exit codes:")));
  EXPECT_THAT(run_semitone({"manual", "launch"}).out,
              HasSubstr("\\fIPROGRAM\\fR [\\fIARGUMENTS...\\fR]"));
}

TEST_F(LaunchCommandTest, WhatFollowsTheProgramIsTheProgramsOwn) {
  const ProcessResult finished = run_semitone(
      {"launch", "--nproc_per_node", "1", "--max_restarts=0", "-t", "0", "printf", "%s|", "--tee",
       "--nproc-per-node", "0", "--help", "--x=", "--", "-x", "train"});
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(finished.out, "--tee|--nproc-per-node|0|--help|--x=|--|-x|train|");
  const ProcessResult after_dashes =
      run_semitone({"launch", "--nproc-per-node", "1", "--", "printf", "%s|", "--help", "--"});
  EXPECT_TRUE(after_dashes.status.success()) << after_dashes.err;
  EXPECT_EQ(after_dashes.out, "--help|--|");
  // A program may have the name of a command.
  write_text(folder_ / "train", "#!/bin/sh\necho own\n");
  std::filesystem::permissions(folder_ / "train", std::filesystem::perms::owner_all);
  const ProcessResult own =
      launch::run(ProcessOptions(SEMITONE_PROGRAM)
                      .arguments({"launch", "train"})
                      .environment("PATH", folder_.path().string() + ":/usr/bin:/bin")
                      .out(Output::capture));
  EXPECT_EQ(own.out, "own\n");
}

TEST_F(LaunchCommandTest, WrongUsageIsOneClearMessageAndCode2) {
  const std::vector<std::pair<Words, std::string>> cases{
      {{}, "[cli.launch] expected a program to launch, got none — see semitone launch --help"},
      {{"--nproc", "2", "sh"}, "[cli.launch] expected flags of this command, got '--nproc'"},
      {{"--max-restart", "2", "sh"}, "got '--max-restart' — did you mean '--max-restarts'?"},
      {{"--json", "true"},
       "expected a program to launch, got none — --json takes the next word, 'true', for its "
       "file: --json - is standard output"},
      {{"--nproc-per-node"}, "--nproc-per-node: 1 required"},
      {{"--nproc-per-node", "0", "sh"}, "expected nproc-per-node from 1 to 4096, got '0'"},
      {{"--nproc-per-node", "two", "sh"}, "a number, auto, cpu or gpu, got 'two'"},
      {{"--nnodes", "3:2", "sh"}, "[launch.options] expected a number of nodes"},
      {{"--nnodes", "2", "sh"},
       "expected rdzv-endpoint or master-addr for several nodes, got neither"},
      {{"--nnodes", "2", "--master-addr", "a", "--node-rank", "2", "sh"},
       "expected node-rank from 0 to 1, as there are 2 nodes, got 2"},
      {{"--node-rank", "-1", "sh"}, "[cli.launch] expected --node-rank from 0"},
      {{"--nnodes", "2", "--rdzv-endpoint", "a:b", "sh"}, "expected an endpoint as in"},
      {{"--nnodes", "1:2", "sh"}, "expected rdzv-endpoint with a range of nodes"},
      {{"--standalone", "--nnodes", "2", "sh"}, "expected one node with --standalone, got 2"},
      {{"--rdzv-backend", "etcd", "sh"}, "expected --rdzv-backend to be one of static, c10d"},
      {{"--rdzv-backend", "c10d", "sh"}, "expected --rdzv-endpoint with --rdzv-backend c10d"},
      {{"--tee", "4", "sh"},
       "expected 0, 1, 2 or 3, or those by local rank as in 0:1,1:3, got '4'"},
      {{"--redirects", "3", "sh"}, "expected log-dir with redirects, got none"},
      {{"--max-restarts", "x", "sh"}, "expected --max-restarts from 0"},
      {{"--grace", "-1", "sh"}, "expected --grace from 0"},
      {{"--max-restarts", "1", "--log-dir=", "--nproc-per-node", "1", "sh"},
       "expected --log-dir DIR, got ''"},
      {{"--master-port", "70000", "sh"}, "expected --master-port from 0 to 65535"},
  };
  for (const auto& [arguments, message] : cases) {
    Words words{"launch"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const ProcessResult finished = run_semitone(words);
    SCOPED_TRACE(message);
    EXPECT_EQ(finished.status.code, 2) << finished.err;
    EXPECT_THAT(finished.err, AllOf(StartsWith("["), HasSubstr(message)));
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
    EXPECT_EQ(finished.out, "");
  }
}

TEST_F(LaunchCommandTest, WhatCannotBeginIsOneClearMessageAndCode1) {
  const std::string port = std::to_string(launch::free_port());
  write_text(folder_ / "file", "");
  const std::vector<std::pair<Words, std::string>> cases{
      {{"/no/such/program"},
       "[launch.program] expected a program to launch, got '/no/such/program'"},
      {{"/tmp"}, "got '/tmp', a folder"},
      {{"--rdzv-token-file", "/no/such", "sh"},
       "[cli.launch] expected a file with a token at '/no/such', got No such file or directory"},
      {{"--rdzv-token-file", "/dev/null", "sh"}, "at '/dev/null', got an empty one"},
      {{"--log-dir", (folder_ / "file" / "logs").string(), "sh"}, "[launch.logs] expected to make"},
      {{"--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", port,
        "--join-timeout", "0.2", "sh"},
       "[launch.rendezvous] expected node 0's launcher to answer"},
  };
  for (const auto& [arguments, message] : cases) {
    Words words{"launch"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const ProcessResult finished = run_semitone(words);
    EXPECT_EQ(finished.status.code, 1) << finished.err;
    EXPECT_THAT(finished.err, HasSubstr(message));
    EXPECT_EQ(finished.out, "");
  }
}

TEST_F(LaunchCommandTest, TakesTorchrunsCommandLines) {
  const std::string endpoint = "localhost:" + std::to_string(launch::free_port());
  for (const Words& flags : {
           Words{"--standalone", "--nnodes=1", "--nproc-per-node=1"},
           Words{"--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", "--no_python"},
           Words{"--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=" + endpoint, "--rdzv_id=7",
                 "--monitor_interval=5"},
           Words{"--nnodes=1:1", "--rdzv-backend=static", "--rdzv-endpoint=" + endpoint},
       }) {
    const ProcessResult finished = launch(flags, "echo $RANK of $WORLD_SIZE at $MASTER_ADDR");
    EXPECT_TRUE(finished.status.success()) << finished.err;
    EXPECT_THAT(finished.out, StartsWith("0 of 1 at "));
  }
}

TEST_F(LaunchCommandTest, TakesTheMasterFromTheEnvironmentAsFromFlags) {
  const int port = launch::free_port();
  const auto node = [&](const char* rank) {
    return command({"--nnodes", "2", "--node-rank", rank},
                   "echo $RANK at $MASTER_ADDR $MASTER_PORT")
        .environment("MASTER_ADDR", "localhost")
        .environment("MASTER_PORT", std::to_string(port));
  };
  Process other(node("1"));
  const ProcessResult first = launch::run(node("0"));
  const ProcessResult second = other.wait();
  EXPECT_EQ(first.out, "0 at localhost " + std::to_string(port) + "\n") << first.err;
  EXPECT_EQ(second.out, "1 at localhost " + std::to_string(port) + "\n") << second.err;
  // Flags come first, and one node has no use for it.
  const ProcessResult flag = launch::run(
      command({"--nnodes", "2", "--master-addr", "192.0.2.1", "--join-timeout", "1"}, "exit 0")
          .environment("MASTER_ADDR", "localhost"));
  EXPECT_THAT(flag.err, HasSubstr("192.0.2.1"));
  const ProcessResult alone =
      launch::run(command({}, "echo $MASTER_ADDR").environment("MASTER_ADDR", "192.0.2.1"));
  EXPECT_EQ(alone.out, "127.0.0.1\n");
  const ProcessResult wrong = launch::run(command({"--nnodes", "2"}, "exit 0")
                                              .environment("MASTER_ADDR", "localhost")
                                              .environment("MASTER_PORT", "http"));
  EXPECT_EQ(wrong.status.code, 2);
  EXPECT_THAT(wrong.err,
              HasSubstr("[cli.launch] expected MASTER_PORT from 1 to 65535, got 'http'"));
}

TEST_F(LaunchCommandTest, SaysHowManyProcessesAutoMeans) {
  const ProcessResult finished = launch({"--nproc-per-node", "cpu"}, "echo $WORLD_SIZE");
  EXPECT_TRUE(finished.status.success());
  const std::string count = finished.out.substr(0, finished.out.find('\n'));
  EXPECT_THAT(finished.err,
              HasSubstr("[launch] " + count + " processes: one for each of " + count + " cores"));
}

TEST_F(LaunchCommandTest, AutoMeansOneForEachGpuWhereThereAreAny) {
  for (const char* word : {"auto", "gpu"}) {
    const ProcessResult finished =
        launch::run(command({"--nproc-per-node", word}, "[ $RANK = 0 ] && echo $WORLD_SIZE; exit 0")
                        .environment("LD_LIBRARY_PATH", FAKE_CUDA_DIR));
    EXPECT_EQ(finished.out, "3\n");
    EXPECT_THAT(finished.err, HasSubstr("[launch] 3 processes: one for each of 3 GPUs"));
  }
}

// -------------------------------------------------------------------------------------------------
// output

TEST_F(LaunchCommandTest, WithoutFlagsProcessesWriteDirectly) {
  const ProcessResult finished = launch({}, "echo out; echo err >&2; printf 'no newline'");
  EXPECT_EQ(finished.out, "out\nno newline");
  EXPECT_EQ(finished.err, "err\n");
}

TEST_F(LaunchCommandTest, TeeMarksWholeLines) {
  const ProcessResult finished =
      launch({"--nproc-per-node", "2", "--tee", "3"},
             "for i in 1 2 3; do printf 'a '; sleep 0.02; echo b$i; done\n"
             "echo err >&2; printf 'no newline'");
  EXPECT_TRUE(finished.status.success());
  EXPECT_EQ(sorted_lines(finished.out),
            (Words{"[rank0]: a b1", "[rank0]: a b2", "[rank0]: a b3", "[rank0]: no newline",
                   "[rank1]: a b1", "[rank1]: a b2", "[rank1]: a b3", "[rank1]: no newline"}));
  EXPECT_THAT(finished.err, AllOf(HasSubstr("[rank0]: err\n"), HasSubstr("[rank1]: err\n")));
}

TEST_F(LaunchCommandTest, TeeBringsMuchOutputWhole) {
  const ProcessResult finished =
      launch({"--nproc-per-node", "3", "--tee", "1"}, "seq -f \"$RANK %.0f\" 1 50000");
  Words expected;
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 1; i <= 50000; ++i)
      expected.push_back("[rank" + std::to_string(rank) + "]: " + std::to_string(rank) + " " +
                         std::to_string(i));
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_TRUE(sorted_lines(finished.out) == expected);
}

TEST_F(LaunchCommandTest, ALogFolderAloneShowsAndKeepsEverything) {
  const auto logs = folder_ / "logs";
  const ProcessResult finished =
      launch({"--log-dir", logs.string(), "--rdzv-id", "job"}, "echo out; echo err >&2");
  EXPECT_EQ(finished.out, "[rank0]: out\n");
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("[rank0]: err\n"), HasSubstr("logs: " + (logs / "job").string())));
  EXPECT_EQ(read_text(logs / "job" / "attempt_0" / "0" / "stdout.log"), "out\n");
  EXPECT_EQ(read_text(logs / "job" / "attempt_0" / "0" / "stderr.log"), "err\n");
}

TEST_F(LaunchCommandTest, AReaderThatGoesDoesNotEndTheJob) {
  const ProcessResult finished =
      launch::run(ProcessOptions("sh")
                      .arguments({"-c",
                                  "$0 launch --tee 1 --log-dir $1 --rdzv-id job sh -c 'seq 1 "
                                  "100000; echo done > $0/done' $1 | head -1",
                                  SEMITONE_PROGRAM, folder_.path().string()})
                      .out(Output::capture)
                      .err(Output::capture));
  EXPECT_EQ(finished.out, "[rank0]: 1\n");
  EXPECT_TRUE(eventually([&] { return !read_words(folder_ / "done").empty(); }));
}

TEST_F(LaunchCommandTest, AReaderOfMessagesThatGoesDoesNotEndTheJob) {
  const ProcessResult finished = launch::run(
      ProcessOptions("sh")
          .arguments(
              {"-c",
               "($0 launch --max-restarts 1 sh -c '[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 7; "
               "while [ ! -e $0/gone ]; do sleep 0.01; done; exit 1' $1 2>&1; echo $? > $1/code) "
               "| (exec <&-; touch $1/gone)",
               SEMITONE_PROGRAM, folder_.path().string()})
          .err(Output::capture));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  ASSERT_TRUE(eventually([&] { return !read_words(folder_ / "code").empty(); }));
  EXPECT_THAT(read_words(folder_ / "code"), ElementsAre("7"));
}

// A program expects the default, and may be the writer of a pipe itself.
TEST_F(LaunchCommandTest, BrokenPipesEndAProgramAsUsual) {
  const ProcessResult finished =
      run_semitone({"launch", "sh", "-c", "(yes; echo $? >&2) | head -1 > /dev/null"});
  EXPECT_EQ(finished.err, "141\n");  // SIGPIPE
  const ProcessResult status =
      run_semitone({"launch", "sh", "-c", "grep SigIgn /proc/self/status"});
  // SIGPIPE is bit 12. The caller of the tests may have ignored other signals.
  EXPECT_THAT(status.out, testing::ContainsRegex("SigIgn:\\s+[0-9a-f]{12}[02468ace][0-9a-f]{3}\n"));
}

TEST_F(LaunchCommandTest, AReaderThatWaitsDoesNotStopTheLauncher) {
  // Nothing reads the pipe, which soon is full.
  Process process(
      command({"--tee", "1", "--grace", "0.2"}, "echo $$ >> $DIR/ids; trap '' TERM; exec yes"));
  ASSERT_TRUE(wait_for_ids(1));
  process.send(SIGTERM);
  process.send(SIGTERM);
  EXPECT_TRUE(eventually([&] { return !is_running(ids_in(folder_ / "ids").at(0)); }));
  // The remaining output still waits for its reader; a second interrupt drops it.
  process.send(SIGINT);
  EXPECT_EQ(process.wait().status.code, 128 + SIGKILL);
}

// -------------------------------------------------------------------------------------------------
// ends

TEST_F(LaunchCommandTest, AFailureIsOneBlockAndItsCodeTheProgramsOwn) {
  const ProcessResult finished =
      launch({"--nproc-per-node", "2", "--tee", "2"},
             "[ $RANK = 1 ] && { echo no such file: data >&2; exit 5; }; exec sleep 1000");
  EXPECT_EQ(finished.status.code, 5);
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("[launch] rank 1 failed: exit code 5\n  local rank 1 on node 0 ("),
                    HasSubstr("  the last lines it wrote:\n    no such file: data\n")));
  EXPECT_EQ(launch({}, "kill -SEGV $$").status.code, 128 + SIGSEGV);
}

TEST_F(LaunchCommandTest, AFailureNamesTheProcessThatIsStopped) {
  const ProcessResult finished = launch({"--nproc-per-node", "3", "--grace", "0.1"}, R"sh(
    [ $RANK = 1 ] && kill -STOP $$
    [ $RANK = 0 ] && exec sleep 60
    sleep 0.5
    exit 3)sh");
  EXPECT_EQ(finished.status.code, 3);
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("rank 1 (process "), HasSubstr("was stopped by signal 19"),
                    HasSubstr("rank 2 failed: exit code 3"), Not(HasSubstr("rank 0"))));
}

TEST_F(LaunchCommandTest, WritesHowItEndedAsJson) {
  const std::string file = (folder_ / "end.json").string();
  EXPECT_EQ(launch({"--json", file, "--max-restarts", "1", "--nproc-per-node", "2"}, "exit 3")
                .status.code,
            3);
  const json end = json::parse(read_text(file));
  EXPECT_EQ(end.at("outcome"), "failed");
  EXPECT_EQ(end.at("exit_code"), 3);
  EXPECT_EQ(end.at("restarts"), 1);
  EXPECT_EQ(end.at("first_failure").at("status").at("code"), 3);
  EXPECT_EQ(end.at("workers").size(), 2U);
  EXPECT_EQ(launch({"--json", file}, "exit 0").status.code, 0);
  EXPECT_EQ(json::parse(read_text(file)).at("first_failure"), nullptr);
  // An earlier job's outcome would be taken for that of one that could not start.
  EXPECT_NE(launch({"--json", file, "--log-dir", file}, "exit 0").status.code, 0);
  const json error = json::parse(read_text(file));
  EXPECT_EQ(error.at("outcome"), "error");
  EXPECT_THAT(error.at("reason").get<std::string>(), HasSubstr("log"));
}

TEST_F(LaunchCommandTest, SignalsStopEverything) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    write_text(folder_ / "ids", "");
    // A shell's background processes ignore SIGINT: SIGKILL ends them.
    Process process(command({"--nproc-per-node", "2", "--grace", "0.5"},
                            "sleep 1000 & echo $! >> $DIR/ids; echo $$ >> $DIR/ids; wait"));
    ASSERT_TRUE(wait_for_ids(4));
    process.send(signal);
    const ProcessResult finished = process.wait();
    EXPECT_EQ(finished.status.code, 128 + signal);
    EXPECT_THAT(finished.err, HasSubstr("[launch] stopped by signal " + std::to_string(signal)));
    expect_all_gone(4);
  }
}

TEST_F(LaunchCommandTest, SignalsAheadOfATimeLimitGoOnToTheProcesses) {
  for (const int signal : {SIGUSR1, SIGUSR2}) {
    write_text(folder_ / "ids", "");
    Process process(command({"--nproc-per-node", "2"},
                            "trap 'echo saved > $DIR/saved$RANK; exit 0' USR1 USR2\n"
                            "echo $$ >> $DIR/ids; while :; do sleep 0.01; done"));
    ASSERT_TRUE(wait_for_ids(2));
    process.send(signal);
    EXPECT_EQ(process.wait().status.code, 0);
    for (const char* file : {"saved0", "saved1"}) {
      EXPECT_EQ(read_words(folder_ / file), Words{"saved"});
      std::filesystem::remove(folder_ / file);
    }
  }
}

TEST_F(LaunchCommandTest, QuitStopsWithTheGrace) {
  Process process(command({},
                          "trap 'echo $$ > $DIR/heard; exit 0' QUIT\n"
                          "echo $$ >> $DIR/ids; while :; do sleep 0.01; done"));
  ASSERT_TRUE(wait_for_ids(1));
  process.send(SIGQUIT);
  EXPECT_EQ(process.wait().status.code, 128 + SIGQUIT);
  EXPECT_EQ(read_words(folder_ / "heard").size(), 1U);
}

TEST_F(LaunchCommandTest, NothingOutlivesALauncherThatIsKilled) {
  // Also grandchildren, and processes that ignore all signals except SIGKILL.
  Process process(command({"--nproc-per-node", "2"},
                          "trap '' TERM HUP INT; sh -c 'echo $$ >> '$DIR'/ids; sleep 1000' &\n"
                          "echo $$ >> $DIR/ids; wait; sleep 1000"));
  ASSERT_TRUE(wait_for_ids(4));
  process.send(SIGKILL);
  expect_all_gone(4);
  EXPECT_EQ(process.wait().status.signal, SIGKILL);
}

TEST_F(LaunchCommandTest, OneThatWasStoppedAndContinuedGoesOn) {
  Process process(command({"--heartbeat-timeout", "0.3"},
                          "echo $$ >> $DIR/ids; while [ ! -e $DIR/go ]; do sleep 0.01; done"));
  ASSERT_TRUE(wait_for_ids(1));
  process.send(SIGSTOP);
  ::usleep(1'000'000);
  process.send(SIGCONT);
  ::usleep(300'000);
  write_text(folder_ / "go", "");
  EXPECT_EQ(process.wait().status.code, 0);
}

// -------------------------------------------------------------------------------------------------
// several nodes: two launchers on this machine

class TwoNodes : public LaunchCommandTest {
 protected:
  ProcessOptions node(const std::string& script, Words more = {}) const {
    Words flags{"--nnodes", "2", "--rdzv-endpoint", endpoint_};
    flags.insert(flags.end(), more.begin(), more.end());
    return command(flags, script);
  }

  // The process of the launcher whose worker has this rank.
  pid_t launcher_of(const std::string& rank) const {
    return ids_in(folder_ / ("launcher" + rank)).at(0);
  }

  const std::string endpoint_ = "127.0.0.1:" + std::to_string(launch::free_port());
  const std::string wait_ = "echo $PPID > $DIR/launcher$RANK; echo $$ >> $DIR/ids; exec sleep 1000";
};

TEST_F(TwoNodes, AFailureOnOneStopsBothAndBothNameIt) {
  const std::string script =
      "echo $$ >> $DIR/ids\n"
      "while [ $(wc -l < $DIR/ids) -lt 2 ]; do sleep 0.01; done\n"
      "[ $RANK = 1 ] && { echo it broke >&2; exit 6; }; exec sleep 1000";
  Process one(node(script, {"--tee", "2"}));
  Process other(node(script, {"--tee", "2"}));
  for (Process* process : {&one, &other}) {
    const ProcessResult finished = process->wait();
    EXPECT_EQ(finished.status.code, 6);
    EXPECT_THAT(finished.err,
                AllOf(HasSubstr("[launch] rank 1 failed: exit code 6\n  local rank 0 on node 1 ("),
                      HasSubstr("\n    it broke\n")));
  }
  expect_all_gone(2);
}

TEST_F(TwoNodes, ALauncherThatIsKilledOrFrozenIsMissed) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    for (const std::string victim : {"0", "1"}) {
      SCOPED_TRACE(std::string(signal == SIGKILL ? "killed" : "frozen") + " node " + victim);
      write_text(folder_ / "ids", "");
      const Words patience{"--heartbeat-timeout", signal == SIGSTOP ? "3" : "60"};
      Process one(node(wait_, patience));
      Process other(node(wait_, patience));
      ASSERT_TRUE(wait_for_ids(2));
      const pid_t id = launcher_of(victim);
      ASSERT_EQ(::kill(id, signal), 0);
      Process& survivor = one.id() == id ? other : one;
      Process& lost = one.id() == id ? one : other;
      const ProcessResult finished = survivor.wait();
      EXPECT_EQ(finished.status.code, 1);
      EXPECT_THAT(finished.err,
                  AllOf(HasSubstr("node " + victim), HasSubstr("is lost: "),
                        HasSubstr(signal == SIGKILL ? "closed the connection" : "for 3 s")));
      if (signal == SIGSTOP) {
        // When it continues, it finds that it was given up, and ends.
        lost.send(SIGCONT);
        EXPECT_EQ(lost.wait().status.code, 1);
      }
      expect_all_gone(2);
    }
  }
}

TEST_F(TwoNodes, TheTokenIsInAFileOrInTheEnvironment) {
  const auto file = folder_ / "token";
  write_text(file, "secret\n");
  Process one(node("exit 0", {"--rdzv-token-file", file.string()}));
  Process other(node("exit 0").environment("SEMITONE_RDZV_TOKEN", "secret"));
  EXPECT_TRUE(one.wait().status.success());
  EXPECT_TRUE(other.wait().status.success());
}

TEST_F(TwoNodes, AReplacementMayComeBeforeItsPredecessorIsKnownToBeDead) {
  const std::string script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo $WORLD_SIZE >> $DIR/sizes; exit 0; }\n" +
      wait_;
  const Words flags{"--heartbeat-timeout", "3", "--max-restarts", "1"};
  Process one(node(script, flags));
  Process other(node(script, flags));
  ASSERT_TRUE(wait_for_ids(2));
  const pid_t frozen = launcher_of("1");
  ASSERT_EQ(::kill(frozen, SIGSTOP), 0);
  Process third(node(script, flags));
  Process& survivor = one.id() == frozen ? other : one;
  Process& lost = one.id() == frozen ? one : other;
  const ProcessResult first = survivor.wait();
  EXPECT_EQ(first.status.code, 0) << first.err;
  const ProcessResult replacement = third.wait();
  EXPECT_EQ(replacement.status.code, 0) << replacement.err;
  EXPECT_THAT(replacement.err,
              HasSubstr("this node waits until there is room for it: this job already has 2"));
  EXPECT_EQ(read_words(folder_ / "sizes"), (Words{"2", "2"}));
  lost.send(SIGCONT);
  EXPECT_EQ(lost.wait().status.code, 1);
  expect_all_gone(2);
}

}  // namespace
}  // namespace semitone
