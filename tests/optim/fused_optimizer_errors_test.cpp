// All fused optimizers: what they refuse, before anything is changed.

#include "semitone/optim/fused_optimizer.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/optim/fused_optimizers_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <initializer_list>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

namespace semitone::test::fused_optimizer_errors_test {
namespace {

using optim::FusedStep;

TEST_P(FusedOptimizers, RefuseSparseGradientsBeforeAnythingIsChanged) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  set_grads(parameters, make_grads(parameters));
  parameters[2].mutable_grad() = parameters[2].grad().to_sparse();
  expect_error([&] { optimizer->step(); },
               {"[optim.", "dense gradients", "Sparse for parameter 2 of group 0"});
  expect_bitwise_equal(everything(*optimizer), before);
}

TEST_P(FusedOptimizers, NameWhatIsWrong) {
  const auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  const auto step = [&](const FusedStep& how = {}) { return [&, how] { optimizer->step(how); }; };
  weight.mutable_grad() = torch::ones({4});
  expect_error(step(), {"shape [3]", "[4]", "parameter 0 of group 0"});
  weight.mutable_grad() = torch::ones({3}, at::kInt);
  expect_error(step(), {"int32"});
  weight.mutable_grad() = torch::ones({3});
  expect_error(step(FusedStep().found_inf(torch::zeros({2}))), {"found_inf of one element", "[2]"});
  expect_error(step(FusedStep().inv_scale(std::numeric_limits<double>::infinity())),
               {"an inv_scale * clip that float32 holds", "inf"});
  expect_error(step(FusedStep().inv_scale(1e20).clip(1e20)), {"float32 holds", "1e+40"});
  expect_error(step(FusedStep().clip(std::numeric_limits<double>::quiet_NaN())), {"nan"});

  const auto with_copy = [&](const at::Tensor& copy,
                             std::initializer_list<std::string_view> parts) {
    const optim::ModelCopies copies{{weight.unsafeGetTensorImpl(), copy}};
    expect_error(step(FusedStep().copies(&copies)), parts);
  };
  with_copy({}, {"a model copy of shape [3]", "undefined"});
  with_copy(torch::ones({4}, at::kHalf), {"[3]", "[4]"});
  with_copy(torch::ones({3}, at::kInt), {"int32"});
  with_copy(weight.detach(), {"memory of its own"});
  auto copy = torch::ones({3}, at::kHalf).requires_grad_();
  copy.mutable_grad() = torch::ones({3}, at::kHalf);
  with_copy(copy, {"one gradient for parameter 0 of group 0", "one of the model copy"});

  expect_error([&] { optimizer->state_of(weight, "momentum"); },
               {"one of the state's names, ", "got momentum"});
  weight.set_data(torch::ones({3}, at::kComplexFloat));
  weight.mutable_grad() = torch::ones({3}, at::kComplexFloat);
  expect_error(step(), {"float32, float16, bfloat16 or float64", "complex64"});
}

TEST_P(FusedOptimizers, RefuseOptionsOfAnotherOptimizerOrOutOfRange) {
  const auto weight = torch::ones({3}).requires_grad_();
  weight.mutable_grad() = torch::ones({3});
  const Groups foreign{torch::optim::OptimizerParamGroup(
      {weight}, std::make_unique<torch::optim::RMSpropOptions>(0.1))};
  expect_error([&] { GetParam().make(foreign); }, {"[optim.", "its own options"});
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  optimizer->add_param_group(torch::optim::OptimizerParamGroup(
      {torch::ones({2})}, std::make_unique<torch::optim::RMSpropOptions>(0.1)));
  expect_error([&] { optimizer->step(); }, {"its own options"});
  EXPECT_TRUE(torch::equal(weight, torch::ones({3})));

  const auto other = GetParam()(std::vector<at::Tensor>{weight});
  for (const double lr :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    other->param_groups()[0].options().set_lr(lr);
    expect_error([&] { other->step(); }, {"lr of at least 0"});
  }
  EXPECT_TRUE(torch::equal(weight, torch::ones({3})));
}

TEST_P(FusedOptimizers, RefuseAParameterThatWasResized) {
  auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  weight.mutable_grad() = torch::ones({3});
  optimizer->step();
  if (optimizer->state_of(weight, GetParam().first_state).numel() != 3) return;
  weight.mutable_grad().reset();
  weight.set_data(torch::ones({5}));
  weight.mutable_grad() = torch::ones({5});
  expect_error([&] { optimizer->step(); }, {"state of shape [5]", "got [3]", "resized"});
}

}  // namespace
}  // namespace semitone::test::fused_optimizer_errors_test
