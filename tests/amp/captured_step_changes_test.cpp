// Captured steps while weights, memory, state and the program change around them, and their errors.

#include "semitone/amp/captured_step.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_sgd.h"
#include "src/amp/step_graph.h"
#include "tests/amp/captured_steps_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::amp::captured_step_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

TEST_F(CapturedSteps, MayBeMixedWithStepsByHand) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[2], options, {}, false);
    Training got(kinds()[2], options);
    for (std::uint64_t i = 0; i < 10; ++i) {
      if (i % 3 != 1) {
        expect_same_step(got, want, batch(i));
        continue;
      }
      for (Training* one : {&got, &want}) {
        one->mixed->scale_loss(one->loss(batch(i)), *one->optimizer).backward();
        one->mixed->step(*one->optimizer);
        one->mixed->zero_grad(*one->optimizer);
      }
    }
    expect_same(got, want);
  }
}

// In place, as weights are clamped, averaged or loaded.
TEST_F(CapturedSteps, SeeWeightsThatWereChanged) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    for (std::uint64_t i = 0; i < 8; ++i) {
      for (Training* one : {&got, &want}) {
        const torch::NoGradGuard no_grad;
        if (i == 3 || i == 5) one->model->head->weight.mul_(0.5);  // when it is captured, and later
      }
      expect_same_step(got, want, batch(i));
    }
    EXPECT_EQ(graphs().captures, 1);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, SeeALossScaleThatWasLowered) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    const double first = got.mixed->loss_scaler().scale();
    for (std::uint64_t i = 0; i < 8; ++i) {
      for (Training* one : {&got, &want}) {
        if (i == 3 || i == 5 || i == 6) one->mixed->back_off_loss_scale();
      }
      expect_same_step(got, want, batch(i));
    }
    const Properties& level = got.mixed->properties();
    EXPECT_EQ(got.mixed->loss_scaler().scale() < first,
              level.enabled && level.loss_scale.is_dynamic());
    EXPECT_EQ(graphs().captures, 1);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, AreCapturedAgainWhereLayersAreFrozenOrStateIsWanted) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    const Kind sgd = kind<optim::FusedSGD>("SGD", optim::FusedSGDOptions(0.05));
    Training want(sgd, options, {}, false);
    Training got(sgd, options);
    for (Training* one : {&got, &want}) one->model->conv->weight.requires_grad_(false);
    for (std::uint64_t i = 0; i < 14; ++i) {
      for (Training* one : {&got, &want}) {
        if (i == 3) one->model->conv->weight.requires_grad_(true);  // when it is captured
        if (i == 6) one->model->head->weight.requires_grad_(false);
        if (i == 8) one->model->head->weight.requires_grad_(true);
        auto& chosen =
            static_cast<optim::FusedSGDOptions&>(one->optimizer->param_groups()[0].options());
        if (i == 11) chosen.momentum(0.9).dampening(0.3);
      }
      SCOPED_TRACE("step " + std::to_string(i));
      expect_same_step(got, want, batch(i));
      if (HasFailure()) return;
    }
    EXPECT_GE(graphs().captures, 4);
    graphs() = {};
  }
}

// An ordinary step that was never taken, and overflowed.
TEST_F(CapturedSteps, ForgetGradientsThatWereLeft) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    if (!got.is_checked()) continue;
    for (std::uint64_t i = 0; i < 8; ++i) {
      for (Training* one : {&got, &want}) {
        // Batch norm would keep the infinity.
        const at::Tensor bad =
            one->model->head->weight.sum() * std::numeric_limits<float>::infinity();
        if (i % 2 == 1) one->mixed->scale_loss(bad, *one->optimizer).backward();
      }
      expect_same_step(got, want, batch(i));
    }
  }
}

// There is no state before the first step, of either kind.
TEST_F(CapturedSteps, MakeStateWithTheFirstStepThatIsTaken) {
  const Options options = Options("O2").dtype(torch::kBFloat16);
  for (const Kind& of : kinds()) {
    for (const bool resets : {false, true}) {
      SCOPED_TRACE(of.name + (resets ? ", reset" : ""));
      graphs() = {};
      Training want(of, options, {}, false);
      Training got(of, options);
      for (int i = 0; i < 5; ++i) expect_same_step(got, want, overflowing_batch());
      EXPECT_EQ(graphs().replays, 2);
      expect_same_step(got, want, batch(1, 3));  // by operators
      if (resets) got.step->reset();
      for (std::uint64_t i = 2; i < 7; ++i) expect_same_step(got, want, batch(i));
    }
  }
}

