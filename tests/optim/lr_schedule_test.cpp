// tests/conformance/lr_schedulers_test.cpp compares the rates with PyTorch's.

#include "semitone/optim/lr_schedule.h"

#include "semitone/core/error.h"
#include "tests/support/errors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace semitone::optim {
namespace {

using test::expect_error;

template <typename Schedule>
void expect_refused(const Schedule& schedule, std::initializer_list<std::string_view> parts) {
  expect_error([&] { const LRSchedule refused(schedule); }, parts);
}

TEST(LRSchedule, RefusesOptionsThatAreOutOfRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refused(LinearLR(0), {"[optim.linear_lr]", "total_iters of at least 1", "0"});
  expect_refused(LinearLR(5).start_factor(-0.1), {"start_factor in [0, 1]", "-0.1"});
  expect_refused(LinearLR(5).end_factor(1.5), {"end_factor in [0, 1]", "1.5"});
  expect_refused(LinearLR(5).end_factor(nan), {"end_factor", "nan"});
  expect_refused(CosineAnnealingLR(-1), {"[optim.cosine_annealing_lr]", "T_max", "-1"});
  expect_refused(CosineAnnealingLR(5).eta_min(-1), {"eta_min", "-1"});
  expect_refused(PolynomialLR(0), {"[optim.polynomial_lr]", "total_iters"});
  expect_refused(PolynomialLR(5).power(0), {"power", "0"});
  expect_refused(StepLR(0), {"[optim.step_lr]", "step_size"});
  expect_refused(StepLR(5).gamma(0), {"gamma", "0"});
  expect_refused(MultiStepLR({3, 3}), {"[optim.multi_step_lr]", "ascending", "[3, 3]"});
  expect_refused(MultiStepLR({0}), {"milestones above 0", "[0]"});
  expect_refused(MultiStepLR({3}).gamma(nan), {"gamma", "nan"});
  expect_refused(OneCycleLR(0), {"[optim.one_cycle_lr]", "total_steps", "0"});
  expect_refused(OneCycleLR(9).pct_start(1.1), {"pct_start in [0, 1]", "1.1"});
  expect_refused(OneCycleLR(9).pct_start(0.6).three_phase(true), {"in [0, 0.5]", "0.6"});
  expect_refused(OneCycleLR(9).div_factor(0), {"div_factor"});
  expect_refused(OneCycleLR(9).final_div_factor(nan), {"final_div_factor"});
  expect_refused(LambdaLR(nullptr), {"[optim.lambda_lr]", "a function"});
}

TEST(LRSchedule, RefusesSequencesThatDoNotFitTogether) {
  const LRSchedule warm_up = LinearLR(5);
  expect_refused(SequentialLR({}, {}), {"[optim.sequential_lr]", "0 schedules"});
  expect_refused(SequentialLR({warm_up, warm_up}, {}), {"2 schedules and 0 milestones"});
  expect_refused(SequentialLR({warm_up, warm_up, warm_up}, {4, 4}), {"ascending", "[4, 4]"});
  expect_refused(SequentialLR({OneCycleLR(9), warm_up}, {10}),
                 {"at least 10 steps before milestone 10", "one of 9"});
}

TEST(LRSchedule, HasNoRateBeforeTheFirstStepAndAfterTheEnd) {
  const LRSchedule cycle = OneCycleLR(9);
  EXPECT_EQ(cycle.total_steps(), 9);
  EXPECT_EQ(cycle.lr(0.1, 9), cycle.lr(0.1, 8));
  expect_error([&] { cycle.lr(0.1, 10); }, {"a step from 0 to 9", "10"});
  expect_error([&] { cycle.lr(0.1, -1); }, {"a step from 0 to 9", "-1"});
  const LRSchedule sequence = SequentialLR({LinearLR(3), OneCycleLR(9)}, {3});
  EXPECT_EQ(sequence.total_steps(), 12);
  expect_error([&] { sequence.lr(0.1, 13); }, {"a step from 0 to 12", "13"});
}

TEST(LRSchedule, KeepsItsLastRateOtherwise) {
  EXPECT_EQ(LRSchedule(LinearLR(5)).lr(0.5, 1000), 0.5);
  EXPECT_EQ(LRSchedule(CosineAnnealingLR(5).eta_min(0.25)).lr(0.5, 1000), 0.25);
  EXPECT_EQ(LRSchedule(PolynomialLR(5)).lr(0.5, 1000), 0.0);
  EXPECT_EQ(LRSchedule(LinearLR(5)).total_steps(), std::nullopt);
}

// A rate that rises where it should fall would train a slow group faster and faster.
TEST(LRSchedule, CosineRefusesBaseRatesBelowItsMinimum) {
  const LRSchedule cosine = CosineAnnealingLR(5).eta_min(0.01);
  EXPECT_EQ(cosine.lr(0.01, 3), 0.01);
  expect_error([&] { cosine.lr(0.001, 0); }, {"eta_min 0.01", "0.001"});
}

TEST(LRSchedule, OneCycleOfOneStepHasTheFinalRate) {
  EXPECT_DOUBLE_EQ(LRSchedule(OneCycleLR(1)).lr(0.5, 0), 0.5 / 25 / 1e4);
}

TEST(LRSchedule, TakesFunctionsAndClassesOfTheProgram) {
  const LRSchedule lambda =
      LambdaLR([](std::int64_t step) { return 1 / static_cast<double>(1 + step); });
  EXPECT_EQ(lambda.lr(0.5, 3), 0.125);
  struct Own {
    double lr(double base_lr, std::int64_t step) const { return step < 2 ? base_lr : 0; }
    std::optional<std::int64_t> total_steps() const { return 4; }
  };
  const LRSchedule own = SequentialLR({Own(), Own()}, {4});
  EXPECT_EQ(own.lr(0.5, 1), 0.5);
  EXPECT_EQ(own.lr(0.5, 3), 0);
  EXPECT_EQ(own.lr(0.5, 5), 0.5);
  EXPECT_EQ(own.total_steps(), 8);
}

}  // namespace
}  // namespace semitone::optim
