#include "semitone/autocast/autocast.h"

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/nn.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <string>

namespace semitone::test::accelerator {
namespace {

namespace F = torch::nn::functional;

struct AcceleratorAutocast : AcceleratorTest {};

TEST_F(AcceleratorAutocast, MatrixProductsRunIn16Bits) {
  const auto a = torch::randn({4, 5}, device()), b = torch::randn({5, 3}, device());
  for (const auto dtype : kDtypes) {
    const amp::Autocast region(kType, dtype);
    EXPECT_EQ(torch::matmul(a, b).scalar_type(), dtype);
    EXPECT_EQ(torch::mm(a, b).scalar_type(), dtype);
  }
  const amp::Autocast region(kType);
  EXPECT_EQ(torch::matmul(a, b).scalar_type(), at::kHalf);
}

TEST_F(AcceleratorAutocast, RegionsBelongToOneDeviceType) {
  const auto a = torch::randn({4, 4});
  const auto b = a.to(device());
  {
    const amp::Autocast region(at::kCPU, at::kBFloat16);
    EXPECT_EQ(torch::mm(b, b).scalar_type(), at::kFloat);
  }
  const amp::Autocast region(kType);
  EXPECT_EQ(torch::mm(a, a).scalar_type(), at::kFloat);
  EXPECT_EQ(torch::mm(b, b).scalar_type(), at::kHalf);
}

// LibTorch's lists for GPUs hold for devices that it has no list for.
TEST_F(AcceleratorAutocast, LossesAndNormsRunInFp32) {
  const auto x = torch::randn({4, 5}, device()).to(at::kHalf);
  const amp::Autocast region(kType, at::kHalf);
  EXPECT_EQ(torch::softmax(x, 1).scalar_type(), at::kFloat);
  EXPECT_EQ(torch::layer_norm(x, {5}).scalar_type(), at::kFloat);
  EXPECT_EQ(F::mse_loss(x, x).scalar_type(), at::kFloat);
  EXPECT_EQ(torch::cat({x, x.to(at::kFloat)}).scalar_type(), at::kFloat);
}

TEST_F(AcceleratorAutocast, EveryPresetTakesTheDevice) {
  for (const std::string& name : amp::CastPolicy::preset_names()) {
    const amp::Autocast region(amp::CastPolicy::by_name(name, {kType, at::kBFloat16}));
    const auto x = torch::randn({4, 4}, device());
    const auto want = name == "none" ? at::kFloat : at::kBFloat16;
    EXPECT_EQ(torch::mm(x, x).scalar_type(), want) << name;
  }
}

TEST_F(AcceleratorAutocast, GradientsHaveTheLeavesDtypeAndNothingIsRead) {
  torch::manual_seed(1);
  const auto x = torch::randn({8, 5});
  const auto weight = torch::randn({3, 5}), bias = torch::randn({3});
  const auto loss_of = [&](const at::Tensor& input, const at::Tensor& w, const at::Tensor& b) {
    return torch::relu(F::linear(F::linear(input, w, b), w.t())).pow(2).mean();
  };
  for (const auto dtype : kDtypes) {
    auto host_weight = weight.clone().requires_grad_(), host_bias = bias.clone().requires_grad_();
    loss_of(x, host_weight, host_bias).backward();
    auto there = weight.to(device()).requires_grad_(),
         its_bias = bias.to(device()).requires_grad_();
    const auto input = x.to(device());
    const auto before = counts();
    {
      const amp::Autocast region(kType, dtype);
      loss_of(input, there, its_bias).backward();
    }
    EXPECT_EQ(counts().reads, before.reads);
    EXPECT_EQ(counts().waits, before.waits);
    EXPECT_EQ(there.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(near(there.grad().cpu(), host_weight.grad(), rounding_tolerance(dtype, 12)));
    EXPECT_TRUE(near(its_bias.grad().cpu(), host_bias.grad(), rounding_tolerance(dtype, 12)));
  }
}

TEST_F(AcceleratorAutocast, ChangedWeightsAreCastAgain) {
  auto weight = torch::ones({4, 4}, device()).requires_grad_();
  const auto x = torch::ones({1, 4}, device());
  const amp::Autocast region(kType, at::kHalf);
  EXPECT_EQ(torch::mm(x, weight)[0][0].item<float>(), 4);
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
  EXPECT_EQ(torch::mm(x, weight)[0][0].item<float>(), 8);
  weight.data().sub_(1);
  EXPECT_EQ(torch::mm(x, weight)[0][0].item<float>(), 4);
}

}  // namespace
}  // namespace semitone::test::accelerator
