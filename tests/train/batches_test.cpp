#include "src/train/batches.h"

#include "semitone/zoo/augment.h"
#include "src/train/images.h"
#include "tests/support/image_files.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace semitone::train {
namespace {

at::Tensor joined(const std::vector<at::Tensor>& batches) {
  return torch::cat(batches);
}

class BatchesTest : public ::testing::Test {
 protected:
  zoo::ImageSet set_ = test::made_up_images(25, 3);
  Batches batches_{*image_data(set_, set_).train, torch::kCPU, /*channels_last=*/false};
};

TEST_F(BatchesTest, AnEpochHasEveryImageOnceAndTheRestLast) {
  const auto order = batches_.shuffled(10, 0, 0);
  ASSERT_EQ(order.size(), 3U);
  EXPECT_EQ(order.back().numel(), 5);
  EXPECT_TRUE(torch::equal(std::get<0>(joined(order).sort()), torch::arange(25)));
  EXPECT_FALSE(torch::equal(joined(order), torch::arange(25)));
  EXPECT_TRUE(torch::equal(joined(batches_.in_order(10)), torch::arange(25)));
  EXPECT_EQ(batches_.shuffled(100, 0, 0).size(), 1U);
}

TEST_F(BatchesTest, TheOrderDependsOnSeedAndEpochAlone) {
  const at::Tensor order = joined(batches_.shuffled(10, 4, 7));
  torch::manual_seed(99);
  EXPECT_TRUE(torch::equal(joined(batches_.shuffled(10, 4, 7)), order));
  EXPECT_TRUE(torch::equal(joined(batches_.shuffled(3, 4, 7)), order));
  EXPECT_FALSE(torch::equal(joined(batches_.shuffled(10, 4, 8)), order));
  EXPECT_FALSE(torch::equal(joined(batches_.shuffled(10, 5, 7)), order));
  // Not only the sum of the two.
  EXPECT_FALSE(torch::equal(joined(batches_.shuffled(10, 5, 6)), order));
}

TEST_F(BatchesTest, ImagesComeAsNumbersFromZeroToOne) {
  set_.images[6].fill_(255);
  set_.images[2].fill_(51);
  const Batch batch = batches_.batch(torch::tensor({6, 2}));
  EXPECT_EQ(batch.inputs.scalar_type(), torch::kFloat);
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{2, 1, 28, 28}));
  EXPECT_TRUE(torch::equal(batch.inputs[0], torch::ones({1, 28, 28})));
  EXPECT_TRUE(torch::equal(batch.inputs[1], torch::full({1, 28, 28}, 51.F / 255.F)));
  EXPECT_TRUE(torch::equal(batch.labels, set_.labels.index_select(0, torch::tensor({6, 2}))));
}

TEST_F(BatchesTest, ColoursStayAsTheyAre) {
  const zoo::ImageSet set = test::made_up_colours(5, 3);
  const Batch batch = Batches(*image_data(set, set).train, torch::kCPU, /*channels_last=*/true)
                          .batch(torch::tensor({4, 0}));
  EXPECT_EQ(batch.inputs.suggest_memory_format(), at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(torch::equal(batch.inputs[1], set.images[0].to(torch::kFloat).div(255)));
}

TEST_F(BatchesTest, AugmentedImagesDependOnSeedAndEpoch) {
  const at::Tensor indices = torch::tensor({20, 3, 11});
  const Batch batch = batches_.augmented(indices, 5, 2);
  const at::Tensor expected =
      zoo::augment(set_.images.index_select(0, indices), indices, 2, zoo::AugmentOptions().seed(5));
  EXPECT_TRUE(torch::equal(batch.inputs, expected.unsqueeze(1).to(torch::kFloat).div(255)));
  EXPECT_TRUE(torch::equal(batch.labels, set_.labels.index_select(0, indices)));
  EXPECT_FALSE(torch::equal(batches_.augmented(indices, 5, 3).inputs, batch.inputs));
  EXPECT_FALSE(torch::equal(batches_.augmented(indices, 6, 2).inputs, batch.inputs));
}

TEST_F(BatchesTest, ChannelsLastIsSaidByTheStridesAlsoWithOneChannel) {
  const Batches last(*image_data(set_, set_).train, torch::kCPU, /*channels_last=*/true);
  const at::Tensor indices = torch::arange(4);
  const at::Tensor images = last.batch(indices).inputs;
  EXPECT_EQ(images.suggest_memory_format(), at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(torch::equal(images, batches_.batch(indices).inputs));
}

}  // namespace
}  // namespace semitone::train
