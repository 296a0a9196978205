// ScaledLoss: unscaled gradients at every level, accumulation, and one backward per loss.

#include "semitone/amp/scaled_loss.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "tests/amp/scaled_loss_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace semitone::amp::scaled_loss_test {
namespace {

using test::message_of;
using test::near;
using test::pointwise_tolerance;
using test::reduction_tolerance;
using test::same_bits;
using testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(All, ScaledLossAtEveryLevel, testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(ScaledLossAtEveryLevel, BackwardGivesUnscaledGradients) {
  Trained trained(opts());
  trained.backward();
  plain.backward();
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
}

// A product whose backward is computed in 16 bits: its sums are fp32, so that each gradient is
// rounded once.
struct ProductImpl : torch::nn::Module {
  ProductImpl() {
    const at::NoGradGuard no_grad;
    linear->weight.copy_(linear->weight.to(torch::kBFloat16));
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{torch::nn::LinearOptions(48, 16).bias(false)};
};
TORCH_MODULE(Product);

TEST_P(ScaledLossAtEveryLevel, GradientsOf16BitArithmeticAreRoundedOnce) {
  torch::manual_seed(3);
  Product model;
  torch::optim::SGD optimizer(model->parameters(), 0.125);
  auto mixed = initialize(model, optimizer, Options(opts()).policy(CastPolicy::semitone()));
  // Few bits, so that bf16 and fp16 hold them; and nothing that fp16 could not hold scaled.
  const at::Tensor x = torch::randint(-16, 17, {40, 48}).to(torch::kFloat) / 8;
  const at::Tensor weights = torch::randint(1, 17, {40, 16}).to(torch::kFloat) / 16;
  const at::Tensor signs = torch::randint(0, 2, {40, 16}).to(torch::kFloat) * 2 - 1;
  const at::Tensor grad_output = weights * signs;
  for (const bool by_value : {false, true}) {
    const at::Tensor loss = (mixed.forward(model, x) * grad_output).sum();
    auto scaled = mixed.scale_loss(loss, optimizer);
    if (by_value) {
      scaled.value().backward();
      scaled.finish();
    } else {
      scaled.backward();
    }
    const at::Tensor got = mixed.master_params(optimizer)[0].grad().to(torch::kDouble);
    const at::Tensor want = grad_output.to(torch::kDouble).t().mm(x.to(torch::kDouble));
    const at::Tensor terms =
        grad_output.to(torch::kDouble).abs().t().mm(x.to(torch::kDouble).abs());
    const bool is_fp32 = opts().opt_level() == OptLevel::O0;
    const double rounding = is_fp32 ? 0 : test::rounding_tolerance(dtype());
    const at::Tensor bound = want.abs() * rounding + terms * std::ldexp(40.0, -24);
    EXPECT_TRUE(((got - want).abs() <= bound).all().item<bool>())
        << ((got - want).abs() / bound).max().item<double>();
    EXPECT_GT(want.abs().max().item<double>(), 1);
    mixed.zero_grad(optimizer);
  }
}

TEST_P(ScaledLossAtEveryLevel, GradientsAccumulateOverBackwards) {
  Trained trained(opts());
  for (int step = 0; step < 2; ++step) {
    for (Trained* one : {&trained, &plain}) {
      one->optimizer.zero_grad();
      for (int i = 0; i < 3; ++i) one->backward();
    }
    EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
    plain.mixed.step(plain.optimizer);
  }
}

TEST_P(ScaledLossAtEveryLevel, DelayedUnscaleComesToTheSame) {
  Trained trained(opts());
  for (int step = 0; step < 2; ++step) {
    trained.optimizer.zero_grad();
    plain.optimizer.zero_grad();
    trained.backward();  // an unscaled gradient from before
    trained.backward(ScaleLossOptions().delay_unscale(true));
    trained.backward(ScaleLossOptions().delay_unscale(true));
    trained.backward();
    for (int i = 0; i < 4; ++i) plain.backward();
    EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
    trained.mixed.step(trained.optimizer);
    plain.mixed.step(plain.optimizer);
  }
}

TEST_P(ScaledLossAtEveryLevel, AHandMadeBackwardThroughValueIsTheSame) {
  Trained trained(opts());
  auto scaled = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  (2 * scaled.value()).backward();
  scaled.finish();
  (2 * plain.loss()).backward();
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
}

TEST_P(ScaledLossAtEveryLevel, GradientsFromAPlainBackwardAreKept) {
  Trained trained(opts());
  for (int step = 0; step < 2; ++step) {
    trained.mixed.zero_grad(trained.optimizer);
    plain.mixed.zero_grad(plain.optimizer);
    trained.loss().backward();  // for example a regulariser without a scale
    trained.backward();
    for (int i = 0; i < 2; ++i) plain.backward();
    EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
    trained.mixed.step(trained.optimizer);
    plain.mixed.step(plain.optimizer);
    EXPECT_TRUE(near(trained.mixed.master_params(trained.optimizer),
                     plain.mixed.master_params(plain.optimizer), 0));
  }
}

TEST_P(ScaledLossAtEveryLevel, APlainBackwardAloneIsAPlainStep) {
  Trained trained(opts());
  trained.loss().backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
  plain.backward();
  plain.mixed.step(plain.optimizer);
  EXPECT_TRUE(near(trained.mixed.master_params(trained.optimizer),
                   plain.mixed.master_params(plain.optimizer), 0));
}

TEST_P(ScaledLossAtEveryLevel, ClippingOfMasterParamsSeesTrueGradients) {
  Trained trained(opts());
  trained.backward();
  plain.backward();
  const double norm =
      torch::nn::utils::clip_grad_norm_(trained.mixed.master_params(trained.optimizer), 1.0);
  const double expected = torch::nn::utils::clip_grad_norm_(plain.model->parameters(), 1.0);
  // LibTorch takes the norm of a gradient in its dtype: 16 bits where there are no masters.
  auto norm_dtype = torch::kFloat;
  for (const at::Tensor& grad : trained.grads()) {
    if (grad.scalar_type() != torch::kFloat) norm_dtype = grad.scalar_type();
  }
  EXPECT_LE(std::abs(norm - expected), reduction_tolerance(norm_dtype, 4) * expected);
  EXPECT_TRUE(near(trained.grads(), plain.grads(), pointwise_tolerance(norm_dtype)));
}

TEST_P(ScaledLossAtEveryLevel, AStepChangesModelAndMasterAlike) {
  Trained trained(opts());
  for (int step = 0; step < 3; ++step) {
    for (Trained* one : {&trained, &plain}) {
      one->optimizer.zero_grad();
      one->backward();
      EXPECT_EQ(one->mixed.step(one->optimizer), Step::stepped);
    }
  }
  const auto masters = trained.mixed.master_params(trained.optimizer);
  for (std::size_t i = 0; i < masters.size(); ++i) {
    const auto parameter = trained.model->parameters()[i];
    EXPECT_TRUE(same_bits(parameter, masters[i].to(parameter.scalar_type())));
    EXPECT_TRUE(test::near(masters[i], plain.model->parameters()[i], pointwise_tolerance(dtype())));
  }
}

TEST_P(ScaledLossAtEveryLevel, EveryWayOfZeroingLeavesNothing) {
  for (const int way : {0, 1, 2}) {
    Trained trained(opts());
    const auto zero = [&](Trained& one) {
      if (way == 0) one.optimizer.zero_grad();
      if (way == 1) one.model->zero_grad();
      if (way == 2) one.mixed.zero_grad(one.optimizer);
    };
    Trained reference(options("O0"));
    for (int step = 0; step < 3; ++step) {
      for (Trained* one : {&trained, &reference}) {
        zero(*one);
        one->backward();
      }
      EXPECT_TRUE(near(trained.grads(), reference.grads(), pointwise_tolerance(dtype()))) << way;
      trained.mixed.step(trained.optimizer);
      reference.mixed.step(reference.optimizer);
    }
  }
}

TEST(ScaledLoss, ValueIsTheLossTimesTheScaleInFp32) {
  Trained trained(options("O2").loss_scale(128));
  const auto loss = trained.loss();
  auto scaled = trained.mixed.scale_loss(loss.to(torch::kHalf), trained.optimizer);
  EXPECT_EQ(scaled.value().scalar_type(), torch::kFloat);
  EXPECT_EQ(scaled.value().item<float>(), 128 * loss.item<float>());
}

TEST(ScaledLoss, LossesThatAreNoScalarsTakeAGradient) {
  Trained trained(options("O2").loss_scale(128));
  Trained plain(options("O0"));
  for (Trained* one : {&trained, &plain}) {
    const auto losses = torch::stack({one->loss(), one->loss()});
    one->mixed.scale_loss(losses, one->optimizer).backward(torch::tensor({1.0F, 3.0F}));
  }
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
}

TEST(ScaledLoss, BackwardIsForOnce) {
  for (const char* scale : {"1", "128"}) {
    Trained trained(options("O1").loss_scale(scale));
    auto scaled = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    scaled.backward({}, /*retain_graph=*/true);
    const auto before = trained.grads();
    EXPECT_THAT(message_of<Error>([&] { scaled.backward(); }),
                HasSubstr("expected one backward for each scale_loss"));
    EXPECT_THROW(scaled.finish(), Error);
    EXPECT_THROW(scaled.value(), Error);
    EXPECT_TRUE(same_bits(trained.grads(), before));
  }
}

TEST(ScaledLoss, CanBeMovedAndTheOldOneIsSpent) {
  Trained trained(options("O2").loss_scale(128));
  auto first = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  auto second = std::move(first);
  EXPECT_THROW(first.backward(), Error);  // NOLINT(bugprone-use-after-move): what is tested
  second.backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST(ScaledLoss, TakesTheGraphOfASecondDerivative) {
  Trained trained(options("O1").loss_scale(128));
  auto scaled = trained.mixed.scale_loss(trained.loss().pow(2), trained.optimizer);
  scaled.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  Trained plain(options("O0"));
  plain.loss().pow(2).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
  // The graph is that of the unscaled gradient, too.
  for (Trained* const one : {&trained, &plain}) {
    const at::Tensor penalty = one->model->b.grad().pow(2).sum();
    for (const auto& p : one->model->parameters()) p.mutable_grad().reset();
    one->mixed.scale_loss(penalty, one->optimizer).backward();
  }
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
}

TEST(ScaledLoss, RefusesTheGraphOfASecondDerivativeWhereThereAreMasters) {
  for (const std::string scale : {"1", "128"}) {
    Trained trained(options("O2").loss_scale(scale));
    auto scaled = trained.mixed.scale_loss(trained.loss().pow(2), trained.optimizer);
    test::expect_error([&] { scaled.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                       {"[amp.unscale]", "create_graph", "torch::autograd::grad"});
    for (const auto& p : trained.model->parameters()) EXPECT_FALSE(p.grad().defined());
  }
}

TEST(ScaledLoss, MadeBeforeTheScaleMovedItIsUnscaledByItsOwn) {
  Trained trained(dynamic_scale(options("O1")));
  Trained plain(options("O0"));
  plain.backward();
  auto early = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  trained.overflow(trained.model->a);
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);  // halves the scale
  trained.optimizer.zero_grad();
  early.backward();
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
}

TEST(ScaledLoss, SeveralMadeAtOnceAreBackPropagatedOneByOne) {
  Trained trained(options("O2").num_losses(2).loss_scale(128));
  Trained plain(options("O0"));
  auto first =
      trained.mixed.scale_loss(trained.loss(), trained.optimizer, ScaleLossOptions().loss_id(0));
  auto second =
      trained.mixed.scale_loss(trained.loss(), trained.optimizer, ScaleLossOptions().loss_id(1));
  first.backward();
  second.backward();
  for (int i = 0; i < 2; ++i) plain.backward();
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
}

TEST(ScaledLoss, TwoInBackwardAtOnceAreAnError) {
  Trained trained(options("O1").loss_scale(128));
  auto first = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  first.value().backward();
  EXPECT_THAT(message_of<Error>([&] { trained.backward(); }),
              HasSubstr("expected one loss at a time in backward"));
  first.finish();
  EXPECT_NO_THROW(trained.backward());
}

TEST(ScaledLoss, SteppingOnScaledGradientsIsAnError) {
  Trained trained(options("O1").loss_scale(128));
  {
    auto scaled = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    scaled.value().backward();
    EXPECT_THAT(message_of<Error>([&] { trained.mixed.step(trained.optimizer); }),
                HasSubstr("a ScaledLoss that is not finished"));
  }
  trained.backward(ScaleLossOptions().delay_unscale(true));
  EXPECT_THAT(message_of<Error>([&] { trained.mixed.step(trained.optimizer); }),
              HasSubstr("the last scale_loss had delay_unscale = true"));
  trained.backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST(ScaledLoss, DelayedGradientsWantTheSameLossAndScale) {
  Trained trained(options("O1").num_losses(2).loss_scale(128));
  trained.backward(ScaleLossOptions().loss_id(1).delay_unscale(true));
  EXPECT_THAT(
      message_of<Error>([&] { trained.backward(ScaleLossOptions().loss_id(0)); }),
      HasSubstr("expected loss_id 1, with which the optimizer's gradients are scaled, got 0"));
  trained.backward(ScaleLossOptions().loss_id(1));
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);

  // Two optimizers with one loss_id: a step of the first moves the scale under the second.
  Toy first;
  Toy second;
  torch::optim::SGD first_optimizer(first->parameters(), 0.125);
  torch::optim::SGD second_optimizer(second->parameters(), 0.125);
  auto mixed = initialize({first, second}, {first_optimizer, second_optimizer},
                          Options("O1").loss_scale("dynamic").verbosity(0).loss_scale_options(
                              LossScaleOptions().growth_interval(1)));
  mixed
      .scale_loss(mixed.forward(second, ones()), second_optimizer,
                  ScaleLossOptions().delay_unscale(true))
      .backward();
  mixed.scale_loss(mixed.forward(first, ones()), first_optimizer).backward();
  mixed.step(first_optimizer);
  EXPECT_THAT(message_of<Error>([&] {
                mixed.scale_loss(mixed.forward(second, ones()), second_optimizer).backward();
              }),
              HasSubstr("a step with the same loss_id changed it"));
  mixed.zero_grad(second_optimizer);
  mixed.scale_loss(mixed.forward(second, ones()), second_optimizer).backward();
  EXPECT_EQ(mixed.step(second_optimizer), Step::stepped);
}

TEST(ScaledLoss, AbandonedAfterADelayedOneDropsTheDelayedGradientsToo) {
  Trained trained(options("O1").loss_scale(128));
  trained.backward();
  const auto before = trained.grads();
  trained.backward(ScaleLossOptions().delay_unscale(true));
  try {
    auto abandoned = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    abandoned.value().backward();
    throw std::runtime_error("interrupted");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(same_bits(trained.grads(), before));
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

// Apex loses here what fp32 parameters accumulated: a static scale of exactly 1, with masters.
TEST(ScaledLoss, AStaticScaleOfOneWithMastersKeepsWhatBatchNormAccumulated) {
  torch::nn::BatchNorm1d model(2);
  torch::nn::BatchNorm1d reference(2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, Options("O2").loss_scale(1.0).verbosity(0));
  ASSERT_TRUE(mixed.properties().master_weights);
  const auto x = torch::tensor({1.0F, 2.0F, 4.0F, 8.0F}).view({2, 2});
  for (int i = 0; i < 3; ++i) {
    mixed.scale_loss(mixed.forward(model, x).pow(2).sum(), optimizer).backward();
    reference->forward(x).pow(2).sum().backward();
  }
  EXPECT_TRUE(test::near(model->weight.grad(), reference->weight.grad(),
                         reduction_tolerance(torch::kBFloat16, 2)));
  EXPECT_GT(model->weight.grad()[0].item<float>(), 2.5F * 2.0F);
}

struct SumImpl : torch::nn::Module {
  at::Tensor a = register_parameter("a", torch::ones({2}));
  at::Tensor b = register_parameter("b", torch::ones({2}));
};
TORCH_MODULE(Sum);

// master_params() shows the masters' gradients in the model, also while those of a loss are delayed.
TEST(ScaledLoss, DelayedGradientsStayApartFromThoseThatAreShown) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    Sum model;
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    MixedPrecision mixed = initialize(
        model, optimizer, Options(level).dtype(torch::kHalf).loss_scale(128.0).verbosity(0));
    const auto backward = [&](const std::vector<at::Tensor>& of, const ScaleLossOptions& how) {
      at::Tensor loss = torch::zeros({});
      for (const at::Tensor& each : of) loss = loss + each.to(torch::kFloat).sum();
      mixed.scale_loss(loss, optimizer, how).backward();
    };
    backward({model->a, model->b}, {});
    backward({model->b}, ScaleLossOptions().delay_unscale(true));
    mixed.master_params(optimizer);
    backward({model->a, model->b}, {});
    const auto masters = mixed.master_params(optimizer);
    EXPECT_EQ(masters[0].grad()[0].item<float>(), 2.0F);
    EXPECT_EQ(masters[1].grad()[0].item<float>(), 3.0F);
  }
}

}  // namespace
}  // namespace semitone::amp::scaled_loss_test
