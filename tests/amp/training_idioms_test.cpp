// Common uses of losses, gradients and optimizers in programs for LibTorch and Apex: at every level
// they are right, refused, or cause a warning.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/clip_grad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::training_idioms_test {
namespace {

using c10::ScalarType;
using test::CapturedLog;
using test::expect_bitwise_equal;
using test::expect_close;
using test::expect_error;
using testing::HasSubstr;
using testing::Not;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr const char* kLevels[] = {"O0", "O1", "O2", "O3"};
constexpr ScalarType kDtypes[] = {torch::kBFloat16, torch::kHalf};

// Two layers whose forward and backward are computed in 16 bits, and a BatchNorm between them.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(norm(first(x)))); }
  torch::nn::Linear first{12, 24};
  torch::nn::BatchNorm1d norm{24};
  torch::nn::Linear second{24, 4};
};
TORCH_MODULE(Net);

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

MakeOptimizer sgd(double lr, double momentum = 0) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(lr).momentum(momentum));
  };
}
MakeOptimizer fused_sgd(double lr) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<optim::FusedSGD>(std::move(parameters), optim::FusedSGDOptions(lr));
  };
}

struct Training {
  Training(const Options& options, const MakeOptimizer& make) {
    torch::manual_seed(3);
    model = Net();
    optimizer = make(model->parameters());
    mixed = std::make_unique<MixedPrecision>(
        initialize(model, *optimizer, Options(options).verbosity(0)));
  }
  at::Tensor loss(std::uint64_t seed = 1) {
    torch::manual_seed(100 + seed);
    const at::Tensor x = torch::randn({32, 12});
    return torch::cross_entropy_loss(mixed->forward(model, x), torch::randint(4, {32}));
  }
  void backward(double factor = 1, std::uint64_t seed = 1) {
    mixed->scale_loss(loss(seed) * factor, *optimizer).backward();
  }
  Step step() { return mixed->step(*optimizer); }
  std::vector<at::Tensor> grads() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : mixed->master_params(*optimizer))
      all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    return all;
  }
  std::vector<at::Tensor> masters() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : mixed->master_params(*optimizer))
      all.push_back(parameter.detach().clone());
    return all;
  }

  Net model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
};

Options with_scale(const std::string& level, ScalarType dtype) {
  Options options(level);
  options.dtype(dtype);
  if (level != "O0" && dtype == torch::kHalf) options.loss_scale("dynamic");
  return options.loss_scale_options(LossScaleOptions().init_scale(1024));
}

struct Case {
  std::string name;
  Options options;
  MakeOptimizer optimizer;
};
void PrintTo(const Case& one, std::ostream* stream) {
  *stream << one.name;
}
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      const std::string name = level + "_" + dtype_name(dtype);
      all.push_back({name + "_sgd", with_scale(level, dtype), sgd(0.5)});
      all.push_back({name + "_fused_sgd", with_scale(level, dtype), fused_sgd(0.5)});
    }
  }
  return all;
}

class GradientsInTheModel : public testing::TestWithParam<Case> {
 protected:
  Training training() const { return {GetParam().options, GetParam().optimizer}; }
};

INSTANTIATE_TEST_SUITE_P(All, GradientsInTheModel, testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(GradientsInTheModel, AreWhatTheStepReads) {
  Training trained = training();
  trained.backward();
  std::vector<at::Tensor> seen;
  for (const at::Tensor& parameter : trained.model->parameters()) {
    ASSERT_TRUE(parameter.grad().defined());
    seen.push_back(parameter.grad().to(torch::kFloat));
  }
  const auto read = trained.grads();
  ASSERT_EQ(read.size(), seen.size());
  for (std::size_t i = 0; i < seen.size(); ++i)
    expect_bitwise_equal(read[i].to(torch::kFloat), seen[i]);
}

TEST_P(GradientsInTheModel, AreClippedByTorchsFunction) {
  Training trained = training();
  trained.backward(100);
  const double before = optim::grad_norm(trained.mixed->master_params(*trained.optimizer));
  ASSERT_GT(before, 1);
  trained.mixed->zero_grad(*trained.optimizer);
  trained.backward(100);
  const double norm = torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 0.25);
  // LibTorch rounds the norm of a 16-bit gradient to 16 bits.
  const double tolerance = 8 * dtype_limits(torch::kBFloat16).epsilon;
  EXPECT_NEAR(norm, before, tolerance * before);
  EXPECT_NEAR(optim::grad_norm(trained.mixed->master_params(*trained.optimizer)), 0.25,
              tolerance * 0.25);
  EXPECT_EQ(trained.step(), Step::stepped);
}

