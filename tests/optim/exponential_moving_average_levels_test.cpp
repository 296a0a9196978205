// Averages at the opt levels of amp::initialize, with and without master weights.

#include "semitone/amp/initialize.h"
#include "semitone/optim/exponential_moving_average.h"
#include "semitone/optim/fused_adam.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::optim::mixed_average_test {
namespace {

using test::copies;
using test::same_bits;
using test::ToyNet;

ToyNet make_net() {
  torch::manual_seed(3);
  return test::odd_net();
}

struct Setting {
  const char* level;
  c10::ScalarType dtype;
  const char* optimizer;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const std::vector<at::Tensor>& parameters) {
  if (name == "SGD") return std::make_unique<torch::optim::SGD>(parameters, 0.05);
  return std::make_unique<FusedAdam>(parameters,
                                     FusedAdamOptions(0.01).split_master(name == "split"));
}

class MixedAverage : public testing::TestWithParam<Setting> {
 protected:
  void train() {
    optimizer->zero_grad();
    mixed.scale_loss(mixed.forward(net, torch::randn({4, 9})).pow(2).mean(), *optimizer).backward();
    EXPECT_EQ(mixed.step(*optimizer), amp::Step::stepped);
  }

  // In fp32: with the masters' values.
  std::vector<at::Tensor> exact() {
    const auto fp32 = mixed.fp32_weights(net);
    return copies(net->parameters());
  }

  std::vector<at::Tensor> averages_of(ExponentialMovingAverage& ema) const {
    const auto averaged = ema.apply();
    return copies(net->parameters());
  }

  ToyNet net = make_net();
  std::unique_ptr<torch::optim::Optimizer> optimizer =
      make_optimizer(GetParam().optimizer, net->parameters());
  amp::MixedPrecision mixed = amp::initialize(
      net, *optimizer,
      amp::Options(GetParam().level).dtype(GetParam().dtype).loss_scale(16).verbosity(0));
};

TEST_P(MixedAverage, AveragesMastersAndRestoresBothBitForBit) {
  ExponentialMovingAverage ema(*net, 0.75);
  std::vector<at::Tensor> want;
  for (int step = 0; step < 5; ++step) {
    train();
    ema.update();
    const auto now = exact();
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (step == 0) {
        want.push_back(now[i]);
      } else {
        want[i] = torch::lerp(want[i], now[i], 1 - 0.75);
      }
    }
  }
  const auto weights = copies(net->parameters());
  const auto masters = exact();
  const bool has_masters = std::string(GetParam().level) != "O3";
  {
    const auto averaged = ema.apply();
    std::vector<at::Tensor> rounded;
    for (std::size_t i = 0; i < want.size(); ++i)
      rounded.push_back(want[i].to(weights[i].scalar_type()));
    if (std::string(GetParam().optimizer) != "split") {  // which rounds ties away from 0
      EXPECT_TRUE(same_bits(copies(net->parameters()), rounded));
    }
    if (has_masters) {
      EXPECT_TRUE(same_bits(exact(), want));
    }
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(mixed.forward(net, torch::randn({4, 9})).isfinite().all().item<bool>());
  }
  EXPECT_TRUE(same_bits(copies(net->parameters()), weights));
  EXPECT_TRUE(same_bits(exact(), masters));
}

// An evaluation with averaged weights leaves no trace in the training.
TEST_P(MixedAverage, TrainingContinuesAsWithoutTheEvaluation) {
  torch::manual_seed(9);
  ExponentialMovingAverage ema(*net, 0.75);
  train();
  ema.update();
  train();
  {
    const auto averaged = ema.apply();
    const torch::NoGradGuard no_grad;
    net->eval();
    mixed.forward(net, torch::ones({4, 9}));
    net->train();
  }
  train();
  const auto got = exact();

  const ToyNet other = make_net();
  auto other_optimizer = make_optimizer(GetParam().optimizer, other->parameters());
  auto other_mixed = amp::initialize(
      other, *other_optimizer,
      amp::Options(GetParam().level).dtype(GetParam().dtype).loss_scale(16).verbosity(0));
  std::swap(mixed, other_mixed);
  torch::manual_seed(9);
  const ToyNet first = std::exchange(net, other);
  std::swap(optimizer, other_optimizer);
  for (int step = 0; step < 3; ++step) train();
  EXPECT_TRUE(same_bits(got, exact()));
}

TEST_P(MixedAverage, IsTheSameInsideFp32Weights) {
  ExponentialMovingAverage outside(*net, 0.75);
  ExponentialMovingAverage inside(*net, 0.75);
  for (int step = 0; step < 2; ++step) {
    train();
    outside.update();
    const auto fp32 = mixed.fp32_weights(net);
    inside.update();
  }
  EXPECT_TRUE(same_bits(averages_of(inside), averages_of(outside)));
  const auto before = exact();
  {
    const auto fp32 = mixed.fp32_weights(net);
    const auto averaged = inside.apply();
  }
  EXPECT_TRUE(same_bits(exact(), before));
}

INSTANTIATE_TEST_SUITE_P(Levels, MixedAverage,
                         testing::Values(Setting{"O1", torch::kBFloat16, "SGD"},
                                         Setting{"O2", torch::kHalf, "SGD"},
                                         Setting{"O2", torch::kHalf, "FusedAdam"},
                                         Setting{"O2", torch::kBFloat16, "FusedAdam"},
                                         Setting{"O2", torch::kBFloat16, "split"},
                                         Setting{"O3", torch::kBFloat16, "FusedAdam"}),
                         [](const auto& one) {
                           return std::string(one.param.level) +
                                  (one.param.dtype == torch::kHalf ? "half" : "bfloat16") +
                                  one.param.optimizer;
                         });

}  // namespace
}  // namespace semitone::optim::mixed_average_test
