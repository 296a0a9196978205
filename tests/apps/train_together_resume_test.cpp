// `semitone train` with several processes that are killed, signalled and restarted.

#include "src/checkpoint/folder.h"
#include "src/launch/ports.h"
#include "src/launch/process.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/image_files.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace semitone::train_together_resume_test {
namespace {

namespace fs = std::filesystem;
using launch::Process;
using launch::ProcessResult;
using nlohmann::json;
using test::read_text;
using test::run_semitone;
using test::semitone_command;
using test::Words;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The steps from which a training was resumed, in turn.
std::vector<std::int64_t> resumed_steps(const std::string& log) {
  const std::string before = "resumed from step ";
  std::vector<std::int64_t> steps;
  for (auto at = log.find(before); at != std::string::npos; at = log.find(before, at + 1))
    steps.push_back(std::stoll(log.substr(at + before.size())));
  return steps;
}

// Whether a process that does not run has been sent a signal.
bool is_pending(pid_t id, int signal) {
  const Words words = test::read_words("/proc/" + std::to_string(id) + "/status");
  const auto name = std::ranges::find(words, "ShdPnd:");
  if (words.end() - name < 2) return false;
  return (std::stoull(*(name + 1), nullptr, 16) >> (signal - 1) & 1) != 0;
}

class TrainTogetherResume : public ::testing::Test {
 protected:
  TrainTogetherResume() { test::write_data_set(data_.path(), 401, 101); }