// A loss so large that training diverges unless it is clipped.
TEST_P(GradientsInTheModel, KeepATrainingStableThatIsClippedByTorchsFunctions) {
  for (const bool by_value : {false, true}) {
    Training trained = training();
    double first = 0;
    double last = 0;
    int stepped = 0;
    for (int i = 0; i < 20; ++i) {
      trained.optimizer->zero_grad();
      const at::Tensor loss = trained.loss();
      trained.mixed->scale_loss(loss * 100, *trained.optimizer).backward();
      if (by_value)
        torch::nn::utils::clip_grad_value_(trained.model->parameters(), 0.05);
      else
        torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 1.0);
      stepped += trained.step() == Step::stepped ? 1 : 0;
      (i == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.5 * first) << by_value;
    EXPECT_GE(stepped, 15) << by_value;
  }
}

// As in a program that averages gradients over ranks itself.
TEST_P(GradientsInTheModel, MayBeChangedInPlaceOrReplaced) {
  for (const bool in_place : {true, false}) {
    SCOPED_TRACE(in_place ? "in place" : "replaced");
    Training changed = training();
    Training halved = training();
    for (int i = 0; i < 2; ++i) {
      changed.optimizer->zero_grad();
      halved.optimizer->zero_grad();
      changed.backward();
      halved.backward();
      for (const at::Tensor& parameter : changed.model->parameters()) {
        if (in_place)
          parameter.grad().data().div_(2);  // past version counters, too
        else
          parameter.mutable_grad() = parameter.grad() / 2;
      }
      for (const at::Tensor& master : halved.mixed->master_params(*halved.optimizer))
        master.grad().div_(2);
      EXPECT_EQ(changed.step(), Step::stepped);
      EXPECT_EQ(halved.step(), Step::stepped);
    }
    const auto got = changed.masters();
    const auto want = halved.masters();
    for (std::size_t i = 0; i < want.size(); ++i) expect_bitwise_equal(got[i], want[i]);
  }
}

TEST_P(GradientsInTheModel, AreDroppedOnBothSides) {
  for (const bool by_model : {true, false}) {
    for (const bool set_to_none : {true, false}) {
      SCOPED_TRACE(testing::Message() << by_model << set_to_none);
      Training trained = training();
      Training once = training();
      const auto zero = [&] {
        if (by_model)
          trained.model->zero_grad(set_to_none);
        else
          trained.optimizer->zero_grad(set_to_none);
      };
      trained.backward(1, 1);
      zero();
      once.loss(1);  // BatchNorm sees it
      trained.backward(1, 2);
      once.backward(1, 2);
      const auto got = trained.grads();
      const auto want = once.grads();
      for (std::size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 1e-6);
    }
  }
}

// The next forward removes them, so that a backward without scale_loss adds to nothing.
TEST_P(GradientsInTheModel, AreNotAddedToTwice) {
  Training trained = training();
  trained.backward(1, 1);
  const auto first = trained.grads();
  trained.loss(2).backward();
  trained.backward(1, 3);
  Training parts = training();
  std::vector<std::vector<at::Tensor>> each;
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    parts.mixed->zero_grad(*parts.optimizer);
    parts.backward(1, seed);
    each.push_back(parts.grads());
  }
  const auto got = trained.grads();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const at::Tensor want = (each[0][i].to(torch::kDouble) + each[1][i].to(torch::kDouble) +
                             each[2][i].to(torch::kDouble));
    // fp16 without a scale loses small parts.
    const double tolerance =
        GetParam().name.rfind("O0", 0) == 0 ? 1e-5 : 8 * dtype_limits(torch::kBFloat16).epsilon;
    EXPECT_LE(
        (got[i].to(torch::kDouble) - want).norm().item<double>(),
        tolerance * (each[0][i].norm() + each[1][i].norm() + each[2][i].norm()).item<double>());
  }
}

