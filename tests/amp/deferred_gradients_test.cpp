// Gradients that a fused optimizer reads in 16 bits without moving them: O2's step in one pass.
// Code that reads the masters' gradients gets them moved first, with the same results.

#include "semitone/amp/initialize.h"
#include "semitone/optim/clip_grad.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace semitone::amp::deferred_gradients_test {
namespace {

using test::expect_bitwise_equal;

// A model at O2. Scaled gradients are moved at once, so that the model shows unscaled ones; bf16
// needs no scale. The scale of fp16 is a power of two, so that unscaling is exact.
struct Trained {
  explicit Trained(const test::Kind& kind, c10::ScalarType dtype = torch::kBFloat16)
      : model(make()),
        optimizer(kind(model->parameters())),
        mixed(initialize(model, *optimizer,
                         Options(OptLevel::O2)
                             .dtype(dtype)
                             .loss_scale(dtype == torch::kHalf ? 128.0 : 1.0)
                             .verbosity(0))) {}

  static test::ToyNet make() {
    torch::manual_seed(7);
    return test::odd_net();
  }

  at::Tensor loss(std::int64_t step) {
    torch::manual_seed(100 + static_cast<std::uint64_t>(step));
    const at::Tensor input = torch::randn({16, 9});
    return torch::cross_entropy_loss(mixed.forward(model, input), torch::randint(5, {16}));
  }
  void backward(std::int64_t step, ScaleLossOptions how = {}) {
    mixed.scale_loss(loss(step), *optimizer, how).backward();
  }
  const std::vector<at::Tensor>& masters() const { return optimizer->param_groups()[0].params(); }

  test::ToyNet model;
  std::unique_ptr<optim::FusedOptimizer> optimizer;
  MixedPrecision mixed;
};

void expect_same_training(const Trained& got, const Trained& want) {
  for (std::size_t i = 0; i < want.masters().size(); ++i) {
    expect_bitwise_equal(got.masters()[i], want.masters()[i]);
    expect_bitwise_equal(got.model->parameters()[i], want.model->parameters()[i]);
  }
}

// Split masters have no gradients of their own: split_masters_test.cpp.
std::vector<test::Kind> with_masters() {
  auto kinds = test::all_fused_optimizers();
  std::erase_if(kinds, [](const test::Kind& kind) { return kind.splits_masters; });
  return kinds;
}

class DeferredGradients : public testing::TestWithParam<test::Kind> {};

INSTANTIATE_TEST_SUITE_P(Optimizers, DeferredGradients, testing::ValuesIn(with_masters()),
                         [](const auto& kind) { return kind.param.name; });

TEST_P(DeferredGradients, TrainAsMovedOnesDo) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    SCOPED_TRACE(dtype);
    Trained deferred(GetParam(), dtype);
    Trained moved(GetParam(), dtype);
    for (std::int64_t step = 0; step < 6; ++step) {
      for (Trained* one : {&deferred, &moved}) {
        one->backward(2 * step);
        if (step % 2 == 1) one->backward(2 * step + 1);  // accumulated
        if (one == &moved) {
          const auto params = one->mixed.master_params(*one->optimizer);
          for (const at::Tensor& param : params) {
            EXPECT_EQ(param.grad().scalar_type(), torch::kFloat);
            EXPECT_TRUE(param.grad().isfinite().all().item<bool>());
          }
        }
        EXPECT_EQ(one->mixed.step(*one->optimizer), Step::stepped);
        for (const at::Tensor& parameter : one->model->parameters())
          EXPECT_TRUE(!parameter.grad().defined() || parameter.scalar_type() == torch::kFloat);
        one->optimizer->zero_grad();
      }
      expect_same_training(deferred, moved);
    }
  }
}

