// Optimizers that scale_loss does not name, that share parameters, or that lack some.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/clip_grad.h"
#include "tests/amp/training_idioms_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace semitone::amp::training_idioms_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;
using test::kDtypes;
using test::kLevels;

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
    parts.mixed->scale_loss(parts.loss(), *parts.first, ScaleLossOptions().delay_unscale(true))
        .backward();
    parts.mixed->scale_loss(parts.loss(), *parts.second, ScaleLossOptions().loss_id(1)).backward();
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
      parts.mixed->scale_loss(parts.loss() * kInf, *parts.second, ScaleLossOptions().loss_id(1))
          .backward();
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
                ->scale_loss(shared.loss(), optimizer,
                             ScaleLossOptions().delay_unscale(delayed && pass < 2))
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

// The first one's are set aside before those of the others are looked at.
TEST(OptimizersThatShareParameters, SkipAfterAnotherLossToo) {
  Shared shared(scaled_by("O1", torch::kHalf, "dynamic").num_losses(2));
  shared.mixed->scale_loss(shared.loss() * kInf, *shared.bias, ScaleLossOptions().loss_id(1))
      .backward();
  shared.mixed->scale_loss(shared.loss(), *shared.all).backward();
  for (auto* one : {shared.other_bias.get(), shared.bias.get(), shared.all.get()})
    EXPECT_EQ(shared.mixed->step(*one), Step::skipped);
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

// Training of one layer after the other, with as many parameters.
TEST(OptimizersWhoseParametersAreReplaced, GetUnscaledGradients) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    torch::nn::Linear first(torch::nn::LinearOptions(4, 4).bias(false));
    torch::nn::Linear second(torch::nn::LinearOptions(4, 1).bias(false));
    torch::nn::Sequential net(first, second);
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.fill_(0.5);
    }
    torch::optim::SGD optimizer(first->parameters(), 0.0);
    auto mixed = initialize(net, optimizer, scaled_by(level, torch::kHalf, "128"));
    const auto expect_gradients = [&](const char* when) {
      SCOPED_TRACE(when);
      net->zero_grad();
      optimizer.zero_grad();
      mixed.scale_loss(mixed.forward(net, torch::ones({2, 4})).sum(), optimizer).backward();
      for (const at::Tensor& parameter : net->parameters()) {
        const double want = parameter.size(0) == 4 ? 1 : 4;
        EXPECT_TRUE(parameter.grad().eq(want).all().item<bool>()) << parameter.grad();
      }
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    };
    expect_gradients("the first layer");
    optimizer.param_groups().clear();
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(second->parameters()));
    expect_gradients("the second layer");
    expect_gradients("once more");
  }
}

TEST(OptimizersThatShareParameters, MayStepAtDifferentTimes) {
  torch::nn::Linear encoder(4, 4);
  torch::nn::Linear left(4, 1);
  torch::nn::Linear right(4, 1);
  const auto both = [&](const torch::nn::Linear& head) {
    auto parameters = encoder->parameters();
    for (const at::Tensor& parameter : head->parameters()) parameters.push_back(parameter);
    return parameters;
  };
  torch::optim::SGD of_left(both(left), 0.125);
  torch::optim::SGD of_right(both(right), 0.125);
  auto mixed = initialize({encoder, left, right}, {of_left, of_right},
                          scaled_by("O1", torch::kHalf, "128").verbosity(0));
  for (int i = 0; i < 2; ++i) {
    const at::Tensor hidden = mixed.forward(encoder, torch::ones({2, 4}));
    const at::Tensor loss = mixed.forward(left, hidden).sum() + mixed.forward(right, hidden).sum();
    mixed.scale_loss(loss, {of_left, of_right}).backward();
    EXPECT_EQ(mixed.step(of_left), Step::stepped);
    if (i == 1) {
      EXPECT_EQ(mixed.step(of_right), Step::stepped);
    }
  }
}

// A layer that a second optimizer trains from now on.
TEST(OptimizersThatShareParameters, MayPassThemOn) {
  for (const std::string level : kLevels) {
    for (const bool as_group : {false, true}) {
      SCOPED_TRACE(level + (as_group ? ", the group itself" : ", its parameters"));
      Parts parts(scaled_by(level, torch::kBFloat16, "128"));
      parts.first->param_groups()[0].options().set_lr(0.001);  // not exact in 16 bits
      const auto exact = [&] {
        const auto weights = parts.mixed->fp32_weights(parts.encoder);
        return parts.encoder->weight.detach().clone();
      };
      const auto step = [&](const OptimizerRefs& optimizers) {
        parts.encoder->zero_grad();
        parts.head->zero_grad();
        parts.mixed->scale_loss(parts.loss(), optimizers).backward();
        for (torch::optim::Optimizer& optimizer : optimizers) {
          EXPECT_EQ(parts.mixed->step(optimizer), Step::stepped);
          optimizer.zero_grad();
        }
      };
      step({*parts.first, *parts.second});
      const auto group = parts.first->param_groups().back();
      parts.first->param_groups().clear();
      if (as_group) {
        parts.second->param_groups().push_back(group);
      } else {
        parts.second->add_param_group(
            torch::optim::OptimizerParamGroup(parts.encoder->parameters()));
      }
      auto& options = parts.second->param_groups()[1].options();
      options.set_lr(0);
      const at::Tensor before = exact();
      step({*parts.second});
      EXPECT_TRUE(torch::equal(exact(), before)) << "by the second one's rate";
      options.set_lr(0.125);
      step({*parts.second});
      EXPECT_FALSE(torch::equal(exact(), before));
    }
  }
}

// For files and averages too.
TEST(MasterParams, OfALayerThatIsTrainedNoMoreStayExact) {
  for (const auto& make : {sgd(0.001), fused_sgd(0.001)}) {
    Training trained(with_scale("O2", torch::kBFloat16), make);
    trained.backward();
    EXPECT_EQ(trained.step(), Step::stepped);
    const at::Tensor exact = trained.masters().at(0).detach().clone();
    const at::Tensor weight = trained.model->parameters()[0];
    ASSERT_FALSE(torch::equal(exact, weight.detach().to(torch::kFloat)));
    auto& places = trained.optimizer->param_groups()[0].params();
    places.erase(places.begin());
    trained.backward();
    EXPECT_EQ(trained.step(), Step::stepped);
    EXPECT_TRUE(weight.grad().defined()) << "nothing has taken it";
    const auto exact_weights = trained.mixed->fp32_weights(trained.model);
    expect_bitwise_equal(weight.detach(), exact);
  }
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

// A second optimizer that amp does not know trains a layer that was registered later.
TEST(ParametersInNoOptimizer, GetUnscaledGradientsIfTheyAreRegisteredLater) {
  const auto layer = [](double weight) {
    torch::nn::Linear made(torch::nn::LinearOptions(4, 4).bias(false));
    torch::nn::init::constant_(made->weight, weight);
    return made;
  };
  torch::nn::Sequential model(layer(0.5));
  torch::optim::SGD optimizer(model->parameters(), 0);
  auto mixed = initialize(model, optimizer, scaled_by("O1", torch::kHalf, "128").verbosity(0));
  const auto train = [&] {
    mixed.scale_loss(mixed.forward(model, torch::ones({1, 4})).sum(), optimizer).backward();
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
  };
  train();
  const auto later = layer(1);
  model->push_back(later);
  train();
  expect_bitwise_equal(later->weight.grad(), torch::full({4, 4}, 2.0F));
}

}  // namespace
}  // namespace semitone::amp::training_idioms_test
