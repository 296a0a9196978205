// `semitone train --model gpt` on a text.

#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/image_files.h"
#include "tests/support/made_up_text.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <string>

namespace semitone::train_text_test {
namespace {

using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::Words;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainText : public CliTest {
 protected:
  TrainText() { write_text(text_, test::made_up_text(200, 1)); }

  // On the file, which has 1200 characters, or on another one.
  Words words(const Words& more = {}) const { return words_for(text_, more); }
  static Words words_for(const std::filesystem::path& file, const Words& more = {}) {
    Words all{"train", "--model", "gpt", "--data", file.string(), "--threads", "1"};
    all.insert(all.end(), {"--sequence-length", "32"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  std::filesystem::path text_ = folder_ / "text.txt";
};

TEST_F(TrainText, SaysWhatItDoesAndReportsThePerplexity) {
  const std::string file = (folder_ / "gpt.json").string();
  const std::string run = (folder_ / "run").string();
  const ProcessResult finished = run_semitone(words(
      {"--epochs", "3", "--lr", "0.002", "--json", file, "--log-dir", run, "--log-every", "2"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(
      finished.out,
      AllOf(HasSubstr("1056 training and 96 test characters, 9 different ones, in sequences "
                      "of 32, from " +
                      text_.string()),
            HasSubstr("gpt, 3 epochs in batches of 8, adamw lr 0.002, cosine, seed 0"),
            HasSubstr("level  dtype     perplexity  test loss     loss  characters/s  ms/step"),
            Not(HasSubstr("memory  "))));
  EXPECT_THAT(finished.err, AllOf(HasSubstr(" characters/s"), HasSubstr("test perplexity ")));
  const json result = json::parse(read_text(file)).at(0);
  EXPECT_EQ(result.at("data"), "text");
  EXPECT_EQ(result.at("steps"), 15);
  // A guess among nine.
  EXPECT_LT(result.at("test_loss"), std::log(9));
  EXPECT_NEAR(result.at("test_perplexity").get<double>(),
              std::exp(result.at("test_loss").get<double>()), 1e-9);
  EXPECT_GT(result.at("characters_per_second"), 0);
  EXPECT_FALSE(result.contains("images_per_second"));
  EXPECT_THAT(read_text(run + "/metrics.csv"),
              AllOf(HasSubstr(",train/characters_per_second,"), HasSubstr(",test/perplexity,")));
  const json config = json::parse(read_text(run + "/run.json")).at("config");
  EXPECT_EQ(config.at("optimizer"), "adamw");
  EXPECT_EQ(config.at("lr"), "0.002");
}

TEST_F(TrainText, LevelsAndProcessesOfTheirOwnGetTheSameFlags) {
  const std::string file = (folder_ / "all.json").string();
  const ProcessResult finished =
      run_semitone(words({"--opt-level", "all", "--nproc", "2", "--batch-size", "4", "--max-steps",
                          "2", "--json", file}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  const json results = json::parse(read_text(file));
  ASSERT_EQ(results.size(), 4U);
  for (const json& result : results) {
    EXPECT_EQ(result.at("processes"), 2);
    EXPECT_EQ(result.at("epochs"), 10);  // the model's default, not the flag's
    EXPECT_EQ(result.at("data"), "text");
    EXPECT_NEAR(result.at("test_loss").get<double>(), results[0].at("test_loss").get<double>(),
                0.05);
  }
}

TEST_F(TrainText, ResumesAndWritesWeights) {
  const auto weights = [&](const char* name) { return folder_ / name; };
  const auto run = (folder_ / "checkpoints").string();
  ASSERT_TRUE(run_semitone(words({"--epochs", "1", "--save-weights", weights("whole.pt").string()}))
                  .status.success());
  const Words resumable{"--epochs", "1",    "--checkpoint-dir", run,
                        "--resume", "auto", "--save-weights",   weights("two.pt").string()};
  Words first = resumable;
  first.insert(first.end(), {"--max-steps", "2"});
  ASSERT_TRUE(run_semitone(words(first)).status.success());
  const ProcessResult second = run_semitone(words(resumable));
  ASSERT_TRUE(second.status.success()) << second.err;
  EXPECT_THAT(second.err, HasSubstr("resumed from step 2"));
  EXPECT_TRUE(read_text(weights("two.pt")) == read_text(weights("whole.pt")));
}

TEST_F(TrainText, TheOtherCommandsTakeTextsToo) {
  const auto run = [&](const Words& command) {
    Words all = command;
    all.insert(all.end(), {"--model", "gpt", "--data", text_.string(), "--threads", "1",
                           "--sequence-length", "32"});
    return run_semitone(all);
  };
  const ProcessResult what_if = run({"whatif", "--max-steps", "2"});
  EXPECT_TRUE(what_if.status.success()) << what_if.err;
  EXPECT_THAT(what_if.out, HasSubstr("layers.0.q_proj"));
  const ProcessResult tuned = run({"tune", "--max-steps", "4", "--band", "50"});
  EXPECT_TRUE(tuned.status.success()) << tuned.err;
  EXPECT_THAT(tuned.out, HasSubstr("the given policy suffices"));
}

TEST_F(TrainText, DefaultsAreThoseOfTheModel) {
  const ProcessResult finished = run_semitone({"train", "--model", "gpt", "--print-config"});
  EXPECT_THAT(finished.out, AllOf(HasSubstr("\n# optimizer=\"adamw\""), HasSubstr("\n# lr=0.001"),
                                  HasSubstr("\n# max-data=1\n"), HasSubstr("\n# test-share=0.1")));
  EXPECT_THAT(run_semitone({"train", "--print-config"}).out,
              AllOf(HasSubstr("\n# optimizer=\"sgd\""), HasSubstr("\n# lr=0.05"),
                    HasSubstr("\n# max-data=8\n")));
  EXPECT_THAT(run_semitone({"train", "--help"}).out,
              HasSubstr("Defaults of gpt: --optimizer adamw"));
}

TEST_F(TrainText, ALargerTextNeedsALargerLimit) {
  // 10^-6 GiB.
  const std::string expected = "[zoo.text] expected a text of at most 1074 bytes in '";
  expect_failure(run_semitone(words({"--max-data", "1e-6"})), 1,
                 expected + text_.string() +
                     "', got 1200 bytes — raise --max-data, or use a part of the text");
  const auto packed = folder_ / "text.txt.gz";
  write_text(packed, test::gzip(read_text(text_)));
  expect_failure(run_semitone(words_for(packed, {"--max-data", "1e-6"})), 1,
                 expected + packed.string() + "', got a longer one — raise --max-data");
  const ProcessResult finished = run_semitone(words({"--max-data", "2e-6", "--max-steps", "1"}));
  EXPECT_TRUE(finished.status.success()) << finished.err;
  expect_failure(run_semitone(words({"--max-data", "0"})), 2,
                 "[cli.train] expected --max-data above 0 and up to 1e9, got '0'");
}

TEST_F(TrainText, ModelsAndDataThatDoNotFitAreOneMessageWithARemedy) {
  expect_failure(run_semitone(train({"--model", "gpt"})), 1,
                 "[cli.train] expected a text file at '" + data_.path().string() +
                     "' for --model gpt, got a folder — give --data FILE");
  expect_failure(
      run_semitone({"train", "--data", text_.string()}), 1,
      "[cli.train] expected a folder with images at '" + text_.string() +
          "' for --model convnet, got a file — give --data DIR, or for a text --model gpt");
  expect_failure(run_semitone(words_for(folder_ / "none.txt")), 1, "[zoo.text] expected ");
  expect_failure(run_semitone(words_for(data_ / "train-images-idx3-ubyte.gz")), 1,
                 "for --model gpt, got bytes that are 0 — give --data a text in UTF-8");
  write_text(text_, test::made_up_text(20, 1));
  expect_failure(run_semitone(words()), 1,
                 "[train.text] expected a text with at least 33 characters to train on and 33 for "
                 "the test, for sequences of 32, got 108 and 12 — use a longer text");
  expect_failure(
      run_semitone(train({"--sequence-length", "16"})), 2,
      "[cli.train] expected --sequence-length with a model for text, got --model convnet");
  expect_failure(run_semitone(words({"--memory-format", "nhwc"})), 2,
                 "[cli.train] expected --memory-format with a model for images, got --model gpt");
  expect_failure(run_semitone(words({"--augment"})), 2,
                 "[cli.train] expected --augment with a model for images, got --model gpt");
  expect_failure(run_semitone(words({"--image-size", "32"})), 2,
                 "[cli.train] expected --image-size with a model for images, got --model gpt");
}

}  // namespace
}  // namespace semitone::train_text_test