// Another forward of the same model, before the step, does not undo the clipping.
TEST_P(GradientsInTheModel, StayClippedThroughAForward) {
  Training trained = training();
  trained.backward(100);
  torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 0.25);
  trained.loss(2);
  EXPECT_NEAR(optim::grad_norm(trained.mixed->master_params(*trained.optimizer)), 0.25, 0.02);
}

// ------------------------------------------------------------------ optimizers that were not named

// y = x * encoder * head, in exact powers of two.
struct Parts {
  explicit Parts(const Options& options)
      : encoder(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false))),
        head(torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false))) {
    {
      const at::NoGradGuard no_grad;
      encoder->weight.copy_(torch::eye(4) * 2);
      head->weight.copy_(torch::tensor({{1.0F, 0.5F, 2.0F, 4.0F}}));
    }
    first = std::make_unique<torch::optim::SGD>(encoder->parameters(), 0.125);
    second = std::make_unique<torch::optim::SGD>(head->parameters(), 0.125);
    mixed = std::make_unique<MixedPrecision>(
        initialize({encoder, head}, {*first, *second}, Options(options).verbosity(0)));
  }
  at::Tensor loss() {
    return mixed->forward(head, mixed->forward(encoder, torch::ones({2, 4}))).sum();
  }
  torch::nn::Linear encoder;
  torch::nn::Linear head;
  std::unique_ptr<torch::optim::SGD> first;
  std::unique_ptr<torch::optim::SGD> second;
  std::unique_ptr<MixedPrecision> mixed;
};

at::Tensor gradient_of(Parts& parts, torch::optim::Optimizer& optimizer) {
  return parts.mixed->master_params(optimizer)[0].grad().to(torch::kFloat);
}

Options scaled_by(const std::string& level, ScalarType dtype, const std::string& scale) {
  Options options(level);
  options.dtype(dtype);
  if (level != "O0") options.loss_scale(scale);
  return options.loss_scale_options(LossScaleOptions().init_scale(256));
}

TEST(OptimizersThatWereNotNamed, GetTheirGradientsAtEveryLevelDtypeAndScale) {
  Parts plain(Options("O0"));
  for (int i = 0; i < 2; ++i) plain.mixed->scale_loss(plain.loss(), *plain.second).backward();
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      for (const std::string scale : {"1", "128", "dynamic"}) {
        SCOPED_TRACE(level + " " + dtype_name(dtype) + " " + scale);
        if (level == "O0" && scale != "1") continue;  // the same
        Parts parts(scaled_by(level, dtype, scale == "dynamic" ? "dynamic" : scale));
        for (int i = 0; i < 2; ++i) parts.mixed->scale_loss(parts.loss(), *parts.second).backward();
        expect_bitwise_equal(gradient_of(parts, *parts.first), gradient_of(plain, *plain.first));
        expect_bitwise_equal(gradient_of(parts, *parts.second), gradient_of(plain, *plain.second));
        const at::Tensor before = parts.encoder->weight.detach().clone();
        EXPECT_EQ(parts.mixed->step(*parts.first), Step::stepped);
        EXPECT_EQ(parts.mixed->step(*parts.second), Step::stepped);
        EXPECT_FALSE(parts.encoder->weight.equal(before));
      }
    }
  }
}

