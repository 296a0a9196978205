// GradScaler: calls in the wrong order, exceptions, and the names in its messages.

#include "semitone/core/error.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/scaling/grad_scaler_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>

namespace semitone::amp::grad_scaler_test {
namespace {

using test::message_of;
using test::RecordedEvents;
using test::same_bits;
using testing::HasSubstr;

TEST(GradScaler, EverythingButScaleWantsScaleFirst) {
  GradScaler scaler;
  One one;
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(one.optimizer); }),
              HasSubstr("[amp.grad_scaler.unscale_] expected scale() to be called before"));
  EXPECT_THAT(message_of<Error>([&] { scaler.step(one.optimizer); }),
              HasSubstr("[amp.grad_scaler.step] expected scale()"));
  EXPECT_THAT(message_of<Error>([&] { scaler.update(); }),
              HasSubstr("[amp.grad_scaler.update] expected scale()"));
  EXPECT_THROW(scaler.update(2.0), Error);
}

TEST(GradScaler, UnscaleTwiceIsAnError) {
  One one(128);
  GradScaler scaler = used_once();
  scaler.unscale_(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(one.optimizer); }),
              HasSubstr("a second call"));
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 1);
  scaler.step(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(one.optimizer); }),
              HasSubstr("a call after step()"));
}

TEST(GradScaler, StepTwiceIsAnError) {
  One one;
  GradScaler scaler = used_once();
  scaler.step(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { scaler.step(one.optimizer); }), HasSubstr("a second call"));
  scaler.update();
  EXPECT_NO_THROW(scaler.step(one.optimizer));
}

TEST(GradScaler, UpdateWithoutAStepIsAnError) {
  GradScaler scaler = used_once();
  EXPECT_THAT(message_of<Error>([&] { scaler.update(); }),
              HasSubstr("expected step() or unscale_() before"));
  One one(kInf);
  scaler.unscale_(one.optimizer);
  EXPECT_NO_THROW(scaler.update());  // what unscale_() found counts
  EXPECT_EQ(scaler.get_scale(), 64);
}

TEST(GradScaler, LbfgsIsRefused) {
  const auto weight = parameter({1});
  torch::optim::LBFGS optimizer({weight});
  GradScaler scaler = used_once();
  EXPECT_THAT(message_of<Error>([&] { scaler.step(optimizer); }), HasSubstr("got LBFGS"));
  static_assert(
      !std::is_invocable_v<
          decltype([](auto& s,
                      auto& o) -> decltype(s.step(o, torch::optim::Optimizer::LossClosure())) {}),
          GradScaler&, torch::optim::SGD&>,
      "a closure must not compile");
}

TEST(GradScaler, LossesThatAreNotFloatingAreRefused) {
  GradScaler scaler;
  EXPECT_THROW(scaler.scale(torch::ones({}, torch::kLong)), Error);
  EXPECT_THROW(scaler.scale(at::Tensor()), Error);
  One one;
  EXPECT_THROW(scaler.step(one.optimizer), Error);  // still nothing was scaled
}

struct Faulty : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(broken, false)) throw std::runtime_error("no power");
    return SGD::step(closure);
  }
  bool broken = true;
};

TEST(GradScaler, AnOptimizerThatThrowsLeavesItUsable) {
  const auto weight = parameter({1});
  Faulty optimizer({weight}, 1.0);
  GradScaler scaler = used_once();
  weight.mutable_grad() = torch::full({1}, 128.0F);
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 256);
  weight.mutable_grad() = torch::full({1}, 256.0F);
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_EQ(weight.item<float>(), 0);
}

TEST(GradScaler, AHookThatThrowsLeavesTheStepToBeTriedAgain) {
  One one(128);
  GradScaler scaler = used_once();
  scaler.set_found_inf_hook([](at::Tensor&) { throw std::runtime_error("connection lost"); });
  EXPECT_THROW(scaler.step(one.optimizer), std::runtime_error);
  scaler.set_found_inf_hook(nullptr);
  EXPECT_EQ(scaler.step(one.optimizer), Step::stepped);
  EXPECT_TRUE(same_bits(one.weight, parameter({0, 1})));  // unscaled once
}

TEST(GradScaler, TheOverflowIsNamedByTheParameterNearestTheLoss) {
  test::ToyNet net(test::ToyNetOptions{.inputs = 4});
  // Not in the model's order, and in two groups: the order of the model counts.
  torch::optim::SGD optimizer({net->second->weight, net->first->bias}, 1.0);
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({net->second->bias, net->first->weight}));
  for (const at::Tensor& p : net->parameters()) p.mutable_grad() = torch::zeros_like(p);
  net->first->weight.mutable_grad().fill_(kNan);
  net->second->weight.mutable_grad().fill_(kInf);
  GradScaler scaler = used_once(LossScaleOptions(kRule).max_consecutive_skips(1));
  scaler.name_parameters(net);
  const RecordedEvents events;
  EXPECT_EQ(scaler.step(optimizer), Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "second.weight");
  EXPECT_EQ(events.skips()[0].non_finite, 2);
  EXPECT_EQ(events.skips()[0].loss_scale, 128);
  EXPECT_THAT(message_of<DivergedError>([&] { scaler.update(); }), HasSubstr("'second.weight'"));
}

TEST(GradScaler, AnUnknownParameterIsNamedByItsPlace) {
  torch::optim::SGD optimizer({parameter({1})}, 1.0);
  const auto weight = parameter({1});
  weight.mutable_grad() = torch::full({1}, kNan);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameter({1}), weight}));
  GradScaler scaler = used_once();
  const RecordedEvents events;
  scaler.step(optimizer);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "group 1, parameter 1");
}

}  // namespace
}  // namespace semitone::amp::grad_scaler_test
