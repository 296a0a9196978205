// NonFiniteCheck in mixed precision.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/nn/fused_gelu.h"
#include "semitone/report/nonfinite_check.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <vector>

namespace semitone::nonfinite_levels_test {
namespace {

using report::NonFiniteCheck;
using report::NonFiniteFinding;

// The parameters after some healthy steps.
std::vector<at::Tensor> trained(const char* level, c10::ScalarType dtype, bool checked) {
  torch::manual_seed(3);
  test::ToyConvNet net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed =
      amp::initialize(net, optimizer, amp::Options(level).dtype(dtype).loss_scale(8).verbosity(0));
  std::optional<NonFiniteCheck> check;
  if (checked) check.emplace(*net);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto logits = mixed.forward(net, torch::randn({4, 2, 6, 6}));
    mixed.scale_loss(torch::cross_entropy_loss(logits, torch::randint(3, {4})), optimizer)
        .backward();
    mixed.step(optimizer);
    if (!checked) continue;
    EXPECT_FALSE(check->finding().has_value())
        << level << " " << dtype << ": " << check->finding()->to_string();
    EXPECT_NO_THROW(check->throw_if_found());  // nor a result that could not be looked at
    check->next_step();
  }
  std::vector<at::Tensor> tensors = test::copies(net->parameters());
  for (const at::Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  return tensors;
}

TEST(NonFiniteCheckInMixedPrecision, HealthyStepsAreBitForBitTheSameAtEveryLevel) {
  for (const char* level : test::kLevels) {
    for (const auto dtype : test::kDtypes)
      test::expect_bitwise_equal(trained(level, dtype, true), trained(level, dtype, false));
  }
}

TEST(NonFiniteCheckInMixedPrecision, AnOverflowInFp16NamesTheLayer) {
  torch::manual_seed(1);
  test::ToyNet net;
  const at::Tensor x = torch::full({4, 6}, 3e5);
  const NonFiniteCheck check(*net);
  {
    const amp::Autocast region(torch::kCPU, torch::kHalf);
    net(x);
  }
  const auto finding = check.finding();
  ASSERT_TRUE(finding.has_value());
  EXPECT_EQ(finding->origin, NonFiniteFinding::Origin::op) << finding->to_string();
  EXPECT_EQ(finding->layer, "first") << finding->to_string();
  EXPECT_EQ(finding->values.dtype, torch::kHalf);
}

TEST(NonFiniteCheckInMixedPrecision, TheBackwardPassOfACastWeightNamesItsOperator) {
  torch::manual_seed(1);
  test::ToyNet net;
  const NonFiniteCheck check(*net);
  at::Tensor y;
  {
    const amp::Autocast region(torch::kCPU, torch::kBFloat16);
    y = net(torch::ones({4, 6}));
  }
  (y.to(torch::kFloat).sum() * 0).sqrt().backward();
  const auto finding = check.finding();
  ASSERT_TRUE(finding.has_value());
  EXPECT_TRUE(finding->backward);
  EXPECT_EQ(finding->forward_op, "sqrt") << finding->to_string();
  EXPECT_EQ(finding->layer, "second");
  EXPECT_TRUE(finding->is_after_layer);
}

TEST(NonFiniteCheckInMixedPrecision, WhatAFusedLayerPassesOnIsNotItsFault) {
  const at::Tensor x = torch::full({3, 8}, std::nan(""), torch::requires_grad());
  const NonFiniteCheck check;
  torch::relu(nn::fused_gelu(x));
  const auto finding = check.finding();
  ASSERT_TRUE(finding.has_value());
  EXPECT_EQ(finding->origin, NonFiniteFinding::Origin::function);
  EXPECT_THAT(finding->to_string(), testing::HasSubstr("returned 24 nan in result"));
  EXPECT_THAT(test::message_of<report::NonFiniteError>([&] { check.throw_if_found(); }),
              testing::HasSubstr("check its arguments first"));
}

}  // namespace
}  // namespace semitone::nonfinite_levels_test
