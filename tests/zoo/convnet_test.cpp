#include "semitone/zoo/convnet.h"

#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace semitone::zoo {
namespace {

TEST(ConvNet, HasTheTutorialsSize) {
  ConvNet model;
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += parameter.numel();
  EXPECT_EQ(parameters, 29034);
  EXPECT_EQ(model->forward(torch::zeros({3, 1, 28, 28})).sizes(), (std::vector<int64_t>{3, 10}));
}

TEST(ConvNet, HasAsManyOutputsAsAskedFor) {
  ConvNet model(4);
  EXPECT_EQ(model->forward(torch::zeros({2, 1, 28, 28})).sizes(), (std::vector<int64_t>{2, 4}));
}

TEST(ConvNet, FitsImagesOfOtherSizes) {
  ConvNet model(ConvNetOptions().channels(3).image_height(32).image_width(47).classes(5));
  EXPECT_EQ(model->conv1->weight.sizes(), (std::vector<int64_t>{16, 3, 5, 5}));
  EXPECT_EQ(model->forward(torch::zeros({2, 3, 32, 47})).sizes(), (std::vector<int64_t>{2, 5}));
  ConvNet least(ConvNetOptions().image_height(4).image_width(4));
  EXPECT_EQ(least->forward(torch::zeros({2, 1, 4, 4})).sizes(), (std::vector<int64_t>{2, 10}));
}

TEST(ConvNet, NeedsAtLeastThisMuch) {
  test::expect_error([] { ConvNet model(0); }, {"[zoo.convnet]", "classes of at least 1, got 0"});
  test::expect_error([] { ConvNet model(ConvNetOptions().channels(0)); }, {"channels of at least"});
  test::expect_error([] { ConvNet model(ConvNetOptions().image_height(3)); },
                     {"image_height of at least 4"});
  test::expect_error([] { ConvNet model(ConvNetOptions().image_width(3)); },
                     {"image_width of at least 4"});
}

TEST(ConvNet, ClonesWithItsWeights) {
  ConvNet model;
  const auto copy = std::dynamic_pointer_cast<ConvNetImpl>(model->clone());
  model->eval();
  copy->eval();
  const at::Tensor images = torch::rand({2, 1, 28, 28});
  EXPECT_TRUE(torch::equal(copy->forward(images), model->forward(images)));
  const torch::NoGradGuard no_grad;
  copy->fc->bias.add_(1);
  EXPECT_FALSE(torch::equal(copy->forward(images), model->forward(images)));
}

}  // namespace
}  // namespace semitone::zoo
