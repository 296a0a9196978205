#include "semitone/zoo/resnet50.h"

#include "tests/support/errors.h"
#include "tests/zoo/training.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

TEST(ResNet50, HasTheSizeOfTheOriginal) {
  const ResNet50 model;
  int64_t parameters = 0;
  int64_t convolutions = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    parameters += parameter.numel();
    convolutions += parameter.dim() == 4;
  }
  EXPECT_EQ(parameters, 25'557'032);
  EXPECT_EQ(convolutions, 53);
}

TEST(ResNet50, MapsImagesToLogits) {
  ResNet50 model(4);
  EXPECT_EQ(model->forward(torch::zeros({2, 3, 32, 32})).sizes(), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(model->forward(torch::zeros({2, 3, 48, 33})).sizes(), (std::vector<int64_t>{2, 4}));
}

TEST(ResNet50, HalvesTheImageFiveTimes) {
  ResNet50 model(4);
  EXPECT_EQ(model->features->forward(torch::zeros({1, 3, 64, 96})).sizes(),
            (std::vector<int64_t>{1, 2048, 2, 3}));
}

TEST(ResNet50, ClonesWithItsWeights) {
  torch::manual_seed(0);
  ResNet50 model(4);
  const auto copy = std::dynamic_pointer_cast<ResNet50Impl>(model->clone());
  model->eval();
  copy->eval();
  const at::Tensor images = torch::rand({2, 3, 32, 32});
  EXPECT_TRUE(torch::equal(copy->forward(images), model->forward(images)));
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : copy->parameters()) parameter.add_(0.1);
  EXPECT_FALSE(torch::equal(copy->forward(images), model->forward(images)));
}

TEST(ResNet50, LearnsABatch) {
  torch::manual_seed(0);
  ResNet50 model(4);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.002).momentum(0.9));
  const at::Tensor images = torch::rand({8, 3, 64, 64});
  const at::Tensor labels = torch::arange(8) % 4;
  // The loss of the first steps goes up and down, differently on each processor; after 20 it is
  // below 0.01.
  const auto losses = losses_of(model, optimizer, 20, [&] {
    return torch::cross_entropy_loss(model->forward(images), labels);
  });
  EXPECT_LT(losses.back(), 0.1 * losses.front());
}

TEST(ResNet50, ItsBlocksStartWithTheGainThatIsAskedFor) {
  for (const double gain : {1.0, 0.25, 0.0}) {
    const ResNet50 model(ResNetOptions(4).residual_gain(gain));
    int64_t last_ones = 0;
    int64_t ones = 0;
    for (const auto& item : model->named_parameters()) {
      if (item.key().find("expand.1.weight") != std::string::npos)
        last_ones += torch::equal(item.value(), torch::full_like(item.value(), gain));
      else if (item.value().dim() == 1 && item.key().find(".1.weight") != std::string::npos)
        ones += torch::equal(item.value(), torch::ones_like(item.value()));
    }
    EXPECT_EQ(last_ones, 16);
    EXPECT_EQ(ones, 37);
  }
}

TEST(ResNet50, NeedsAClass) {
  test::expect_error([] { ResNet50 model(0); }, {"[zoo.resnet50]", "classes above 0, got 0"});
}

}  // namespace
}  // namespace semitone::zoo
