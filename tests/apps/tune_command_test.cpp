// `semitone tune`, --policy of `train` and `ops`, and the smallest number of steps of `whatif`.

#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

namespace semitone::tune_command_test {
namespace {

using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::Words;
using test::write_text;
using ::testing::HasSubstr;
using ::testing::Not;

class TuneCommand : public CliTest {
 protected:
  Words tune(const Words& more = {}) const {
    Words words = train({"--dtype", "bf16"});
    words.front() = "tune";
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string policy() const { return (folder_ / "policy.json").string(); }
};

TEST_F(TuneCommand, WritesAPolicyThatTrainAndOpsTake) {
  const auto result = folder_ / "tune.json";
  const ProcessResult tuned = run_semitone(
      tune({"--max-steps", "8", "--band", "50", "--out", policy(), "--json", result.string()}));
  ASSERT_TRUE(tuned.status.success()) << tuned.err;
  EXPECT_THAT(tuned.out, HasSubstr("CastPolicy::semitone({torch::kCPU, torch::kBFloat16})"));
  EXPECT_THAT(tuned.err, HasSubstr("in the band"));
  const json written = json::parse(read_text(result));
  EXPECT_EQ(written.at("steps"), 8);
  EXPECT_EQ(written.at("trials").size(), 3U);
  EXPECT_EQ(written.at("policy"), json::parse(read_text(policy())));

  write_text(policy(), R"({"format": "semitone.cast-policy", "version": 1, "preset": "semitone",
                           "operators": {"conv2d": {"action": "fp32", "reason": "as found"}}})");
  EXPECT_THAT(run_semitone({"ops", "--policy", policy(), "--op", "conv2d"}).out,
              HasSubstr("as found"));
  const auto trained = run_semitone(train({"--max-steps", "4", "--policy", policy()}));
  EXPECT_TRUE(trained.status.success()) << trained.err;
}

TEST_F(TuneCommand, ThePolicyHasAnEffectOnTraining) {
  write_text(policy(), R"({"format": "semitone.cast-policy", "version": 1, "preset": "none",
                           "fast_kernels": []})");
  const auto loss_of = [&](const Words& more) {
    const auto file = folder_ / "train.json";
    Words words = train({"--max-steps", "8", "--dtype", "bf16", "--json", file.string()});
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult finished = run_semitone(words);
    EXPECT_TRUE(finished.status.success()) << finished.err;
    return json::parse(read_text(file)).at(0).at("train_loss").get<double>();
  };
  const double fp32 = loss_of({"--opt-level", "O0"});
  EXPECT_EQ(loss_of({"--policy", policy()}), fp32);
  EXPECT_NE(loss_of({}), fp32);
}

TEST_F(TuneCommand, RefusesWhatIsNoPolicy) {
  expect_failure(run_semitone(train({"--policy", "apx"})), 2, "did you mean");
  expect_failure(run_semitone(tune({"--policy", "apx"})), 2, "did you mean");
  expect_failure(run_semitone({"ops", "--policy", "apx"}), 2, "did you mean");
  expect_failure(run_semitone(tune({"--policy", policy()})), 1, "missing, empty or unreadable");
  expect_failure(run_semitone(train({"--policy", "apex", "--opt-level", "O0"})), 2,
                 "--opt-level O1, O2, O3 or all with --policy");
  expect_failure(run_semitone(tune({"--band", "0"})), 2, "--band above 0");
  expect_failure(run_semitone(tune({"--max-steps", "2"})), 2, "--max-steps from 4");
  expect_failure(run_semitone(tune({"--out", (folder_ / "none" / "p.json").string()})), 1,
                 "p.json");
}

TEST_F(TuneCommand, RefusesATrainingOfFewerThanFourSteps) {
  const ProcessResult one = run_semitone(tune({"--epochs", "1", "--limit-batches", "1"}));
  expect_failure(one, 1,
                 "[train.tuning] expected at least 4 steps, got 1 step in 1 epoch of 1 batch — "
                 "raise --epochs or --limit-batches");
  EXPECT_THAT(one.err, Not(HasSubstr("[tune]")));
  const auto result = folder_ / "tune.json";
  const ProcessResult four = run_semitone(
      tune({"--epochs", "2", "--limit-batches", "2", "--band", "50", "--json", result.string()}));
  EXPECT_TRUE(four.status.success()) << four.err;
  EXPECT_EQ(json::parse(read_text(result)).at("steps"), 4);
}

TEST_F(TuneCommand, WhatIfRefusesATrainingOfOneStep) {
  Words words = train({"--limit-batches", "1"});
  words.front() = "whatif";
  const auto with_epochs = [&](const char* epochs) {
    Words all = words;
    all.insert(all.end(), {"--epochs", epochs});
    return run_semitone(all);
  };
  expect_failure(with_epochs("1"), 1,
                 "[cli.whatif] expected at least 2 steps, got 1 step in 1 epoch of 1 batch — "
                 "raise --epochs or --limit-batches");
  const ProcessResult two = with_epochs("2");
  EXPECT_TRUE(two.status.success()) << two.err;
  EXPECT_THAT(two.out, HasSubstr("conv1"));
}

TEST_F(TuneCommand, AResumedTrainingHasTheSamePolicy) {
  const std::string checkpoints = (folder_ / "checkpoints").string();
  ASSERT_TRUE(
      run_semitone(train({"--max-steps", "4", "--policy", "apex", "--checkpoint-dir", checkpoints}))
          .status.success());
  const ProcessResult other = run_semitone(
      train({"--max-steps", "8", "--checkpoint-dir", checkpoints, "--resume", "auto"}));
  EXPECT_FALSE(other.status.success());
  EXPECT_THAT(other.err, HasSubstr("--policy"));
  const ProcessResult in_fp8 =
      run_semitone(train({"--max-steps", "8", "--policy", "apex", "--fp8", "--checkpoint-dir",
                          checkpoints, "--resume", "auto"}));
  EXPECT_FALSE(in_fp8.status.success());
  EXPECT_THAT(in_fp8.err, HasSubstr("expected --fp8 true in '" + checkpoints));
  EXPECT_TRUE(run_semitone(train({"--max-steps", "8", "--policy", "apex", "--checkpoint-dir",
                                  checkpoints, "--resume", "auto"}))
                  .status.success());
}

}  // namespace
}  // namespace semitone::tune_command_test
