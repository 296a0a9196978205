// Several MixedPrecision objects whose models meet in one loss.

#include "semitone/amp/captured_step.h"
#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/recompute/checkpoint.h"
#include "tests/amp/training_idioms_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::training_idioms_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::expect_error;
using test::kDtypes;
using test::kLevels;

// A layer with an optimizer and an object of its own, in exact powers of two.
struct Part {
  Part(const Options& options, const at::Tensor& weight)
      : layer(torch::nn::LinearOptions(weight.size(1), weight.size(0)).bias(false)) {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(weight);
    optimizer = std::make_unique<torch::optim::SGD>(layer->parameters(), 0.125);
    mixed = std::make_unique<MixedPrecision>(
        initialize(layer, *optimizer, Options(options).verbosity(0)));
  }
  at::Tensor operator()(const at::Tensor& x) { return mixed->forward(layer, x); }
  at::Tensor weight() const {
    return mixed->master_params(*optimizer)[0].detach().to(torch::kFloat).clone();
  }

  torch::nn::Linear layer;
  std::unique_ptr<torch::optim::SGD> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
};

struct Pair {
  explicit Pair(const Options& options)
      : generator(options, torch::eye(4) * 2),
        critic(options, torch::tensor({{1.0F, 0.5F, 2.0F, 4.0F}})) {}

  // The loop of a GAN, whose optimizers zero gradients at the beginning of their own steps.
  void train() {
    for (int i = 0; i < 2; ++i) {
      critic.optimizer->zero_grad();
      critic.mixed->scale_loss(critic(torch::ones({1, 4})).sum() * 0.25, *critic.optimizer)
          .backward();
      EXPECT_EQ(critic.mixed->step(*critic.optimizer), Step::stepped);
      generator.optimizer->zero_grad();
      generator.mixed
          ->scale_loss(critic(generator(torch::ones({1, 4}))).sum(), *generator.optimizer)
          .backward();
      EXPECT_EQ(generator.mixed->step(*generator.optimizer), Step::stepped);
    }
  }

  Part generator;
  Part critic;
};

TEST(SeveralObjects, TrainAGanAsWithoutMixedPrecision) {
  Pair plain(Options("O0"));
  plain.train();
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      for (const std::string scale : {"1", "128", "dynamic"}) {
        SCOPED_TRACE(level + " " + dtype_name(dtype) + " " + scale);
        if (level == "O0" && scale != "1") continue;  // the same
        Pair pair(scaled_by(level, dtype, scale));
        pair.train();
        const double rounding = level == "O3" ? 0x1p-7 : 0;  // of 16-bit weights
        expect_close(pair.critic.weight(), plain.critic.weight(), rounding);
        expect_close(pair.generator.weight(), plain.generator.weight(), rounding);
      }
    }
  }
}

// One loss for both, named for one of the optimizers.
TEST(SeveralObjects, StepOnUnscaledGradientsOfOneLoss) {
  const auto train = [](Pair& pair) {
    pair.critic.mixed
        ->scale_loss(pair.critic(pair.generator(torch::ones({1, 4}))).sum(), *pair.critic.optimizer)
        .backward();
    EXPECT_EQ(pair.critic.mixed->step(*pair.critic.optimizer), Step::stepped);
    EXPECT_EQ(pair.generator.mixed->step(*pair.generator.optimizer), Step::stepped);
  };
  Pair plain(Options("O0"));
  train(plain);
  for (const std::string level : {"O1", "O2", "O3"}) {
    SCOPED_TRACE(level);
    Pair pair(scaled_by(level, torch::kHalf, "128"));
    train(pair);
    expect_bitwise_equal(pair.critic.weight(), plain.critic.weight());
    expect_bitwise_equal(pair.generator.weight(), plain.generator.weight());
  }
}

// The backward pass runs the generator's forward again.
TEST(SeveralObjects, StepOnUnscaledGradientsOfARecomputedForward) {
  const auto train = [](Pair& pair, int losses) {
    for (int i = 0; i < losses; ++i) {
      const at::Tensor made = nn::checkpoint([&](const at::Tensor& x) { return pair.generator(x); },
                                             torch::ones({1, 4}));
      pair.critic.mixed->scale_loss(pair.critic(made).sum(), *pair.critic.optimizer).backward();
    }
    EXPECT_EQ(pair.critic.mixed->step(*pair.critic.optimizer), Step::stepped);
    EXPECT_EQ(pair.generator.mixed->step(*pair.generator.optimizer), Step::stepped);
  };
  for (const std::string level : {"O1", "O2", "O3"}) {
    SCOPED_TRACE(level);
    const int losses = level == "O2" ? 2 : 1;  // elsewhere a second one adds to the model's
    Pair plain(Options("O0"));
    train(plain, losses);
    Pair pair(scaled_by(level, torch::kHalf, "128"));
    train(pair, losses);
    expect_bitwise_equal(pair.critic.weight(), plain.critic.weight());
    expect_bitwise_equal(pair.generator.weight(), plain.generator.weight());
  }
}