TEST(OptimizersThatWereNotNamed, AddThemToScaledOnesOfAnotherLoss) {
  for (const std::string level : {"O1", "O2", "O3"}) {
    SCOPED_TRACE(level);
    Parts plain(Options("O0"));
    for (int i = 0; i < 3; ++i) plain.mixed->scale_loss(plain.loss(), *plain.first).backward();
    Parts parts(scaled_by(level, torch::kBFloat16, "128").num_losses(2));
    parts.mixed->scale_loss(parts.loss(), *parts.first, {.delay_unscale = true}).backward();
    parts.mixed->scale_loss(parts.loss(), *parts.second, {.loss_id = 1}).backward();
    parts.mixed->scale_loss(parts.loss(), *parts.first).backward();
    expect_bitwise_equal(gradient_of(parts, *parts.first), gradient_of(plain, *plain.first));
    expect_bitwise_equal(gradient_of(parts, *parts.second), gradient_of(plain, *plain.second));
  }
}

TEST(OptimizersThatWereNotNamed, SkipAStepOnlyWithWhatOverflowed) {
  for (const std::string level : {"O1", "O2", "O3"}) {
    for (const bool zeroed : {true, false}) {
      SCOPED_TRACE(level + (zeroed ? " zeroed" : " kept"));
      Parts parts(scaled_by(level, torch::kHalf, "dynamic").num_losses(2));
      parts.mixed->scale_loss(parts.loss() * kInf, *parts.second, {.loss_id = 1}).backward();
      EXPECT_EQ(parts.mixed->step(*parts.second), Step::skipped);
      parts.second->zero_grad();
      if (zeroed) parts.first->zero_grad();
      const at::Tensor before = parts.encoder->weight.detach().clone();
      parts.mixed->scale_loss(parts.loss(), *parts.first).backward();
      EXPECT_EQ(parts.mixed->step(*parts.first), zeroed ? Step::stepped : Step::skipped);
      EXPECT_EQ(parts.encoder->weight.equal(before), !zeroed);
      EXPECT_EQ(parts.mixed->loss_scaler(1).scale(), 128) << "moved once";
      EXPECT_EQ(parts.mixed->loss_scaler(0).scale(), 256);
    }
  }
}

TEST(OptimizersThatWereNotNamed, HaveTheirOwnAgainWhereBackwardThrows) {
  for (const std::string level : {"O1", "O2"}) {
    Parts parts(scaled_by(level, torch::kHalf, "dynamic"));
    parts.mixed->scale_loss(parts.loss(), *parts.first).backward();
    const at::Tensor first = gradient_of(parts, *parts.first).clone();
    const at::Tensor loss = parts.loss();
    torch::autograd::grad({loss}, {parts.head->weight});  // frees the graph
    EXPECT_THROW(parts.mixed->scale_loss(loss, *parts.second).backward(), std::exception);
    expect_bitwise_equal(gradient_of(parts, *parts.first), first);
  }
}

// Two optimizers with a parameter in common, of which losses name one.
struct Shared {
  explicit Shared(const Options& options) : net(torch::nn::LinearOptions(4, 4)) {
    {
      const torch::NoGradGuard no_grad;
      net->weight.copy_(torch::eye(4));
      net->bias.zero_();
    }
    all = std::make_unique<torch::optim::SGD>(net->parameters(), 0.125);
    bias = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{net->bias}, 0.125);
    other_bias = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{net->bias}, 0.125);
    mixed = std::make_unique<MixedPrecision>(
        initialize({net}, {*all, *bias, *other_bias}, Options(options).verbosity(0)));
  }
  at::Tensor loss() { return mixed->forward(net, torch::ones({2, 4})).sum(); }
  torch::nn::Linear net;
  std::unique_ptr<torch::optim::SGD> all;
  std::unique_ptr<torch::optim::SGD> bias;
  std::unique_ptr<torch::optim::SGD> other_bias;
  std::unique_ptr<MixedPrecision> mixed;
};

