#include "semitone/amp/divergence_guard.h"

#include "semitone/amp/accumulate.h"
#include "semitone/amp/captured_step.h"
#include "semitone/amp/initialize.h"
#include "semitone/checkpoint/checkpoint.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::amp::divergence_guard_test {
namespace {

using test::expect_error;
using test::message_of;
using Observed = DivergenceGuard::Observed;
using GuardOptions = DivergenceGuardOptions;

at::Tensor loss_of(double value) {
  return torch::full({}, value, torch::kDouble);
}

void expect_parts(const std::string& message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

// 100 losses of 1 ± 0.1.
void warm_up(DivergenceGuard& guard) {
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(guard.observe(loss_of(i % 2 == 0 ? 0.9 : 1.1), Step::stepped), Observed::normal);
  }
}

TEST(DivergenceGuard, ALossThatIsNotFiniteEndsTheTraining) {
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    DivergenceGuard guard;
    guard.observe(loss_of(2), Step::stepped);
    EXPECT_EQ(guard.observe(loss_of(bad), Step::skipped), Observed::skipped);
    const auto message =
        message_of<DivergedError>([&] { guard.observe(loss_of(bad), Step::stepped); });
    expect_parts(message, {"[amp.divergence_guard] expected a finite loss", "in step 3",
                           "mean loss was 2", "lower the learning rate"});
    EXPECT_EQ(guard.mean_loss(), 2);
  }
}

TEST(DivergenceGuard, ConsecutiveSkipsEndTheTraining) {
  DivergenceGuard guard(GuardOptions().max_consecutive_skips(3));
  for (int round = 0; round < 2; ++round) {  // a step in between starts anew
    EXPECT_EQ(guard.observe(loss_of(1), Step::stepped), Observed::normal);
    EXPECT_EQ(guard.observe(loss_of(1), Step::skipped), Observed::skipped);
    EXPECT_EQ(guard.observe(loss_of(1), Step::skipped), Observed::skipped);
  }
  expect_parts(message_of<DivergedError>([&] { guard.observe(loss_of(1), Step::skipped); }),
               {"a step within 3 steps", "3 consecutive skipped steps up to step 7",
                "check the loss and the input"});
  DivergenceGuard never(GuardOptions().max_consecutive_skips(0));
  for (int i = 0; i < 300; ++i)
    EXPECT_EQ(never.observe(loss_of(1), Step::skipped), Observed::skipped);
}

TEST(DivergenceGuard, ConsecutiveSpikesEndTheTraining) {
  DivergenceGuard guard(GuardOptions().max_loss_ratio(3).max_consecutive_spikes(3));
  warm_up(guard);
  const double mean = guard.mean_loss();
  EXPECT_NEAR(mean, 1, 0.01);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(guard.observe(loss_of(3.2), Step::stepped), Observed::spike);
    EXPECT_EQ(guard.observe(loss_of(50), Step::stepped), Observed::spike);
    EXPECT_EQ(guard.mean_loss(), mean);
    EXPECT_EQ(guard.observe(loss_of(mean), Step::stepped), Observed::normal);
  }
  guard.observe(loss_of(4), Step::stepped);
  guard.observe(loss_of(4), Step::stepped);
  expect_parts(
      message_of<DivergedError>([&] { guard.observe(loss_of(5), Step::stepped); }),
      {"expected finite losses of at most 3", "3 consecutive others, the last 5 in step 109",
       "the standard deviation 0.09", "raise max_loss_ratio"});
}

TEST(DivergenceGuard, InspectedSpikesDoNotMoveTheMeanAndEndTheTrainingToo) {
  DivergenceGuard guard(GuardOptions().max_loss_ratio(3).max_consecutive_spikes(3));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(guard.inspect(loss_of(1)), Observed::normal);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(guard.inspect(loss_of(4)), Observed::spike);
    EXPECT_EQ(guard.inspect(loss_of(9)), Observed::spike);
    EXPECT_EQ(guard.consecutive_spikes(), 2);
    EXPECT_EQ(guard.last_loss(), 9);
    EXPECT_EQ(guard.mean_loss(), 1);
    EXPECT_EQ(guard.inspect(loss_of(1)), Observed::normal);
    EXPECT_EQ(guard.consecutive_spikes(), 0);
  }
  // A loss that stays at a higher level is no reason to leave out all batches for ever.
  EXPECT_EQ(guard.inspect(loss_of(4)), Observed::spike);
  EXPECT_EQ(guard.inspect(loss_of(4)), Observed::spike);
  expect_parts(message_of<DivergedError>([&] { guard.inspect(loss_of(4)); }),
               {"expected finite losses of at most 3",
                "3 consecutive others, the last 4 in step 109; before them the mean was 1"});
}