// Two networks alternately: each loss passes through parameters that the other optimizer trains.
struct Pair {
  explicit Pair(bool has_graphs) {
    graphs().exist = has_graphs;
    torch::manual_seed(1);
    first = torch::nn::Linear(3, 3);
    second = torch::nn::Linear(3, 3);
    first_optimizer = std::make_unique<optim::FusedAdam>(first->parameters(), 0.01);
    second_optimizer = std::make_unique<optim::FusedSGD>(second->parameters(), 0.01);
    mixed = std::make_unique<MixedPrecision>(
        initialize({first, second}, {*first_optimizer, *second_optimizer},
                   Options("O2").dtype(torch::kHalf).num_losses(2).verbosity(0)));
    const auto loss = [this](double sign) {
      return [this, sign](const Batch& of) {
        const at::Tensor value = mixed->forward(second, mixed->forward(first, of[0])).pow(2).mean();
        return graphs().capturing ? value * std::numeric_limits<float>::infinity() : value * sign;
      };
    };
    first_step = std::make_unique<CapturedStep>(*mixed, *first_optimizer, loss(1));
    second_step = std::make_unique<CapturedStep>(*mixed, *second_optimizer, loss(-1),
                                                 CapturedStepOptions().loss_id(1));
  }

  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  std::unique_ptr<optim::FusedOptimizer> first_optimizer;
  std::unique_ptr<optim::FusedOptimizer> second_optimizer;
  std::unique_ptr<MixedPrecision> mixed;
  std::unique_ptr<CapturedStep> first_step;
  std::unique_ptr<CapturedStep> second_step;
};

TEST_F(CapturedSteps, OfTwoOptimizersTakeTurns) {
  Pair want(false);
  Pair got(true);
  for (std::uint64_t i = 0; i < 12; ++i) {
    torch::manual_seed(i);
    const Batch of{torch::randn({4, 3})};
    for (Pair* one : {&got, &want}) {
      // Gradients of earlier code are preserved.
      one->second->weight.mutable_grad() = torch::ones_like(one->second->weight);
      one->first_step->run(of);
      EXPECT_TRUE(one->second->weight.grad().eq(1).all().item<bool>());
      one->second->weight.mutable_grad().reset();
      one->second_step->run(of);
    }
    for (const auto member : {&Pair::first, &Pair::second}) {
      expect_bitwise_equal((got.*member)->weight, (want.*member)->weight);
      EXPECT_FALSE((got.*member)->weight.grad().defined());
    }
    for (const int id : {0, 1})
      EXPECT_EQ(got.mixed->loss_scaler(id).scale(), want.mixed->loss_scaler(id).scale());
  }
  EXPECT_EQ(graphs().captures, 2);
  EXPECT_EQ(graphs().replays, 18);
}

TEST_F(CapturedSteps, AreCapturedAgainWhereMemoryHasMoved) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    for (std::uint64_t i = 0; i < 5; ++i) expect_same_step(got, want, batch(i));
    for (Training* one : {&got, &want}) {
      torch::serialize::OutputArchive saved;
      one->optimizer->save(saved);
      std::stringstream stream;
      saved.save_to(stream);
      torch::serialize::InputArchive loaded;
      loaded.load_from(stream);
      one->optimizer->load(loaded);
    }
    for (std::uint64_t i = 5; i < 7; ++i) expect_same_step(got, want, batch(i));
    EXPECT_EQ(graphs().captures, 2);
    EXPECT_EQ(graphs().warm_ups, 4);
    for (Training* one : {&got, &want}) {
      const auto fp32 = one->mixed->fp32_weights(one->model);
      const torch::NoGradGuard no_grad;
      one->model->head->weight.mul_(0.5);
    }
    expect_same_step(got, want, batch(7));
    std::vector<at::Tensor> old_memory;
    for (Training* one : {&got, &want}) {
      at::Tensor& weight = one->model->head->weight;
      old_memory.push_back(weight.variable_data());
      weight.set_data(weight.detach().clone());
    }
    graphs().captures = 0;
    for (std::uint64_t i = 8; i < 10; ++i) expect_same_step(got, want, batch(i));
    EXPECT_EQ(graphs().captures, 1);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, GoOnAfterAnExceptionOfTheLoss) {
  for (const Options& options : all_options()) {
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    for (std::uint64_t i = 0; i < 6; ++i) {
      got.breaks = true;  // in warm-up, when it is captured, and later
      EXPECT_THROW(got.step->run(batch(i)), std::runtime_error);
      got.breaks = false;
      expect_same_step(got, want, batch(i));
    }
  }
}