TEST(OptimizersThatShareParameters, GetTheGradientsOfPlainTraining) {
  for (const std::string level : {"O0", "O1", "O3"}) {
    for (const std::string scale : {"1", "128", "dynamic"}) {
      if (level == "O0" && scale != "1") continue;
      for (const bool delayed : {false, true}) {
        SCOPED_TRACE(level + " " + scale + (delayed ? " delayed" : ""));
        for (int named = 0; named < 3; ++named) {
          Shared shared(scaled_by(level, torch::kHalf, scale));
          auto& optimizer = *std::vector{shared.all.get(), shared.bias.get(),
                                         shared.other_bias.get()}[static_cast<std::size_t>(named)];
          for (int pass = 0; pass < 3; ++pass) {
            shared.mixed
                ->scale_loss(shared.loss(), optimizer, {.delay_unscale = delayed && pass < 2})
                .backward();
          }
          EXPECT_TRUE(shared.net->bias.grad().eq(6).all().item<bool>()) << shared.net->bias.grad();
          EXPECT_TRUE(shared.net->weight.grad().eq(6).all().item<bool>());
          for (auto* one : {shared.all.get(), shared.bias.get(), shared.other_bias.get()})
            EXPECT_EQ(shared.mixed->step(*one), Step::stepped);
          EXPECT_TRUE(shared.net->bias.eq(-3 * 0.125 * 6).all().item<bool>());
        }
      }
    }
  }
}

TEST(OptimizersThatShareParameters, SkipTheirStepsTogether) {
  Shared shared(scaled_by("O1", torch::kHalf, "dynamic"));
  shared.mixed->scale_loss(shared.loss() * kInf, *shared.bias).backward();
  for (auto* one : {shared.bias.get(), shared.all.get(), shared.other_bias.get()})
    EXPECT_EQ(shared.mixed->step(*one), Step::skipped);
  EXPECT_EQ(shared.mixed->loss_scaler().scale(), 128) << "moved once";
  for (auto* one : {shared.bias.get(), shared.all.get()}) one->zero_grad();
  shared.mixed->scale_loss(shared.loss(), *shared.all).backward();
  for (auto* one : {shared.bias.get(), shared.all.get()})
    EXPECT_EQ(shared.mixed->step(*one), Step::stepped);
}

TEST(OptimizersThatShareParameters, HaveTheirGradientsAgainWhereBackwardThrows) {
  Shared shared(scaled_by("O1", torch::kHalf, "dynamic"));
  shared.mixed->scale_loss(shared.loss(), *shared.bias).backward();
  const at::Tensor loss = shared.loss();
  torch::autograd::grad({loss}, {shared.net->weight});  // frees the graph
  EXPECT_THROW(shared.mixed->scale_loss(loss, *shared.all).backward(), std::exception);
  EXPECT_TRUE(shared.net->bias.grad().eq(2).all().item<bool>());
  EXPECT_TRUE(shared.net->weight.grad().eq(2).all().item<bool>());
}

TEST(OptimizersThatShareParameters, AreErrorsWhereOneGetsThemLaterAndThereAreMasters) {
  torch::nn::Linear net(4, 4);
  torch::nn::Linear other(4, 4);
  torch::optim::SGD first(net->parameters(), 0.125);
  torch::optim::SGD second(other->parameters(), 0.125);
  auto mixed = initialize({net, other}, {first, second}, Options("O2").verbosity(0));
  second.add_param_group(torch::optim::OptimizerParamGroup(net->parameters()));
  expect_error([&] { mixed.forward(net, torch::ones({2, 4})); },
               {"every parameter in one optimizer", "second optimizer", "one master"});
}

// What clipping by master_params() has to see.
TEST(MasterParams, HaveGradientsByHandToo) {
  for (const auto& make : {sgd(0.5), fused_sgd(0.5)}) {
    for (const bool replaced : {false, true}) {
      SCOPED_TRACE(replaced ? "replaced" : "back-propagated without scale_loss");
      Training trained(with_scale("O2", torch::kBFloat16), make);
      if (replaced) {
        trained.backward();
        for (at::Tensor& parameter : trained.model->parameters())
          parameter.mutable_grad() = parameter.grad() * 2;
      } else {
        trained.loss().backward();
      }
      const double before = optim::grad_norm(trained.mixed->master_params(*trained.optimizer));
      ASSERT_GT(before, 0.1);
      torch::nn::utils::clip_grad_norm_(trained.mixed->master_params(*trained.optimizer), 0.01);
      EXPECT_NEAR(optim::grad_norm(trained.model->parameters()), 0.01, 1e-4);
      const auto weights = trained.masters();
      EXPECT_EQ(trained.step(), Step::stepped);
      double moved = 0;
      const auto now = trained.masters();
      for (std::size_t i = 0; i < now.size(); ++i)
        moved += (now[i] - weights[i]).pow(2).sum().item<double>();
      EXPECT_NEAR(std::sqrt(moved), 0.005, 1e-4);
    }
  }
}