TEST_P(DeferredGradients, AreSkippedWithTheStep) {
  Trained trained(GetParam());
  trained.backward(0);
  trained.mixed.step(*trained.optimizer);
  trained.optimizer->zero_grad();
  Trained untouched(GetParam());
  untouched.backward(0);
  untouched.mixed.step(*untouched.optimizer);

  const at::Tensor loss = trained.loss(1) * std::numeric_limits<float>::infinity();
  trained.mixed.scale_loss(loss, *trained.optimizer).backward();
  EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::skipped);
  expect_same_training(trained, untouched);
  for (const at::Tensor& master : trained.masters())
    EXPECT_TRUE(!master.grad().defined() || master.grad().numel() == 33);  // BatchNorm's own
}

// The products of deferred gradients are rounded once, those of moved ones twice.
TEST_P(DeferredGradients, AreClippedAsMovedOnesAre) {
  for (const double norm_type : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.01, 1e6}) {
      Trained deferred(GetParam());
      Trained moved(GetParam());
      deferred.backward(0);
      moved.backward(0);
      const double norm = deferred.mixed.clip_grad_norm_(*deferred.optimizer, max_norm, norm_type);
      const double want =
          optim::clip_grad_norm_(moved.mixed.master_params(*moved.optimizer), max_norm, norm_type);
      EXPECT_NEAR(norm, want, 1e-6 * want);
      ASSERT_GT(want, 0.01);
      for (const at::Tensor& master : deferred.masters()) {
        if (master.numel() == 33) continue;  // BatchNorm's own
        EXPECT_EQ(master.grad().storage().nbytes(), sizeof(float)) << "it was moved";
      }
      EXPECT_EQ(deferred.mixed.step(*deferred.optimizer), Step::stepped);
      EXPECT_EQ(moved.mixed.step(*moved.optimizer), Step::stepped);
      for (std::size_t i = 0; i < moved.masters().size(); ++i)
        test::expect_close(deferred.masters()[i], moved.masters()[i], 1e-6);
      // The next step is not clipped.
      deferred.optimizer->zero_grad();
      deferred.backward(1);
      const std::vector<at::Tensor> params = deferred.mixed.master_params(*deferred.optimizer);
      const double unclipped = optim::grad_norm(params);
      EXPECT_GT(unclipped, 0.02);
    }
  }
}

const test::Kind& adam() {
  static const auto* const kinds = new std::vector<test::Kind>(test::all_fused_optimizers());
  return kinds->front();
}

TEST(DeferredGradientsOfAdam, TakeNoMemoryInTheMasters) {
  Trained trained(adam());
  trained.backward(0);
  for (const at::Tensor& master : trained.masters()) {
    if (master.numel() == 33) continue;  // BatchNorm's are fp32 in the model
    EXPECT_EQ(master.grad().storage().nbytes(), sizeof(float));
    EXPECT_EQ(master.grad().sizes(), master.sizes());
  }
}

// Reading them without master_params() must be noticed.
TEST(DeferredGradientsOfAdam, AreNaNWhereNobodyMayLook) {
  Trained trained(adam());
  trained.backward(0);
  const at::Tensor& master = trained.masters()[0];
  EXPECT_TRUE(std::isnan(master.grad().sum().item<double>()));
  EXPECT_THROW(master.grad().mul_(0.5), c10::Error);
  const auto params = trained.mixed.master_params(*trained.optimizer);
  EXPECT_TRUE(params[0].grad().isfinite().all().item<bool>());
  params[0].mutable_grad().mul_(0.5);
}

TEST(DeferredGradientsOfAdam, AreMovedAsTheyWereClipped) {
  Trained trained(adam());
  trained.backward(0);
  EXPECT_GT(trained.mixed.clip_grad_norm_(*trained.optimizer, 0.01), 0.02);
  EXPECT_NEAR(optim::grad_norm(trained.mixed.master_params(*trained.optimizer)), 0.01, 1e-5);
  // Nothing is deferred any more.
  trained.mixed.clip_grad_norm_(*trained.optimizer, 0.005);
  EXPECT_NEAR(optim::grad_norm(trained.mixed.master_params(*trained.optimizer)), 0.005, 1e-5);
}

