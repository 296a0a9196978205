// MixedPrecision::scale_loss, step and zero_grad: scaling and unscaling of gradients.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::amp::scaled_loss_test {
namespace {

using c10::ScalarType;
using test::message_of;
using test::near;
using test::pointwise_tolerance;
using test::RecordedEvents;
using test::reduction_tolerance;
using test::same_bits;
using testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr const char* kLevels[] = {"O0", "O1", "O2", "O3"};
constexpr ScalarType kDtypes[] = {torch::kBFloat16, torch::kHalf};

// y = (x * a) * b with a kept in fp32 and b in the level's dtype. Small powers of two, so that
// 16-bit arithmetic is exact and levels can be compared bit for bit.
struct ToyImpl : torch::nn::Module {
  explicit ToyImpl(float unique = 0) {
    a = register_parameter("a", torch::tensor({unique + 1, unique + 2}));
    b = register_parameter("b", torch::tensor({2.0F, 0.5F}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return ((x.to(torch::kFloat) * a.to(torch::kFloat)) * b.to(torch::kFloat)).sum();
  }
  at::Tensor a;
  at::Tensor b;
};
TORCH_MODULE(Toy);

Options options(const std::string& level, ScalarType dtype = torch::kHalf) {
  Options made(level);
  made.dtype(dtype).verbosity(0);
  if (level != "O0") made.policy(CastPolicy::semitone().keep_fp32_params("a"));
  return made;
}

// A dynamic scale, starting from a value with which none of these gradients overflows fp16.
constexpr double kFirstScale = 1024;

Options dynamic_scale(const Options& given, const LossScaleOptions& rule = {}) {
  return Options(given).loss_scale("dynamic").loss_scale_options(
      LossScaleOptions(rule).init_scale(kFirstScale));
}

at::Tensor ones() {
  return torch::ones({2});
}

// One model and one optimizer at a level.
struct Trained {
  explicit Trained(const Options& opts, double lr = 0.125)
      : optimizer(model->parameters(), torch::optim::SGDOptions(lr).momentum(0.5)),
        mixed(initialize(model, optimizer, opts)) {}

  at::Tensor loss() { return mixed.forward(model, ones()); }
  void backward(ScaleLossOptions how = {}) { mixed.scale_loss(loss(), optimizer, how).backward(); }
  // A backward whose gradient of a parameter is inf.
  void overflow(const at::Tensor& parameter, ScaleLossOptions how = {}) {
    auto scaled = mixed.scale_loss(loss(), optimizer, how);
    scaled.value().backward();
    parameter.mutable_grad()[0] = kInf;
    scaled.finish();
  }
  // The gradients that the optimizer will step with.
  std::vector<at::Tensor> grads() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : mixed.master_params(optimizer)) {
      all.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
    }
    return all;
  }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : mixed.master_params(optimizer)) all.push_back(p.detach().clone());
    for (const at::Tensor& p : model->parameters()) all.push_back(p.detach().clone());
    return all;
  }

  Toy model;
  torch::optim::SGD optimizer;
  MixedPrecision mixed;
};

testing::AssertionResult equal(const std::vector<at::Tensor>& got,
                               const std::vector<at::Tensor>& want) {
  if (got.size() != want.size()) return testing::AssertionFailure() << "another number";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (auto same = same_bits(got[i], want[i]); !same) return same << " (number " << i << ")";
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult near(const std::vector<at::Tensor>& got,
                              const std::vector<at::Tensor>& want, double relative) {
  if (got.size() != want.size()) return testing::AssertionFailure() << "another number";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (auto close = test::near(got[i], want[i], relative); !close) {
      return close << " (number " << i << ")";
    }
  }
  return testing::AssertionSuccess();
}

// Levels, dtypes and scales: nothing of this may change the gradients.
struct Case {
  std::string name;
  Options options;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      const Options given = options(level, dtype);
      const std::string name = level + "_" + dtype_name(dtype);
      for (const double scale : {1, 128}) {
        all.push_back({name + "_" + std::to_string(static_cast<int>(scale)),
                       Options(given).loss_scale(scale)});
      }
      all.push_back({name + "_dynamic", dynamic_scale(given)});
    }
  }
  return all;
}