TEST(ParametersInNoOptimizer, GetUnscaledGradients) {
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      const auto gradient = [](const Options& options) {
        Parts made(Options("O0"));  // for its layers
        torch::optim::SGD optimizer(made.head->parameters(), 0.125);
        auto mixed =
            initialize({made.encoder, made.head}, {optimizer}, Options(options).verbosity(0));
        for (int i = 0; i < 2; ++i) {
          const at::Tensor hidden = mixed.forward(made.encoder, torch::ones({2, 4}));
          mixed.scale_loss(mixed.forward(made.head, hidden).sum(), optimizer).backward();
        }
        return made.encoder->weight.grad().to(torch::kFloat);
      };
      expect_bitwise_equal(gradient(scaled_by(level, dtype, "128")), gradient(Options("O0")));
    }
  }
}

// ------------------------------------------------------------------ steps past mixed.step()

std::vector<test::OptimizerKind> every_optimizer() {
  auto all = test::all_optimizers();
  all.push_back(test::optimizer_kind<optim::FusedAdam>("FusedAdam", optim::FusedAdamOptions(0.01)));
  all.push_back(test::optimizer_kind<optim::FusedSGD>("FusedSGD", optim::FusedSGDOptions(0.01)));
  return all;
}

TEST(AStepPastMixedPrecision, IsAnErrorWhereItWouldMissAnOverflow) {
  for (const std::string level : {"O1", "O2", "O3"}) {
    for (const auto& kind : every_optimizer()) {
      SCOPED_TRACE(level + " " + kind.name);
      // LibTorch's Adam and RMSprop divide by 0 in fp16 weights: their eps is none there.
      const auto dtype = level == "O3" ? torch::kBFloat16 : torch::kHalf;
      Training trained(with_scale(level, dtype).loss_scale("dynamic"), kind.make);
      trained.optimizer->zero_grad();
      trained.backward();
      trained.optimizer->step();
      trained.optimizer->zero_grad();
      expect_error([&] { trained.loss(); },
                   {"mixed.step(optimizer)", "optimizer.step()", "instead"});
      // Once; the program may continue.
      trained.backward();
      EXPECT_EQ(trained.step(), Step::stepped);
      // As from a checkpoint: the state exists before.
      Training resumed(with_scale(level, dtype).loss_scale("dynamic"), kind.make);
      resumed.backward();
      for (const at::Tensor& parameter : resumed.mixed->master_params(*resumed.optimizer))
        parameter.mutable_grad() = torch::ones_like(parameter);
      resumed.optimizer->step();
      resumed.mixed->zero_grad(*resumed.optimizer);
      resumed.backward();
      resumed.optimizer->step();
      expect_error([&] { resumed.backward(); }, {"mixed.step(optimizer)"});
    }
  }
}

TEST(AStepPastMixedPrecision, IsNoErrorWhereThereIsNone) {
  for (const std::string level : {"O1", "O2", "O3"}) {
    for (const auto& kind : every_optimizer()) {
      SCOPED_TRACE(level + " " + kind.name);
      Training trained(with_scale(level, torch::kHalf).loss_scale("dynamic"), kind.make);
      trained.backward();
      trained.optimizer->zero_grad();  // discarded
      trained.backward();
      trained.backward();  // accumulated
      // Weights moved for another look, and back.
      for (const double by : {0.01, -0.01}) {
        {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& parameter : trained.model->parameters()) parameter.add_(by);
        }
        trained.backward();
      }
      EXPECT_EQ(trained.step(), Step::stepped);
      trained.backward();
    }
  }
}

