#include "src/train/schedule.h"

#include "semitone/core/error.h"

#include <gtest/gtest.h>

namespace semitone::train {
namespace {

TEST(Schedule, ConstantIsThePeakThroughout) {
  for (const int step : {0, 1, 57, 99})
    EXPECT_EQ(learning_rate(Schedule::constant, 0.3, step, 100), 0.3);
}

TEST(Schedule, CosineRisesOverAQuarterAndFallsTowardsZero) {
  const auto rate = [](std::int64_t step) {
    return learning_rate(Schedule::cosine, 2.0, step, 100);
  };
  EXPECT_DOUBLE_EQ(rate(0), 0.08);
  EXPECT_DOUBLE_EQ(rate(24), 2.0);
  for (std::int64_t step = 1; step < 25; ++step) EXPECT_GT(rate(step), rate(step - 1)) << step;
  for (std::int64_t step = 25; step < 100; ++step) EXPECT_LT(rate(step), rate(step - 1)) << step;
  // The middle of what follows the rise, and its end, which still moves the weights.
  EXPECT_NEAR(rate(62), 1.0, 0.05);
  EXPECT_GT(rate(99), 0);
  EXPECT_LT(rate(99), 0.01);
}

TEST(Schedule, CosineWorksForAnyNumberOfSteps) {
  for (std::int64_t steps = 1; steps < 40; ++steps) {
    for (std::int64_t step = 0; step < steps; ++step) {
      const double rate = learning_rate(Schedule::cosine, 1.0, step, steps);
      EXPECT_TRUE(rate > 0 && rate <= 1) << rate << " at " << step << " of " << steps;
    }
  }
}

TEST(Schedule, HasNames) {
  for (const Schedule schedule : {Schedule::constant, Schedule::cosine})
    EXPECT_EQ(parse_schedule(name_of(schedule)), schedule);
  EXPECT_THROW(parse_schedule("linear"), Error);
}

}  // namespace
}  // namespace semitone::train
