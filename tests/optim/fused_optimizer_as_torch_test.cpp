// All fused optimizers as LibTorch's: groups, learning rate schedulers, closures, shared parameters.

#include "semitone/optim/fused_optimizer.h"
#include "tests/optim/fused_optimizers_fixture.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <vector>

namespace semitone::test::fused_optimizer_as_torch_test {
namespace {

TEST_P(FusedOptimizers, StepGroupsThatAreAddedLaterByTheirOwnOptions) {
  const std::vector<at::Tensor> parameters{torch::randn({7}).requires_grad_(),
                                           torch::randn({33, 5}).requires_grad_()};
  const auto optimizer = GetParam()(std::vector<at::Tensor>{parameters[0]});
  plain_step(*optimizer, {parameters[0]}, make_grads({parameters[0]}));
  optimizer->add_param_group(torch::optim::OptimizerParamGroup({parameters[1]}));
  optimizer->param_groups()[1].options().set_lr(0.5);
  const auto fresh = leaves_like(parameters);
  const auto other = GetParam()(fresh);
  other->param_groups()[0].options().set_lr(0.5);
  for (int i = 0; i < 2; ++i) {
    const auto grads = make_grads(parameters);
    plain_step(*optimizer, parameters, grads);
    plain_step(*other, fresh, grads);
    expect_bitwise_equal(parameters[1].detach(), fresh[1].detach());
    EXPECT_FALSE(torch::equal(parameters[0], fresh[0])) << "it has its own learning rate";
  }
}

// A weight that no longer gets a gradient: its momentum does not stay at a few units of the
// smallest subnormal number, with which some processors compute ten times slower.
TEST_P(FusedOptimizers, StateThatFadesEndsAtZero) {
  const at::Tensor weight = torch::zeros({37}).requires_grad_();
  const auto optimizer = GetParam()({weight});
  weight.mutable_grad() = torch::ones({37});
  optimizer->step();
  const at::Tensor state = optimizer->state_of(weight, GetParam().first_state);
  if (!state.defined()) return;  // SGD without momentum
  {
    const at::NoGradGuard no_grad;
    weight.zero_();
  }
  weight.mutable_grad() = torch::zeros({37});
  state.fill_(2e-38);  // twice the smallest normal number
  for (int i = 0; i < 30; ++i) {
    optimizer->step();
    const at::Tensor now = state.abs();
    EXPECT_FALSE(
        now.gt(0).logical_and(now.lt(std::numeric_limits<float>::min())).any().item<bool>())
        << now[0];
  }
  EXPECT_EQ(state.eq(0).all().item<bool>(), GetParam().name != "adagrad");  // a sum does not fade
}

TEST_P(FusedOptimizers, FollowLearningRateSchedulers) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const double lr = optimizer->param_groups()[0].options().get_lr();
  torch::optim::StepLR schedule(*optimizer, 2, 0.0);
  // LibTorch's StepLR looks at the steps before this one: with 2, the third changes the rate.
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), lr);
    plain_step(*optimizer, parameters, make_grads(parameters));
    schedule.step();
  }
  EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0);
  EXPECT_EQ(optimizer->defaults().get_lr(), lr);
  const auto before = leaves_like(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(torch::equal(parameters[i], before[i])) << "the learning rate is 0";
}

TEST_P(FusedOptimizers, EvaluateAClosureWithGradientsEnabled) {
  const auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  const at::NoGradGuard no_grad;
  const at::Tensor loss = optimizer->step([&] {
    optimizer->zero_grad();
    at::Tensor value = weight.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_TRUE((weight < 1).all().item<bool>());
  EXPECT_FALSE(optimizer->step().defined());
}

TEST_P(FusedOptimizers, StepAParameterThatStandsTwiceOnce) {
  const auto once = torch::randn({50}).requires_grad_();
  const auto twice = once.detach().clone().requires_grad_();
  const auto a = GetParam()(std::vector<at::Tensor>{once});
  const auto b = GetParam()(std::vector<at::Tensor>{twice, twice});
  for (int i = 0; i < 2; ++i) {
    once.mutable_grad() = torch::ones({50});
    twice.mutable_grad() = torch::ones({50});
    a->step();
    b->step();
  }
  expect_bitwise_equal(twice.detach(), once.detach());
}

TEST_P(FusedOptimizers, MarkParametersAsChangedForAutograd) {
  const auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  const auto saved = weight.exp().mul(weight).sum();
  weight.mutable_grad() = torch::ones({3});
  optimizer->step();
  EXPECT_THROW(saved.backward(), c10::Error);
}

}  // namespace
}  // namespace semitone::test::fused_optimizer_as_torch_test