TEST_F(CapturedSteps, LeaveNoStateOfStepsThatWereSkipped) {
  const Kind sgd = kinds()[2];
  const Options options = Options("O2").dtype(torch::kBFloat16);
  Training want(sgd, options, {}, false);
  Training got(sgd, options);
  for (std::uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(got.step->run(overflowing_batch()).step, Step::skipped);
    want.step->run(overflowing_batch());
  }
  EXPECT_EQ(graphs().replays, 2);
  got.step->reset();
  expect_same(got, want);
  expect_same_step(got, want, batch(1));
}

TEST_F(CapturedSteps, NameTheParameterThatOverflowed) {
  const Options options = Options("O2").dtype(torch::kHalf);
  Training want(kinds()[0], options, {}, false);
  Training got(kinds()[0], options);
  for (std::uint64_t i = 0; i < 4; ++i) expect_same_step(got, want, batch(i));
  test::RecordedEvents events;
  EXPECT_EQ(got.step->run(overflowing_batch()).step, Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "head.bias");
}

TEST_F(CapturedSteps, StopAfterTooManySkips) {
  const Options options = Options("O2")
                              .dtype(torch::kHalf)
                              .loss_scale_options(LossScaleOptions().max_consecutive_skips(2));
  Training training(kinds()[0], options, CapturedStepOptions().warmup(1));
  while (training.step->run(batch(0)).step == Step::skipped) {
  }
  training.step->run(batch(1));
  EXPECT_EQ(training.step->run(overflowing_batch()).step, Step::skipped);
  EXPECT_THROW(training.step->run(overflowing_batch()), DivergedError);
  EXPECT_EQ(training.step->run(batch(2)).step, Step::stepped);
}

TEST_F(CapturedSteps, SayWhatTheyCannotRepeat) {
  const Options bf16 = Options("O2").dtype(torch::kBFloat16);
  const auto make = [&](const Kind& of, const CapturedStepOptions& how = {}) {
    return [=] { Training(of, bf16, how); };
  };
  expect_error(make(kind<optim::FusedAdam>("Adam", optim::FusedAdamOptions(0.1).bf16_state(true))),
               {"[optim.capturable_step]", "bf16_state in group 0"});
  expect_error(make(kinds()[0], CapturedStepOptions().warmup(0)), {"warmup of at least 1"});
  expect_error(make(kinds()[0], CapturedStepOptions().max_grad_norm(-1)), {"max_grad_norm", "-1"});
  expect_error(make(kinds()[0], CapturedStepOptions().max_grad_norm(std::nan(""))),
               {"max_grad_norm"});
  expect_error(make(kinds()[0], CapturedStepOptions().loss_id(1)), {"loss_id below 1"});

  Training training(kinds()[0], bf16, CapturedStepOptions().warmup(1));
  training.step->run(batch(0));
  training.step->run(batch(0));
  EXPECT_TRUE(training.step->is_captured());
  training.mixed->set_found_inf_hook([](at::Tensor&) {});
  expect_error([&] { training.step->run(batch(0)); }, {"no found_inf hook"});
  training.mixed->set_found_inf_hook(nullptr);
  expect_error([&] { training.step->run({at::Tensor(), batch(0)[1]}); }, {"an undefined one"});

  optim::FusedSGD stranger(test::ToyConvNet()->parameters(), 0.1);
  expect_error(
      [&] { CapturedStep(*training.mixed, stranger, [](const Batch&) { return at::Tensor(); }); },
      {"given to amp::initialize"});
  expect_error([&] { CapturedStep(*training.mixed, *training.optimizer, nullptr); },
               {"a function that computes the loss"});
  CapturedStep vector(*training.mixed, *training.optimizer,
                      [](const Batch& of) { return of[0].flatten(); });
  expect_error([&] { vector.run(batch(0)); }, {"a loss of one element"});
}

TEST_F(CapturedSteps, RefuseLayersThatTakeTurns) {
  torch::manual_seed(0);
  torch::nn::Linear first(3, 3);
  torch::nn::Linear second(3, 3);
  torch::nn::Sequential both(first, second);
  optim::FusedSGD optimizer(both->parameters(), 0.1);
  auto mixed = initialize(both, optimizer, Options("O0").verbosity(0));
  int count = 0;
  CapturedStep step(mixed, optimizer, [&](const Batch& of) {
    return (count++ % 2 == 0 ? first : second)->forward(of[0]).sum();
  });
  for (std::uint64_t i = 0; i < 3; ++i) step.run({torch::ones({2, 3})});
  const at::Tensor before = second->weight.clone();
  expect_error([&] { step.run({torch::ones({2, 3})}); },
               {"[optim.capturable_step]", "the same parameters in each step"});
  expect_bitwise_equal(second->weight, before);
}

}  // namespace
}  // namespace semitone::amp::captured_step_test
