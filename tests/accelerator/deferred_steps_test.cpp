#include "semitone/core/error.h"
#include "semitone/optim/clip_grad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/accelerator/training.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/archive.h"
#include "tests/support/captured_log.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tolerance.h"

#include <torch/optim.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Steps that a device decides, and whose outcome the host learns later.
namespace semitone::test::accelerator {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct AcceleratorDeferredSteps : AcceleratorTest {};

MakeOptimizer maker(const Kind& kind) {
  return [kind](std::vector<at::Tensor> parameters) { return kind(std::move(parameters)); };
}

amp::Options dynamic(const std::string& level) {
  return amp::Options(level).dtype(at::kHalf).loss_scale_options(
      amp::LossScaleOptions().init_scale(1024).growth_interval(2));
}

TEST_F(AcceleratorDeferredSteps, ReadNothing) {
  for (const Kind& kind : all_fused_optimizers()) {
    for (const std::string level : {"O1", "O2"}) {
      SCOPED_TRACE(kind.name + " " + level);
      const Trained trained = train({.device = device(),
                                     .options = dynamic(level),
                                     .make = maker(kind),
                                     .looks_at_steps = false});
      EXPECT_EQ(trained.forward_and_backward.reads, 0);
      EXPECT_EQ(trained.step.reads, 0);
      EXPECT_EQ(trained.step.waits, 0);
      EXPECT_EQ(trained.step.uploads, 0);
      // For the check of the step before, in scale_loss.
      EXPECT_EQ(trained.forward_and_backward.waits, 3);
    }
  }
}

// Two losses with scales of their own, static ones included, and gradients that are clipped.
TEST_F(AcceleratorDeferredSteps, ReadNothingWithTwoLossesAndClipping) {
  for (const Kind& kind : all_fused_optimizers()) {
    for (const std::string level : {"O1", "O2"}) {
      for (const bool is_static : {false, true}) {
        SCOPED_TRACE(kind.name + " " + level + (is_static ? " static" : " dynamic"));
        auto net = make_net(device());
        const auto optimizer = kind(net->parameters());
        auto options = dynamic(level).num_losses(2).verbosity(0);
        if (is_static) options = amp::Options(level).dtype(at::kHalf).loss_scale(64).num_losses(2);
        auto mixed = amp::initialize(net, *optimizer, options.verbosity(0));
        std::vector<amp::StepResult> steps;
        for (int i = 0; i < 4; ++i) {
          const at::Tensor input = input_of(i, device());
          const Counts before = counts();
          optimizer->zero_grad();
          for (const std::int64_t id : {0, 1}) {
            const at::Tensor loss = loss_of(mixed.forward(net, input), input);
            mixed
                .scale_loss(i == 2 && id == 1 ? loss * kInfinity : loss, *optimizer,
                            amp::ScaleLossOptions().loss_id(id))
                .backward();
          }
          const auto parameters = mixed.master_params(*optimizer);
          std::vector<at::Tensor> grads;
          for (const at::Tensor& parameter : parameters) grads.push_back(parameter.grad());
          optim::clip_grads_with_norm_(parameters, 0.1, optim::get_total_norm(grads));
          steps.push_back(mixed.step(*optimizer));
          const Counts step = counts() - before;
          EXPECT_EQ(step.reads, 0);
          EXPECT_EQ(step.uploads, 0);
          EXPECT_LE(step.waits, 1);  // for the outcome of the step before
        }
        EXPECT_EQ(steps[2], amp::Step::skipped);
        EXPECT_EQ(steps[3], amp::Step::stepped);
        EXPECT_EQ(mixed.loss_scaler(1).scale(), is_static ? 64 : 1024);
        EXPECT_EQ(mixed.loss_scaler(0).scale(), is_static ? 64 : 4096);
      }
    }
  }
}

// Also in the first step, whose state is new.
TEST_F(AcceleratorDeferredSteps, SkipAsOnTheCPU) {
  for (const Kind& kind : all_fused_optimizers()) {
    for (const std::string level : {"O1", "O2"}) {
      for (const int overflow_at : {0, 2}) {
        SCOPED_TRACE(kind.name + " " + level + ", overflow at " + std::to_string(overflow_at));
        Training training{.options = dynamic(level),
                          .make = maker(kind),
                          .overflow_at = overflow_at,
                          .looks_at_steps = overflow_at == 2,
                          .is_exact = false};
        const Trained want = train(training);
        training.device = device();
        const Trained got = train(training);
        EXPECT_EQ(got.skipped, 1);
        expect_same_training(got, want, rounding_tolerance(at::kHalf, 20));
      }
    }
  }
}

// A net with an optimizer of a device.
struct Trainer {
  explicit Trainer(c10::Device where_ = device(), amp::Options options = dynamic("O2"))
      : where(where_),
        net(make_net(where)),
        optimizer(net->parameters(), optim::FusedSGDOptions(0.05).momentum(0.9).dampening(0.3)),
        mixed(amp::initialize(net, optimizer, options.verbosity(0))) {}

