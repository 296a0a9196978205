// The weight-cast cache never gives the cast of an old value, however the weight was changed.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/autocast/cast_cache_fixture.h"
#include "tests/support/casts.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::amp::cast_cache_test {
namespace {

using test::CastRecording;
using test::expect_bitwise_equal;

struct Change {
  const char* name;
  void (*make)(at::Tensor& weight);
};

class CastCacheChanges : public CastCacheTest, public testing::WithParamInterface<Change> {};

TEST_P(CastCacheChanges, DropTheCast) {
  const Autocast region(bf16);
  expect_current(at::mm(x, weight));
  GetParam().make(weight);
  expect_current(at::mm(x, weight));
  GetParam().make(weight);  // once more, where memory may be reused
  expect_current(at::mm(x, weight));
}

INSTANTIATE_TEST_SUITE_P(
    CastCache, CastCacheChanges,
    testing::Values(
        Change{"InPlaceUpdate",
               [](at::Tensor& weight) {
                 const torch::NoGradGuard no_grad;
                 weight.add_(1);
               }},
        Change{"InPlaceUpdateOfADetachedAlias",
               [](at::Tensor& weight) { weight.detach().mul_(2); }},
        Change{"InPlaceUpdateOfAPart",
               [](at::Tensor& weight) {
                 const torch::NoGradGuard no_grad;
                 weight[0].zero_();
               }},
        Change{"Copy",
               [](at::Tensor& weight) {
                 const torch::NoGradGuard no_grad;
                 weight.copy_(torch::rand_like(weight));
               }},
        Change{"SetData", [](at::Tensor& weight) { weight.set_data(torch::rand({kIn, kOut})); }},
        // The third weight gets the freed memory of the first: same address, same version.
        Change{"SetDataRoundAndRound",
               [](at::Tensor& weight) {
                 for (int i = 0; i < 4; ++i) weight.set_data(torch::rand({kIn, kOut}));
               }},
        Change{"SetDataToAnotherLayoutOfTheSameMemory",
               [](at::Tensor& weight) {
                 const auto data = weight.detach();
                 weight.set_data(data.as_strided({kIn, kOut}, {1, kIn}));
               }}),
    [](const auto& tested) { return tested.param.name; });

template <typename Optimizer>
class CastCacheOptimizers : public CastCacheTest {};
using Optimizers = testing::Types<torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW,
                                  torch::optim::RMSprop, torch::optim::Adagrad>;
TYPED_TEST_SUITE(CastCacheOptimizers, Optimizers);

// torch::optim::SGD writes through tensor.data(), which no version counter shows.
TYPED_TEST(CastCacheOptimizers, AStepInsideTheRegionIsSeen) {
  TypeParam optimizer({this->weight}, 0.5);
  const Autocast region(this->bf16);
  for (int step = 0; step < 3; ++step) {
    at::mm(this->x, this->weight).sum().backward();
    this->expect_current(at::mm(this->x, this->weight));  // between backward and step
    const at::Tensor before = this->weight.detach().clone();
    optimizer.step();
    ASSERT_FALSE(at::equal(before, this->weight));
    this->expect_current(at::mm(this->x, this->weight));
    if (step == 1) optimizer.zero_grad(/*set_to_none=*/false);
    if (step == 2) optimizer.zero_grad();
    this->expect_current(at::mm(this->x, this->weight));
  }
}

// One element of many, between the sampled ones, by an optimizer without any notification.
TEST_F(CastCacheTest, ASparseStepOfSgdInsideTheRegionIsSeen) {
  const auto eye = torch::eye(256);
  for (const char* preset : {"semitone", "torch", "apex", "paddle", "none"}) {
    for (const double momentum : {0.0, 0.9}) {
      SCOPED_TRACE(preset);
      const auto large = torch::zeros({256, 256}).requires_grad_();
      torch::optim::SGD optimizer({large}, torch::optim::SGDOptions(0.5).momentum(momentum));
      const Autocast region(CastPolicy::by_name(preset, {torch::kCPU, kBf16}).lower("mm"));
      large.mutable_grad() = torch::zeros({256, 256});
      large.mutable_grad()[3][5] = 1;
      at::mm(eye, large);
      optimizer.step();
      expect_bitwise_equal(at::mm(eye, large).detach(), large.detach().to(kBf16));
    }
  }
}

TEST_F(CastCacheTest, HandWrittenStepsThroughDataAreSeen) {
  const auto large = torch::zeros({256, 256}).requires_grad_();
  const auto eye = torch::eye(256);
  const Autocast region(bf16);
  large.mutable_grad() = torch::zeros({256, 256});
  large.mutable_grad()[3][5] = 1;
  const auto expect_seen = [&] {
    expect_bitwise_equal(at::mm(eye, large).detach(), large.detach().to(kBf16));
  };
  expect_seen();
  large.data() -= 0.5 * large.grad();
  expect_seen();
  large.data().add_(large.grad(), -0.5);
  expect_seen();
}

// Two ways in which SGD steps without a backward pass through the cast.
TEST_F(CastCacheTest, AStepOfSgdAfterABackwardWithCastsOffIsSeen) {
  torch::optim::SGD optimizer({weight}, 0.5);
  const Autocast region(bf16);
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    expect_current(at::mm(x, weight));
  };
  evaluate();
  {
    const DisableCasts no_casts;
    at::mm(x, weight).sum().backward();
  }
  optimizer.step();
  optimizer.zero_grad();
  evaluate();
}

