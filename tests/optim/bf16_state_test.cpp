// Optimizer state in bf16, rounded stochastically.

#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

namespace semitone::test {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using optim::FusedOptimizer;
using optim::FusedSGD;
using optim::FusedSGDOptions;

at::Tensor weight_of(at::IntArrayRef shape, c10::ScalarType dtype = at::kFloat) {
  torch::manual_seed(4);
  return torch::randn(shape).to(dtype).requires_grad_();
}

void step_with(FusedOptimizer& optimizer, const at::Tensor& weight, const at::Tensor& grad) {
  weight.mutable_grad() = grad.to(weight.scalar_type());
  optimizer.step();
}

// A gradient for each step.
void step_number(FusedOptimizer& optimizer, const at::Tensor& weight, int number) {
  step_with(optimizer, weight, torch::cos(torch::arange(weight.numel()) + number).view_as(weight));
}

TEST(Bf16State, TakesTwoBytesANumber) {
  const at::Tensor weight = weight_of({3, 5});
  FusedAdam adam({weight}, FusedAdamOptions().amsgrad(true).bf16_state(true));
  step_number(adam, weight, 0);
  for (const char* name : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
    EXPECT_EQ(adam.state_of(weight, name).scalar_type(), at::kBFloat16) << name;
  FusedSGD sgd({weight}, FusedSGDOptions().momentum(0.9).bf16_state(true));
  step_number(sgd, weight, 0);
  EXPECT_EQ(sgd.state_of(weight, "momentum_buffer").scalar_type(), at::kBFloat16);
}

TEST(Bf16State, LeavesFp64ParametersTheirFp64State) {
  const at::Tensor weight = weight_of({3}, at::kDouble);
  FusedAdam adam({weight}, FusedAdamOptions().bf16_state(true));
  step_number(adam, weight, 0);
  EXPECT_EQ(adam.state_of(weight, "exp_avg").scalar_type(), at::kDouble);
}

// Rounded to nearest, exp_avg_sq would stop at 0.25, from where a step adds less than half a unit.
TEST(Bf16State, MovesInStepsThatAreBelowItsUnit) {
  constexpr int kSteps = 3000;
  const at::Tensor weight = torch::zeros({4096}).requires_grad_();
  FusedAdam adam({weight}, FusedAdamOptions(0).bf16_state(true));
  const at::Tensor grad = torch::ones({4096});
  for (int i = 0; i < kSteps; ++i) step_with(adam, weight, grad);
  const at::Tensor squares = adam.state_of(weight, "exp_avg_sq").to(at::kDouble);
  const double want = 1 - std::pow(0.999, kSteps);
  // A step's rounding error has a variance of at most a quarter of a squared unit, 2^-16 below 1,
  // and 0.999 of an error is left after each step: 0.045 of standard deviation for a number at
  // most, 0.0007 for the mean of 4096.
  EXPECT_NEAR(squares.mean().item<double>(), want, 5 * 0.0007);
  EXPECT_LT(squares.std().item<double>(), 0.045);
  EXPECT_GT(squares.std().item<double>(), 0.001);  // each element draws its own
}

// Momentum of a gradient that lies in the middle between two numbers, as the way each element was
// rounded: 1 up, -1 down.
class Rounded {
 public:
  explicit Rounded(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)),
        sgd_(parameters_, FusedSGDOptions(0).momentum(0.5).bf16_state(true)) {}

  FusedSGD& optimizer() { return sgd_; }

  // Of each parameter, in the next step.
  std::vector<at::Tensor> ways() {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad() = torch::full(parameter.sizes(), 1 + 0x1p-8);
      if (const at::Tensor buffer = sgd_.state_of(parameter, "momentum_buffer"); buffer.defined())
        buffer.zero_();
    }
    sgd_.step();
    std::vector<at::Tensor> ways;
    for (const at::Tensor& parameter : parameters_) {
      const at::Tensor buffer = sgd_.state_of(parameter, "momentum_buffer").flatten();
      ways.push_back(buffer.gt(1).to(at::kDouble).mul(2).sub(1));
    }
    return ways;
  }

 private:
  std::vector<at::Tensor> parameters_;
  FusedSGD sgd_;
};

constexpr std::int64_t kMany = 1 << 16;

std::vector<at::Tensor> parameters_of(const std::vector<std::vector<std::int64_t>>& shapes) {
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) parameters.push_back(torch::zeros(shape).requires_grad_());
  return parameters;
}

// Parameters of equal shapes too, as the layers of a transformer have them: with the same bits
// their errors would go the same way.
TEST(Bf16State, IsDrawnIndependentlyForEachParameterAndStep) {
  Rounded rounded(parameters_of({{256, 256}, {256, 256}, {kMany}, {256, 256}}));
  std::vector<at::Tensor> ways;
  for (int step = 0; step < 3; ++step) {
    for (const at::Tensor& way : rounded.ways()) ways.push_back(way);
  }
  // Five standard deviations of the mean of so many independent 1s and -1s.
  const double most = 5 / std::sqrt(static_cast<double>(kMany));
  for (std::size_t i = 0; i < ways.size(); ++i) {
    EXPECT_LT(std::abs(ways[i].mean().item<double>()), most) << i;
    for (std::size_t j = 0; j < i; ++j)
      EXPECT_LT(std::abs(ways[i].mul(ways[j]).mean().item<double>()), most) << i << " and " << j;
  }
}

