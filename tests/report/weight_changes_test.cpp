#include "src/report/weight_changes.h"

#include "tests/support/errors.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace semitone::report::weight_changes_test {
namespace {

template <typename Kept>
bool is_lost(float before, float after) {
  const Kept kept(before);
  return static_cast<float>(Kept(static_cast<float>(kept) + (after - before))) ==
         static_cast<float>(kept);
}

// One element after the other.
WeightChange compared(const at::Tensor& before, const at::Tensor& after) {
  WeightChange change;
  change.numel = before.numel();
  double updates = 0;
  double weights = 0;
  for (std::int64_t i = 0; i < before.numel(); ++i) {
    const float old = before.const_data_ptr<float>()[i];
    const float now = after.const_data_ptr<float>()[i];
    const auto update = static_cast<double>(now - old);
    updates += update * update;
    weights += static_cast<double>(old) * static_cast<double>(old);
    if (now == old) continue;
    ++change.changed;
    change.lost_in_half += is_lost<at::Half>(old, now) ? 1 : 0;
    change.lost_in_bfloat16 += is_lost<at::BFloat16>(old, now) ? 1 : 0;
  }
  change.ratio = std::sqrt(updates / weights);
  return change;
}

TEST(WeightChanges, AreThoseOfEachElement) {
  torch::manual_seed(4);
  for (const std::int64_t size : {1, 7, 1000, 300'000}) {
    const at::Tensor before = torch::randn({size});
    // Updates around half a unit in the last place of fp16 and bf16.
    const at::Tensor after = before + before * torch::randn({size}).mul(3).sub(7).exp2();
    after.slice(0, 0, size / 5).copy_(before.slice(0, 0, size / 5));
    const WeightChange got = change_of(before, after);
    const WeightChange want = compared(before, after);
    EXPECT_EQ(got.numel, want.numel);
    EXPECT_EQ(got.changed, want.changed);
    EXPECT_EQ(got.lost_in_half, want.lost_in_half);
    EXPECT_EQ(got.lost_in_bfloat16, want.lost_in_bfloat16);
    EXPECT_NEAR(got.ratio, want.ratio, 1e-12 * want.ratio);
    if (size < 1000) continue;
    EXPECT_GT(got.lost_in_half, 0);
    EXPECT_GT(got.lost_in_bfloat16, got.lost_in_half);
    EXPECT_LT(got.lost_in_bfloat16, got.changed);
  }
}

TEST(WeightChanges, ANaNThatStaysIsNoChange) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const WeightChange change =
      change_of(torch::tensor({nan, nan, 1.0F, 2.0F}), torch::tensor({nan, 1.0F, nan, 2.0F}));
  EXPECT_EQ(change.changed, 2);
  EXPECT_EQ(change.lost_in_half, 0);
  EXPECT_TRUE(std::isnan(change.ratio));
}

TEST(WeightChanges, OfNothingAreNone) {
  const WeightChange same = change_of(torch::zeros({2, 3}), torch::zeros({2, 3}));
  EXPECT_EQ(same.numel, 6);
  EXPECT_EQ(same.changed, 0);
  EXPECT_EQ(same.ratio, 0);
  EXPECT_EQ(change_of(torch::empty({0}), torch::empty({0})).numel, 0);
  EXPECT_TRUE(std::isinf(change_of(torch::zeros({2}), torch::ones({2})).ratio));
}

TEST(WeightChanges, OfAnotherShapeAreAnError) {
  semitone::test::expect_error([] { change_of(torch::ones({2, 3}), torch::ones({7})); },
                               {"report.recorder", "[2, 3]", "[7]"});
}

}  // namespace
}  // namespace semitone::report::weight_changes_test