// The model shows them as they were, and step() multiplies what it reads.
TEST(DeferredGradientsOfAdam, AreNotChangedAfterTheyWereClipped) {
  const std::vector<std::function<void(const at::Tensor&)>> changes{
      [](const at::Tensor& parameter) { parameter.mutable_grad().add_(1); },
      [](const at::Tensor& parameter) { parameter.mutable_grad() = parameter.grad() + 1; },
      // LibTorch's functions change no version.
      [](const at::Tensor& parameter) { torch::nn::utils::clip_grad_value_({parameter}, 1e-6); },
      [](const at::Tensor& parameter) { torch::nn::utils::clip_grad_norm_({parameter}, 1e-6); },
  };
  for (const auto& change : changes) {
    Trained trained(adam());
    trained.backward(0);
    trained.mixed.clip_grad_norm_(*trained.optimizer, 0.01);
    change(trained.model->parameters()[0]);
    const at::Tensor before = trained.masters()[0].detach().clone();
    test::expect_error([&] { trained.mixed.step(*trained.optimizer); },
                       {"[amp.mixed_precision.step]", "before clip_grad_norm_"});
    test::expect_error([&] { trained.mixed.clip_grad_norm_(*trained.optimizer, 1); },
                       {"before clip_grad_norm_"});
    expect_bitwise_equal(trained.masters()[0], before);
    trained.mixed.zero_grad(*trained.optimizer);
    trained.backward(1);
    EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::stepped);
  }
  // Another forward takes what the program has changed.
  Trained evaluated(adam());
  evaluated.backward(0);
  evaluated.mixed.clip_grad_norm_(*evaluated.optimizer, 0.01);
  evaluated.model->parameters()[0].mutable_grad().add_(1);
  evaluated.loss(1);
  test::expect_error([&] { evaluated.mixed.master_params(*evaluated.optimizer); },
                     {"[amp.mixed_precision.master_params]", "before clip_grad_norm_"});
  test::expect_error([&] { evaluated.mixed.step(*evaluated.optimizer); },
                     {"[amp.mixed_precision.step]", "before clip_grad_norm_"});
  evaluated.mixed.zero_grad(*evaluated.optimizer);
  evaluated.backward(1);
  EXPECT_EQ(evaluated.mixed.step(*evaluated.optimizer), Step::stepped);
  // Not clipped, because the norm was small enough.
  Trained trained(adam());
  trained.backward(0);
  trained.mixed.clip_grad_norm_(*trained.optimizer, 1e6);
  trained.model->parameters()[0].mutable_grad().add_(1);
  EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::stepped);
}

// A parameter that the program has taken out of the optimizer is not among those that are clipped.
TEST(DeferredGradientsOfAdam, AreClippedWithoutThoseOfParametersThatWereTakenOut) {
  Trained trained(adam());
  auto& parameters = trained.optimizer->param_groups()[0].params();
  parameters.erase(parameters.begin());
  trained.backward(0);
  const at::Tensor taken_out = trained.model->parameters()[0];
  double squares = 0;
  for (const at::Tensor& parameter : trained.model->parameters()) {
    if (parameter.is_same(taken_out)) continue;
    squares += parameter.grad().to(torch::kDouble).square().sum().item<double>();
  }
  ASSERT_GT(squares, 0);
  const double norm = trained.mixed.clip_grad_norm_(*trained.optimizer, 1e6);
  EXPECT_NEAR(norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
  const at::Tensor before = taken_out.detach().clone();
  EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::stepped);
  expect_bitwise_equal(taken_out, before);
}

TEST(DeferredGradientsOfAdam, AreNotClippedWhereTheyAreNotFinite) {
  Trained trained(adam());
  const at::Tensor loss = trained.loss(1) * std::numeric_limits<float>::infinity();
  trained.mixed.scale_loss(loss, *trained.optimizer).backward();
  test::expect_error(
      [&] { trained.mixed.clip_grad_norm_(*trained.optimizer, 1, 2, /*error_if_nonfinite=*/true); },
      {"[amp.mixed_precision.clip_grad_norm_]", "finite gradients"});
  EXPECT_FALSE(std::isfinite(trained.mixed.clip_grad_norm_(*trained.optimizer, 1)));
  Trained unclipped(adam());
  unclipped.mixed
      .scale_loss(unclipped.loss(1) * std::numeric_limits<float>::infinity(), *unclipped.optimizer)
      .backward();
  const auto got = trained.mixed.master_params(*trained.optimizer);
  const auto want = unclipped.mixed.master_params(*unclipped.optimizer);
  for (std::size_t i = 0; i < want.size(); ++i) expect_bitwise_equal(got[i].grad(), want[i].grad());
  EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::skipped);
}