  void backward(int number, bool overflows = false) {
    const at::Tensor input = input_of(number, where);
    const at::Tensor loss = loss_of(mixed.forward(net, input), input);
    mixed.scale_loss(overflows ? loss * kInfinity : loss, optimizer).backward();
  }
  amp::StepResult step(int number, bool overflows = false) {
    optimizer.zero_grad();
    backward(number, overflows);
    return mixed.step(optimizer);
  }
  at::Tensor first() { return mixed.master_params(optimizer)[0]; }

  c10::Device where;
  NormedNet net;
  optim::FusedSGD optimizer;
  amp::MixedPrecision mixed;
};

TEST_F(AcceleratorDeferredSteps, OutcomesAreKnownWhenTheyAreUsed) {
  Trainer trainer;
  const amp::StepResult first = trainer.step(0);
  EXPECT_FALSE(first.is_known());
  EXPECT_EQ(first, amp::Step::stepped);
  EXPECT_TRUE(first.is_known());
  const amp::StepResult second = trainer.step(1, true);
  const amp::StepResult copy = second;
  const amp::StepResult third = trainer.step(2);
  EXPECT_TRUE(second == amp::Step::skipped);
  EXPECT_TRUE(copy.is_known());
  EXPECT_EQ(trainer.mixed.skipped_steps(), 1);
  EXPECT_EQ(trainer.mixed.loss_scaler().scale(), 512);
  EXPECT_EQ(third, amp::Step::stepped);
  const amp::Step known = Trainer(at::kCPU).step(0);
  EXPECT_EQ(known, amp::Step::stepped);
}

TEST_F(AcceleratorDeferredSteps, OutcomesOutliveTheirTraining) {
  auto trainer = std::make_unique<Trainer>();
  const amp::StepResult skipped = trainer->step(0, true);
  trainer.reset();
  EXPECT_EQ(skipped, amp::Step::skipped);
}

TEST_F(AcceleratorDeferredSteps, OptimizersTellTheStateThatTheyHave) {
  Trainer trainer;
  trainer.step(0, true);
  EXPECT_EQ(trainer.optimizer.steps_of(trainer.first()), 0);
  EXPECT_FALSE(trainer.optimizer.state_of(trainer.first(), "momentum_buffer").defined());
  trainer.step(1);
  EXPECT_EQ(trainer.optimizer.steps_of(trainer.first()), 1);
  trainer.step(2, true);
  EXPECT_EQ(trainer.optimizer.steps_of(trainer.first()), 1);
  EXPECT_TRUE(trainer.optimizer.state_of(trainer.first(), "momentum_buffer").defined());
}

TEST_F(AcceleratorDeferredSteps, FilesBetweenStepsContinueTheTraining) {
  for (const bool overflows : {false, true}) {
    Trainer trainer, again;
    trainer.step(0);
    trainer.step(1, overflows);
    again.step(3);
    auto state = saved(trainer.mixed), optimizer = saved(trainer.optimizer);
    again.optimizer.load(optimizer);
    again.mixed.load(state);
    for (int i = 4; i < 6; ++i) {
      trainer.step(i);
      again.step(i);
    }
    EXPECT_EQ(again.mixed.skipped_steps(), overflows ? 1 : 0);
    EXPECT_EQ(again.mixed.loss_scaler().scale(), trainer.mixed.loss_scaler().scale());
    EXPECT_EQ(again.optimizer.steps_of(again.first()), trainer.optimizer.steps_of(trainer.first()));
  }
}

TEST_F(AcceleratorDeferredSteps, AccumulatedGradientsAreSkippedTogether) {
  for (const int bad : {-1, 0, 1}) {
    Trainer there, here(at::kCPU);
    for (Trainer* one : {&there, &here}) {
      one->step(0);
      one->optimizer.zero_grad();
      one->backward(1, bad == 0);
      one->backward(2, bad == 1);
      EXPECT_EQ(one->mixed.step(one->optimizer), bad < 0 ? amp::Step::stepped : amp::Step::skipped);
      one->step(3);
    }
    EXPECT_EQ(there.mixed.skipped_steps(), bad < 0 ? 0 : 1);
    EXPECT_EQ(there.mixed.loss_scaler().scale(), here.mixed.loss_scaler().scale());
    EXPECT_TRUE(near(there.first().detach().cpu(), here.first().detach(),
                     rounding_tolerance(at::kHalf, 20)));
  }
}

// zero_grad drops what was found in the gradients, and not the outcome of the step before.
TEST_F(AcceleratorDeferredSteps, DroppedGradientsDoNotCount) {
  Trainer trainer;
  trainer.step(0, true);
  trainer.backward(1, true);
  trainer.mixed.zero_grad(trainer.optimizer);
  trainer.backward(2);
  EXPECT_EQ(trainer.mixed.step(trainer.optimizer), amp::Step::stepped);
  EXPECT_EQ(trainer.mixed.skipped_steps(), 1);
}

// The log comes later, and cannot name a parameter.
TEST_F(AcceleratorDeferredSteps, SkippedStepsAreLoggedWithTheNextLoss) {
  const CapturedLog log;
  auto net = make_net(device());
  optim::FusedAdam optimizer(net->parameters(), optim::FusedAdamOptions(0.01));
  auto mixed = amp::initialize(net, optimizer, dynamic("O1"));
  const at::Tensor input = input_of(0, device());
  const auto loss = [&] { return loss_of(mixed.forward(net, input), input); };
  mixed.scale_loss(loss() * kInfinity, optimizer).backward();
  mixed.step(optimizer);
  EXPECT_THAT(log.text(), testing::Not(testing::HasSubstr("skipped a step")));
  mixed.scale_loss(loss(), optimizer).backward();
  EXPECT_THAT(log.text(), testing::HasSubstr("skipped a step: loss 0 overflowed at scale 1024"));
}

TEST_F(AcceleratorDeferredSteps, ListenersAndLimitsNeedTheNamesAtOnce) {
  {
    Trainer trainer;
    const RecordedEvents events;
    const auto before = host_reads();
    EXPECT_TRUE(trainer.step(0).is_known());
    EXPECT_EQ(host_reads(), before + 1);
    EXPECT_TRUE(trainer.step(1, true).is_known());
    ASSERT_EQ(events.skips().size(), 1);
    EXPECT_GT(events.skips()[0].non_finite, 0);
    EXPECT_EQ(events.updates().size(), 2);
  }
  amp::LossScaleOptions rule;
  Trainer trainer(device(), amp::Options("O1").dtype(at::kHalf).loss_scale_options(
                                rule.max_consecutive_skips(2)));
  EXPECT_EQ(trainer.step(0, true), amp::Step::skipped);
  try {
    trainer.step(1, true);
    ADD_FAILURE() << "no DivergedError";
  } catch (const DivergedError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("nearest the loss that of '"));
  }
}

