// ScaledLoss: losses that are not finished, and exceptions in backward and in the optimizer.

#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "tests/amp/scaled_loss_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

namespace semitone::amp::scaled_loss_test {
namespace {

using test::message_of;
using test::near;
using test::pointwise_tolerance;
using test::same_bits;
using testing::HasSubstr;

TEST_P(ScaledLossAtEveryLevel, DestroyedBeforeBackwardGradientsAreAsBefore) {
  Trained trained(opts());
  trained.backward();
  const auto before = trained.grads();
  {
    const auto unused = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  }
  EXPECT_TRUE(same_bits(trained.grads(), before));
  {
    auto begun = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    begun.value();
  }
  EXPECT_TRUE(same_bits(trained.grads(), before));
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

// value() of a temporary would leave scaled gradients behind, or none.
template <typename T>
concept HasValue = requires(T&& object) { std::forward<T>(object).value(); };
static_assert(HasValue<ScaledLoss&> && !HasValue<ScaledLoss>);

TEST_P(ScaledLossAtEveryLevel, IsFinishedByItsEndWhereTheProgramForgets) {
  Trained trained(opts());
  for (int step = 0; step < 3; ++step) {
    for (Trained* one : {&trained, &plain}) one->optimizer.zero_grad();
    {
      auto scaled = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
      scaled.value().backward();
    }
    plain.backward();
    // At O3 the second step's weights are rounded.
    EXPECT_TRUE(near(trained.grads(), plain.grads(), step == 0 ? 0 : pointwise_tolerance(dtype())));
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
    plain.mixed.step(plain.optimizer);
  }
}

TEST_P(ScaledLossAtEveryLevel, DestroyedByAnExceptionGradientsAreAsBefore) {
  if (is_plain()) return;  // nothing stands between a plain loss and its gradients
  Trained trained(opts());
  trained.backward();
  const auto before = trained.grads();
  try {
    auto abandoned = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    abandoned.value().backward();
    throw std::runtime_error("interrupted");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(same_bits(trained.grads(), before));
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

// An autograd function whose backward throws.
struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("broken backward");
  }
};

TEST_P(ScaledLossAtEveryLevel, AnExceptionInBackwardLeavesGradientsAsBeforeAndTrainingGoesOn) {
  Trained trained(opts());
  for (Trained* one : {&trained, &plain}) one->backward();
  const auto before = trained.grads();
  // Part of the gradients arrive before the break.
  const auto loss = trained.loss() + Broken::apply(trained.model->a.sum());
  auto scaled = trained.mixed.scale_loss(loss, trained.optimizer);
  EXPECT_THROW(scaled.backward(), std::runtime_error);
  // At once, though the object lives on.
  if (!is_plain()) {
    EXPECT_TRUE(same_bits(trained.grads(), before));
    EXPECT_THROW(scaled.backward(), Error);
    for (Trained* one : {&trained, &plain}) one->backward();
    EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
  }
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST_P(ScaledLossAtEveryLevel, AnExceptionInTheOptimizerLeavesAUsableState) {
  struct Faulty : torch::optim::SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      if (broken) throw std::runtime_error("no power");
      return SGD::step(closure);
    }
    bool broken = true;
  };
  Toy model;
  Faulty optimizer(model->parameters(), 0.125);
  auto mixed = initialize(model, optimizer, opts());
  Trained reference(opts());
  const auto iterate = [&] {
    optimizer.zero_grad();
    mixed.scale_loss(mixed.forward(model, ones()), optimizer).backward();
    return mixed.step(optimizer);
  };
  const detail::LossScaleState before = mixed.loss_scaler().state();
  EXPECT_THROW(iterate(), std::runtime_error);
  EXPECT_EQ(mixed.loss_scaler().state(), before);
  optimizer.broken = false;
  EXPECT_EQ(iterate(), Step::stepped);
  reference.backward();
  reference.mixed.step(reference.optimizer);
  EXPECT_TRUE(
      near(mixed.master_params(optimizer), reference.mixed.master_params(reference.optimizer), 0));
}

TEST_P(ScaledLossAtEveryLevel, AStepOfTheOptimizerItselfIsRepairedOrRefused) {
  Trained trained(opts());
  const LossScaler& scaler = trained.mixed.loss_scaler();
  const bool could_overflow = scaler.options().dynamic() || scaler.scale() != 1;
  for (int step = 0; step < 3; ++step) {
    for (Trained* one : {&trained, &plain}) {
      one->optimizer.zero_grad();
      if (one == &trained && step == 1 && could_overflow) {
        // The message appears once; the step is repaired as elsewhere.
        EXPECT_THAT(message_of<Error>([&] { trained.loss(); }),
                    HasSubstr("call mixed.step(optimizer) instead"));
      }
      one->backward();
      one->optimizer.step();
    }
  }
  trained.loss();  // forward
  const auto masters = trained.mixed.master_params(trained.optimizer);
  for (std::size_t i = 0; i < masters.size(); ++i) {
    const auto parameter = trained.model->parameters()[i];
    EXPECT_TRUE(same_bits(parameter, masters[i].to(parameter.scalar_type())));
    EXPECT_TRUE(test::near(masters[i], plain.model->parameters()[i], pointwise_tolerance(dtype())));
  }
}

}  // namespace
}  // namespace semitone::amp::scaled_loss_test