TEST(DivergenceGuard, AnInspectedLossThatIsNotFiniteIsASpikeFromTheFirstOneOn) {
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    DivergenceGuard guard(GuardOptions().max_consecutive_spikes(3));
    EXPECT_EQ(guard.inspect(loss_of(bad)), Observed::spike);
    EXPECT_TRUE(std::isnan(guard.mean_loss()));
    EXPECT_EQ(guard.inspect(loss_of(2)), Observed::normal);
    EXPECT_EQ(guard.inspect(loss_of(bad)), Observed::spike);
    EXPECT_EQ(guard.inspect(loss_of(bad)), Observed::spike);
    expect_parts(message_of<DivergedError>([&] { guard.inspect(loss_of(bad)); }),
                 {"expected finite losses, got 3 consecutive others", "in step 5", "the mean was 2",
                  "check the input"});
    EXPECT_EQ(guard.mean_loss(), 2);
  }
}

TEST(DivergenceGuard, CountsTheSkippedStepsOfInspectedLosses) {
  DivergenceGuard guard(GuardOptions().max_consecutive_skips(3));
  const auto step = [&](Step outcome) {
    EXPECT_EQ(guard.inspect(loss_of(1)), Observed::normal);
    return guard.observe(outcome);
  };
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(step(Step::stepped), Observed::normal);
    EXPECT_EQ(step(Step::skipped), Observed::skipped);
    // A batch that is left out has no step, so it does not end a series of skipped steps.
    EXPECT_EQ(guard.inspect(loss_of(std::nan(""))), Observed::spike);
    EXPECT_EQ(step(Step::skipped), Observed::skipped);
  }
  expect_parts(message_of<DivergedError>([&] { step(Step::skipped); }),
               {"3 consecutive skipped steps up to step 9"});
}

TEST(DivergenceGuard, StepsMayHaveNumbersOfTheirOwn) {
  DivergenceGuard guard(GuardOptions().max_consecutive_spikes(2));
  guard.set_step(41);
  EXPECT_EQ(guard.inspect(loss_of(1)), Observed::normal);
  EXPECT_EQ(guard.inspect(loss_of(std::nan(""))), Observed::spike);
  guard.set_step(50);
  expect_parts(message_of<DivergedError>([&] { guard.inspect(loss_of(std::nan(""))); }),
               {"in step 50"});
  expect_parts(
      message_of<DivergedError>([&] { guard.observe(loss_of(std::nan("")), Step::stepped); }),
      {"in step 51"});
  expect_error([&] { guard.set_step(0); }, {"a step of at least 1", "0"});
}

TEST(DivergenceGuard, AStepWithoutALossIsAnError) {
  DivergenceGuard guard;
  expect_error(
      [&] { guard.observe(Step::stepped); },
      {"[amp.divergence_guard] expected inspect(loss) before the step", "observe(loss, step)"});
}

TEST(DivergenceGuard, AnInspectedLossMayRollBack) {
  int calls = 0;
  DivergenceGuard guard(GuardOptions().max_consecutive_spikes(2).max_rollbacks(1).rollback(
      [&](const DivergedError&) { ++calls; }));
  EXPECT_EQ(guard.inspect(loss_of(std::nan(""))), Observed::spike);
  EXPECT_EQ(guard.inspect(loss_of(std::nan(""))), Observed::rolled_back);
  EXPECT_EQ(guard.consecutive_spikes(), 0);
  EXPECT_EQ(guard.inspect(loss_of(std::nan(""))), Observed::spike);
  EXPECT_THROW(guard.inspect(loss_of(std::nan(""))), DivergedError);
  EXPECT_EQ(calls, 1);
}

TEST(DivergenceGuard, TheScoreIsInStandardDeviationsAboveTheMean) {
  DivergenceGuard guard(GuardOptions().max_z_score(4));
  warm_up(guard);
  EXPECT_EQ(guard.observe(loss_of(1.35), Step::stepped), Observed::normal);
  EXPECT_EQ(guard.observe(loss_of(2), Step::stepped), Observed::spike);
  EXPECT_EQ(guard.observe(loss_of(-5), Step::stepped), Observed::normal);  // falling is no spike
}