TEST(Bf16State, IsDrawnByThePlacesThatWereSet) {
  const auto parameters = parameters_of({{256, 256}, {7}, {256, 256}, {256, 256}});
  Rounded all(parameters);
  const std::vector<at::Tensor> want = all.ways();
  Rounded share({parameters[0], parameters[3]});
  share.optimizer().set_parameter_places(
      semitone::detail::places_of(all.optimizer().param_groups()));
  const std::vector<at::Tensor> got = share.ways();
  expect_bitwise_equal(got[0], want[0]);
  expect_bitwise_equal(got[1], want[3]);
  EXPECT_FALSE(want[2].equal(want[3]));
}

TEST(Bf16State, GoesOnBitForBitFromAFile) {
  const auto options = FusedAdamOptions(0.01).bf16_state(true).split_master(true);
  const at::Tensor weight = weight_of({33, 7}, at::kBFloat16);
  FusedAdam adam({weight}, options);
  for (int i = 0; i < 3; ++i) step_number(adam, weight, i);
  std::stringstream file;
  torch::save(adam, file);
  const at::Tensor restored = weight.detach().clone().requires_grad_();
  FusedAdam other({restored}, FusedAdamOptions());
  torch::load(other, file);
  for (int i = 3; i < 6; ++i) {
    step_number(adam, weight, i);
    step_number(other, restored, i);
  }
  expect_bitwise_equal(restored, weight);
  EXPECT_EQ(other.state_of(restored, "exp_avg_sq").scalar_type(), at::kBFloat16);
  expect_bitwise_equal(other.state_of(restored, "exp_avg_sq"), adam.state_of(weight, "exp_avg_sq"));
}

// LibTorch's optimizers keep state in the file's dtype.
TEST(Bf16State, IsFp32InFilesForLibTorchsOptimizers) {
  const at::Tensor weight = weight_of({9});
  FusedAdam adam({weight}, FusedAdamOptions(0.01).bf16_state(true));
  step_number(adam, weight, 0);
  std::stringstream file;
  torch::save(adam, file);
  torch::optim::AdamW theirs(std::vector<at::Tensor>{weight}, torch::optim::AdamWOptions(0.01));
  torch::load(theirs, file);
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *theirs.state().at(weight.unsafeGetTensorImpl()));
  expect_bitwise_equal(state.exp_avg_sq(), adam.state_of(weight, "exp_avg_sq").to(at::kFloat));
}

TEST(Bf16State, TakesTheStateOfLibTorchsOptimizers) {
  const at::Tensor weight = weight_of({9});
  torch::optim::AdamW theirs(std::vector<at::Tensor>{weight}, torch::optim::AdamWOptions(0.01));
  weight.mutable_grad() = torch::ones({9});
  theirs.step();
  std::stringstream file;
  torch::save(theirs, file);
  FusedAdam adam({weight}, FusedAdamOptions(0.01).bf16_state(true));
  torch::load(adam, file);
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *theirs.state().at(weight.unsafeGetTensorImpl()));
  expect_bitwise_equal(adam.state_of(weight, "exp_avg"), state.exp_avg().to(at::kBFloat16));
}

TEST(Bf16State, DoesNotDependOnTheNumberOfThreads) {
  const int before = at::get_num_threads();
  std::vector<at::Tensor> weights;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    weights.push_back(weight_of({100003}));
    FusedAdam adam({weights.back()}, FusedAdamOptions().bf16_state(true));
    for (int i = 0; i < 2; ++i) step_number(adam, weights.back(), i);
  }
  at::set_num_threads(before);
  expect_bitwise_equal(weights[1], weights[0]);
}

// Within what rounding to 8 bits can do to a step: Adam's are lr long.
TEST(Bf16State, TrainsAsFp32StateDoes) {
  const at::Tensor wide = weight_of({64, 32});
  const at::Tensor narrow = weight_of({64, 32});
  FusedAdam a({wide}, FusedAdamOptions(1e-3));
  FusedAdam b({narrow}, FusedAdamOptions(1e-3).bf16_state(true));
  const at::Tensor start = wide.detach().clone();
  for (int i = 0; i < 100; ++i) {
    step_number(a, wide, i / 10);
    step_number(b, narrow, i / 10);
  }
  const double moved = (wide - start).norm().item<double>();
  EXPECT_GT(moved, 0.1);
  EXPECT_LT((wide - narrow).norm().item<double>(), 0.01 * moved);
}

TEST(Bf16State, CanBeTurnedOnAndOffBetweenSteps) {
  const at::Tensor weight = weight_of({16});
  FusedAdam adam({weight}, FusedAdamOptions());
  step_number(adam, weight, 0);
  const at::Tensor wide = adam.state_of(weight, "exp_avg").clone();
  auto& options = static_cast<FusedAdamOptions&>(adam.param_groups()[0].options());
  options.bf16_state(true).betas({0.999, 0.999}).lr(0);
  step_with(adam, weight, torch::zeros({16}));
  const at::Tensor narrow = adam.state_of(weight, "exp_avg");
  EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(narrow.to(at::kFloat), wide, 0.02, 0));
  options.bf16_state(false);
  step_with(adam, weight, torch::zeros({16}));
  EXPECT_EQ(adam.state_of(weight, "exp_avg").scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace semitone::test