void PrintTo(const Case& one, std::ostream* stream) {
  *stream << one.name;
}

class ScaledLossAtEveryLevel : public testing::TestWithParam<Case> {
 protected:
  const Options& opts() const { return GetParam().options; }
  ScalarType dtype() const { return Properties::resolve(opts(), c10::DeviceType::CPU).dtype; }
  // Nothing is unscaled: a scale of 1 and no masters.
  bool is_plain() const {
    const auto properties = Properties::resolve(opts(), c10::DeviceType::CPU);
    return properties.loss_scale.to_string() == "1" && !properties.master_weights;
  }
  Trained plain{options("O0")};
};

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
    trained.backward({.delay_unscale = true});
    trained.backward({.delay_unscale = true});
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

TEST_P(ScaledLossAtEveryLevel, DestroyedBeforeBackwardGradientsAreAsBefore) {
  Trained trained(opts());
  trained.backward();
  const auto before = trained.grads();
  {
    const auto unused = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
  }
  EXPECT_TRUE(equal(trained.grads(), before));
  {
    auto begun = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    begun.value();
  }
  EXPECT_TRUE(equal(trained.grads(), before));
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
  EXPECT_TRUE(equal(trained.grads(), before));
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
    EXPECT_TRUE(equal(trained.grads(), before));
    EXPECT_THROW(scaled.backward(), Error);
    for (Trained* one : {&trained, &plain}) one->backward();
    EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
  }
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

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
    EXPECT_TRUE(equal(trained.weights(), before));
    EXPECT_EQ(trained.mixed.skipped_steps(), 1);
    const bool dynamic = trained.mixed.properties().loss_scale.is_dynamic();
    EXPECT_EQ(trained.mixed.loss_scaler().scale(), dynamic ? scale / 2 : scale);
    // The iteration after it is a good one.
    trained.optimizer.zero_grad();
    trained.backward();
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
    EXPECT_FALSE(equal(trained.weights(), before));
  }
}

TEST_P(ScaledLossAtEveryLevel, AnOverflowInOneOfSeveralAccumulatedBackwardsSkips) {
  if (is_plain()) return;
  for (const int broken : {0, 1, 2}) {
    Trained trained(opts());
    const auto before = trained.weights();
    for (int i = 0; i < 3; ++i)
      i == broken ? trained.overflow(trained.model->b) : trained.backward();
    EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::skipped);
    EXPECT_TRUE(equal(trained.weights(), before));
  }
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
  const LossScaleState before = mixed.loss_scaler().state();
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