TEST(DivergenceGuard, FindsNoSpikesWithoutALimitOrBeforeTheWarmUp) {
  DivergenceGuard none;
  warm_up(none);
  EXPECT_EQ(none.observe(loss_of(1e9), Step::stepped), Observed::normal);
  DivergenceGuard early(GuardOptions().max_loss_ratio(2).max_z_score(1).warmup_steps(3));
  for (const double loss : {1.0, 100.0, 1.0})
    EXPECT_EQ(early.observe(loss_of(loss), Step::stepped), Observed::normal);
  EXPECT_EQ(early.observe(loss_of(1000), Step::stepped), Observed::spike);
}

// The formulas in the plain form, over all losses.
TEST(DivergenceGuard, TheFirstLossesCountEqually) {
  DivergenceGuard guard(GuardOptions().decay(0.9));
  double sum = 0;
  for (int n = 1; n <= 10; ++n) {
    guard.observe(loss_of(n * n), Step::stepped);
    sum += n * n;
    EXPECT_NEAR(guard.mean_loss(), sum / n, 1e-12);
  }
  const double before = guard.mean_loss();
  guard.observe(loss_of(7), Step::stepped);
  EXPECT_NEAR(guard.mean_loss(), 0.9 * before + 0.1 * 7, 1e-12);
}

TEST(DivergenceGuard, RollsBackAFewTimesAndThenThrows) {
  std::vector<std::string> messages;
  DivergenceGuard guard(GuardOptions().max_rollbacks(2).rollback(
      [&](const DivergedError& error) { messages.emplace_back(error.what()); }));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(guard.observe(loss_of(std::nan("")), Step::stepped), Observed::rolled_back);
    EXPECT_EQ(guard.observe(loss_of(1), Step::stepped), Observed::normal);
  }
  EXPECT_EQ(guard.rollbacks(), 2);
  ASSERT_EQ(messages.size(), 2U);
  expect_parts(messages[1], {"a finite loss", "nan in step 3"});
  EXPECT_THROW(guard.observe(loss_of(std::nan("")), Step::stepped), DivergedError);
  EXPECT_EQ(messages.size(), 2U);
}

TEST(DivergenceGuard, ARollbackMayLoadTheGuardItselfAndMayThrow) {
  DivergenceGuard* self = nullptr;
  torch::serialize::InputArchive file;
  DivergenceGuard guard(GuardOptions().max_consecutive_skips(2).rollback([&](const DivergedError&) {
    if (self->rollbacks() == 2) throw std::runtime_error("no checkpoint");
    self->load(file);
  }));
  self = &guard;
  guard.observe(loss_of(3), Step::stepped);
  file = test::saved(guard);
  guard.observe(loss_of(5), Step::stepped);
  guard.observe(loss_of(5), Step::skipped);
  EXPECT_EQ(guard.observe(loss_of(5), Step::skipped), Observed::rolled_back);
  EXPECT_EQ(guard.mean_loss(), 3);
  EXPECT_EQ(guard.rollbacks(), 1);
  guard.observe(loss_of(5), Step::skipped);
  EXPECT_THROW(guard.observe(loss_of(5), Step::skipped), std::runtime_error);
}

TEST(DivergenceGuard, UsesTheLossThatRanksAgreeOn) {
  DivergenceGuard guard(GuardOptions().agree([](at::Tensor& loss) {
    EXPECT_EQ(loss.scalar_type(), torch::kDouble);
    loss.fill_(std::nan(""));  // of another rank
  }));
  const at::Tensor loss = torch::ones({1});
  EXPECT_EQ(guard.observe(loss, Step::skipped), Observed::skipped);
  EXPECT_THROW(guard.observe(loss, Step::stepped), DivergedError);
  EXPECT_EQ(loss.item<float>(), 1);
}

TEST(DivergenceGuard, ResumesExactly) {
  const auto options = GuardOptions().max_loss_ratio(3).max_consecutive_spikes(2);
  DivergenceGuard whole(options);
  warm_up(whole);
  whole.observe(loss_of(9), Step::stepped);
  auto file = test::saved(whole);
  DivergenceGuard resumed(options);
  resumed.load(file);
  EXPECT_EQ(resumed.mean_loss(), whole.mean_loss());
  const auto end = [](DivergenceGuard& guard) {
    return message_of<DivergedError>([&] { guard.observe(loss_of(9), Step::stepped); });
  };
  EXPECT_EQ(end(resumed), end(whole));
}

