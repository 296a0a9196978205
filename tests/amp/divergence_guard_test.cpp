#include "semitone/amp/divergence_guard.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
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
  expect_parts(message_of<DivergedError>([&] { guard.observe(loss_of(5), Step::stepped); }),
               {"expected losses of at most 3", "3 consecutive higher ones, the last 5 in step 109",
                "the standard deviation 0.09", "raise max_loss_ratio"});
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
  EXPECT_TRUE(std::isnan(guard.mean_loss()));
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