TEST(DeferredGradientsOfAdam, AreClippedTogetherWithThoseByHand) {
  Trained trained(adam());
  trained.backward(0);
  trained.loss(1).backward();  // without scale_loss
  EXPECT_GT(trained.mixed.clip_grad_norm_(*trained.optimizer, 0.01), 0.02);
  EXPECT_NEAR(optim::grad_norm(trained.mixed.master_params(*trained.optimizer)), 0.01, 1e-5);
  Trained alone(adam());
  alone.loss(1).backward();
  EXPECT_GT(alone.mixed.clip_grad_norm_(*alone.optimizer, 0.01), 0.02);
  EXPECT_NEAR(optim::grad_norm(alone.mixed.master_params(*alone.optimizer)), 0.01, 1e-5);
}

// For another optimizer at another level the name of the overflow would be lost.
TEST(ClippedGradients, StayAsTheyAreWhereTheyAreNotFinite) {
  test::ToyNet model = Trained::make();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, Options(OptLevel::O1).dtype(torch::kHalf).verbosity(0));
  const at::Tensor loss = model->parameters()[0].pow(2).sum();
  mixed.scale_loss(loss, optimizer).backward();
  model->parameters()[0].mutable_grad().flatten()[3] = std::numeric_limits<float>::infinity();
  const at::Tensor before = model->parameters()[0].grad().clone();
  EXPECT_FALSE(std::isfinite(mixed.clip_grad_norm_(optimizer, 1)));
  expect_bitwise_equal(model->parameters()[0].grad(), before);
  // They were finite when scale_loss checked them.
  const double scale = mixed.loss_scaler().scale();
  const auto weights = test::copies(model->parameters());
  EXPECT_EQ(mixed.step(optimizer), Step::skipped);
  expect_bitwise_equal(test::copies(model->parameters()), weights);
  EXPECT_EQ(mixed.loss_scaler().scale(), scale / 2);
}

// The check has found the overflow, for the loss that it belongs to.
TEST(ClippedGradients, ThatOverflowChangeTheScaleOfTheirLossAlone) {
  test::ToyNet model = Trained::make();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer,
                          Options(OptLevel::O1).dtype(torch::kHalf).num_losses(2).verbosity(0));
  const double scale = mixed.loss_scaler(0).scale();
  const auto loss = [&] { return model->parameters()[0].pow(2).sum(); };
  mixed.scale_loss(loss(), optimizer, ScaleLossOptions().loss_id(0)).backward();
  mixed
      .scale_loss(loss() * std::numeric_limits<float>::infinity(), optimizer,
                  ScaleLossOptions().loss_id(1))
      .backward();
  EXPECT_FALSE(std::isfinite(mixed.clip_grad_norm_(optimizer, 1)));
  EXPECT_EQ(mixed.step(optimizer), Step::skipped);
  EXPECT_EQ(mixed.loss_scaler(0).scale(), scale);
  EXPECT_EQ(mixed.loss_scaler(1).scale(), scale / 2);
}

TEST(DeferredGradientsOfAdam, AreClippedOnceTheyAreUnscaled) {
  Trained trained(adam());
  trained.backward(0, ScaleLossOptions().delay_unscale(true));
  test::expect_error([&] { trained.mixed.clip_grad_norm_(*trained.optimizer, 1); },
                     {"[amp.mixed_precision.clip_grad_norm_]", "delay_unscale"});
  trained.backward(1);
  test::expect_error([&] { trained.mixed.clip_grad_norm_(*trained.optimizer, -1); }, {"max_norm"});
  test::expect_error([&] { trained.mixed.clip_grad_norm_(*trained.optimizer, 1, 0); },
                     {"norm_type"});
}