TEST(DivergenceGuard, RefusesFilesThatDoNotFitAndChangesNothing) {
  DivergenceGuard guard;
  guard.observe(loss_of(3), Step::stepped);
  const auto file_with = [](double mean, std::int64_t losses) {
    return test::archived([&](torch::serialize::OutputArchive& archive) {
      for (const char* key : {"steps", "skips", "spikes"})
        archive.write(key, c10::IValue(std::int64_t{0}));
      archive.write("losses", c10::IValue(losses));
      archive.write("mean", c10::IValue(mean));
      archive.write("variance", c10::IValue(0.0));
    });
  };
  auto empty = test::archived([](auto&) {});
  auto nan = file_with(std::nan(""), 5);
  auto negative = file_with(1, -5);
  expect_parts(message_of<FileError>([&] { guard.load(empty); }), {"'steps'"});
  expect_parts(message_of<FileError>([&] { guard.load(nan); }), {"finite mean", "nan"});
  expect_parts(message_of<FileError>([&] { guard.load(negative); }), {"'losses'", "-5"});
  EXPECT_EQ(guard.mean_loss(), 3);
}

TEST(DivergenceGuard, RefusesOptionsOutOfRangeAndOtherLosses) {
  const auto refuse = [](const GuardOptions& options,
                         std::initializer_list<std::string_view> parts) {
    expect_error([&] { DivergenceGuard guard(options); }, parts);
  };
  refuse(GuardOptions().max_consecutive_skips(-1), {"max_consecutive_skips of at least 0", "-1"});
  refuse(GuardOptions().max_consecutive_spikes(0), {"max_consecutive_spikes of at least 1", "0"});
  refuse(GuardOptions().warmup_steps(1), {"warmup_steps of at least 2", "1"});
  refuse(GuardOptions().max_rollbacks(0), {"max_rollbacks of at least 1", "0"});
  refuse(GuardOptions().max_loss_ratio(0.5), {"max_loss_ratio", "0.5"});
  refuse(GuardOptions().max_z_score(-1), {"max_z_score", "-1"});
  refuse(GuardOptions().max_z_score(std::nan("")), {"max_z_score", "nan"});
  refuse(GuardOptions().decay(1), {"decay in [0, 1)", "1"});
  DivergenceGuard guard;
  expect_error([&] { guard.observe(torch::ones({2}), Step::stepped); }, {"one floating", "[2]"});
  expect_error([&] { guard.observe(torch::ones({}, torch::kLong), Step::stepped); }, {"Long"});
  expect_error([&] { guard.observe(at::Tensor(), Step::stepped); }, {"undefined"});
  expect_error([&] { guard.inspect(torch::ones({2})); }, {"one floating", "[2]"});
  EXPECT_TRUE(std::isnan(guard.mean_loss()));
}

// A training that leaves out batches, at every opt level.
struct Inspected {
  explicit Inspected(const Options& options)
      : optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)),
        mixed(initialize(net, optimizer, Options(options).verbosity(0))) {}

  // The weights, and their masters if there are some.
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : net->parameters()) all.push_back(parameter.detach().clone());
    for (const at::Tensor& parameter : mixed.master_params(optimizer))
      all.push_back(parameter.detach().clone());
    return all;
  }

  test::ToyNet net;
  torch::optim::SGD optimizer;
  MixedPrecision mixed;
};

std::vector<Options> options_of_levels() {
  std::vector<Options> all;
  for (const auto dtype : {torch::kHalf, torch::kBFloat16})
    for (const char* const level : {"O0", "O1", "O2", "O3"})
      all.push_back(
          Options(level).dtype(dtype).loss_scale_options(LossScaleOptions().init_scale(128)));
  return all;
}

at::Tensor batch_of(std::uint64_t number) {
  torch::manual_seed(number);
  return torch::randn({8, 6});
}

