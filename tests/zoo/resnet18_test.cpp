#include "semitone/zoo/resnet18.h"

#include "tests/support/errors.h"
#include "tests/zoo/training.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

TEST(ResNet18, HasTheSizeOfTheOriginal) {
  const ResNet18 model;
  int64_t parameters = 0;
  int64_t convolutions = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    parameters += parameter.numel();
    convolutions += parameter.dim() == 4;
  }
  EXPECT_EQ(parameters, 11'689'512);
  EXPECT_EQ(convolutions, 20);
}

TEST(ResNet18, HalvesTheImageFiveTimes) {
  ResNet18 model(4);
  EXPECT_EQ(model->features->forward(torch::zeros({1, 3, 64, 96})).sizes(),
            (std::vector<int64_t>{1, 512, 2, 3}));
  EXPECT_EQ(model->forward(torch::zeros({2, 3, 48, 33})).sizes(), (std::vector<int64_t>{2, 4}));
}

TEST(ResNet18, ClonesWithItsWeights) {
  torch::manual_seed(0);
  ResNet18 model(4);
  const auto copy = std::dynamic_pointer_cast<ResNet18Impl>(model->clone());
  model->eval();
  copy->eval();
  const at::Tensor images = torch::rand({2, 3, 32, 32});
  EXPECT_TRUE(torch::equal(copy->forward(images), model->forward(images)));
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : copy->parameters()) parameter.add_(0.1);
  EXPECT_FALSE(torch::equal(copy->forward(images), model->forward(images)));
}

TEST(ResNet18, LearnsABatch) {
  torch::manual_seed(0);
  ResNet18 model(4);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.002).momentum(0.9));
  const at::Tensor images = torch::rand({8, 3, 32, 32});
  const at::Tensor labels = torch::arange(8) % 4;
  // As in ResNet-50's test, the first steps differ between processors.
  const auto losses = losses_of(model, optimizer, 20, [&] {
    return torch::cross_entropy_loss(model->forward(images), labels);
  });
  EXPECT_LT(losses.back(), 0.1 * losses.front());
}

TEST(ResNet18, ItsBlocksStartWithTheGainThatIsAskedFor) {
  const ResNet18 model(ResNetOptions(4).residual_gain(0.25));
  int64_t last = 0;
  int64_t ones = 0;
  for (const auto& item : model->named_parameters()) {
    if (item.key().find("second.1.weight") != std::string::npos)
      last += torch::equal(item.value(), torch::full_like(item.value(), 0.25));
    else if (item.value().dim() == 1 && item.key().find(".1.weight") != std::string::npos)
      ones += torch::equal(item.value(), torch::ones_like(item.value()));
  }
  EXPECT_EQ(last, 8);
  EXPECT_EQ(ones, 12);  // the stem's, eight first ones and three shortcuts'
}

TEST(ResNet18, NeedsAClass) {
  test::expect_error([] { ResNet18 model(0); }, {"[zoo.resnet18]", "classes above 0, got 0"});
}

}  // namespace
}  // namespace semitone::zoo
