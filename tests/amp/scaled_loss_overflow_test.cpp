// ScaledLoss: overflows, skipped steps and the scale over many steps.

#include "semitone/amp/initialize.h"
#include "tests/amp/scaled_loss_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::amp::scaled_loss_test {
namespace {

using test::message_of;
using test::RecordedEvents;
using test::same_bits;
using testing::HasSubstr;

TEST_P(ScaledLossAtEveryLevel, AnOverflowSkipsTheStepAndChangesNothing) {
  if (is_plain()) return;
  for (const bool in_low : {false, true}) {
    Trained trained(opts());
    trained.backward();
    trained.mixed.step(trained.optimizer);  // momentum is there now
    trained.optimizer.zero_grad();
    const auto before = trained.weights();
    const double scale = trained.mixed.loss_scaler().scale();
    trained.overflow(in_low ? trained.model->b : trained.model->a);
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
    EXPECT_TRUE(same_bits(trained.weights(), before));
    EXPECT_EQ(trained.mixed.skipped_steps(), 1);
    const bool dynamic = trained.mixed.properties().loss_scale.is_dynamic();
    EXPECT_EQ(trained.mixed.loss_scaler().scale(), dynamic ? scale / 2 : scale);
    // The iteration after it is a good one.
    trained.optimizer.zero_grad();
    trained.backward();
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
    EXPECT_FALSE(same_bits(trained.weights(), before));
  }
}

// As in torch: an inf stays in a gradient until it is zeroed.
TEST_P(ScaledLossAtEveryLevel, WhatOverflowedIsNotSteppedOnLater) {
  if (is_plain()) return;
  for (const bool in_low : {false, true}) {
    Trained trained(opts());
    trained.overflow(in_low ? trained.model->b : trained.model->a);
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
    for (int i = 0; i < 2; ++i) {
      trained.backward();
      trained.mixed.step(trained.optimizer);
      for (const at::Tensor& weight : trained.weights())
        EXPECT_TRUE(weight.isfinite().all().item<bool>());
    }
    for (const bool set_to_none : {false, true}) {
      trained.optimizer.zero_grad(set_to_none);
      trained.model->zero_grad(set_to_none);
      const auto before = trained.weights();
      trained.backward();
      EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
      EXPECT_FALSE(same_bits(trained.weights(), before));
    }
  }
}

TEST(ScaledLoss, OneOfTwoOptimizersMayHaveBeenZeroedAfterAnOverflow) {
  for (const bool zeroed_steps_first : {false, true}) {
    Toy model;
    torch::optim::SGD kept({model->a}, 0.125);
    torch::optim::SGD zeroed({model->b}, 0.125);
    auto mixed = initialize({model}, {kept, zeroed}, dynamic_scale(options("O1")));
    const auto backward = [&](float factor) {
      mixed.scale_loss(mixed.forward(model, ones()) * factor, {kept, zeroed}).backward();
    };
    backward(kInf);
    EXPECT_EQ(mixed.step(kept), Step::skipped);
    EXPECT_EQ(mixed.step(zeroed), Step::skipped);
    zeroed.zero_grad();
    backward(1);
    if (zeroed_steps_first) {
      EXPECT_EQ(mixed.step(zeroed), Step::stepped);
    }
    EXPECT_EQ(mixed.step(kept), Step::skipped);
    if (!zeroed_steps_first) {
      EXPECT_EQ(mixed.step(zeroed), Step::stepped);
    }
    for (const at::Tensor& weight : model->parameters())
      EXPECT_TRUE(weight.isfinite().all().item<bool>());
  }
}

TEST(ScaledLoss, ASecondStepAfterAnOverflowSkipsToo) {
  Trained trained(dynamic_scale(options("O1")));
  const auto before = trained.weights();
  trained.overflow(trained.model->b);
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
  EXPECT_TRUE(same_bits(trained.weights(), before));
}

TEST_P(ScaledLossAtEveryLevel, AnOverflowInOneOfSeveralAccumulatedBackwardsSkips) {
  if (is_plain()) return;
  for (const int broken : {0, 1, 2}) {
    Trained trained(opts());
    const auto before = trained.weights();
    for (int i = 0; i < 3; ++i)
      i == broken ? trained.overflow(trained.model->b) : trained.backward();
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
    EXPECT_TRUE(same_bits(trained.weights(), before));
  }
}

TEST(ScaledLoss, TheScaleMovesOnceAStepHoweverManyBackwards) {
  Trained trained(dynamic_scale(options("O1"), LossScaleOptions().growth_interval(2)));
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < 4; ++i) trained.backward();
    trained.mixed.step(trained.optimizer);
    EXPECT_EQ(trained.mixed.loss_scaler().scale(), step == 0 ? kFirstScale : 2 * kFirstScale);
  }
}

