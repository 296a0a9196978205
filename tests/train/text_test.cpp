#include "src/train/text.h"

#include "semitone/weights/file.h"
#include "src/train/task.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/small_training.h"
#include "tests/train/text_training.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

using amp::OptLevel;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The text 0 1 2 … of numbers below 256.
zoo::Text counted(std::int64_t size) {
  return {torch::arange(size).to(torch::kByte), std::string(256, '?')};
}

TEST(TextData, PredictsEachCharacterFromThoseBeforeIt) {
  // 90 characters to train on and 10 for the test, in sequences of 4.
  const DataSet data = text_data(counted(100), TextOptions().sequence_length(4));
  ASSERT_EQ(data.train->size(), 22);
  ASSERT_EQ(data.test->size(), 2);
  const Batch batch = data.train->batch(torch::tensor({2, 0}));
  EXPECT_TRUE(torch::equal(batch.inputs, torch::tensor({{8, 9, 10, 11}, {0, 1, 2, 3}})));
  EXPECT_TRUE(torch::equal(batch.labels, torch::tensor({9, 10, 11, 12, 1, 2, 3, 4})));
  const at::Tensor learned = data.train->batch(torch::arange(22)).labels;
  EXPECT_TRUE(torch::equal(learned, torch::arange(1, 89)));
  // The character before the first one that is predicted belongs to the test too.
  const at::Tensor tested = data.test->to(torch::kCPU)->batch(torch::arange(2)).labels;
  EXPECT_TRUE(torch::equal(tested, torch::arange(91, 99)));
}

TEST(TextData, ATextThatIsTooShortIsAnError) {
  const auto message = [](std::int64_t size, const TextOptions& options) {
    return test::error_of([&] { text_data(counted(size), options); });
  };
  EXPECT_THAT(
      message(1000, TextOptions()),
      AllOf(HasSubstr("[train.text] expected a text with at least 129 characters to train "
                      "on and 129 for the test, for sequences of 128, got 900 and 100"),
            HasSubstr("use a longer text, a lower --sequence-length or another --test-share")));
  EXPECT_NO_THROW(text_data(counted(1290)));
  EXPECT_THAT(message(1000, TextOptions().sequence_length(0)), HasSubstr("a sequence length"));
  EXPECT_THAT(message(1000, TextOptions().test_share(1)), HasSubstr("a test share"));
  EXPECT_THAT(message(1000, TextOptions().test_share(std::nan(""))), HasSubstr("a test share"));
}

TEST(TextData, AModelOfImagesAndATextAreAnErrorAndSoIsTheReverse) {
  EXPECT_THAT(test::error_of([] { text_task(find_model("vit"), counted(2000)); }),
              HasSubstr("expected a model for text, got vit, a model for images"));
  EXPECT_THAT(test::error_of([] { image_task(find_model("gpt"), {}, {}); }),
              HasSubstr("expected a model for images, got gpt, a model for text"));
}

TEST(TextTraining, ATextCannotBeAugmented) {
  const DataSet data = text_data(counted(2000), TextOptions().sequence_length(48));
  EXPECT_THAT(test::error_of([&] {
                train_classifier(small_gpt, data,
                                 text_options(OptLevel::O1, torch::kBFloat16).augment(true));
              }),
              HasSubstr("expected data that can be augmented, got sequences"));
}

// Attention over the characters of a word finds what pairs of characters do not have.
TEST(TextTraining, LearnsNearlyAllOfATextWhoseEntropyIsKnown) {
  const zoo::Text text = test::read_made_up_text(4000, 2);
  const double entropy = std::log(test::kMadeUpWords) / test::kMadeUpWordLength;
  const double of_pairs = test::loss_of_pairs(text, 0.1);
  EXPECT_GT(of_pairs, 1.2);
  const DataSet data = text_data(text, TextOptions().sequence_length(48));
  const TrainResult result = train_classifier(
      small_gpt, data,
      text_options(OptLevel::O1, torch::kBFloat16).batch_size(16).lr(0.01).epochs(6));
  // 0.471, and 0.473 with AVX2: nearly 0.462.
  EXPECT_LT(result.test_loss, entropy + 0.05);
  // A model that saw what it predicts would be below.
  EXPECT_GT(result.test_loss, 0.95 * entropy);
  EXPECT_DOUBLE_EQ(result.test_perplexity(), std::exp(result.test_loss));
  EXPECT_GT(result.test_accuracy, 0.7);
  EXPECT_EQ(result.kind.items, "characters");
  EXPECT_EQ(result.memory_format, MemoryFormat::nchw);
}

TEST(TextTraining, TheGptTrainsAtEveryLevel) {
  const zoo::Text text = test::read_made_up_text(200, 2);
  const Task task = text_task(find_model("gpt"), text, TextOptions().sequence_length(48));
  EXPECT_EQ(task.description,
            "1056 training and 96 test characters, 9 different ones, in sequences of 48");
  for (const auto& [level, dtype] :
       {std::pair(OptLevel::O0, torch::kBFloat16), std::pair(OptLevel::O1, torch::kBFloat16),
        std::pair(OptLevel::O2, torch::kHalf), std::pair(OptLevel::O3, torch::kBFloat16)}) {
    Recorder recorder;
    train_classifier(task.make_model, task.data,
                     text_options(level, dtype)
                         .lr(0.001)
                         .batch_size(4)
                         .epochs(2)
                         .check_nonfinite(level == OptLevel::O2),
                     recorder);
    ASSERT_EQ(recorder.losses.size(), 12U);
    // It guesses at first. In 12 steps it learns that spaces are more frequent (2.10).
    EXPECT_NEAR(recorder.losses.front(), std::log(9), 0.3) << amp::name_of(level);
    EXPECT_LT(recorder.losses.back(), 2.15) << amp::name_of(level);
  }
}

TEST(TextTraining, ARunContinuesBitForBit) {
  const test::TemporaryFolder folder;
  const DataSet data = short_text();
  for (const auto& [level, optimizer] :
       {std::pair(OptLevel::O1, "adamw"), std::pair(OptLevel::O2, "fused-adamw")}) {
    const auto run = folder / optimizer;
    const auto options = [level = level, optimizer = optimizer](std::int64_t steps) {
      return text_options(level, torch::kHalf).optimizer(optimizer).epochs(2).max_steps(steps);
    };
    Recorder whole;
    const TrainResult expected = train_classifier(
        small_gpt, data, options(24).save_weights(folder / "whole.safetensors"), whole);
    train_classifier(small_gpt, data, options(10).checkpoint_dir(run));
    torch::manual_seed(12345);  // what a new process would not have
    Recorder second;
    const TrainResult resumed = train_classifier(
        small_gpt, data,
        options(24).checkpoint_dir(run).resume_auto(true).save_weights(folder / "two.safetensors"),
        second);
    EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + 10, whole.losses.end()));
    EXPECT_EQ(resumed.train_loss, expected.train_loss);
    EXPECT_EQ(resumed.test_loss, expected.test_loss);
    EXPECT_TRUE(test::read_text(folder / "two.safetensors") ==
                test::read_text(folder / "whole.safetensors"));
    const DataSet longer =
        text_data(test::read_made_up_text(800, 2), TextOptions().sequence_length(16));
    EXPECT_THAT(test::error_of([&] {
                  train_classifier(small_gpt, longer,
                                   options(34).checkpoint_dir(run).resume_auto(true));
                }),
                AllOf(HasSubstr("--sequence-length 16"), HasSubstr("got --sequence-length 32"),
                      HasSubstr("training sequences")));
  }
}

}  // namespace
}  // namespace semitone::train