// ------------------------------------------------------------------ one loss, one backward

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
    EXPECT_TRUE(equal(trained.grads(), before));
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
  plain.loss().pow(2).backward();
  EXPECT_TRUE(near(trained.grads(), plain.grads(), 0));
  for (const auto& p : trained.model->parameters()) p.mutable_grad().reset();
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
  auto first = trained.mixed.scale_loss(trained.loss(), trained.optimizer, {.loss_id = 0});
  auto second = trained.mixed.scale_loss(trained.loss(), trained.optimizer, {.loss_id = 1});
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
  trained.backward({.delay_unscale = true});
  EXPECT_THAT(message_of<Error>([&] { trained.mixed.step(trained.optimizer); }),
              HasSubstr("the last scale_loss had delay_unscale = true"));
  trained.backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST(ScaledLoss, DelayedGradientsWantTheSameLossAndScale) {
  Trained trained(options("O1").num_losses(2).loss_scale(128));
  trained.backward({.loss_id = 1, .delay_unscale = true});
  EXPECT_THAT(
      message_of<Error>([&] { trained.backward({.loss_id = 0}); }),
      HasSubstr("expected loss_id 1, with which the optimizer's gradients are scaled, got 0"));
  trained.backward({.loss_id = 1});
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);

  // Two optimizers with one loss_id: a step of the first moves the scale under the second.
  Toy first;
  Toy second;
  torch::optim::SGD first_optimizer(first->parameters(), 0.125);
  torch::optim::SGD second_optimizer(second->parameters(), 0.125);
  auto mixed = initialize({first, second}, {first_optimizer, second_optimizer},
                          Options("O1").loss_scale("dynamic").verbosity(0).loss_scale_options(
                              LossScaleOptions().growth_interval(1)));
  mixed.scale_loss(mixed.forward(second, ones()), second_optimizer, {.delay_unscale = true})
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
  trained.backward({.delay_unscale = true});
  try {
    auto abandoned = trained.mixed.scale_loss(trained.loss(), trained.optimizer);
    abandoned.value().backward();
    throw std::runtime_error("interrupted");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(equal(trained.grads(), before));
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

// ------------------------------------------------------------------ several optimizers

struct Gan {
  explicit Gan(const Options& opts)
      : g_optimizer(g->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5)),
        d_optimizer(d->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5)),
        mixed(initialize({g, d}, {g_optimizer, d_optimizer}, Options(opts).num_losses(3))) {}

  // Apex's DCGAN example: three losses, of which the generator's reaches the discriminator too.
  // @param broken  the loss whose gradients get an inf
  void iterate(int broken = -1, bool name_both = false) {
    const auto run = [&](const at::Tensor& loss, OptimizerRefs optimizers, std::int64_t id,
                         const at::Tensor& parameter) {
      auto scaled = mixed.scale_loss(loss, optimizers, {.loss_id = id});
      scaled.value().backward();
      if (id == broken) parameter.mutable_grad()[0] = kInf;
      scaled.finish();
    };
    d_optimizer.zero_grad();
    const auto fake = ones() * mixed.forward(g, ones());
    run(mixed.forward(d, ones()), {d_optimizer}, 0, d->b);
    run(-mixed.forward(d, fake.detach()), {d_optimizer}, 1, d->a);
    d_step = mixed.step(d_optimizer);
    g_optimizer.zero_grad();
    OptimizerRefs of_g{g_optimizer};
    if (name_both) of_g.emplace_back(d_optimizer);
    run(mixed.forward(d, fake), of_g, 2, g->b);
    g_step = mixed.step(g_optimizer);
  }

  Toy g{0};
  Toy d{2};
  torch::optim::SGD g_optimizer;
  torch::optim::SGD d_optimizer;
  MixedPrecision mixed;
  Step d_step = Step::stepped;
  Step g_step = Step::stepped;
};

Options gan_options(const std::string& level, ScalarType dtype) {
  return Options(level).dtype(dtype).verbosity(0).loss_scale("dynamic").loss_scale_options(
      LossScaleOptions().init_scale(128));
}

TEST(ScaledLoss, DcganTrainsScaledLossAtEveryLevelAsInFp32) {
  Gan reference(Options("O0").verbosity(0));
  for (int i = 0; i < 2; ++i) reference.iterate();
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Gan gan(gan_options(level, dtype));
      for (int i = 0; i < 2; ++i) gan.iterate();
      EXPECT_TRUE(near(gan.mixed.master_params(gan.g_optimizer), reference.g->parameters(),
                       reduction_tolerance(dtype, 4)));
      EXPECT_TRUE(near(gan.mixed.master_params(gan.d_optimizer), reference.d->parameters(),
                       reduction_tolerance(dtype, 4)));
    }
  }
}

TEST(ScaledLoss, AnOverflowConcernsTheOptimizersOfItsLossAndItsScaler) {
  for (const std::string level : kLevels) {
    for (const int broken : {0, 1, 2}) {
      SCOPED_TRACE(level + ", loss " + std::to_string(broken));
      Gan gan(gan_options(level, torch::kHalf));
      gan.iterate(broken);
      EXPECT_EQ(gan.d_step, broken == 2 ? Step::stepped : Step::skipped);
      EXPECT_EQ(gan.g_step, broken == 2 ? Step::skipped : Step::stepped);
      for (int id = 0; id < 3; ++id) {
        EXPECT_EQ(gan.mixed.loss_scaler(id).scale(), id == broken ? 64 : 128);
        EXPECT_EQ(gan.mixed.loss_scaler(id).skipped_steps(), id == broken ? 1 : 0);
      }
      EXPECT_EQ(gan.mixed.skipped_steps(), 1);
    }
  }
}

