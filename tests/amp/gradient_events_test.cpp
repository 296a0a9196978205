// The gradients of a step as listeners see them (events::GradientsUnscaled, events::GradientsReady).

#include "semitone/amp/initialize.h"
#include "semitone/core/events.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/amp/scaled_loss_fixture.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace semitone::amp::scaled_loss_test {
namespace {

using test::RecordedEvents;
using test::RecordedGradients;
using test::same_bits;

// The gradients that the toy model has without Semitone.
std::vector<at::Tensor> plain_gradients() {
  Toy model;
  model->forward(ones()).backward();
  return test::gradients_of(model->parameters());
}

std::vector<at::Tensor> unscaled(const RecordedGradients& event) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(event.gradients.size());
  for (const at::Tensor& gradient : event.gradients)
    gradients.push_back(gradient.to(torch::kFloat) / event.scale);
  return gradients;
}

bool are_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  bool same = got.size() == want.size();
  for (std::size_t i = 0; same && i < got.size(); ++i) same = got[i].is_same(want[i]);
  return same;
}

TEST_P(ScaledLossAtEveryLevel, ListenersGetTheGradientsOfTheModel) {
  Trained trained(opts());
  const RecordedEvents events;
  trained.backward();
  EXPECT_TRUE(events.gradients().empty());
  trained.mixed.step(trained.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  const RecordedGradients& event = events.gradients().front();
  EXPECT_TRUE(are_same(event.parameters, trained.model->parameters()));
  EXPECT_TRUE(are_same(event.weights, trained.optimizer.param_groups()[0].params()));
  EXPECT_TRUE(same_bits(unscaled(event), plain_gradients()));
}

// LibTorch's function changes what the step reads, and emits no event.
TEST_P(ScaledLossAtEveryLevel, ListenersGetTheGradientsBeforeTheProgramClipsThem) {
  Trained trained(opts());
  const RecordedEvents events;
  trained.backward();
  ASSERT_EQ(events.unscaled().size(), 1);
  torch::nn::utils::clip_grad_norm_(trained.mixed.master_params(trained.optimizer), 1e-3);
  trained.mixed.step(trained.optimizer);
  ASSERT_EQ(events.unscaled().size(), 1);
  ASSERT_EQ(events.gradients().size(), 1);
  const RecordedGradients& before = events.unscaled().front();
  EXPECT_TRUE(are_same(before.parameters, trained.model->parameters()));
  EXPECT_TRUE(same_bits(unscaled(before), plain_gradients()));
  EXPECT_FALSE(same_bits(unscaled(events.gradients().front()), plain_gradients()));
}

TEST(GradScalerEvents, HaveTheGradientsBeforeTheProgramClipsThem) {
  Toy model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  GradScaler scaler(LossScaleOptions().init_scale(64));
  const RecordedEvents events;
  scaler.scale(model->forward(ones())).backward();
  scaler.unscale_(optimizer);
  torch::nn::utils::clip_grad_norm_(model->parameters(), 1e-3);
  scaler.step(optimizer);
  ASSERT_EQ(events.unscaled().size(), 1);
  EXPECT_TRUE(same_bits(unscaled(events.unscaled().front()), plain_gradients()));
  EXPECT_FALSE(same_bits(unscaled(events.gradients().front()), plain_gradients()));
}

TEST_P(ScaledLossAtEveryLevel, ListenersGetTheGradientsOfASkippedStep) {
  if (is_plain()) return;
  Trained trained(opts());
  const RecordedEvents events;
  trained.overflow(trained.model->b);
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
  ASSERT_EQ(events.gradients().size(), 1);
  const RecordedGradients& event = events.gradients().front();
  EXPECT_TRUE(event.gradients[1][0].isinf().item<bool>());
  EXPECT_TRUE(same_bits(unscaled(event)[0], plain_gradients()[0]));
}

TEST_P(ScaledLossAtEveryLevel, ListenersDoNotChangeTheTraining) {
  Trained heard(opts());
  Trained unheard(opts());
  std::optional<RecordedEvents> events;
  for (Trained* const trained : {&unheard, &heard}) {
    if (trained == &heard) events.emplace();
    for (int i = 0; i < 3; ++i) {
      trained->optimizer.zero_grad();
      i == 1 ? trained->overflow(trained->model->a) : trained->backward();
      trained->mixed.step(trained->optimizer);
    }
  }
  EXPECT_EQ(events->gradients().size(), 3);
  EXPECT_TRUE(same_bits(heard.weights(), unheard.weights()));
  EXPECT_EQ(heard.mixed.loss_scaler().scale(), unheard.mixed.loss_scaler().scale());
}

TEST(GradientEvents, WithoutLossScalingTheyAreThere) {
  Trained trained(options("O2").enabled(false));
  const RecordedEvents events;
  trained.backward();
  trained.mixed.step(trained.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  EXPECT_TRUE(same_bits(unscaled(events.gradients().front()), plain_gradients()));
}

TEST(GradientEvents, ParametersWithoutAGradientHaveNone) {
  Trained trained(options("O2"));
  trained.model->a.requires_grad_(false);
  const RecordedEvents events;
  trained.backward();
  trained.mixed.step(trained.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  EXPECT_FALSE(events.gradients().front().gradients[0].defined());
  EXPECT_TRUE(events.gradients().front().gradients[1].defined());
}

// A net at O2 whose fused optimizer reads the model's bf16 gradients, and an fp32 BatchNorm.
struct Deferring {
  Deferring() {
    torch::manual_seed(7);
    model = test::odd_net();
    optimizer = std::make_unique<optim::FusedSGD>(model->parameters(), optim::FusedSGDOptions(0.1));
    mixed.emplace(
        initialize(model, *optimizer, Options(OptLevel::O2).dtype(torch::kBFloat16).verbosity(0)));
  }
  void backward() {
    torch::manual_seed(8);
    const at::Tensor output = mixed->forward(model, torch::randn({16, 9}));
    mixed->scale_loss(output.pow(2).sum(), *optimizer).backward();
  }
  std::vector<at::Tensor> gradients() {
    return test::copies(test::gradients_of(mixed->master_params(*optimizer)));
  }
  test::ToyNet model{nullptr};
  std::unique_ptr<optim::FusedSGD> optimizer;
  std::optional<MixedPrecision> mixed;
};

TEST(GradientEvents, DeferredGradientsStayDeferred) {
  Deferring read;
  read.backward();
  const auto want = read.gradients();
  Deferring trained;
  trained.backward();
  const RecordedEvents events;
  trained.mixed->step(*trained.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  const RecordedGradients& event = events.gradients().front();
  EXPECT_EQ(event.gradients.front().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(event.weights.front().scalar_type(), torch::kFloat);
  EXPECT_EQ(event.scale, 1);
  EXPECT_TRUE(same_bits(unscaled(event), want));
}

TEST(GradientEvents, TheScaleOfClippedDeferredGradientsIsThatOfAll) {
  Deferring read;
  read.backward();
  read.mixed->clip_grad_norm_(*read.optimizer, 0.01);
  const auto want = read.gradients();
  Deferring trained;
  trained.backward();
  trained.mixed->clip_grad_norm_(*trained.optimizer, 0.01);
  const RecordedEvents events;
  trained.mixed->step(*trained.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  const RecordedGradients& event = events.gradients().front();
  EXPECT_EQ(event.gradients.front().scalar_type(), torch::kBFloat16);
  EXPECT_GT(event.scale, 2);
  EXPECT_TRUE(test::near(unscaled(event), want, test::rounding_tolerance(torch::kFloat, 3)));
}

TEST(GradientEvents, GradientsThatAreClippedToZeroAreZero) {
  Deferring trained;
  trained.backward();
  trained.mixed->clip_grad_norm_(*trained.optimizer, 0);
  const RecordedEvents events;
  trained.mixed->step(*trained.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  for (const at::Tensor& gradient : unscaled(events.gradients().front()))
    EXPECT_TRUE(gradient.eq(0).all().item<bool>());
}

TEST(GradientEvents, SplitMastersHaveNoWeight) {
  torch::manual_seed(7);
  test::ToyNet model = test::odd_net();
  optim::FusedAdam optimizer(model->parameters(), optim::FusedAdamOptions().split_master(true));
  MixedPrecision mixed =
      initialize(model, optimizer, Options(OptLevel::O2).dtype(torch::kBFloat16).verbosity(0));
  mixed.scale_loss(mixed.forward(model, torch::randn({16, 9})).sum(), optimizer).backward();
  const RecordedEvents events;
  mixed.step(optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  const RecordedGradients& event = events.gradients().front();
  for (std::size_t i = 0; i < event.parameters.size(); ++i) {
    const bool is_split = event.parameters[i].scalar_type() == torch::kBFloat16;
    EXPECT_EQ(event.weights[i].defined(), !is_split);
  }
  EXPECT_FALSE(event.weights.front().defined());
}

}  // namespace
}  // namespace semitone::amp::scaled_loss_test