TEST(ScaledLoss, AScaleIsLoweredWithoutAnOverflowAndGradientsStayTheSame) {
  for (const std::string level : kLevels) {
    Trained trained(dynamic_scale(options(level).num_losses(2)));
    Trained other(dynamic_scale(options(level).num_losses(2)));
    EXPECT_TRUE(trained.mixed.back_off_loss_scale()) << level;
    EXPECT_EQ(trained.mixed.loss_scaler(0).scale(), kFirstScale / 2);
    EXPECT_EQ(trained.mixed.loss_scaler(1).scale(), kFirstScale);
    for (Trained* const one : {&trained, &other}) {
      one->backward();
      EXPECT_EQ(one->mixed.step(one->optimizer), Step::stepped) << level;
    }
    EXPECT_TRUE(same_bits(trained.weights(), other.weights())) << level;
    EXPECT_EQ(trained.mixed.skipped_steps(), 0);
    EXPECT_THROW(trained.mixed.back_off_loss_scale(2), Error);
  }
  Trained constant(options("O2").loss_scale(8.0));
  EXPECT_FALSE(constant.mixed.back_off_loss_scale());
  EXPECT_EQ(constant.mixed.loss_scaler().scale(), 8);
}

TEST(ScaledLoss, AScaleIsNotLoweredWhileGradientsHaveIt) {
  Trained trained(dynamic_scale(options("O2").num_losses(2)));
  trained.backward(ScaleLossOptions().delay_unscale(true));
  EXPECT_THAT(message_of<Error>([&] { trained.mixed.back_off_loss_scale(); }),
              HasSubstr("[amp.mixed_precision.back_off_loss_scale] expected gradients that are "
                        "unscaled, got scaled ones"));
  EXPECT_TRUE(trained.mixed.back_off_loss_scale(1));
  trained.backward();
  EXPECT_TRUE(trained.mixed.back_off_loss_scale());
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
  EXPECT_EQ(trained.mixed.loss_scaler().scale(), kFirstScale / 2);
}

TEST(ScaledLoss, KOverflowsHalveEachScalerKTimes) {
  Trained trained(dynamic_scale(options("O2").num_losses(2)));
  for (int i = 0; i < 5; ++i) {
    trained.optimizer.zero_grad();
    trained.overflow(trained.model->b, ScaleLossOptions().loss_id(0));
    i < 2 ? trained.overflow(trained.model->b, ScaleLossOptions().loss_id(1))
          : trained.backward(ScaleLossOptions().loss_id(1));
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
  }
  EXPECT_EQ(trained.mixed.loss_scaler(0).scale(), kFirstScale / 32);
  EXPECT_EQ(trained.mixed.loss_scaler(1).scale(), kFirstScale / 4);
  EXPECT_EQ(trained.mixed.loss_scaler(0).state().growth_tracker, 0);
  EXPECT_EQ(trained.mixed.loss_scaler(1).state().growth_tracker, 3);
}

TEST(ScaledLoss, TooManySkipsInARowStopAndNameTheParameter) {
  Trained trained(
      dynamic_scale(options("O2").num_losses(2), LossScaleOptions().max_consecutive_skips(2)));
  const auto before = trained.weights();
  const auto iterate = [&] {
    trained.optimizer.zero_grad();
    trained.overflow(trained.model->b, ScaleLossOptions().loss_id(0));
    trained.overflow(trained.model->a, ScaleLossOptions().loss_id(1));
    return trained.mixed.step(trained.optimizer);
  };
  EXPECT_EQ(iterate(), Step::skipped);
  EXPECT_THAT(message_of<DivergedError>(iterate), HasSubstr("'b'"));
  EXPECT_TRUE(same_bits(trained.weights(), before));
  // Both scalers count the step, and training may continue.
  EXPECT_EQ(trained.mixed.loss_scaler(0).consecutive_skips(), 2);
  EXPECT_EQ(trained.mixed.loss_scaler(1).consecutive_skips(), 2);
  trained.optimizer.zero_grad();
  trained.backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST(ScaledLoss, SkipsAreToldByNameForMastersOfLaterGroupsToo) {
  Toy model;
  Toy later{3};
  torch::optim::SGD optimizer(model->parameters(), 0.125);
  auto mixed = initialize({model, later}, {optimizer},
                          dynamic_scale(Options("O2").dtype(torch::kHalf).verbosity(0)));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(later->parameters()));
  const RecordedEvents events;
  auto scaled =
      mixed.scale_loss(mixed.forward(model, ones()) + mixed.forward(later, ones()), optimizer);
  scaled.value().backward();
  model->a.mutable_grad()[0] = kInf;
  later->a.mutable_grad()[1] = kInf;
  scaled.finish();
  EXPECT_EQ(mixed.step(optimizer), Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "model 1: a");
  EXPECT_EQ(events.skips()[0].non_finite, 2);
  ASSERT_EQ(events.updates().size(), 1U);
  EXPECT_EQ(events.updates()[0].before, kFirstScale);
  EXPECT_EQ(events.updates()[0].after, kFirstScale / 2);
}

