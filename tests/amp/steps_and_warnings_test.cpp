// Steps past MixedPrecision::step, and what is reported once.

#include "semitone/amp/initialize.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/amp/training_idioms_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace semitone::amp::training_idioms_test {
namespace {

using test::CapturedLog;
using test::expect_bitwise_equal;
using test::expect_error;
using test::kDtypes;
using test::kLevels;
using testing::HasSubstr;

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

// A dry run before a training is resumed: the step counts are those of the file.
TEST(AStepPastMixedPrecision, IsNotALoadedState) {
  for (const std::string level : {"O1", "O2", "O3"}) {
    for (const auto& kind : every_optimizer()) {
      for (const int steps : {1, 3}) {
        SCOPED_TRACE(level + " " + kind.name + " " + std::to_string(steps));
        const auto dtype = level == "O3" ? torch::kBFloat16 : torch::kHalf;
        const auto options = with_scale(level, dtype).loss_scale("dynamic");
        Training first(options, kind.make);
        for (int i = 0; i < steps; ++i) {
          first.mixed->zero_grad(*first.optimizer);
          first.backward();
          ASSERT_EQ(first.step(), Step::stepped);
        }
        auto file = test::saved(*first.optimizer);
        auto again = test::saved(*first.optimizer);
        Training resumed(options, kind.make);
        resumed.backward();
        if (steps == 1) resumed.optimizer->zero_grad();
        resumed.optimizer->load(file);
        EXPECT_NO_THROW(resumed.loss());
        // Over existing state.
        resumed.mixed->zero_grad(*resumed.optimizer);
        resumed.backward();
        resumed.optimizer->load(again);
        EXPECT_NO_THROW(resumed.loss());
        // The optimizer is still watched.
        resumed.mixed->zero_grad(*resumed.optimizer);
        resumed.backward();
        resumed.optimizer->step();
        resumed.optimizer->zero_grad();
        expect_error([&] { resumed.loss(); }, {"mixed.step(optimizer)", "optimizer.step()"});
        resumed.backward();
        EXPECT_EQ(resumed.step(), Step::stepped);
      }
    }
  }
}

// With the weights, as a checkpoint is.
TEST(AStepPastMixedPrecision, IsNotALoadedTraining) {
  for (const auto& kind : every_optimizer()) {
    SCOPED_TRACE(kind.name);
    const auto options = with_scale("O1", torch::kHalf);
    Training first(options, kind.make);
    for (int i = 0; i < 3; ++i) {
      first.mixed->zero_grad(*first.optimizer);
      first.backward();
      ASSERT_EQ(first.step(), Step::stepped);
    }
    auto file = test::saved(*first.optimizer);
    Training resumed(options, kind.make);
    resumed.backward();
    resumed.optimizer->zero_grad();
    {
      const at::NoGradGuard no_grad;
      const auto weights = first.model->parameters();
      for (std::size_t i = 0; i < weights.size(); ++i)
        resumed.model->parameters()[i].copy_(weights[i]);
    }
    resumed.optimizer->load(file);
    EXPECT_NO_THROW(resumed.loss());
    resumed.backward();
    EXPECT_EQ(resumed.step(), Step::stepped);
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

// The model has the weights before the step until the next forward.
TEST(AStepPastMixedPrecision, IsNotUndoneByAChangeOfTheWeights) {
  for (const auto& kind : test::all_optimizers()) {
    SCOPED_TRACE(kind.name);
    Training trained(Options("O2").dtype(torch::kBFloat16), kind.make);
    Training want(Options("O2").dtype(torch::kBFloat16), kind.make);
    const auto clamp = [](Training& training) {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : training.model->parameters()) parameter.clamp_(-0.1, 0.1);
    };
    trained.backward();
    trained.optimizer->step();
    {
      const auto scope = trained.mixed->fp32_weights(trained.model);
      clamp(trained);
    }
    want.backward();
    want.step();
    {
      const auto scope = want.mixed->fp32_weights(want.model);
      clamp(want);
    }
    trained.backward();
    const auto got = trained.masters();
    const auto masters = want.masters();
    for (std::size_t i = 0; i < got.size(); ++i) expect_bitwise_equal(got[i], masters[i]);
    trained.optimizer->step();
    clamp(trained);
    expect_error([&] { trained.backward(); }, {"mixed.step(optimizer)", "fp32_weights"});
  }
}

// Without mixed.forward, nothing copies the masters into the model: the loss would be that of the
// first weights in every step.
TEST(AStepPastMixedPrecision, IsAnErrorIfTheLossIsOneOfTheWeightsBefore) {
  for (const auto& kind : test::all_optimizers()) {
    SCOPED_TRACE(kind.name);
    Training trained(Options("O2").dtype(torch::kBFloat16), kind.make);
    const auto region = trained.mixed->autocast();
    const auto backward = [&] {
      const at::Tensor output = trained.model->forward(torch::ones({4, 12}));
      amp::scale_loss(output.to(torch::kFloat).pow(2).mean(), *trained.optimizer).backward();
    };
    backward();
    trained.optimizer->step();
    trained.optimizer->zero_grad();
    expect_error(backward, {"[amp.master_weights]", "mixed.step(optimizer)", "mixed.forward"});
    trained.loss();  // updates the model
    backward();
    EXPECT_EQ(trained.step(), Step::stepped);
    trained.optimizer->zero_grad();
    backward();
  }
}

// As in a loop ported from Apex without its braces: the ScaledLoss ends with the loop's body.
TEST(AStepPastMixedPrecision, IsAnErrorBeforeTheScaledLossEndsToo) {
  for (const auto& kind : every_optimizer()) {
    SCOPED_TRACE(kind.name);
    if (kind.name == "SGD") continue;  // has no state, and its weights are inf at once
    Training trained(with_scale("O1", torch::kHalf).loss_scale("dynamic"), kind.make);
    const auto body = [&] {
      trained.optimizer->zero_grad();
      auto scaled = trained.mixed->scale_loss(trained.loss(), *trained.optimizer);
      scaled.value().backward();
      trained.optimizer->step();
    };
    body();
    EXPECT_THROW(
        {
          body();
          body();
        },
        Error);
  }
}

TEST(MasterParams, AreRefusedWhileTheirGradientsAreScaled) {
  for (const std::string level : {"O1", "O2"}) {
    Training trained(with_scale(level, torch::kHalf), sgd(0.1));
    auto scaled = trained.mixed->scale_loss(trained.loss(), *trained.optimizer);
    scaled.value().backward();
    expect_error([&] { trained.mixed->master_params(*trained.optimizer); },
                 {"[amp.mixed_precision.master_params]", "call its backward() or finish()"});
    scaled.finish();
    trained.mixed->master_params(*trained.optimizer);
  }
}

std::string log_of(
    const std::function<void(MixedPrecision&, ToyNet&, torch::optim::Optimizer&)>& run,
    const Options& options) {
  const CapturedLog log;
  ToyNet model = make_net();
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

at::Tensor some_loss(MixedPrecision& mixed, ToyNet& model) {
  return mixed.forward(model, torch::ones({4, 12})).pow(2).mean();
}

TEST(Warnings, OfABackwardWithoutALossScale) {
  const auto plain = [](MixedPrecision& mixed, ToyNet& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i) {
      some_loss(mixed, model).backward();
      mixed.step(optimizer);
      mixed.zero_grad(optimizer);
    }
  };
  const auto scaled = [](MixedPrecision& mixed, ToyNet& model, torch::optim::Optimizer& optimizer) {
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

// The program of O1 in bf16, where both lines may stay.
TEST(Warnings, OfALoopThatNeverReachesTheMasters) {
  const auto plain = [](MixedPrecision& mixed, ToyNet& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 200; ++i) {
      optimizer.zero_grad();
      some_loss(mixed, model).backward();
      optimizer.step();
    }
  };
  const auto accumulating = [](MixedPrecision& mixed, ToyNet& model,
                               torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 200; ++i) {
      some_loss(mixed, model).backward();
      if (i % 32 == 31) mixed.step(optimizer);
    }
  };
  const auto unfinished = [](MixedPrecision& mixed, ToyNet& model,
                             torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 200; ++i) {
      optimizer.zero_grad();
      auto scaled = mixed.scale_loss(some_loss(mixed, model), optimizer);
      scaled.value().backward();
      optimizer.step();
    }
  };
  const std::string unseen = "do not reach these gradients";
  for (const auto dtype : kDtypes) {
    const Options options = Options("O2").dtype(dtype);
    EXPECT_EQ(count(log_of(plain, options), unseen), 1U);
    EXPECT_EQ(count(log_of(accumulating, options), unseen), 0U);
  }
  EXPECT_EQ(count(log_of(plain, Options("O1")), unseen), 0U);
  EXPECT_EQ(count(log_of(unfinished, Options("O2").dtype(torch::kHalf)),
                  "to be called after the ScaledLoss is finished"),
            1U);
}

TEST(Warnings, OfAStepWithoutASingleGradient) {
  const auto no_backward = [](MixedPrecision& mixed, ToyNet& model,
                              torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i) {
      some_loss(mixed, model);
      mixed.step(optimizer);
    }
  };
  const auto other_model = [](MixedPrecision& mixed, ToyNet&, torch::optim::Optimizer& optimizer) {
    ToyNet other = make_net();
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
  const auto nan = [](MixedPrecision& mixed, ToyNet& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 2; ++i)
      mixed.scale_loss(some_loss(mixed, model) * std::nan(""), optimizer).backward();
  };
  EXPECT_EQ(count(log_of(nan, Options("O1").dtype(torch::kBFloat16)), "the loss is nan"), 1U);
  EXPECT_EQ(count(log_of(nan, Options("O1").dtype(torch::kHalf)), "the loss is nan"), 0U);
}

TEST(Warnings, OfAScaledLossThatEndsBeforeBackward) {
  const auto early = [](MixedPrecision& mixed, ToyNet& model, torch::optim::Optimizer& optimizer) {
    auto scaled = mixed.scale_loss(some_loss(mixed, model), optimizer);
    scaled.value();
  };
  EXPECT_THAT(log_of(early, Options("O2").dtype(torch::kHalf)),
              HasSubstr("a ScaledLoss was destroyed"));
}

}  // namespace
}  // namespace semitone::amp::training_idioms_test