TEST(SeveralObjects, KeepTheirGradientsInACapturedStepOfAnother) {
  for (const std::string level : {"O0", "O1", "O2", "O3"}) {
    SCOPED_TRACE(level);
    const auto options = level == "O0" ? Options("O0") : scaled_by(level, torch::kHalf, "128");
    Part critic(options, torch::tensor({{1.0F, 0.5F, 2.0F, 4.0F}}));
    torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
    optim::FusedSGD optimizer(layer->parameters(), optim::FusedSGDOptions(0.125));
    auto mixed = initialize(layer, optimizer, Options(options).verbosity(0));
    CapturedStep step(mixed, optimizer, [&](const std::vector<at::Tensor>& batch) {
      return critic(mixed.forward(layer, batch[0])).sum();
    });
    step.run({torch::ones({1, 4})});
    EXPECT_FALSE(critic.layer->weight.grad().defined());

    critic.mixed->scale_loss(critic(torch::ones({1, 4})).sum(), *critic.optimizer).backward();
    const auto before = critic.mixed->master_params(*critic.optimizer)[0].grad().clone();
    step.run({torch::ones({1, 4})});
    expect_bitwise_equal(critic.mixed->master_params(*critic.optimizer)[0].grad(), before);
    const auto weight = critic.weight();
    EXPECT_EQ(critic.mixed->step(*critic.optimizer), Step::stepped);
    expect_bitwise_equal(critic.weight(), weight - 0.125);
  }
}

TEST(SeveralOptimizers, SeeTheirGradientsAfterACapturedStepOfAnother) {
  for (const std::string level : {"O1", "O2"}) {
    SCOPED_TRACE(level);
    torch::nn::Linear first(4, 4);
    torch::nn::Linear second(4, 4);
    optim::FusedSGD of_first(first->parameters(), optim::FusedSGDOptions(0.125));
    optim::FusedSGD of_second(second->parameters(), optim::FusedSGDOptions(0.125));
    auto mixed = initialize({first, second}, {of_first, of_second},
                            scaled_by(level, torch::kHalf, "128").verbosity(0));
    CapturedStep step(mixed, of_second, [&](const std::vector<at::Tensor>& batch) {
      return mixed.forward(second, batch[0]).sum();
    });
    mixed.scale_loss(mixed.forward(first, torch::ones({1, 4})).sum(), of_first).backward();
    const at::Tensor before = first->weight.grad().clone();
    step.run({torch::ones({1, 4})});
    ASSERT_TRUE(first->weight.grad().defined());
    expect_bitwise_equal(first->weight.grad(), before);
    const at::Tensor weight = mixed.master_params(of_first)[0].detach().clone();
    first->weight.grad().zero_();
    EXPECT_EQ(mixed.step(of_first), Step::stepped);
    expect_bitwise_equal(mixed.master_params(of_first)[0].detach(), weight);
  }
}

TEST(SeveralObjects, SkipTheStepOfALossThatOverflowed) {
  for (const std::string level : {"O1", "O2"}) {
    SCOPED_TRACE(level);
    Pair pair(scaled_by(level, torch::kHalf, "dynamic"));
    const at::Tensor before = pair.generator.weight();
    auto scaled = pair.critic.mixed->scale_loss(
        pair.critic(pair.generator(torch::ones({1, 4}))).sum(), *pair.critic.optimizer);
    scaled.value().backward();
    pair.generator.layer->weight.mutable_grad()[0][0] = kInf;
    scaled.finish();
    EXPECT_EQ(pair.critic.mixed->step(*pair.critic.optimizer), Step::stepped);
    EXPECT_EQ(pair.generator.mixed->step(*pair.generator.optimizer), Step::skipped);
    expect_bitwise_equal(pair.generator.weight(), before);
  }
}