TEST_F(AcceleratorDeferredSteps, HooksSeeTheFlagOnTheDevice) {
  Trainer trainer;
  int calls = 0;
  trainer.mixed.set_found_inf_hook([&](at::Tensor& found_inf) {
    EXPECT_EQ(found_inf.device(), device());
    if (++calls == 2) found_inf.fill_(1);  // another rank's
  });
  const auto before = host_reads();
  trainer.step(0);
  const at::Tensor weights = trainer.first().detach().clone();
  const amp::StepResult second = trainer.step(1);
  EXPECT_EQ(host_reads(), before);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(second, amp::Step::skipped);
  expect_bitwise_equal(trainer.first().detach().cpu(), weights.cpu());
}

// Losses that two optimizers share make both skip: the host decides.
TEST_F(AcceleratorDeferredSteps, SeveralLossesAndOptimizersTrainAsOnTheCPU) {
  const auto run = [](c10::Device where) {
    auto one = make_net(where), two = make_net(where);
    optim::FusedSGD first(one->parameters(), optim::FusedSGDOptions(0.05).momentum(0.9));
    optim::FusedSGD second(two->parameters(), optim::FusedSGDOptions(0.05));
    auto mixed =
        amp::initialize({one, two}, {first, second}, dynamic("O2").num_losses(3).verbosity(0));
    std::vector<double> result;
    for (int i = 0; i < 8; ++i) {
      const at::Tensor input = input_of(i, where);
      const auto loss = [&](NormedNet& net, bool overflows) {
        const at::Tensor value = loss_of(mixed.forward(net, input), input);
        return overflows ? value * kInfinity : value;
      };
      mixed.zero_grad(first);
      mixed.zero_grad(second);
      const auto with = [](std::int64_t id) { return amp::ScaleLossOptions().loss_id(id); };
      mixed.scale_loss(loss(one, i == 1), first, with(0)).backward();
      mixed.scale_loss(loss(one, i == 2), first, with(1)).backward();
      if (i % 2 == 0)
        mixed.scale_loss(loss(one, i == 4) + loss(two, false), {first, second}, with(2)).backward();
      if (i % 2 == 1) mixed.scale_loss(loss(two, i == 5), second, with(2)).backward();
      const amp::StepResult a = mixed.step(first), b = mixed.step(second);
      if (i % 3 == 0) result.push_back(a == amp::Step::skipped ? 1 : 0);
      if (i % 3 == 1) result.push_back(b == amp::Step::skipped ? 1 : 0);
    }
    for (const std::int64_t id : {0, 1, 2}) {
      result.push_back(mixed.loss_scaler(id).scale());
      result.push_back(static_cast<double>(mixed.loss_scaler(id).skipped_steps()));
      result.push_back(static_cast<double>(mixed.loss_scaler(id).state().growth_tracker));
    }
    return result;
  };
  EXPECT_EQ(run(device()), run(at::kCPU));
}

