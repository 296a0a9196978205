// `semitone train` in one process: checkpoints, signals, and what a run resumes from.

#include "src/checkpoint/folder.h"
#include "src/launch/process.h"
#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train_resume_test {
namespace {

namespace fs = std::filesystem;
using launch::Process;
using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::semitone_command;
using test::Words;
using test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainResume : public CliTest {
 protected:
  Words resumable(const Words& more = {}) const {
    Words words = train({"--checkpoint-dir", run_.string(), "--resume", "auto"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::vector<std::int64_t> steps() const { return checkpoint::steps_in(run_); }

  fs::path run_ = folder_ / "run";
};

TEST_F(TrainResume, OneCommandLineStartsAndContinues) {
  const auto result = [&](const Words& more) {
    Words words = resumable({"--epochs", "2", "--json"});
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult finished = run_semitone(words);
    EXPECT_TRUE(finished.status.success()) << finished.err;
    return std::pair(json::parse(finished.out).at(0), finished.err);
  };
  const auto [first, head] = result({"--max-steps", "25"});
  EXPECT_EQ(first.at("steps"), 25);
  EXPECT_THAT(head, AllOf(HasSubstr("checkpoints   '" + run_.string() +
                                    "', at the end, the newest 3 stay; none yet: a new run"),
                          Not(HasSubstr("resumed"))));
  const auto [rest, head_then] = result({"--save-every", "10"});
  EXPECT_THAT(head_then, AllOf(HasSubstr("every 10 steps, the newest 3 stay\n"),
                               HasSubstr("O1 bfloat16  resumed from step 25, '" +
                                         checkpoint::complete_path(run_, 25).string() + "'")));
  EXPECT_THAT(steps(), ElementsAre(25, 30, 40));
  const json whole = json::parse(run_semitone(train({"--epochs", "2", "--json"})).out).at(0);
  for (const char* key :
       {"steps", "train_loss", "test_loss", "test_accuracy", "skipped_steps", "final_loss_scale"})
    EXPECT_EQ(rest.at(key), whole.at(key)) << key;
  // A launcher may restart a finished training.
  EXPECT_EQ(result({}).first.at("test_loss"), whole.at("test_loss"));
}

TEST_F(TrainResume, AFinishedTrainingHasNoSpeed) {
  const Words words = resumable({"--opt-level", "O0", "--quiet"});
  ASSERT_TRUE(run_semitone(words).status.success());
  const ProcessResult again = run_semitone(words);
  ASSERT_TRUE(again.status.success()) << again.err;
  EXPECT_THAT(again.out, AllOf(HasSubstr("0.00      -"), Not(HasSubstr("nan"))));
}

// What a batch system does before a time limit, at moments of its own choice.
TEST_F(TrainResume, APreemptedRunEndsWithTheWeightsOfAnUndisturbedOne) {
  for (const char* const level : {"O1", "O2"}) {
    SCOPED_TRACE(level);
    fs::remove_all(run_);
    const Words common{"--opt-level", level,          "--dtype", "fp16",          "--epochs",
                       "10",          "--save-every", "7",       "--save-weights"};
    const auto weights = [&](const char* name) {
      return (folder_ / (std::string(level) + name + ".safetensors")).string();
    };
    Words whole = train(common);
    whole.insert(whole.end(), {weights("whole"), "--checkpoint-dir", (folder_ / level).string()});
    ASSERT_TRUE(run_semitone(whole).status.success());
    Words words = resumable(common);
    words.push_back(weights("resumed"));
    std::int64_t reached = 0;
    for (const int signal : {SIGTERM, SIGUSR1, SIGHUP}) {
      Process process(semitone_command(words));
      ASSERT_TRUE(test::eventually([&] { return !steps().empty() && steps().back() > reached; }));
      process.send(signal);
      process.send(signal);  // as from a batch system and from a launcher
      const ProcessResult finished = process.wait();
      ASSERT_EQ(finished.status.code, 128 + signal) << finished.err;
      EXPECT_EQ(finished.status.signal, 0);
      ASSERT_GT(steps().back(), reached);
      reached = steps().back();
      EXPECT_THAT(
          finished.err,
          AllOf(HasSubstr("[train] stopped by signal " + std::to_string(signal)),
                HasSubstr("after step " + std::to_string(reached) + ": the checkpoint is '" +
                          checkpoint::complete_path(run_, reached).string() + "'"),
                HasSubstr("--resume auto"), Not(HasSubstr("test accuracy"))));
      EXPECT_THAT(finished.out, Not(HasSubstr("level  dtype")));
      EXPECT_FALSE(fs::exists(weights("resumed")));
    }
    const ProcessResult last = run_semitone(words);
    ASSERT_TRUE(last.status.success()) << last.err;
    EXPECT_THAT(last.err, HasSubstr("resumed from step " + std::to_string(reached)));
    const std::string bytes = read_text(weights("resumed"));
    EXPECT_GT(bytes.size(), 100'000U);
    EXPECT_TRUE(bytes == read_text(weights("whole")));
    for (const char* const file : {"model.pt", "mixed.pt", "loss_sums.pt"}) {
      EXPECT_TRUE(read_text(checkpoint::complete_path(run_, 200) / file) ==
                  read_text(checkpoint::complete_path(folder_ / level, 200) / file))
          << file;
    }
  }
}

TEST_F(TrainResume, ANewRunAmongCheckpointsIsRefusedAtOnce) {
  const Words words = train({"--checkpoint-dir", run_.string(), "--max-steps", "3"});
  ASSERT_TRUE(run_semitone(words).status.success());
  expect_failure(run_semitone(words), 1,
                 "[train.checkpoints] expected no checkpoint of another run in '" + run_.string() +
                     "', got one of step 3 — pass --resume auto to continue from it, or choose "
                     "another --checkpoint-dir");
}

TEST_F(TrainResume, CheckpointsThatAreNotThereOrDoNotFitAreCode1) {
  // Before the data are read and the head is written.
  expect_failure(
      run_semitone(train({"--resume", "/no/such"})), 1,
      "expected checkpoints to resume from at '/no/such', got No such file or directory");
  expect_failure(run_semitone(train({"--resume", folder_.path().string()})), 1, "got none");
  write_text(folder_ / "file", "nonsense");
  expect_failure(run_semitone(train({"--checkpoint-dir", (folder_ / "file").string()})), 1,
                 "Not a directory");
  ASSERT_TRUE(run_semitone(resumable({"--max-steps", "3"})).status.success());
  expect_failure(run_semitone(resumable({"--quiet", "--lr", "0.1", "--seed", "4"})), 1,
                 "[checkpoint.resume] expected --lr 0.1, --seed 4 in '" +
                     checkpoint::complete_path(run_, 3).string() + "', got --lr 0.05, --seed 0");
}

TEST_F(TrainResume, OneStepCanBeResumedInAnotherProcessAtAnotherLevel) {
  ASSERT_TRUE(run_semitone(resumable({"--max-steps", "6", "--save-every", "3"})).status.success());
  const ProcessResult other =
      run_semitone(train({"--resume", checkpoint::complete_path(run_, 3).string(), "--opt-level",
                          "O2", "--dtype", "fp16", "--max-steps", "5"}));
  EXPECT_TRUE(other.status.success());
  EXPECT_THAT(other.err, AllOf(HasSubstr("O2 float16   resumed from step 3"),
                               HasSubstr("loss scales start anew")));
}

}  // namespace
}  // namespace semitone::train_resume_test
