// Captured steps whose outcome the host learns later: the device updates the loss scale, and chooses
// between the rules of a step that follows a taken or a skipped one.

#include "semitone/amp/captured_step.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/amp/captured_steps_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::amp::captured_step_test {
namespace {

using test::expect_bitwise_equal;

struct Outcomes {
  std::vector<at::Tensor> losses;
  std::vector<StepResult> steps;
};

// Takes a step for each element, which says whether it overflows. Nothing is looked at.
Outcomes run(Training& training, const std::vector<bool>& overflows, std::uint64_t first = 0) {
  Outcomes outcomes;
  for (std::uint64_t i = 0; i < overflows.size(); ++i) {
    training.optimizer->param_groups()[0].options().set_lr(0.02 / double(1 + first + i));
    const auto [loss, step] = training.step->run(
        overflows[i] && training.is_checked() ? overflowing_batch() : batch(first + i));
    outcomes.losses.push_back(loss);
    outcomes.steps.push_back(step);
  }
  return outcomes;
}

void expect_same(const Outcomes& got, const Outcomes& want) {
  for (std::size_t i = 0; i < want.losses.size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    EXPECT_EQ(got.steps[i], want.steps[i]);
    expect_bitwise_equal(got.losses[i], want.losses[i]);
  }
}

std::vector<bool> random_overflows(std::size_t count, double probability, unsigned seed) {
  std::mt19937 random(seed);
  std::bernoulli_distribution overflow(probability);
  std::vector<bool> overflows(count);
  for (auto&& one : overflows) one = overflow(random);
  return overflows;
}

struct CapturedOutcomes : CapturedSteps {};

TEST_F(CapturedOutcomes, MayStayUnknownWhileStepsFollow) {
  for (const Kind& of : kinds()) {
    for (const Options& options : all_options()) {
      const Properties level = Properties::resolve(options, torch::kCPU);
      if (of.name == "SplitAdam" && level.opt_level == OptLevel::O3 && level.dtype == torch::kHalf)
        continue;  // only bf16 can be split
      for (const double probability : {0.2, 0.7}) {
        SCOPED_TRACE(of.name + " " + level.to_string() + " " + std::to_string(probability));
        const std::vector<bool> overflows = random_overflows(16, probability, 3);
        Training want(of, options, {}, false);
        const Outcomes expected = run(want, overflows);
        Training got(of, options);
        expect_same(run(got, overflows), expected);
        expect_same(got, want);
        if (HasFailure()) return;
      }
    }
  }
}

// The first ones too, which make state: it is new until a step is taken.
TEST_F(CapturedOutcomes, MayAllBeSkipsAtFirst) {
  const Options options = Options("O2").dtype(torch::kBFloat16).loss_scale("dynamic");
  for (const Kind& of : kinds()) {
    SCOPED_TRACE(of.name);
    std::vector<bool> overflows(12, true);
    overflows[0] = overflows[9] = overflows[11] = false;
    Training want(of, options, {}, false);
    const Outcomes expected = run(want, overflows);
    Training got(of, options);
    expect_same(run(got, overflows), expected);
    expect_same(got, want);
  }
}

// Rules of every kind: bounds, delays, several ways of counting overflows.
TEST_F(CapturedOutcomes, ChangeTheScaleByTheRuleOfTheHost) {
  const std::vector<LossScaleOptions> rules{
      LossScaleOptions::apex().growth_interval(2),
      LossScaleOptions::paddle().growth_interval(2).hysteresis(2),
      LossScaleOptions::deepspeed().growth_interval(2),
      LossScaleOptions().growth_interval(1).init_scale(64).max_scale(100).min_scale(48),
      LossScaleOptions::fixed(32),
  };
  for (const LossScaleOptions& rule : rules) {
    const Options options = Options("O1").dtype(torch::kHalf).loss_scale_options(rule);
    const std::vector<bool> overflows = random_overflows(24, 0.4, 5);
    Training want(kinds()[0], options, {}, false);
    const Outcomes expected = run(want, overflows);
    Training got(kinds()[0], options);
    expect_same(run(got, overflows), expected);
    EXPECT_EQ(got.mixed->loss_scaler().state(), want.mixed->loss_scaler().state());
    EXPECT_EQ(got.mixed->loss_scaler().consecutive_skips(),
              want.mixed->loss_scaler().consecutive_skips());
    expect_same(got, want);
  }
}

// Between two steps in whatever order: questions, steps by hand, other shapes.
TEST_F(CapturedOutcomes, MayBecomeKnownAtAnyTime) {
  const Options options =
      Options("O2")
          .dtype(torch::kHalf)
          .loss_scale_options(LossScaleOptions().init_scale(1024).growth_interval(2));
  const std::vector<bool> overflows = random_overflows(30, 0.4, 11);
  Training want(kinds()[0], options, {}, false);
  Training got(kinds()[0], options);
  for (std::uint64_t i = 0; i < overflows.size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    std::vector<double> answers[2];
    Training* const both[] = {&got, &want};
    for (int k = 0; k < 2; ++k) {
      Training& one = *both[k];
      const Batch data = overflows[i] ? overflowing_batch() : batch(i, i % 11 == 9 ? 3 : 4);
      if (i % 7 == 6) {
        one.mixed->scale_loss(one.loss(data), *one.optimizer).backward();
        one.mixed->step(*one.optimizer);
        one.mixed->zero_grad(*one.optimizer);
      } else {
        const auto result = one.step->run(data);
        if (i % 5 == 4) answers[k].push_back(result.step == Step::skipped ? 1 : 0);
      }
      const at::Tensor& parameter = one.optimizer->param_groups()[0].params()[0];
      if (i % 6 == 5) answers[k].push_back(double(one.optimizer->steps_of(parameter)));
      if (i % 4 == 3) answers[k].push_back(double(one.mixed->skipped_steps()));
      if (i % 9 == 8) answers[k].push_back(one.mixed->loss_scaler().scale());
    }
    EXPECT_EQ(answers[0], answers[1]);
  }
  expect_same(got, want);
  EXPECT_GT(graphs().replays, 10);
}

// What a checkpoint holds: all of it is written and read with the outcome of the last step unknown.
struct Files {
  explicit Files(Training& training)
      : optimizer(test::saved(*training.optimizer)), mixed(test::saved(*training.mixed)) {
    for (const at::Tensor& parameter : training.model->parameters())
      weights.push_back(parameter.detach().clone());
    for (const at::Tensor& buffer : training.model->buffers()) weights.push_back(buffer.clone());
  }
  void load_into(Training& training) {
    const torch::NoGradGuard no_grad;
    std::size_t i = 0;
    for (at::Tensor& parameter : training.model->parameters()) parameter.copy_(weights[i++]);
    for (at::Tensor& buffer : training.model->buffers()) buffer.copy_(weights[i++]);
    training.optimizer->load(optimizer);
    training.mixed->load(mixed);
  }
  std::vector<at::Tensor> weights;
  torch::serialize::InputArchive optimizer;
  torch::serialize::InputArchive mixed;
};

TEST_F(CapturedOutcomes, AreInCheckpoints) {
  for (const Kind& of : kinds()) {
    for (const char* level : {"O1", "O2"}) {
      for (const bool last_overflows : {false, true}) {
        SCOPED_TRACE(of.name + " " + level + (last_overflows ? ", after an overflow" : ""));
        const Options options = Options(level)
                                    .dtype(torch::kBFloat16)
                                    .loss_scale_options(LossScaleOptions().growth_interval(3));
        std::vector<bool> before = random_overflows(9, 0.3, 2);
        before.back() = last_overflows;
        const std::vector<bool> after = random_overflows(9, 0.3, 4);

        Training want(of, options, {}, false);
        run(want, before);
        const Outcomes expected = run(want, after, 20);

        Training undisturbed(of, options);
        run(undisturbed, before);
        expect_same(run(undisturbed, after, 20), expected);
        expect_same(undisturbed, want);

        Training saved(of, options);
        run(saved, before);
        Files files(saved);
        expect_same(run(saved, after, 20), expected);
        expect_same(saved, want);

        // Into a training that is captured, with an outcome of its own that is unknown.
        Training resumed(of, options);
        run(resumed, random_overflows(7, 0.5, 8), 40);
        files.load_into(resumed);
        expect_same(run(resumed, after, 20), expected);
        expect_same(resumed, want);
        if (HasFailure()) return;
      }
    }
  }
}

// A file may hold another rule for the scale.
TEST_F(CapturedOutcomes, FollowARuleThatIsLoaded) {
  const auto options = [](std::int64_t interval) {
    return Options("O1")
        .dtype(torch::kHalf)
        .loss_scale_options(LossScaleOptions().init_scale(64).growth_interval(interval));
  };
  Training other(kinds()[0], options(1));
  auto file = test::saved(*other.mixed);
  Training training(kinds()[0], options(1000));
  run(training, std::vector<bool>(5, false));
  EXPECT_EQ(training.mixed->loss_scaler().scale(), 64);
  training.mixed->load(file);
  graphs().captures = 0;
  run(training, std::vector<bool>(4, false));
  EXPECT_EQ(training.mixed->loss_scaler().scale(), 64 * 16);
  EXPECT_EQ(graphs().captures, 1);
}

// Whoever listens hears of a step in that step, with the name of the parameter that overflowed.
TEST_F(CapturedOutcomes, AreReportedWithNames) {
  const Options options =
      Options("O2").dtype(torch::kHalf).loss_scale_options(LossScaleOptions().init_scale(1024));
  Training training(kinds()[0], options);
  run(training, {false, false, false, false, true});
  {
    test::RecordedEvents events;
    run(training, {true, false, true});
    // The first one was unknown until then.
    ASSERT_EQ(events.skips().size(), 3U);
    EXPECT_EQ(events.updates().size(), 4U);
    EXPECT_EQ(events.skips()[0].parameter, "");
    EXPECT_EQ(events.skips()[1].parameter, "head.bias");
    EXPECT_EQ(events.skips()[2].parameter, "head.bias");
    EXPECT_EQ(events.skips()[2].total, 3);
    EXPECT_EQ(events.updates().back().after, 128);
  }
  run(training, {true});
  EXPECT_EQ(training.mixed->loss_scaler().scale(), 64);
  EXPECT_EQ(training.mixed->skipped_steps(), 4);
}

TEST_F(CapturedOutcomes, OutliveTheStep) {
  const Options options =
      Options("O2").dtype(torch::kHalf).loss_scale_options(LossScaleOptions().init_scale(1024));
  Training training(kinds()[0], options);
  run(training, std::vector<bool>(5, false));
  const StepResult skipped = run(training, {true}).steps[0];
  training.step.reset();
  EXPECT_EQ(skipped, Step::skipped);
  EXPECT_EQ(training.optimizer->steps_of(training.optimizer->param_groups()[0].params()[0]), 5);
  EXPECT_EQ(training.mixed->loss_scaler().scale(), 512);
}

}  // namespace
}  // namespace semitone::amp::captured_step_test