// Losses of different objects may be in progress at the same time.
TEST(SeveralObjects, KeepTheGradientsOfTheirOwnLosses) {
  for (const std::string level : {"O1", "O2"}) {
    for (const bool in_one_pass : {false, true}) {
      SCOPED_TRACE(level + (in_one_pass ? ", one pass" : ""));
      const auto train = [&](Pair& pair) {
        Part& one = pair.generator;
        Part& other = pair.critic;
        auto first = one.mixed->scale_loss(one(torch::ones({1, 4})).sum(), *one.optimizer);
        auto second = other.mixed->scale_loss(other(torch::ones({1, 4})).sum(), *other.optimizer);
        if (in_one_pass) {
          (first.value() + second.value()).backward();
        } else {
          first.value().backward();
          second.value().backward();
        }
        first.finish();
        second.finish();
        EXPECT_EQ(one.mixed->step(*one.optimizer), Step::stepped);
        EXPECT_EQ(other.mixed->step(*other.optimizer), Step::stepped);
      };
      Pair plain(Options("O0"));
      train(plain);
      Pair pair(scaled_by(level, torch::kHalf, "128"));
      train(pair);
      expect_bitwise_equal(pair.critic.weight(), plain.critic.weight());
      expect_bitwise_equal(pair.generator.weight(), plain.generator.weight());
    }
  }
}

// The first object's masters cannot take a graph: the second one's gradients are as before.
TEST(SeveralObjects, StayUsableWhereTheBackwardPassThrows) {
  Part critic(scaled_by("O1", torch::kHalf, "128"), torch::tensor({{1.0F, 0.5F, 2.0F, 4.0F}}));
  Part generator(scaled_by("O2", torch::kHalf, "128"), torch::eye(4) * 2);
  const auto loss = [&] { return critic(generator(torch::ones({1, 4}))).sum(); };
  expect_error(
      [&] {
        critic.mixed->scale_loss(loss(), *critic.optimizer)
            .backward({}, /*retain_graph=*/false, /*create_graph=*/true);
      },
      {"[amp.unscale]"});
  EXPECT_FALSE(generator.layer->weight.grad().defined());
  generator.mixed->scale_loss(loss(), *generator.optimizer).backward();
  EXPECT_EQ(generator.mixed->step(*generator.optimizer), Step::stepped);
}

// It would be a race to look at the gradients of an object that another thread uses.
TEST(SeveralObjects, OfAnotherThreadAreLeftAlone) {
  Pair pair(scaled_by("O2", torch::kHalf, "128"));
  std::thread([&] { pair.generator(torch::ones({1, 4})); }).join();
  pair.generator.layer->weight.mutable_grad() = torch::ones({4, 4}, torch::kHalf);
  const at::Tensor grad = pair.generator.layer->weight.grad();
  pair.critic.mixed->scale_loss(pair.critic(torch::ones({1, 4})).sum(), *pair.critic.optimizer)
      .backward();
  EXPECT_TRUE(pair.generator.layer->weight.grad().is_same(grad));
}

TEST(SeveralObjects, MayBeDestroyedDuringABackwardPass) {
  Part critic(scaled_by("O2", torch::kHalf, "128"), torch::tensor({{1.0F, 0.5F, 2.0F, 4.0F}}));
  auto other = std::make_unique<Part>(scaled_by("O2", torch::kHalf, "128"), torch::eye(4));
  auto scaled =
      critic.mixed->scale_loss(critic((*other)(torch::ones({1, 4}))).sum(), *critic.optimizer);
  scaled.value().backward();
  other.reset();
  scaled.finish();
  EXPECT_EQ(critic.mixed->step(*critic.optimizer), Step::stepped);
}

// The second object's masters would push the first one's out of the loop.
TEST(SeveralObjects, DoNotShareAnOptimizerWithMasters) {
  torch::nn::Linear encoder(4, 4);
  torch::nn::Linear decoder(4, 4);
  std::vector<at::Tensor> all = encoder->parameters();
  for (const at::Tensor& parameter : decoder->parameters()) all.push_back(parameter);
  for (const std::string level : {"O1", "O2"}) {
    torch::optim::SGD optimizer(all, 0.1);
    const auto mixed = initialize(encoder, optimizer, Options("O2").verbosity(0));
    expect_error([&] { std::ignore = initialize(decoder, optimizer, Options(level)); },
                 {"[amp.initialize]", "another MixedPrecision has", "one initialize("});
    EXPECT_EQ(decoder->weight.scalar_type(), torch::kFloat);
    encoder->to(torch::kFloat);
  }
}

// As in a program that tries several learning rates.
TEST(SeveralObjects, MayHaveOptimizersAtOneAddress) {
  std::optional<torch::optim::SGD> optimizer;
  std::optional<MixedPrecision> mixed;
  for (const double lr : {0.1, 0.2}) {
    torch::nn::Linear model(4, 4);
    optimizer.emplace(model->parameters(), lr);
    mixed.emplace(initialize(model, *optimizer, Options("O2").verbosity(0)));
    mixed->scale_loss(mixed->forward(model, torch::ones({1, 4})).sum(), *optimizer).backward();
    EXPECT_EQ(mixed->step(*optimizer), Step::stepped);
  }
}

}  // namespace
}  // namespace semitone::amp::training_idioms_test