TEST(ScaledLoss, ALossThatNamesTwoOptimizersSkipsBothStepsOnce) {
  Gan gan(gan_options("O2", torch::kHalf));
  const RecordedEvents events;
  gan.iterate(2, /*name_both=*/true);
  EXPECT_EQ(gan.g_step, Step::skipped);
  EXPECT_EQ(gan.d_step, Step::stepped);  // it came before
  // Both with the scale that the gradients had, as skips of one iteration.
  ASSERT_EQ(events.skips().size(), 2U);
  for (const auto& skip : events.skips()) {
    EXPECT_EQ(skip.loss_scale, 128);
    EXPECT_EQ(skip.consecutive, 1);
  }
  EXPECT_EQ(gan.mixed.step(gan.d_optimizer), Step::skipped);
  EXPECT_EQ(gan.mixed.loss_scaler(2).scale(), 64);
  EXPECT_EQ(gan.mixed.loss_scaler(2).skipped_steps(), 2);
  EXPECT_EQ(gan.mixed.loss_scaler(2).consecutive_skips(), 1);
  gan.iterate();
  EXPECT_EQ(gan.d_step, Step::stepped);
  EXPECT_EQ(gan.g_step, Step::stepped);
}

TEST(ScaledLoss, ZeroGradForgetsAnOverflowWithTheGradientsThatItWasIn) {
  Gan gan(gan_options("O2", torch::kHalf));
  gan.iterate(2, /*name_both=*/true);
  gan.mixed.zero_grad(gan.d_optimizer);
  gan.iterate();
  EXPECT_EQ(gan.d_step, Step::stepped);

  Trained trained(dynamic_scale(options("O2")));
  trained.overflow(trained.model->a);
  trained.mixed.zero_grad(trained.optimizer);
  trained.backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST(ScaledLoss, OptimizersThatWereNotNamedGetTheirGradientsToo) {
  for (const std::string level : kLevels) {
    Gan gan(gan_options(level, torch::kHalf));
    Gan plain(Options("O0").verbosity(0));
    for (Gan* one : {&gan, &plain}) {
      one->mixed.scale_loss(one->mixed.forward(one->d, ones()), one->d_optimizer).backward();
      const auto fake = ones() * one->mixed.forward(one->g, ones());
      one->mixed.scale_loss(one->mixed.forward(one->d, fake), one->g_optimizer, {.loss_id = 2})
          .backward();
    }
    for (auto optimizer : {&Gan::d_optimizer, &Gan::g_optimizer}) {
      const auto got = gan.mixed.master_params(gan.*optimizer);
      const auto want = plain.mixed.master_params(plain.*optimizer);
      for (std::size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(test::near(got[i].grad(), want[i].grad(), reduction_tolerance(torch::kHalf, 4)))
            << level;
      }
    }
  }
}

// ------------------------------------------------------------------ the scale over many steps

TEST(ScaledLoss, TheScaleMovesOnceAStepHoweverManyBackwards) {
  Trained trained(dynamic_scale(options("O1"), LossScaleOptions().growth_interval(2)));
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < 4; ++i) trained.backward();
    trained.mixed.step(trained.optimizer);
    EXPECT_EQ(trained.mixed.loss_scaler().scale(), step == 0 ? kFirstScale : 2 * kFirstScale);
  }
}

TEST(ScaledLoss, KOverflowsHalveEachScalerKTimes) {
  Trained trained(dynamic_scale(options("O2").num_losses(2)));
  for (int i = 0; i < 5; ++i) {
    trained.optimizer.zero_grad();
    trained.overflow(trained.model->b, {.loss_id = 0});
    i < 2 ? trained.overflow(trained.model->b, {.loss_id = 1}) : trained.backward({.loss_id = 1});
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
    trained.overflow(trained.model->b, {.loss_id = 0});
    trained.overflow(trained.model->a, {.loss_id = 1});
    return trained.mixed.step(trained.optimizer);
  };
  EXPECT_EQ(iterate(), Step::skipped);
  EXPECT_THAT(message_of<DivergedError>(iterate), HasSubstr("'b'"));
  EXPECT_TRUE(equal(trained.weights(), before));
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
    trained.overflow(trained.model->b, {.loss_id = 1});
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

// ------------------------------------------------------------------ found_inf of other ranks

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
    EXPECT_TRUE(equal(trained.weights(), before)) << level;
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