TEST_F(AcceleratorDeferredSteps, ParametersOnSeveralDevicesAreDecidedByTheHost) {
  std::vector<at::Tensor> parameters;
  for (c10::DeviceIndex index = 0; index < kDevices; ++index)
    parameters.push_back(torch::ones({3}, device(index)).requires_grad_());
  optim::FusedSGD optimizer(parameters, optim::FusedSGDOptions(1));
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(4));
  for (const double factor : {1.0, std::numeric_limits<double>::infinity()}) {
    optimizer.zero_grad();
    for (const at::Tensor& parameter : parameters)
      scaler.scale((parameter * (parameter.get_device() == 1 ? factor : 1)).sum()).backward();
    EXPECT_TRUE(scaler.step(optimizer).is_known());
    scaler.update();
  }
  for (const at::Tensor& parameter : parameters)
    expect_bitwise_equal(parameter.detach().cpu(), torch::zeros({3}));
}

struct ScalerRun {
  std::vector<double> numbers;
  double weights = 0;               // their norm
  std::vector<std::int64_t> reads;  // by scale, unscale_, step and update
};

ScalerRun run_scaler(c10::Device where, bool unscale, int overflow_at, bool looks) {
  auto net = make_net(where);
  optim::FusedSGD optimizer(net->parameters(), optim::FusedSGDOptions(0.05).momentum(0.9));
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(1024).growth_interval(2));
  ScalerRun result;
  for (int i = 0; i < 6; ++i) {
    const at::Tensor input = input_of(i, where);
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const amp::Autocast region(where.type(), at::kHalf);
      loss = loss_of(net->forward(input), input);
    }
    const auto before = host_reads();
    scaler.scale(i == overflow_at ? loss * kInfinity : loss).backward();
    if (unscale) scaler.unscale_(optimizer);
    const amp::StepResult step = scaler.step(optimizer);
    if (looks && i % 2 == 0)
      result.numbers.push_back(static_cast<double>(scaler.scaler().skipped_steps()));
    scaler.update();
    result.reads.push_back(host_reads() - before);
    if (looks) result.numbers.push_back(step == amp::Step::skipped ? 1 : 0);
    if (looks && i % 2 == 1) result.numbers.push_back(scaler.get_scale());
    if (i == 3) scaler.update(256);
    if (i == 4) saved(scaler);
  }
  result.numbers.push_back(scaler.get_scale());
  result.numbers.push_back(static_cast<double>(scaler.scaler().skipped_steps()));
  result.numbers.push_back(static_cast<double>(scaler.scaler().consecutive_skips()));
  result.numbers.push_back(static_cast<double>(optimizer.steps_of(net->parameters()[0])));
  result.weights = net->parameters()[0].detach().cpu().norm().item<double>();
  return result;
}