TEST(AStepPastMixedPrecision, IsFineWhereNothingCouldBeMissed) {
  for (const std::string level : {"O0", "O1", "O2", "O3"}) {
    SCOPED_TRACE(level);
    Training trained(Options(level).dtype(torch::kBFloat16), sgd(0.1, 0.5));
    Training want(Options(level).dtype(torch::kBFloat16), sgd(0.1, 0.5));
    for (std::uint64_t i = 0; i < 3; ++i) {
      trained.optimizer->zero_grad();
      trained.backward(1, i);
      trained.optimizer->step();
      want.optimizer->zero_grad();
      want.backward(1, i);
      want.step();
    }
    const auto got = trained.masters();
    const auto masters = want.masters();
    for (std::size_t i = 0; i < got.size(); ++i) expect_bitwise_equal(got[i], masters[i]);
  }
}

// ------------------------------------------------------------------ what is reported once

std::string log_of(const std::function<void(MixedPrecision&, Net&, torch::optim::Optimizer&)>& run,
                   const Options& options) {
  const CapturedLog log;
  Net model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, Options(options).verbosity(1));
  run(mixed, model, optimizer);
  return log.text();
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

at::Tensor some_loss(MixedPrecision& mixed, Net& model) {
  return mixed.forward(model, torch::ones({4, 12})).pow(2).mean();
}

TEST(Warnings, OfABackwardWithoutALossScale) {
  const auto plain = [](MixedPrecision& mixed, Net& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i) {
      some_loss(mixed, model).backward();
      mixed.step(optimizer);
      mixed.zero_grad(optimizer);
    }
  };
  const auto scaled = [](MixedPrecision& mixed, Net& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i) {
      mixed.scale_loss(some_loss(mixed, model), optimizer).backward();
      mixed.step(optimizer);
      mixed.zero_grad(optimizer);
    }
  };
  const std::string warning = "instead of loss.backward()";
  for (const std::string level : {"O1", "O2"}) {
    EXPECT_EQ(count(log_of(plain, Options(level).dtype(torch::kHalf)), warning), 1U) << level;
    EXPECT_EQ(count(log_of(scaled, Options(level).dtype(torch::kHalf)), warning), 0U) << level;
    EXPECT_EQ(count(log_of(plain, Options(level).dtype(torch::kBFloat16)), warning), 0U) << level;
  }
}

TEST(Warnings, OfAStepWithoutASingleGradient) {
  const auto no_backward = [](MixedPrecision& mixed, Net& model,
                              torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i) {
      some_loss(mixed, model);
      mixed.step(optimizer);
    }
  };
  const auto other_model = [](MixedPrecision& mixed, Net&, torch::optim::Optimizer& optimizer) {
    Net other;
    mixed.scale_loss(other(torch::ones({4, 12})).sum(), optimizer).backward();
    mixed.step(optimizer);
  };
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      const Options options = Options(level).dtype(dtype);
      EXPECT_EQ(count(log_of(no_backward, options), "without any gradient"), 1U) << level;
      EXPECT_EQ(count(log_of(other_model, options), "without any gradient"), 1U) << level;
    }
  }
}

TEST(Warnings, OfALossThatIsNotFiniteWhereNothingLooksAtGradients) {
  const auto nan = [](MixedPrecision& mixed, Net& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i)
      mixed.scale_loss(some_loss(mixed, model) * std::nan(""), optimizer).backward();
  };
  EXPECT_EQ(count(log_of(nan, Options("O1").dtype(torch::kBFloat16)), "the loss is nan"), 1U);
  EXPECT_EQ(count(log_of(nan, Options("O1").dtype(torch::kHalf)), "the loss is nan"), 0U);
}

TEST(Warnings, OfAScaledLossThatEndsBeforeBackward) {
  const auto early = [](MixedPrecision& mixed, Net& model, torch::optim::Optimizer& optimizer) {
    auto scaled = mixed.scale_loss(some_loss(mixed, model), optimizer);
    scaled.value();
  };
  EXPECT_THAT(log_of(early, Options("O2").dtype(torch::kHalf)),
              HasSubstr("a ScaledLoss was destroyed"));
}

