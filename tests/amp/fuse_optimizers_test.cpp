// Options::fuse_optimizers: LibTorch's optimizers in one pass.

#include "semitone/amp.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace semitone::amp::fuse_optimizers_test {
namespace {

struct Trained {
  std::vector<at::Tensor> weights;  // in fp32: masters where there are some
  std::vector<double> losses;
};

// Some steps on one batch.
// @param overflow  the step whose gradients overflow; -1: none
Trained train(const Options& options, bool sgd, int overflow = -1) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (sgd) {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(),
                                                    torch::optim::SGDOptions(0.1).momentum(0.9));
  } else {
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), 0.01);
  }
  auto mixed = initialize(net, *optimizer, Options(options).verbosity(0));
  const at::Tensor x = torch::randn({64, 16});
  const at::Tensor labels = torch::randint(4, {64}, torch::kLong);
  Trained result;
  for (int step = 0; step < 8; ++step) {
    optimizer->zero_grad();
    at::Tensor loss = torch::cross_entropy_loss(mixed.forward(net, x), labels);
    result.losses.push_back(loss.item<double>());
    if (step == overflow) loss = loss * std::numeric_limits<float>::max();
    mixed.scale_loss(loss, *optimizer).backward();
    const bool skipped = mixed.step(*optimizer) == Step::skipped;
    EXPECT_EQ(skipped, step == overflow);
  }
  for (const at::Tensor& weight : mixed.master_params(*optimizer))
    result.weights.push_back(weight.detach().to(torch::kFloat));
  return result;
}

TEST(FuseOptimizers, TrainsAsTheOptimizersOwnSteps) {
  for (const char* const level : {"O0", "O1", "O2", "O3"}) {
    for (const bool sgd : {true, false}) {
      SCOPED_TRACE(std::string(level) + (sgd ? " SGD" : " AdamW"));
      const auto options = Options(level).dtype(torch::kBFloat16);
      const Trained got = train(Options(options).fuse_optimizers(true), sgd);
      const Trained want = train(options, sgd);
      EXPECT_LT(got.losses.back(), 0.9 * got.losses.front());
      // The first step starts from the same weights and gradients.
      EXPECT_EQ(got.losses.front(), want.losses.front());
      for (std::size_t i = 0; i < want.losses.size(); ++i)
        EXPECT_NEAR(got.losses[i], want.losses[i], 0.01 * want.losses.front());
      ASSERT_EQ(got.weights.size(), want.weights.size());
      for (std::size_t i = 0; i < want.weights.size(); ++i) {
        const double off = (got.weights[i] - want.weights[i]).norm().item<double>();
        EXPECT_LT(off, 0.02 * want.weights[i].norm().item<double>()) << i;
      }
    }
  }
}

TEST(FuseOptimizers, SkippedStepsChangeNothing) {
  const auto options = Options("O2").dtype(torch::kHalf).loss_scale(128.0).fuse_optimizers(true);
  // A constant scale does not skip, so a dynamic one that never grows.
  const auto dynamic = Options("O2")
                           .dtype(torch::kHalf)
                           .loss_scale_options(LossScaleOptions().init_scale(128))
                           .fuse_optimizers(true);
  const Trained clean = train(dynamic, /*sgd=*/true);
  const Trained skipped = train(dynamic, /*sgd=*/true, /*overflow=*/7);
  const Trained shorter = train(options, /*sgd=*/true);
  EXPECT_EQ(clean.losses, shorter.losses);
  EXPECT_EQ(skipped.losses, clean.losses);
  EXPECT_FALSE(skipped.weights[0].equal(clean.weights[0]));
}

TEST(FuseOptimizers, IsAPropertyThatIsShown) {
  const auto shown = [](const Options& options) {
    return Properties::resolve(options, torch::kCPU).to_string();
  };
  EXPECT_THAT(shown(Options("O1").fuse_optimizers(true)), testing::HasSubstr("fuse_optimizers"));
  EXPECT_THAT(shown(Options("O1")), testing::Not(testing::HasSubstr("fuse_optimizers")));
}

}  // namespace
}  // namespace semitone::amp::fuse_optimizers_test