TEST(DeferredGradientsOfAdam, GoWithZeroGrad) {
  Trained trained(adam());
  trained.backward(0);
  trained.optimizer->zero_grad();
  trained.backward(1);
  trained.mixed.step(*trained.optimizer);
  Trained other(adam());
  other.loss(0);  // BatchNorm sees it
  other.backward(1);
  other.mixed.step(*other.optimizer);
  expect_same_training(trained, other);
}

TEST(DeferredGradientsOfAdam, GoWithZeroGradInPlaceToo) {
  Trained trained(adam());
  trained.backward(0);
  const at::Tensor before = trained.masters()[0].detach().clone();
  trained.optimizer->zero_grad(/*set_to_none=*/false);
  trained.mixed.step(*trained.optimizer);
  expect_bitwise_equal(trained.masters()[0], before.mul(1 - 0.01 * 0.1));  // weight decay alone
}

TEST(DeferredGradientsOfAdam, AreNotSteppedPastTheirMasters) {
  Trained trained(adam());
  trained.backward(0);
  test::expect_error([&] { trained.optimizer->step(); }, {"MixedPrecision::step", "master_params"});
  EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::stepped);
  Trained other(adam());
  other.backward(0);
  other.mixed.step(*other.optimizer);
  expect_same_training(trained, other);
}

TEST(DeferredGradientsOfAdam, GiveWayToOnesThatAreSetByHand) {
  Trained trained(adam());
  trained.backward(0);
  const at::Tensor before = trained.masters()[0].detach().clone();
  trained.masters()[0].mutable_grad() = torch::zeros_like(trained.masters()[0]);
  trained.mixed.step(*trained.optimizer);
  expect_bitwise_equal(trained.masters()[0], before.mul(1 - 0.01 * 0.1));  // weight decay alone
}

// The next backward pass writes to the bucket, so its contents are moved at once.
TEST(DeferredGradientsOfAdam, ArePartsOfNothingLarger) {
  Trained trained(adam());
  auto scaled = trained.mixed.scale_loss(trained.loss(0), *trained.optimizer);
  scaled.value().backward();
  at::Tensor weight = trained.model->first->weight;
  const at::Tensor bucket = torch::zeros({weight.numel() + 1}, torch::kBFloat16);
  bucket.narrow(0, 0, weight.numel()).copy_(weight.grad().flatten());
  weight.mutable_grad() = bucket.narrow(0, 0, weight.numel()).view_as(weight);
  scaled.finish();
  EXPECT_EQ(trained.masters()[0].grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(trained.masters()[0].grad().is_contiguous());
}

TEST(DeferredGradientsOfAdam, BelongToNobodyElse) {
  Trained trained(adam());
  auto scaled = trained.mixed.scale_loss(trained.loss(0), *trained.optimizer);
  scaled.value().backward();
  at::Tensor weight = trained.model->first->weight;
  const at::Tensor bucket = weight.grad().clone();
  weight.mutable_grad() = bucket.variable_data();
  scaled.finish();
  const at::Tensor want = bucket.to(torch::kFloat);
  bucket.zero_();
  expect_bitwise_equal(trained.masters()[0].grad(), want);
}

TEST(DeferredGradientsOfAdam, SurviveAStepThatThrows) {
  Trained trained(adam());
  auto& options =
      static_cast<optim::FusedAdamOptions&>(trained.optimizer->param_groups()[0].options());
  trained.backward(0);
  options.lr(-1);
  EXPECT_FALSE(test::error_of([&] { trained.mixed.step(*trained.optimizer); }).empty());
  options.lr(0.01);
  EXPECT_EQ(trained.mixed.step(*trained.optimizer), Step::stepped);
  Trained other(adam());
  other.backward(0);
  other.mixed.step(*other.optimizer);
  expect_same_training(trained, other);
}

}  // namespace
}  // namespace semitone::amp::deferred_gradients_test