TEST_F(CastCacheTest, AStepOfSgdWithGradientsSetByHandIsSeen) {
  torch::optim::SGD optimizer({weight}, 0.5);
  const Autocast region(bf16);
  expect_current(at::mm(x, weight));
  weight.mutable_grad() = torch::ones({kIn, kOut});
  optimizer.step();
  optimizer.zero_grad();
  expect_current(at::mm(x, weight));
}

// Small weights are compared whole, in every layout.
TEST_F(CastCacheTest, AWriteThroughDataToAnyElementOfASmallWeightIsSeen) {
  const auto storage = torch::rand({2, 2 * kWeight});
  const std::vector<std::pair<const char*, at::Tensor>> layouts{
      {"contiguous", torch::rand({kIn, kOut})},
      {"transposed", torch::rand({kOut, kIn}).t()},
      {"with gaps", storage.slice(1, 0, 2 * kWeight, 2)[1].view({kIn, kOut})},
      {"expanded", torch::rand({kIn, 1}).expand({kIn, kOut})}};
  const Autocast region(bf16);
  for (const auto& [name, layout] : layouts) {
    SCOPED_TRACE(name);
    weight = layout.detach().set_requires_grad(true);
    for (std::int64_t i = 0; i < kWeight; ++i) {
      expect_current(at::mm(x, weight));
      weight.data()[i / kOut][i % kOut].add_(1);
      expect_current(at::mm(x, weight));
    }
  }
}

// The update of a step if one input is always zero, or one output never active: all elements except
// a row or a column.
TEST_F(CastCacheTest, AWriteThroughDataToMostOfALargeWeightIsSeen) {
  constexpr std::int64_t kSide = 256;
  const auto large = torch::rand({kSide, kSide}).requires_grad_();
  const auto y = torch::eye(kSide);
  const auto expect_seen = [&] {
    expect_bitwise_equal(at::mm(y, large).detach(), large.detach().to(kBf16));
  };
  const Autocast region(bf16);
  for (std::int64_t dead = 0; dead < kSide; ++dead) {
    for (const std::int64_t dim : {0, 1}) {
      expect_seen();
      const auto keep = large.detach().select(dim, dead).clone();
      large.data().add_(1);
      large.data().select(dim, dead).copy_(keep);
      expect_seen();
    }
  }
}

