// Trainings with a GradScaler against the same without: optimizers, clipping, penalties, several
// losses.

#include "semitone/scaling/grad_scaler.h"
#include "tests/scaling/grad_scaler_fixture.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace semitone::amp::grad_scaler_test {
namespace {

using test::near;
using test::reduction_tolerance;
using test::same_bits;

class GradScalerWithEachOptimizer : public testing::TestWithParam<test::OptimizerKind> {};

// torch's test_grad_scaling_autocast: four batches, the third with an inf. Scaling by powers of two
// changes nothing, and the skipped batch is as if it had not been.
TEST_P(GradScalerWithEachOptimizer, ScalingChangesNothingButSkipsTheStepWithInf) {
  for (const bool unscale_early : {false, true}) {
    Training plain(GetParam());
    Training scaled(GetParam());
    GradScaler scaler(kRule);
    for (std::size_t i = 0; i < 4; ++i) {
      if (i != 2) {
        plain.optimizer->zero_grad();
        plain.loss(i).backward();
        plain.optimizer->step();
      }
      scaled.optimizer->zero_grad();
      scaler.scale(scaled.loss(i)).backward();
      if (i == 2) scaled.net->first->weight.mutable_grad()[1][1] = kInf;
      if (unscale_early) scaler.unscale_(*scaled.optimizer);
      EXPECT_EQ(scaler.step(*scaled.optimizer), i == 2 ? Step::skipped : Step::stepped);
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 128 * 2 * 2 * 2 * 0.5);
    EXPECT_EQ(scaler.scaler().skipped_steps(), 1);
    for (std::size_t i = 0; i < plain.net->parameters().size(); ++i) {
      EXPECT_TRUE(same_bits(scaled.net->parameters()[i], plain.net->parameters()[i]));
    }
    EXPECT_EQ(state_of(*scaled.optimizer), state_of(*plain.optimizer));
  }
}

TEST_P(GradScalerWithEachOptimizer, ADisabledScalerOnlyPassesOn) {
  Training plain(GetParam());
  Training passed(GetParam());
  GradScaler scaler(kRule, /*enabled=*/false);
  for (std::size_t i = 0; i < 4; ++i) {
    plain.optimizer->zero_grad();
    plain.loss(i).backward();
    plain.optimizer->step();
    passed.optimizer->zero_grad();
    const at::Tensor loss = passed.loss(i);
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    loss.backward();
    scaler.unscale_(*passed.optimizer);
    EXPECT_EQ(scaler.step(*passed.optimizer), Step::stepped);
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.is_enabled());
  for (std::size_t i = 0; i < plain.net->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(passed.net->parameters()[i], plain.net->parameters()[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GradScalerWithEachOptimizer,
                         testing::ValuesIn(test::all_optimizers()),
                         [](const auto& tested) { return tested.param.name; });

TEST(GradScaler, ClippingAfterUnscaleSeesTrueGradients) {
  const auto kind = test::all_optimizers()[0];
  Training plain(kind);
  Training scaled(kind);
  GradScaler scaler(kRule);
  for (std::size_t i = 0; i < 4; ++i) {
    plain.optimizer->zero_grad();
    plain.loss(i).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(plain.net->parameters(), 0.1);
    plain.optimizer->step();
    scaled.optimizer->zero_grad();
    scaler.scale(scaled.loss(i)).backward();
    scaler.unscale_(*scaled.optimizer);
    EXPECT_EQ(torch::nn::utils::clip_grad_norm_(scaled.net->parameters(), 0.1), norm);
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  EXPECT_TRUE(same_bits(scaled.net->first->weight, plain.net->first->weight));
}

TEST(GradScaler, AccumulatedGradientsAreUnscaledOnce) {
  const auto kind = test::all_optimizers()[1];
  Training plain(kind);
  Training scaled(kind);
  GradScaler scaler(kRule);
  for (const std::size_t i : {0U, 2U}) {
    plain.optimizer->zero_grad();
    scaled.optimizer->zero_grad();
    for (const std::size_t k : {i, i + 1}) {
      (plain.loss(k) / 2).backward();
      scaler.scale(scaled.loss(k) / 2).backward();
    }
    plain.optimizer->step();
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  EXPECT_TRUE(same_bits(scaled.net->first->weight, plain.net->first->weight));
}

// torch's test_grad_scaling_penalty: gradients of the scaled loss, unscaled by hand, whose norm is
// part of a second scaled loss.
TEST(GradScaler, GradientPenaltyThroughDoubleBackward) {
  const auto kind = test::all_optimizers()[0];
  Training plain(kind);
  Training scaled(kind);
  GradScaler scaler(kRule);
  const auto penalty = [](const std::vector<at::Tensor>& grads) {
    at::Tensor sum = torch::zeros({});
    for (const at::Tensor& grad : grads) sum = sum + grad.pow(2).sum();
    return sum.sqrt();
  };
  for (std::size_t i = 0; i < 3; ++i) {
    plain.optimizer->zero_grad();
    const auto loss = plain.loss(i);
    const auto grads = torch::autograd::grad({loss}, plain.net->parameters(), {}, true, true);
    (loss + penalty(grads)).backward();
    plain.optimizer->step();

    scaled.optimizer->zero_grad();
    const auto scaled_loss = scaled.loss(i);
    auto scaled_grads = torch::autograd::grad({scaler.scale(scaled_loss)}, scaled.net->parameters(),
                                              {}, true, true);
    for (at::Tensor& grad : scaled_grads) grad = grad / scaler.get_scale();
    scaler.scale(scaled_loss + penalty(scaled_grads)).backward();
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  EXPECT_TRUE(near(scaled.net->first->weight, plain.net->first->weight,
                   reduction_tolerance(torch::kFloat, 5)));
}

TEST(GradScaler, GradientsWithAGraphAreUnscaledToo) {
  const auto weight = parameter({3});
  torch::optim::SGD optimizer({weight}, 1.0);
  GradScaler scaler(kRule);
  scaler.scale(weight.pow(3).sum()).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_TRUE(weight.grad().requires_grad());
  scaler.unscale_(optimizer);
  EXPECT_EQ(weight.grad().item<float>(), 27);
  // d(3 w^2)/dw
  EXPECT_EQ(torch::autograd::grad({weight.grad().sum()}, {weight})[0].item<float>(), 18);
  weight.mutable_grad().reset();
}

TEST(GradScaler, OnlyTheOptimizerThatOverflowedSkipsAndTheScaleBacksOffForAll) {
  for (const bool unscale_early : {false, true}) {
    One good;
    One bad;
    GradScaler scaler = used_once();
    good.set_grad(128);
    bad.set_grad(kNan);
    if (unscale_early) {
      scaler.unscale_(good.optimizer);
      scaler.unscale_(bad.optimizer);
    }
    EXPECT_EQ(scaler.step(good.optimizer), Step::stepped);
    EXPECT_EQ(scaler.step(bad.optimizer), Step::skipped);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 64);
    EXPECT_TRUE(same_bits(good.weight, parameter({0, 1})));
    EXPECT_TRUE(same_bits(bad.weight, parameter({1, 2})));
  }
}

TEST(GradScaler, TwoLossesInTwoModelsWithTwoOptimizers) {
  const auto kind = test::all_optimizers()[1];
  Training plain_a(kind);
  Training plain_b(kind);
  Training a(kind);
  Training b(kind);
  GradScaler scaler(kRule);
  for (std::size_t i = 0; i < 4; ++i) {
    const bool overflow = i == 1;
    for (Training* one : {&plain_a, &plain_b, &a, &b}) one->optimizer->zero_grad();
    const auto losses = [i](Training& first, Training& second) {
      const at::Tensor x = first.net->forward(first.batches[i]);
      const at::Tensor y = second.net->forward(second.batches[3 - i]);
      return std::vector<at::Tensor>{torch::mse_loss(x, y), x.sum() - 0.5 * y.sum()};
    };
    auto plain = losses(plain_a, plain_b);
    plain[0].backward({}, true);
    plain[1].backward();
    if (!overflow) plain_a.optimizer->step();
    plain_b.optimizer->step();

    auto scaled = scaler.scale(losses(a, b));
    ASSERT_EQ(scaled.size(), 2U);
    scaled[0].backward({}, true);
    scaled[1].backward();
    if (overflow) a.net->second->bias.mutable_grad()[0] = -kInf;
    if (i == 2) scaler.unscale_(*b.optimizer);
    EXPECT_EQ(scaler.step(*a.optimizer), overflow ? Step::skipped : Step::stepped);
    EXPECT_EQ(scaler.step(*b.optimizer), Step::stepped);
    scaler.update();
  }
  EXPECT_TRUE(same_bits(a.net->first->weight, plain_a.net->first->weight));
  EXPECT_TRUE(same_bits(b.net->first->weight, plain_b.net->first->weight));
}

}  // namespace
}  // namespace semitone::amp::grad_scaler_test
