#include "semitone/launch/spawn.h"

#include "src/launch/process.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

class SpawnTest : public ::testing::Test {
 protected:
  ProcessResult run_program(const std::string& mode, std::vector<std::string> arguments = {},
                            const std::string& rank = {}) {
    arguments.insert(arguments.begin(), {mode, folder_.path().string()});
    ProcessOptions options(SEMITONE_SPAWN_PROGRAM);
    options.arguments(std::move(arguments)).out(Output::capture).err(Output::capture);
    if (!rank.empty()) options.environment("RANK", rank);
    return run(options);
  }

  std::vector<std::string> lines(const std::string& file) const {
    std::istringstream text(
        std::filesystem::exists(folder_ / file) ? test::read_text(folder_ / file) : "");
    std::vector<std::string> result;
    for (std::string line; std::getline(text, line);) result.push_back(line);
    return result;
  }

  test::TemporaryFolder folder_;
};

TEST_F(SpawnTest, RunsTheFunctionInOtherProcessesWithTheSameArguments) {
  const auto result = run_program("plain", {"a b", "", "--flag=ü"});
  EXPECT_EQ(result.status.code, 0) << result.err;
  EXPECT_THAT(lines("function"),
              UnorderedElementsAre("0 0 2 [a b][][--flag=ü]", "1 1 2 [a b][][--flag=ü]"));
  EXPECT_EQ(lines("main").size(), 3);
  EXPECT_THAT(lines("result"), ElementsAre("2 workers, 0 restarts, outcome 0"));
}

TEST_F(SpawnTest, AnExceptionOfTheFunctionFailsTheJob) {
  const auto result = run_program("throw");
  EXPECT_EQ(result.status.code, 7);
  EXPECT_THAT(result.err, HasSubstr("the function's"));
  EXPECT_THAT(lines("result"), ElementsAre("2 workers, 0 restarts, outcome 1"));
}

TEST_F(SpawnTest, TakesTheOptionsOfALauncher) {
  EXPECT_EQ(run_program("restart").status.code, 0);
  EXPECT_EQ(lines("function").size(), 2);
  EXPECT_THAT(lines("result"), ElementsAre("1 workers, 1 restarts, outcome 0"));
}

TEST_F(SpawnTest, CallsTheFunctionAtOnceIfALauncherStartedTheProcess) {
  EXPECT_EQ(run_program("plain", {}, "5").status.code, 0);
  EXPECT_THAT(lines("function"), ElementsAre("5 5 - "));
  EXPECT_EQ(lines("main").size(), 1);
  EXPECT_THAT(lines("result"), ElementsAre());
}

// As StopSignals of the checkpoint room would.
TEST_F(SpawnTest, ASignalLetsTheProcessesSaveTheirWork) {
  Process program(
      ProcessOptions(SEMITONE_SPAWN_PROGRAM).arguments({"save", folder_.path().string()}));
  ASSERT_TRUE(test::eventually([&] { return lines("ready").size() == 2; }));
  program.send(SIGTERM);
  EXPECT_EQ(program.wait().status.code, 128 + SIGTERM);
  EXPECT_THAT(lines("saved"), UnorderedElementsAre("0", "1"));
  EXPECT_THAT(lines("result"), ElementsAre("2 workers, 0 restarts, outcome 3"));
}

TEST_F(SpawnTest, RefusesWhatCannotWork) {
  EXPECT_THAT(run_program("twice").err, HasSubstr("one call of spawn in a program"));
  EXPECT_THAT(run_program("none").err, HasSubstr("[launch."));
  EXPECT_THAT(run_program("plain", {}, "x").err, HasSubstr("a number from 0 in RANK, got 'x'"));
}

TEST(ThisProgram, IsTheRunningOneWithItsArguments) {
  const LaunchOptions options = this_program();
  EXPECT_TRUE(std::filesystem::equivalent(options.program(), "/proc/self/exe"));
  EXPECT_EQ(options.nproc_per_node(), 1);
}

}  // namespace
}  // namespace semitone::launch
