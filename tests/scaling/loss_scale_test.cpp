#include "semitone/scaling/loss_scale.h"

#include "semitone/core/error.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace semitone::amp::loss_scale_test {
namespace {

using test::message_of;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kFp32Max = double{std::numeric_limits<float>::max()};

detail::LossScaleState after(const LossScaleOptions& options, detail::LossScaleState state,
                             const std::vector<int>& found_inf) {
  for (const int found : found_inf) state = detail::next_loss_scale(options, state, found != 0);
  return state;
}

detail::LossScaleState from_start(const LossScaleOptions& options,
                                  const std::vector<int>& found_inf) {
  return after(options, detail::initial_loss_scale(options), found_inf);
}

TEST(LossScaleOptions, DefaultsAreTorchsWithAFloor) {
  const LossScaleOptions options;
  EXPECT_EQ(options.init_scale(), 65536);
  EXPECT_EQ(options.growth_factor(), 2);
  EXPECT_EQ(options.backoff_factor(), 0.5);
  EXPECT_EQ(options.growth_interval(), 2000);
  EXPECT_EQ(options.min_scale(), 0x1p-24);
  EXPECT_EQ(options.max_scale(), kFp32Max);
  EXPECT_EQ(options.hysteresis(), 1);
  EXPECT_TRUE(options.dynamic());
  EXPECT_EQ(options.max_consecutive_skips(), 0);
  EXPECT_EQ(options.scale_dtype(), c10::kFloat);
}

TEST(LossScaleOptions, PresetsAreWhatEachSystemDoesByDefault) {
  const auto torch = LossScaleOptions::torch();
  EXPECT_EQ(torch.min_scale(), 0);
  EXPECT_EQ(torch.max_scale(), kFp32Max);
  EXPECT_EQ(torch.growth_interval(), 2000);
  EXPECT_EQ(torch.scale_dtype(), c10::kFloat);

  const auto apex = LossScaleOptions::apex();
  EXPECT_EQ(apex.init_scale(), 65536);
  EXPECT_EQ(apex.min_scale(), 0);
  EXPECT_EQ(apex.max_scale(), 0x1p24);
  EXPECT_EQ(apex.growth_interval(), 2000);
  EXPECT_EQ(apex.scale_dtype(), c10::kDouble);

  const auto paddle = LossScaleOptions::paddle();
  EXPECT_EQ(paddle.init_scale(), 65536);
  EXPECT_EQ(paddle.growth_interval(), 2000);
  EXPECT_EQ(paddle.hysteresis(), 1);
  EXPECT_EQ(paddle.overflow_count(), OverflowCount::run_then_restart);
  EXPECT_EQ(paddle.min_scale(), 1);

  const auto deepspeed = LossScaleOptions::deepspeed();
  EXPECT_EQ(deepspeed.init_scale(), 65536);
  EXPECT_EQ(deepspeed.growth_interval(), 1000);
  EXPECT_EQ(deepspeed.growth_delay(), 1);
  EXPECT_EQ(deepspeed.hysteresis(), 2);
  EXPECT_EQ(deepspeed.overflow_count(), OverflowCount::since_growth);
  EXPECT_EQ(deepspeed.min_scale(), 1);
  EXPECT_EQ(deepspeed.max_scale(), kInf);
  EXPECT_EQ(deepspeed.scale_dtype(), c10::kDouble);

  const auto fixed = LossScaleOptions::fixed(128);
  EXPECT_EQ(fixed.init_scale(), 128);
  EXPECT_FALSE(fixed.dynamic());
}

TEST(LossScaleOptions, SettersRefuseWhatMakesNoSenseAndChangeNothing) {
  LossScaleOptions options;
  for (const double bad : {0.0, -1.0, kInf, kNan}) {
    EXPECT_THROW(options.init_scale(bad), Error) << bad;
  }
  for (const double bad : {0.999, 0.0, -2.0, kInf, kNan}) {
    EXPECT_THROW(options.growth_factor(bad), Error) << bad;
  }
  for (const double bad : {0.0, 1.0, 1.5, -0.5, kNan}) {
    EXPECT_THROW(options.backoff_factor(bad), Error) << bad;
  }
  for (const double bad : {-1e-9, kInf, kNan}) {
    EXPECT_THROW(options.min_scale(bad), Error) << bad;
  }
  for (const double bad : {0.0, -1.0, -kInf, kNan}) {
    EXPECT_THROW(options.max_scale(bad), Error) << bad;
  }
  EXPECT_THROW(options.growth_interval(-1), Error);
  EXPECT_THROW(options.growth_delay(-1), Error);
  EXPECT_THROW(options.hysteresis(0), Error);
  EXPECT_THROW(options.max_consecutive_skips(-1), Error);
  EXPECT_THROW(options.scale_dtype(c10::kHalf), Error);

  EXPECT_EQ(options.init_scale(), 65536);
  EXPECT_EQ(options.growth_factor(), 2);
  EXPECT_EQ(options.backoff_factor(), 0.5);
  EXPECT_EQ(options.min_scale(), 0x1p-24);
  EXPECT_EQ(options.max_scale(), kFp32Max);
  EXPECT_EQ(options.growth_interval(), 2000);
  EXPECT_EQ(options.hysteresis(), 1);
  EXPECT_EQ(options.scale_dtype(), c10::kFloat);
}

TEST(LossScaleOptions, MessagesShowSmallValuesToo) {
  const auto message = message_of<Error>([] { LossScaleOptions().min_scale(-1e-30); });
  EXPECT_EQ(message, "[amp.loss_scale] expected a finite min_scale of at least 0, got -1e-30");
  EXPECT_THAT(message_of<Error>([] { LossScaleOptions().growth_interval(-3); }),
              HasSubstr("got -3"));
}

TEST(InitialLossScale, IsClampedToTheCeilingNotToTheFloor) {
  EXPECT_EQ(detail::initial_loss_scale(LossScaleOptions().max_scale(1024)).scale, 1024);
  EXPECT_EQ(detail::initial_loss_scale(LossScaleOptions().init_scale(0.5).min_scale(1)).scale, 0.5);
}

TEST(InitialLossScale, IsRoundedToItsDtype) {
  const auto options = LossScaleOptions().init_scale(0.1);
  EXPECT_EQ(detail::initial_loss_scale(options).scale, static_cast<double>(0.1F));
  EXPECT_EQ(detail::initial_loss_scale(LossScaleOptions(options).scale_dtype(c10::kDouble)).scale,
            0.1);
}

TEST(InitialLossScale, RefusesOptionsThatContradictEachOther) {
  EXPECT_THAT(message_of<Error>(
                  [] { detail::initial_loss_scale(LossScaleOptions().min_scale(8).max_scale(4)); }),
              HasSubstr("min_scale of at most max_scale, got 8 and 4"));
  // 1e39 is inf in fp32, 1e-60 is 0.
  EXPECT_THROW(detail::initial_loss_scale(LossScaleOptions().init_scale(1e39).max_scale(kInf)),
               Error);
  EXPECT_THROW(detail::initial_loss_scale(LossScaleOptions().init_scale(1e-60)), Error);
  EXPECT_NO_THROW(detail::initial_loss_scale(
      LossScaleOptions().init_scale(1e39).max_scale(kInf).scale_dtype(c10::kDouble)));
}

// The table of torch's test_grad_scaling_update_scale.
TEST(NextLossScale, GrowsAfterTheIntervalAndBacksOffAtOnce) {
  const auto options =
      LossScaleOptions().init_scale(4).growth_factor(2).backoff_factor(0.25).growth_interval(2);
  EXPECT_EQ(from_start(options, {0}), (detail::LossScaleState{4, 1, 0}));
  EXPECT_EQ(from_start(options, {0, 0}), (detail::LossScaleState{8, 0, 0}));
  EXPECT_EQ(from_start(options, {0, 0, 1}).scale, 2);
}

TEST(NextLossScale, AnOverflowRestartsTheIntervalOfGrowth) {
  const auto options = LossScaleOptions().init_scale(8).growth_interval(3);
  EXPECT_EQ(from_start(options, {0, 0, 1}).growth_tracker, 0);
  EXPECT_EQ(from_start(options, {0, 0, 1, 0, 0}).scale, 4);
  EXPECT_EQ(from_start(options, {0, 0, 1, 0, 0, 0}).scale, 8);
}

TEST(NextLossScale, ADelayCountsFromTheStartAndFromEachOverflowNotFromGrowth) {
  const auto options = LossScaleOptions().init_scale(8).growth_interval(2).growth_delay(1);
  EXPECT_EQ(from_start(options, {0, 0}).scale, 8);
  EXPECT_EQ(from_start(options, {0, 0, 0}).scale, 16);
  EXPECT_EQ(from_start(options, {0, 0, 0, 0, 0}).scale, 32);
  EXPECT_EQ(from_start(options, {1, 0, 0}).scale, 4);
  EXPECT_EQ(from_start(options, {1, 0, 0, 0}).scale, 8);
}

TEST(NextLossScale, AnIntervalOfZeroNeverGrows) {
  for (const int delay : {0, 1}) {
    const auto options = LossScaleOptions().init_scale(2).growth_interval(0).growth_delay(delay);
    EXPECT_EQ(from_start(options, std::vector<int>(100, 0)).scale, 2);
  }
}

TEST(NextLossScale, FloorAndCeilingHold) {
  const auto options =
      LossScaleOptions().init_scale(8).min_scale(3).max_scale(20).growth_interval(1);
  EXPECT_EQ(from_start(options, {1}).scale, 4);
  EXPECT_EQ(from_start(options, {1, 1}).scale, 3);
  EXPECT_EQ(from_start(options, {1, 1, 1}).scale, 3);
  EXPECT_EQ(from_start(options, {0, 0}).scale, 20);
  EXPECT_EQ(from_start(options, {0, 0, 0}).scale, 20);
}

TEST(NextLossScale, BoundsAreRoundedToTheDtypeOfTheScaleToo) {
  const auto options =
      LossScaleOptions().init_scale(0.15).min_scale(0.1).max_scale(0.2).growth_interval(1);
  EXPECT_EQ(from_start(options, {1}).scale, static_cast<double>(0.1F));
  EXPECT_EQ(from_start(options, {0}).scale, static_cast<double>(0.2F));
}

TEST(NextLossScale, TheDefaultFloorKeepsTheInverseFinite) {
  const LossScaleOptions options;
  const auto state = from_start(options, std::vector<int>(200, 1));
  EXPECT_EQ(state.scale, 0x1p-24);
  EXPECT_TRUE(std::isfinite(static_cast<float>(1.0 / state.scale)));
}

TEST(NextLossScale, GrowthPastFp32IsRefused) {
  const auto options = LossScaleOptions().init_scale(0x1p127).growth_interval(1);
  EXPECT_EQ(from_start(options, {0}), (detail::LossScaleState{0x1p127, 0, 0}));
  // 1.5 * 2^127 still fits.
  EXPECT_EQ(from_start(LossScaleOptions(options).growth_factor(1.5), {0}).scale, 1.5 * 0x1p127);
}

TEST(NextLossScale, AnInfiniteCeilingLetsItGrowToInfinity) {
  const auto options = LossScaleOptions().init_scale(0x1p127).growth_interval(1).max_scale(kInf);
  EXPECT_EQ(from_start(options, {0}).scale, kInf);
}

TEST(NextLossScale, AFactorOfOneNeverGrows) {
  const auto options = LossScaleOptions().init_scale(4).growth_factor(1).growth_interval(1);
  EXPECT_EQ(from_start(options, {0, 0, 0}).scale, 4);
}

struct HysteresisCase {
  OverflowCount count;
  std::vector<int> found_inf;
  double scale;  // from 64, halved at each backoff
  std::int64_t overflows;
};

TEST(NextLossScale, HysteresisCountsOverflowsInEachOfItsWays) {
  using enum OverflowCount;
  const std::vector<HysteresisCase> cases{
      // Below the hysteresis nothing changes.
      {run_then_restart, {1}, 64, 1},
      {run, {1}, 64, 1},
      {since_growth, {1}, 64, 1},
      // A run: every second one backs off, or all from the second on.
      {run_then_restart, {1, 1, 1, 1, 1}, 16, 1},
      {run, {1, 1, 1, 1, 1}, 4, 5},
      {since_growth, {1, 1, 1, 1, 1}, 4, 5},
      // A good step between: only since_growth remembers.
      {run_then_restart, {1, 0, 1}, 64, 1},
      {run, {1, 0, 1}, 64, 1},
      {since_growth, {1, 0, 1}, 32, 2},
      {run, {1, 1, 0, 1}, 32, 1},
      {since_growth, {1, 1, 0, 1}, 16, 3},
      // Growth, after three good steps, refills it.
      {since_growth, {1, 0, 0, 0, 1}, 128, 1},
  };
  for (const HysteresisCase& one : cases) {
    const auto options =
        LossScaleOptions().init_scale(64).growth_interval(3).hysteresis(2).overflow_count(
            one.count);
    const auto state = from_start(options, one.found_inf);
    EXPECT_EQ(state.scale, one.scale) << testing::PrintToString(one.found_inf);
    EXPECT_EQ(state.overflows, one.overflows) << testing::PrintToString(one.found_inf);
  }
}

TEST(NextLossScale, AnOverflowBelowTheAllowanceStillRestartsGrowth) {
  const auto options = LossScaleOptions().hysteresis(3).growth_interval(10);
  EXPECT_EQ(from_start(options, {0, 0, 1}).growth_tracker, 0);
}

TEST(NextLossScale, CountersRestoredBeyondTheirLimitsFireAsInThePeers) {
  const auto options = LossScaleOptions::paddle().init_scale(16).growth_interval(2).hysteresis(2);
  // Paddle and torch test for equality.
  EXPECT_EQ(after(options, {16, 5, 0}, {0}), (detail::LossScaleState{16, 6, 0}));
  EXPECT_EQ(after(options, {16, 0, 5}, {1}), (detail::LossScaleState{16, 0, 6}));
  // Apex and DeepSpeed do not.
  EXPECT_EQ(after(LossScaleOptions(options).overflow_count(OverflowCount::run), {16, 0, 5}, {1}),
            (detail::LossScaleState{8, 0, 6}));
}

TEST(NextLossScale, AFixedScaleNeverMoves) {
  const auto options = LossScaleOptions::fixed(128);
  EXPECT_EQ(from_start(options, {0, 1, 1, 0, 0}), (detail::LossScaleState{128, 2, 0}));
}

}  // namespace
}  // namespace semitone::amp::loss_scale_test