TEST_F(AcceleratorDeferredSteps, GradScalersReadNothingAndTrainAsOnTheCPU) {
  for (const bool unscale : {false, true}) {
    for (const int overflow_at : {-1, 0, 2, 3, 5}) {
      for (const bool looks : {false, true}) {
        SCOPED_TRACE(c10::str("overflow at ", overflow_at, ", looks: ", looks));
        const ScalerRun want = run_scaler(at::kCPU, unscale, overflow_at, looks);
        const ScalerRun got = run_scaler(device(), unscale, overflow_at, looks);
        EXPECT_EQ(got.numbers, want.numbers);
        EXPECT_NEAR(got.weights, want.weights, rounding_tolerance(at::kHalf, 20));
        EXPECT_EQ(got.reads, std::vector<std::int64_t>(6, 0));
      }
    }
  }
}

TEST_F(AcceleratorDeferredSteps, GradScalersOfListenersAndLibTorchsOptimizersReadOnce) {
  const auto reads_of = [](torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                           amp::LossScaleOptions options) {
    amp::GradScaler scaler(options);
    optimizer.zero_grad();
    scaler.scale(parameter.sum()).backward();
    const auto before = host_reads();
    EXPECT_TRUE(scaler.step(optimizer).is_known());
    scaler.update();
    return host_reads() - before;
  };
  const auto parameter = torch::ones({3}, device()).requires_grad_();
  torch::optim::SGD torchs({parameter}, torch::optim::SGDOptions(0.1));
  optim::FusedSGD ours({parameter}, optim::FusedSGDOptions(0.1));
  EXPECT_EQ(reads_of(torchs, parameter, {}), 1);
  EXPECT_EQ(reads_of(ours, parameter, amp::LossScaleOptions().max_consecutive_skips(3)), 1);
  const RecordedEvents events;
  EXPECT_EQ(reads_of(ours, parameter, {}), 1);
}

}  // namespace
}  // namespace semitone::test::accelerator