TEST(ScaledLoss, ALossThatSharesItsSkipsWithAnotherKnowsWhereItOverflowedToo) {
  Trained trained(
      dynamic_scale(options("O2").num_losses(2), LossScaleOptions().max_consecutive_skips(2)));
  const auto iterate = [&](bool first_too) {
    trained.optimizer.zero_grad();
    first_too ? trained.overflow(trained.model->a) : trained.backward();
    trained.overflow(trained.model->b, ScaleLossOptions().loss_id(1));
    return trained.mixed.step(trained.optimizer);
  };
  EXPECT_EQ(iterate(true), Step::skipped);
  const std::string message = message_of<DivergedError>([&] { iterate(false); });
  EXPECT_THAT(message, HasSubstr("loss 1"));
  EXPECT_THAT(message, HasSubstr("inf or NaN in 2 gradients, nearest the loss that of 'b'"));
  EXPECT_EQ(trained.mixed.skipped_steps(), 2) << "a step that two losses skip is skipped once";
}

// Gradients of 1 and more overflow fp16 at the default scale of 65536: the first steps adapt the
// scale.
TEST(ScaledLoss, TheFirstStepsOfFp16WeightsFindAScaleThatFits) {
  for (const std::string level : {"O2", "O3"}) {
    Trained trained(options(level).loss_scale("dynamic"));
    std::vector<Step> steps;
    for (int i = 0; i < 4; ++i) {
      trained.optimizer.zero_grad();
      trained.backward();
      steps.push_back(trained.mixed.step(trained.optimizer));
    }
    // The gradients of b are x * a = 1 and 2 at first.
    EXPECT_EQ(steps, (std::vector{Step::skipped, Step::skipped, Step::stepped, Step::stepped}));
    EXPECT_EQ(trained.mixed.loss_scaler().scale(), 16384);
  }
}

TEST(ScaledLoss, AnotherRanksOverflowSkipsThisRanksStepToo) {
  for (const std::string level : kLevels) {
    Trained trained(dynamic_scale(options(level)));
    const auto before = trained.weights();
    int calls = 0;
    trained.mixed.set_found_inf_hook([&](at::Tensor& found_inf) {
      EXPECT_EQ(found_inf.item<float>(), 0);
      found_inf.fill_(1);
      ++calls;
    });
    for (int i = 0; i < 3; ++i) trained.backward();
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped) << level;
    EXPECT_EQ(calls, 1) << "once a loss, however many micro-batches this rank had";
    EXPECT_EQ(trained.mixed.loss_scaler().scale(), kFirstScale / 2);
    EXPECT_TRUE(same_bits(trained.weights(), before)) << level;
  }
}

TEST(ScaledLoss, TheHookIsCalledForALossWithoutGradients) {
  Trained trained(dynamic_scale(options("O1")));
  int calls = 0;
  trained.mixed.set_found_inf_hook([&](at::Tensor& found_inf) {
    found_inf.fill_(1);
    ++calls;
  });
  auto scaled = trained.mixed.scale_loss(torch::ones({}), trained.optimizer);
  scaled.finish();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
  EXPECT_EQ(calls, 1);
}

// Autograd may give two parameters the same memory as their gradient.
TEST(ScaledLoss, AGradientThatTwoParametersShareIsUnscaledOnce) {
  Trained trained(dynamic_scale(options("O1")));
  auto scaled = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  scaled.value().backward();
  trained.model->a.mutable_grad() = trained.model->b.grad().variable_data();
  const at::Tensor want = trained.model->b.grad().div(kFirstScale);
  scaled.finish();
  EXPECT_TRUE(same_bits(trained.model->a.grad(), want));
  EXPECT_TRUE(same_bits(trained.model->b.grad(), want));
}

TEST(ScaledLoss, AHookThatThrowsLeavesAUsableState) {
  Trained trained(dynamic_scale(options("O2")));
  trained.mixed.set_found_inf_hook(
      [](at::Tensor&) { throw std::runtime_error("connection lost"); });
  trained.backward();
  EXPECT_THROW(trained.mixed.step(trained.optimizer), std::runtime_error);
  trained.mixed.set_found_inf_hook(nullptr);
  trained.overflow(trained.model->a);
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
}

}  // namespace
}  // namespace semitone::amp::scaled_loss_test
