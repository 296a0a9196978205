#include "src/train/images.h"

#include "tests/support/errors.h"
#include "tests/support/image_files.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace semitone::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string message(const zoo::ImageSet& train, const zoo::ImageSet& test) {
  return test::message_of<Error>([&] { image_data(train, test); });
}

TEST(ImageData, DataOfTheWrongKindAreRefused) {
  const zoo::ImageSet good = test::made_up_images(20, 1);
  EXPECT_THAT(message({}, good), AllOf(HasSubstr("training set"), HasSubstr("none")));
  EXPECT_THAT(message(good, {}), HasSubstr("test set"));
  zoo::ImageSet floats = good;
  floats.images = good.images.to(torch::kFloat);
  EXPECT_THAT(message(floats, good), HasSubstr("float32 of sizes [20, 28, 28]"));
  zoo::ImageSet unlabelled = good;
  unlabelled.labels = good.labels.slice(0, 1);
  EXPECT_THAT(message(good, unlabelled), HasSubstr("20 int64 labels"));
}

TEST(ImageData, TestImagesHaveTheSizeOfTrainingImages) {
  EXPECT_THAT(message(test::made_up_colours(8, 1), test::made_up_images(8, 1)),
              AllOf(HasSubstr("test images of sizes [3, 32, 32]"), HasSubstr("got [28, 28]")));
}

TEST(ImageData, OneTestExampleIsTheFirst) {
  const DataSet data = image_data(test::made_up_images(8, 1), test::made_up_images(5, 2));
  const DataSet one = with_one_test_example(data);
  EXPECT_EQ(one.train, data.train);
  EXPECT_EQ(one.test->size(), 1);
  const at::Tensor first = torch::zeros({1}, torch::kLong);
  EXPECT_TRUE(
      torch::equal(one.test->to(torch::kCPU)->batch(first).inputs, data.test->batch(first).inputs));
}

}  // namespace
}  // namespace semitone::train