// One element of many, between the sampled ones.
TEST_F(CastCacheTest, ASparseStepThroughAScalerIsSeen) {
  const auto large = torch::zeros({256, 256}).requires_grad_();
  const auto eye = torch::eye(256);
  for (const bool enabled : {false, true}) {
    SCOPED_TRACE(enabled);
    torch::optim::SGD optimizer({large}, 0.5);
    GradScaler scaler({}, enabled);
    const Autocast region(bf16);
    at::mm(eye, large);
    large.mutable_grad() = torch::zeros({256, 256});
    large.mutable_grad()[3][5] = scaler.get_scale();
    scaler.scale(torch::ones({}));
    scaler.step(optimizer);
    optimizer.zero_grad();
    expect_bitwise_equal(at::mm(eye, large).detach(), large.detach().to(kBf16));
  }
}

TEST_F(CastCacheTest, ASparseStepOfMixedPrecisionIsSeen) {
  torch::nn::Linear linear(256, 256);
  torch::optim::SGD optimizer(linear->parameters(), 0.5);
  auto mixed = initialize(linear, optimizer, Options(OptLevel::O1).dtype(kBf16).verbosity(0));
  const auto eye = torch::eye(256);
  const auto region = mixed.autocast();
  const auto product = [&] { return at::mm(eye, linear->weight).detach(); };
  product();
  linear->weight.mutable_grad() = torch::zeros({256, 256});
  linear->weight.mutable_grad()[3][5] = 1;
  mixed.step(optimizer);
  optimizer.zero_grad();
  expect_bitwise_equal(product(), linear->weight.detach().to(kBf16));
}

TEST_F(CastCacheTest, AnEmptyWeightIsNoTrouble) {
  const auto empty = torch::rand({kIn, 0}).requires_grad_();
  const Autocast region(bf16);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(at::mm(x, empty).sizes(), (at::IntArrayRef{3, 0}));
}

TEST_F(CastCacheTest, AWriteThroughDataIsSeenAfterClearCastCache) {
  const Autocast region(bf16);
  at::mm(x, weight);
  weight.data().add_(1);
  clear_cast_cache();
  expect_current(at::mm(x, weight));
}

TEST_F(CastCacheTest, AWriteToTheCastItselfIsNotCached) {
  // A row with which an operator returns its argument, so that its caller may write to it.
  const auto policy = CastPolicy::semitone({torch::kCPU, kBf16}).lower("dropout");
  const Autocast region(policy);
  {
    const torch::NoGradGuard no_grad;
    at::Tensor alias = at::dropout(weight, 0.5, /*train=*/false);
    ASSERT_EQ(alias.scalar_type(), kBf16);
    alias.zero_();
  }
  expect_current(at::mm(x, weight));
}

TEST_F(CastCacheTest, RequiresGradToggled) {
  const Autocast region(bf16);
  EXPECT_TRUE(at::mm(x, weight).requires_grad());
  weight.requires_grad_(false);
  EXPECT_FALSE(at::mm(x, weight).requires_grad())
      << "a frozen weight must not train by an old cast";
  weight.requires_grad_(true);
  const auto y = at::mm(x, weight);
  ASSERT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST_F(CastCacheTest, RequiresGradToggledOnABoundWeight) {
  torch::nn::Linear linear(kIn, kOut);
  const Autocast region(bf16.bind(linear));
  for (const bool train : {false, true, false, true}) {
    linear->weight.requires_grad_(train);
    linear->bias.requires_grad_(train);
    EXPECT_EQ(linear(x).requires_grad(), train);
  }
}

// During gradient accumulation every weight has a gradient.
TEST_F(CastCacheTest, AWeightThatHasAGradientIsCastOnce) {
  for (const bool outer_region : {false, true}) {
    SCOPED_TRACE(outer_region ? "in one region" : "in a region each");
    weight.mutable_grad().reset();
    std::optional<Autocast> outer;
    if (outer_region) outer.emplace(bf16);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const CastRecording casts;
      at::Tensor sum = torch::zeros({});
      {
        const Autocast region(bf16);
        for (int use = 0; use < 5; ++use) sum = sum + at::mm(x, weight).to(torch::kFloat).sum();
      }
      sum.backward();
      EXPECT_EQ(casts->computed(kWeight), 1U) << "micro-batch " << micro_batch;
      EXPECT_EQ(casts->cached(kWeight), 4U) << "micro-batch " << micro_batch;
    }
  }
}

}  // namespace
}  // namespace semitone::amp::cast_cache_test