  Words train(const Words& more, const Words& batch = {"--batch-size", "10"}) const {
    Words all{"train", "--data", data_.path().string()};
    all.insert(all.end(), settings_.begin(), settings_.end());
    all.insert(all.end(), batch.begin(), batch.end());
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // Of any number of processes.
  Words elastic(const Words& more, const std::string& name = "run") const {
    Words words = train({"--checkpoint-dir", (folder_ / name).string(), "--resume", "auto"},
                        {"--global-batch-size", "20"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // A machine of a job of one or two, whose processes are started by a line of the shell.
  Process machine(const std::string& last_call, const std::string& line) const {
    Words words{"launch", "--nnodes", "1:2", "--rdzv-endpoint", endpoint_, "--max-restarts", "2"};
    words.insert(words.end(), {"--last-call", last_call, "sh", "-c"});
    words.insert(words.end(), {line + "; exec \"$0\" \"$@\"", SEMITONE_PROGRAM});
    const Words train =
        elastic({"--save-every", "5", "--keep", "0", "--threads", "1", "--json",
                 (folder_ / "run.json").string(), "--save-weights", weights("run")});
    words.insert(words.end(), train.begin(), train.end());
    return Process(semitone_command(words));
  }
  // 63 steps.
  Words resumable(const Words& more = {}) const {
    Words words = train({"--checkpoint-dir", run_.string(), "--resume", "auto", "--save-every", "2",
                         "--keep", "0", "--save-weights", weights("run")});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string weights(const std::string& name) const {
    return (folder_ / (name + ".safetensors")).string();
  }
  std::vector<std::int64_t> steps() const { return checkpoint::steps_in(run_); }

  // Of an undisturbed run.
  std::string expected_weights(const std::string& processes) const {
    EXPECT_TRUE(run_semitone(train({"--nproc", processes, "--save-weights", weights("whole")}))
                    .status.success());
    return read_text(weights("whole"));
  }
  void expect_weights_as_undisturbed(const std::string& processes = "2") const {
    const std::string bytes = read_text(weights("run"));
    EXPECT_GT(bytes.size(), 100'000U);
    EXPECT_TRUE(bytes == expected_weights(processes));
  }
  void expect_weights_as_stopped(const Words& processes,
                                 const std::vector<std::int64_t>& steps) const;
  void expect_kills_to_change_nothing(const std::string& processes, std::int64_t last_step) const;

  test::TemporaryFolder data_;
  test::TemporaryFolder folder_;
  fs::path run_ = folder_ / "run";
  Words settings_{"--epochs", "3", "--opt-level", "O2", "--dtype", "fp16"};
  const std::string endpoint_ = "127.0.0.1:" + std::to_string(launch::free_port());
};

// Those of a training that stops after these steps, and continues each time with the next number
// of processes.
void TrainTogetherResume::expect_weights_as_stopped(const Words& processes,
                                                    const std::vector<std::int64_t>& steps) const {
  ASSERT_EQ(processes.size(), steps.size() + 1);
  for (std::size_t part = 0; part < processes.size(); ++part) {
    Words more{"--nproc", processes[part], "--threads", "1", "--save-weights", weights("stopped")};
    if (part < steps.size()) more.insert(more.end(), {"--max-steps", std::to_string(steps[part])});
    const ProcessResult finished = run_semitone(elastic(more, "stopped"));
    ASSERT_TRUE(finished.status.success()) << finished.err;
  }
  const std::string bytes = read_text(weights("run"));
  EXPECT_GT(bytes.size(), 100'000U);
  EXPECT_TRUE(bytes == read_text(weights("stopped")));
}

// Attempts 0 to 2 lose ranks 0, 1 and 0 with SIGKILL, each some steps after the earlier one.
void TrainTogetherResume::expect_kills_to_change_nothing(const std::string& processes,
                                                         std::int64_t last_step) const {
  const std::string kill_later = "attempt=$TORCHELASTIC_RESTART_COUNT; step=$(printf '" +
                                 run_.string() +
                                 "/step-%08d' $((attempt * 14 + 6)))\n"
                                 "[ $attempt -lt 3 ] && [ $RANK = $((attempt % 2)) ] && "
                                 "{ (while [ ! -e $step ]; do sleep 0.01; done; kill -9 $$) & }\n"
                                 "exec \"$0\" \"$@\"";
  Words launch{"launch", "--nproc-per-node", processes,       "--max-restarts", "3", "sh",
               "-c",     kill_later,         SEMITONE_PROGRAM};
  const Words train = resumable();
  launch.insert(launch.end(), train.begin(), train.end());
  const ProcessResult finished = run_semitone(launch);
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("restarting: rank 0 failed: signal 9"),
                                  HasSubstr("restarting: rank 1 failed: signal 9"),
                                  HasSubstr("resumed from step ")));
  EXPECT_EQ(steps().back(), last_step);
  expect_weights_as_undisturbed(processes);
}

TEST_F(TrainTogetherResume, RanksThatAreKilledDoNotChangeTheWeights) {
  expect_kills_to_change_nothing("2", 63);
}

// The sums of three gradients depend on their order, which is resumed too.
TEST_F(TrainTogetherResume, OfThreeRanksThatAreKilledTheSumsDoNotChange) {
  expect_kills_to_change_nothing("3", 42);
}

#ifdef JUMPING_CLOCK
TEST_F(TrainTogetherResume, JumpsOfTheWallClockChangeNothing) {
  const auto dates = launch::run(
      launch::ProcessOptions("sh")
          .arguments({"-c", "for i in 1 2 3 4 5 6 7 8 9; do date +%s; sleep 0.05; done"})
          .environment("LD_PRELOAD", JUMPING_CLOCK)
          .out(launch::Output::capture));
  const Words seconds = test::lines_of(dates.out);
  ASSERT_EQ(seconds.size(), 9U) << dates.out;
  const auto [earliest, latest] = std::ranges::minmax(seconds);
  EXPECT_GT(std::stol(latest) - std::stol(earliest), 80'000);

  const ProcessResult finished = launch::run(
      semitone_command(resumable({"--nproc", "2"})).environment("LD_PRELOAD", JUMPING_CLOCK));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(steps().back(), 63);
  expect_weights_as_undisturbed();
}
#endif

// A signal to the program, which forwards it, and then one to a single rank.
TEST_F(TrainTogetherResume, ASignalToAllOrToOneRankPreemptsAll) {
  {
    Process process(semitone_command(resumable({"--nproc", "2"})));
    ASSERT_TRUE(test::eventually([&] { return !steps().empty(); }));
    process.send(SIGTERM);
    const ProcessResult finished = process.wait();
    EXPECT_EQ(finished.status.code, 128 + SIGTERM) << finished.err;
    EXPECT_THAT(finished.err, Not(HasSubstr("CPUAllocator")));  // a warning of LibTorch
    EXPECT_THAT(finished.err, HasSubstr("[train] stopped by signal 15 (Terminated) after step " +
                                        std::to_string(steps().back())));
  }
  const std::int64_t reached = steps().back();
  EXPECT_LT(reached, 63);
  const std::string id = (folder_ / "id").string();
  Words launch{"launch",
               "--nproc-per-node",
               "2",
               "sh",
               "-c",
               "[ $RANK = 1 ] && echo $$ > " + id + "; exec \"$0\" \"$@\"",
               SEMITONE_PROGRAM};
  const Words train = resumable();
  launch.insert(launch.end(), train.begin(), train.end());
  Process process(semitone_command(launch));
  ASSERT_TRUE(test::eventually([&] { return steps().back() > reached; }));
  ASSERT_EQ(::kill(test::ids_in(id).at(0), SIGUSR1), 0);
  const ProcessResult finished = process.wait();
  EXPECT_EQ(finished.status.code, 128 + SIGUSR1) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("[train] stopped by signal 10"));
  EXPECT_LT(steps().back(), 63);
  ASSERT_TRUE(run_semitone(resumable({"--nproc", "2"})).status.success());
  expect_weights_as_undisturbed();
}

// Of a job without --resume, a restart must not start over among the checkpoints.
TEST_F(TrainTogetherResume, ARestartWithoutResumeIsRefused) {
  Words launch{"launch", "--nproc-per-node", "2", "--max-restarts", "1", SEMITONE_PROGRAM};
  const Words words = train({"--checkpoint-dir", run_.string(), "--max-steps", "2"});
  launch.insert(launch.end(), words.begin(), words.end());
  ASSERT_TRUE(run_semitone(launch).status.success());
  const ProcessResult again = run_semitone(launch);
  EXPECT_EQ(again.status.code, 1);
  EXPECT_THAT(again.err, HasSubstr("pass --resume auto to continue from it"));
}

TEST_F(TrainTogetherResume, AnotherNumberOfProcessesKeepsTheImagesOfAStep) {
  ASSERT_TRUE(run_semitone(resumable({"--nproc", "2", "--max-steps", "4"})).status.success());
  const ProcessResult refused = run_semitone(resumable());
  EXPECT_EQ(refused.status.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("expected images per step 10 in '"));
  const ProcessResult alone = run_semitone(
      {"train", "--data", data_.path().string(), "--batch-size", "20", "--epochs", "3",
       "--opt-level", "O2", "--dtype", "fp16", "--resume", run_.string(), "--max-steps", "6"});
  EXPECT_TRUE(alone.status.success()) << alone.err;
  EXPECT_THAT(alone.err, HasSubstr("resumed from step 4"));
}

TEST_F(TrainTogetherResume, TheGlobalBatchSizeIsDividedAmongTheProcesses) {
  const auto train_with = [&](const std::string& processes, const Words& more) {
    Words words = elastic({"--nproc", processes});
    words.insert(words.end(), more.begin(), more.end());
    return run_semitone(words);
  };
  ASSERT_TRUE(train_with("2", {"--max-steps", "4"}).status.success());
  const ProcessResult alone =
      train_with("1", {"--max-steps", "6", "--save-weights", weights("alone")});
  EXPECT_TRUE(alone.status.success()) << alone.err;
  EXPECT_THAT(alone.err, HasSubstr("resumed from step 4"));
  const ProcessResult three = train_with("3", {});
  EXPECT_EQ(three.status.code, 2);
  EXPECT_THAT(three.err,
              HasSubstr("expected --global-batch-size that is a multiple of 3 processes, got 20"));
  const ProcessResult both = train_with("1", {"--batch-size", "20"});
  EXPECT_EQ(both.status.code, 2);
  EXPECT_THAT(both.err, HasSubstr("expected --batch-size or --global-batch-size, got both"));
}

// Two machines, of which one is lost: the other continues from the last checkpoint with all images.
TEST_F(TrainTogetherResume, ALostMachineLeavesTheTrainingToTheOther) {
  const std::string lost_file = (folder_ / "lost").string();
  // A machine that is much later than the other must not find the training done.
  const std::string line = "echo $PPID > " + (folder_ / "launcher").string() +
                           "$RANK; while [ $WORLD_SIZE = 1 ] && [ ! -e " + lost_file +
                           " ]; do sleep 0.05; done";
  Process host = machine("5", line);
  Process other = machine("5", line);
  const bool together = test::eventually(
      [&] { return !steps().empty() && !test::ids_in(folder_ / "launcher1").empty(); });
  if (!together) {
    host.send(SIGTERM);
    other.send(SIGTERM);
    FAIL() << "steps: " << steps().size() << "\none: " << host.wait().err
           << "\nother: " << other.wait().err;
  }
  write_text(lost_file, "");
  const pid_t id = test::ids_in(folder_ / "launcher1").at(0);
  ASSERT_EQ(::kill(id, SIGKILL), 0);
  Process& survivor = host.id() == id ? other : host;
  Process& lost = host.id() == id ? host : other;
  EXPECT_FALSE(lost.wait().status.success());
  const ProcessResult finished = survivor.wait();
  EXPECT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("node 1"), HasSubstr("is lost")));
  EXPECT_EQ(steps().back(), 63);
  const std::vector<std::int64_t> resumed = resumed_steps(finished.err);
  ASSERT_EQ(resumed.size(), 1U) << finished.err;
  expect_weights_as_stopped({"2", "1"}, resumed);
}

// A machine joins, and is lost with everything on it, both in one epoch. The learning rate is so
// small that the weights hardly change the losses: the mean loss of the epoch shows whether each
// image was taken once. One image in the place of another changes it by some 1e-4; rounding, which
// depends on the number of processes, by less than 1e-7.
TEST_F(TrainTogetherResume, AMachineThatJoinsAndIsLostChangesNoImagesAndNoWeights) {
  test::write_data_set(data_.path(), 4000, 100);
  settings_ = {"--opt-level", "O0", "--sync-bn", "--schedule", "constant", "--lr", "1e-6"};
  const auto rank_of = [&](const std::string& attempt, const std::string& rank) {
    return folder_ / ("attempt" + attempt + "-rank" + rank);
  };
  const std::string line =
      "echo $WORLD_SIZE $$ > " + rank_of("$SEMITONE_ATTEMPT", "$RANK").string();
  // The number of processes, and this one's id.
  const auto started = [&](const char* attempt, const char* rank) {
    std::vector<pid_t> numbers = test::ids_in(rank_of(attempt, rank));
    numbers.resize(2);
    return numbers;
  };
  Process first = machine("0.2", line);
  ASSERT_TRUE(test::eventually([&] { return !steps().empty(); }));
  const pid_t alone = started("0", "0").at(1);
  // It stands still until its launcher tells it to end, so that it cannot have finished before.
  ASSERT_GT(alone, 0);
  ASSERT_EQ(::kill(alone, SIGSTOP), 0);
  Process second = machine("0.2", line);
  EXPECT_TRUE(test::eventually([&] { return is_pending(alone, SIGTERM); }));
  ::kill(alone, SIGCONT);

  ASSERT_TRUE(test::eventually([&] { return started("1", "1").at(1) != 0; }));
  const std::int64_t together = steps().back();
  ASSERT_TRUE(test::eventually([&] { return steps().back() > together; }));
  // Its launcher neither reports the end of the rank nor lets it save.
  second.send(SIGSTOP);
  ASSERT_EQ(::kill(started("1", "1").at(1), SIGKILL), 0);
  second.send(SIGKILL);
  EXPECT_FALSE(second.wait().status.success());

  const ProcessResult finished = first.wait();
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr(" joined"), HasSubstr("is lost")));
  EXPECT_EQ(started("0", "0").at(0), 1);
  EXPECT_EQ(started("1", "0").at(0), 2);
  EXPECT_EQ(started("2", "0").at(0), 1);
  const std::vector<std::int64_t> resumed = resumed_steps(finished.err);
  ASSERT_EQ(resumed.size(), 2U) << finished.err;
  EXPECT_LT(resumed[0], resumed[1]);
  expect_weights_as_stopped({"1", "2", "1"}, resumed);

  const std::string whole = (folder_ / "whole.json").string();
  ASSERT_TRUE(run_semitone(train({"--threads", "1", "--json", whole}, {"--batch-size", "20"}))
                  .status.success());
  const auto result = [&](const fs::path& file) { return json::parse(read_text(file)).at(0); };
  const double loss = result(whole).at("train_loss");
  EXPECT_EQ(result(folder_ / "run.json").at("steps"), 200);
  EXPECT_NEAR(result(folder_ / "run.json").at("train_loss").get<double>(), loss,
              test::pointwise_tolerance(at::kFloat) * loss);
}

}  // namespace
}  // namespace semitone::train_together_resume_test