// ------------------------------------------------------------------ complex parameters

// A filter in the frequency domain.
struct FilterImpl : torch::nn::Module {
  FilterImpl() {
    weight = register_parameter("weight", torch::randn({9}, torch::kComplexFloat));
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    return out(
        torch::fft_irfft(torch::fft_rfft(x.to(torch::kFloat)) * weight, 16).to(x.scalar_type()));
  }
  at::Tensor weight;
  torch::nn::Linear out{16, 3};
};
TORCH_MODULE(Filter);

struct FilterTraining {
  explicit FilterTraining(const Options& options) {
    torch::manual_seed(5);
    model = Filter();
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
    mixed = std::make_unique<MixedPrecision>(
        initialize(model, *optimizer, Options(options).verbosity(0)));
  }
  void backward() {
    torch::manual_seed(6);
    mixed->scale_loss(mixed->forward(model, torch::randn({8, 16})).pow(2).mean(), *optimizer)
        .backward();
  }
  Filter model{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
};

TEST(ComplexParameters, TrainAtEveryLevel) {
  FilterTraining plain{Options("O0")};
  for (int i = 0; i < 2; ++i) plain.backward();
  const at::Tensor want = plain.model->weight.grad();
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      FilterTraining trained(scaled_by(level, dtype, level == "O0" ? "1" : "128"));
      for (int i = 0; i < 2; ++i) trained.backward();
      const at::Tensor got = trained.model->weight.grad();
      ASSERT_EQ(got.scalar_type(), torch::kComplexFloat);
      EXPECT_LE((got - want).abs().max().item<double>(),
                8 * dtype_limits(dtype).epsilon * want.abs().max().item<double>());
      const at::Tensor before = trained.model->weight.detach().clone();
      EXPECT_EQ(trained.mixed->step(*trained.optimizer), Step::stepped);
      EXPECT_FALSE(trained.model->weight.equal(before));
      if (level == "O0") continue;
      trained.mixed->zero_grad(*trained.optimizer);
      trained.backward();
      auto scaled =
          trained.mixed->scale_loss(trained.model->weight.abs().sum() * kInf, *trained.optimizer);
      scaled.backward();
      EXPECT_EQ(trained.mixed->step(*trained.optimizer), Step::skipped);
    }
  }
}

TEST(ComplexParameters, AreClippedAsByTorch) {
  for (const double order : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    SCOPED_TRACE(order);
    FilterTraining ours{Options("O0")};
    FilterTraining torchs{Options("O0")};
    ours.backward();
    torchs.backward();
    const double norm = optim::clip_grad_norm_(ours.model->parameters(), 0.01, order);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(torchs.model->parameters(), 0.01, order),
                1e-5 * norm);
    EXPECT_GT(norm, 0.01);
    for (std::size_t i = 0; i < ours.model->parameters().size(); ++i) {
      const at::Tensor want = torchs.model->parameters()[i].grad();
      EXPECT_LE((ours.model->parameters()[i].grad() - want).abs().max().item<double>(),
                1e-5 * want.abs().max().item<double>());
    }
    FilterTraining mixed{Options("O1")};
    mixed.backward();
    EXPECT_GT(mixed.mixed->clip_grad_norm_(*mixed.optimizer, 0.01, order), 0.01);
    EXPECT_NEAR(optim::grad_norm(mixed.model->parameters(), order), 0.01, 1e-4);
  }
}

TEST(ComplexParameters, AreUnscaledByAGradScaler) {
  torch::manual_seed(5);
  Filter model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  GradScaler scaler;
  const auto loss = [&] { return model->forward(torch::ones({2, 16})).pow(2).mean(); };
  loss().backward();
  const at::Tensor want = model->weight.grad().clone();
  optimizer.zero_grad();
  scaler.scale(loss()).backward();
  scaler.unscale_(optimizer);
  EXPECT_LE((model->weight.grad() - want).abs().max().item<double>(),
            1e-6 * want.abs().max().item<double>());
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
}

}  // namespace
}  // namespace semitone::amp::training_idioms_test