// The same training without the bad batches has the same weights, bit for bit.
TEST(DivergenceGuard, ABatchThatIsLeftOutChangesNothing) {
  for (const Options& options : options_of_levels()) {
    for (const bool before_backward : {true, false}) {
      for (const double factor : {1e3, std::nan("")}) {
        SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
        torch::manual_seed(1);
        Inspected with(options);
        torch::manual_seed(1);
        Inspected without(options);
        DivergenceGuard guard(GuardOptions().max_loss_ratio(10).warmup_steps(5));
        for (std::uint64_t i = 0; i < 20; ++i) {
          const bool is_bad = i == 8 || i == 9 || i == 15;
          const auto loss_with = [&](Inspected& one) {
            return one.mixed.forward(one.net, batch_of(i)).pow(2).mean() * (is_bad ? factor : 1.0);
          };
          const auto weights = with.weights();
          const double scale = with.mixed.loss_scaler().scale();
          with.optimizer.zero_grad();
          const at::Tensor loss = loss_with(with);
          if (!before_backward) with.mixed.scale_loss(loss, with.optimizer).backward();
          const Observed observed = guard.inspect(loss);
          ASSERT_EQ(observed, is_bad ? Observed::spike : Observed::normal) << i;
          if (is_bad) {
            if (!before_backward) with.mixed.zero_grad(with.optimizer);
            const auto now = with.weights();
            for (std::size_t k = 0; k < now.size(); ++k)
              EXPECT_TRUE(torch::equal(now[k], weights[k])) << k;
            EXPECT_EQ(with.mixed.loss_scaler().scale(), scale);
            continue;
          }
          if (before_backward) with.mixed.scale_loss(loss, with.optimizer).backward();
          guard.observe(with.mixed.step(with.optimizer));
          without.optimizer.zero_grad();
          without.mixed.scale_loss(loss_with(without), without.optimizer).backward();
          without.mixed.step(without.optimizer);
        }
        const auto got = with.weights();
        const auto expected = without.weights();
        for (std::size_t k = 0; k < got.size(); ++k)
          EXPECT_TRUE(torch::equal(got[k], expected[k])) << k;
        EXPECT_EQ(with.mixed.skipped_steps(), without.mixed.skipped_steps());
      }
    }
  }
}

TEST(DivergenceGuard, ABatchOfSeveralMicroBatchesIsLeftOutAsAWhole) {
  torch::manual_seed(1);
  Inspected training(Options("O2").dtype(torch::kHalf).loss_scale(128.0));
  DivergenceGuard guard(GuardOptions().max_loss_ratio(10).warmup_steps(2));
  for (std::uint64_t i = 0; i < 6; ++i) {
    const auto weights = training.weights();
    const at::Tensor mean =
        accumulate(training.mixed, training.optimizer, 2, [&](std::int64_t part) {
          const at::Tensor batch = batch_of(i).narrow(0, 4 * part, 4);
          // Only the second micro-batch is bad.
          const double factor = i == 4 && part == 1 ? 1e4 : 1;
          return training.mixed.forward(training.net, batch).pow(2).mean() * factor;
        });
    const bool is_left_out = guard.inspect(mean) != Observed::normal;
    EXPECT_EQ(is_left_out, i == 4);
    if (!is_left_out) guard.observe(training.mixed.step(training.optimizer));
    training.mixed.zero_grad(training.optimizer);
    const auto now = training.weights();
    for (std::size_t k = 0; k < now.size(); ++k)
      EXPECT_EQ(torch::equal(now[k], weights[k]), is_left_out) << k;
  }
}

// The gradients of the batch exist then, which no checkpoint has.
TEST(DivergenceGuard, ARollbackBetweenBackwardAndStepLoadsACheckpoint) {
  const test::TemporaryFolder folder;
  int level = 0;
  for (const Options& options : options_of_levels()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    torch::manual_seed(1);
    Inspected training(options);
    checkpoint::Checkpoint checkpoint(folder.path() / std::to_string(level++));
    checkpoint.add("net", training.net).add("optimizer", training.optimizer);
    checkpoint.add("mixed", training.mixed);
    const auto roll_back = [&](const DivergedError&) {
      training.mixed.zero_grad(training.optimizer);
      EXPECT_EQ(checkpoint.resume(), 3);
    };
    DivergenceGuard guard(
        GuardOptions().max_loss_ratio(10).warmup_steps(2).max_consecutive_spikes(1).rollback(
            roll_back));
    std::vector<at::Tensor> saved;
    for (std::uint64_t i = 0; i < 6; ++i) {
      const at::Tensor mean =
          accumulate(training.mixed, training.optimizer, 2, [&](std::int64_t part) {
            const at::Tensor batch = batch_of(i).narrow(0, 4 * part, 4);
            return training.mixed.forward(training.net, batch).pow(2).mean() * (i == 5 ? 1e4 : 1.0);
          });
      if (guard.inspect(mean) != Observed::normal) continue;
      guard.observe(training.mixed.step(training.optimizer));
      training.mixed.zero_grad(training.optimizer);
      if (i != 2) continue;
      checkpoint.save(3);
      saved = training.weights();
    }
    EXPECT_EQ(guard.rollbacks(), 1);
    const auto now = training.weights();
    for (std::size_t k = 0; k < now.size(); ++k) EXPECT_TRUE(torch::equal(now[k], saved[k])) << k;
  }
}

