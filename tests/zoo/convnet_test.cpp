#include "semitone/zoo/convnet.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

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
