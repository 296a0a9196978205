#include "src/scaling/loss_scale_on_device.h"

#include "semitone/scaling/detail/loss_scale_state.h"
#include "semitone/scaling/loss_scaler.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

// A loss scale that tensors update, against the rule of the host.
namespace semitone::amp::loss_scale_on_device_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Presets, and rules that reach their limits within a few steps.
std::vector<LossScaleOptions> all_rules() {
  std::vector<LossScaleOptions> rules{
      LossScaleOptions(),
      LossScaleOptions::torch().growth_interval(3),
      LossScaleOptions::apex().growth_interval(2),
      LossScaleOptions::paddle().growth_interval(2).hysteresis(2),
      LossScaleOptions::deepspeed().growth_interval(2),
      LossScaleOptions::fixed(128).growth_delay(2),
      LossScaleOptions().growth_interval(0),
  };
  for (const auto count :
       {OverflowCount::run_then_restart, OverflowCount::run, OverflowCount::since_growth}) {
    for (const auto dtype : {c10::kFloat, c10::kDouble}) {
      const auto rule =
          LossScaleOptions().overflow_count(count).scale_dtype(dtype).growth_interval(2);
      rules.push_back(LossScaleOptions(rule).hysteresis(3).growth_delay(2));
      // Products that have to be rounded, between bounds that have to be rounded.
      rules.push_back(
          LossScaleOptions(rule).growth_factor(1.7).backoff_factor(0.3).min_scale(0.1).max_scale(
              1e6 + 0.1));
      // Up to infinity, or not beyond the largest finite scale. Down to 0.
      rules.push_back(
          LossScaleOptions(rule).growth_factor(1e30).growth_interval(1).max_scale(kInf));
      rules.push_back(LossScaleOptions(rule).growth_factor(1e300).growth_interval(1).max_scale(
          std::numeric_limits<double>::max()));
      rules.push_back(LossScaleOptions(rule).backoff_factor(1e-30).min_scale(0));
    }
  }
  return rules;
}

void expect_same(const LossScaleOnDevice& got, const detail::LossScaleState& want) {
  const detail::LossScaleState state = got.read();
  EXPECT_EQ(std::bit_cast<std::int64_t>(state.scale), std::bit_cast<std::int64_t>(want.scale))
      << state.scale << " instead of " << want.scale;
  EXPECT_EQ(state.growth_tracker, want.growth_tracker);
  EXPECT_EQ(state.overflows, want.overflows);
  EXPECT_EQ(got.scale().item<float>(), static_cast<float>(want.scale));
  EXPECT_EQ(got.inverse().item<float>(), static_cast<float>(1.0 / want.scale));
}

TEST(LossScaleOnDevice, IsTheRuleOfTheHost) {
  std::mt19937 random(7);
  const std::vector<LossScaleOptions> rules = all_rules();
  for (std::size_t number = 0; number < rules.size(); ++number) {
    for (const double overflows : {0.0, 0.1, 0.5, 0.9, 1.0}) {
      SCOPED_TRACE(c10::str("rule ", number, ", overflows with probability ", overflows));
      detail::LossScaleState want = detail::initial_loss_scale(rules[number]);
      LossScaleOnDevice got(rules[number], at::kCPU);
      got.send(want);
      expect_same(got, want);
      std::bernoulli_distribution overflow(overflows);
      for (int i = 0; i < 40 && !testing::Test::HasFailure(); ++i) {
        const bool found = overflow(random);
        want = detail::next_loss_scale(rules[number], want, found);
        const std::vector<std::int64_t> sizes(i % 2 == 0 ? 0 : 1, 1);
        got.update(torch::full(sizes, found ? 1.0F : 0.0F));
        expect_same(got, want);
      }
    }
  }
}

// Counters anywhere around their limits, as a program may have changed the rule.
TEST(LossScaleOnDevice, IsTheRuleOfTheHostFromAnyState) {
  for (const LossScaleOptions& rule : all_rules()) {
    LossScaleOnDevice got(rule, at::kCPU);
    for (const double scale : {0.0, 1e-42, 0.75, 65536.0, 3e38, kInf}) {
      for (std::int64_t tracker = -3; tracker < 5; tracker += 2) {
        for (std::int64_t overflows = 0; overflows < 5; ++overflows) {
          const detail::LossScaleState state{rule.rounded(scale), tracker, overflows};
          for (const float found_inf : {0.0F, 1.0F, std::numeric_limits<float>::quiet_NaN()}) {
            got.send(state);
            got.update(torch::full({1}, found_inf));
            expect_same(got, detail::next_loss_scale(rule, state, !(found_inf == 0)));
          }
        }
      }
    }
  }
}

// Captured work has their addresses.
TEST(LossScaleOnDevice, KeepsTheMemoryOfItsFactors) {
  LossScaleOnDevice scale(LossScaleOptions().growth_interval(1), at::kCPU);
  const at::Tensor factor = scale.scale();
  const at::Tensor inverse = scale.inverse();
  scale.send({.scale = 8});
  scale.update(torch::zeros({}));
  EXPECT_EQ(factor.item<float>(), 16);
  EXPECT_EQ(inverse.item<float>(), 1.0F / 16);
}

TEST(LossScaleOnDevice, RulesAreComparedWhole) {
  const LossScaleOptions rule;
  EXPECT_TRUE(same_rule(rule, LossScaleOptions().init_scale(8).max_consecutive_skips(3)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().growth_factor(3)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().backoff_factor(0.25)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().growth_interval(3)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().growth_delay(3)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().min_scale(1)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().max_scale(1)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().hysteresis(3)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().overflow_count(OverflowCount::since_growth)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().dynamic(false)));
  EXPECT_FALSE(same_rule(rule, LossScaleOptions().scale_dtype(c10::kDouble)));
}

}  // namespace
}  // namespace semitone::amp::loss_scale_on_device_test