TEST(DivergenceGuard, AGradScalerTrainsOnWithoutTheBatchesThatAreLeftOut) {
  torch::manual_seed(1);
  test::ToyNet net;
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  GradScaler scaler(LossScaleOptions().init_scale(128));
  DivergenceGuard guard(GuardOptions().max_loss_ratio(10).warmup_steps(2));
  int left_out = 0;
  for (std::uint64_t i = 0; i < 8; ++i) {
    optimizer.zero_grad();
    const at::Tensor loss = net->forward(batch_of(i)).pow(2).mean() * (i == 4 ? 1e4 : 1);
    if (guard.inspect(loss) != Observed::normal) {
      ++left_out;
      continue;
    }
    scaler.scale(loss).backward();
    guard.observe(scaler.step(optimizer));
    scaler.update();
  }
  EXPECT_EQ(left_out, 1);
  EXPECT_EQ(scaler.get_scale(), 128);
  EXPECT_EQ(scaler.scaler().state().growth_tracker, 7);
}

// A captured step returns its loss after the step, so only the scale of the next step can change.
TEST(DivergenceGuard, ASpikeMayLowerTheLossScale) {
  torch::manual_seed(1);
  test::ToyNet net;
  optim::FusedSGD optimizer(net->parameters(), 0.05);
  auto mixed = initialize(net, optimizer,
                          Options("O2")
                              .dtype(torch::kHalf)
                              .verbosity(0)
                              .loss_scale_options(LossScaleOptions().init_scale(128)));
  bool is_bad = false;
  CapturedStep step(mixed, optimizer, [&](const std::vector<at::Tensor>& batch) {
    const at::Tensor loss = mixed.forward(net, batch[0]).pow(2).mean();
    return is_bad ? loss + 1e4 : loss;
  });
  DivergenceGuard guard(GuardOptions().max_loss_ratio(10).warmup_steps(2));
  for (std::uint64_t i = 0; i < 8; ++i) {
    is_bad = i == 4 || i == 6;
    const auto [loss, outcome] = step.run({batch_of(i)});
    const Observed observed = guard.observe(loss, outcome);
    EXPECT_EQ(observed, is_bad ? Observed::spike : Observed::normal);
    if (observed == Observed::spike) {
      EXPECT_TRUE(mixed.back_off_loss_scale());
    }
  }
  EXPECT_EQ(mixed.loss_scaler().scale(), 32);
  EXPECT_EQ(mixed.skipped_steps(), 0);
}

// What the guard is for: plain training in bf16, which checks no gradients.
TEST(DivergenceGuard, EndsAPlainTrainingWhoseWeightsBecomeNaN) {
  torch::manual_seed(1);
  test::ToyNet net;
  torch::optim::SGD optimizer(net->parameters(), 1e4);
  auto mixed = initialize(net, optimizer,
                          Options("O1").dtype(torch::kBFloat16).loss_scale(1.0).verbosity(0));
  DivergenceGuard guard;
  int steps = 0;
  const auto train = [&] {
    for (; steps < 100; ++steps) {
      optimizer.zero_grad();
      const auto loss = mixed.forward(net, torch::randn({8, 6})).to(torch::kFloat).pow(2).sum();
      mixed.scale_loss(loss, optimizer).backward();
      guard.observe(loss, mixed.step(optimizer));
    }
  };
  EXPECT_THROW(train(), DivergedError);
  EXPECT_LT(steps, 99);
}

}  // namespace
}  // namespace semitone::amp::divergence_guard_test
