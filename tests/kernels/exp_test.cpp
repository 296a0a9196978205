// The vectors' exponential function against the standard library's in fp64.

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/exp_test.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/exp-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// `size`: a multiple of 64.
void exp_of_negatives(const float* x, float* result, std::size_t size) {
  const hn::CappedTag<float, 64> d;
  for (std::size_t i = 0; i < size; i += hn::Lanes(d))
    hn::StoreU(exp_of_negative(d, hn::LoadU(d, x + i)), d, result + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels {

HWY_EXPORT(exp_of_negatives);

namespace {

constexpr float kSmallestNormal = 0x1p-126F;
constexpr std::size_t kMost = 64;  // lanes

std::vector<float> exp_of(std::vector<float> x) {
  const std::size_t size = x.size();
  x.resize((size + kMost - 1) / kMost * kMost);
  std::vector<float> result(x.size());
  HWY_DYNAMIC_DISPATCH(exp_of_negatives)(x.data(), result.data(), x.size());
  result.resize(size);
  return result;
}

// Units of the last place between a number and the exact one.
double units_off(float got, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(static_cast<double>(got) - exact) / std::ldexp(1, exponent - 24);
}

class VectorExp : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(VectorExp, IsWithinTwoUnitsOfTheLastPlace) {
  // Every 977th number from -2^-60 down to below the last one whose exponential is normal.
  std::vector<float> x;
  for (auto bits = std::bit_cast<std::uint32_t>(-0x1p-60F);
       bits <= std::bit_cast<std::uint32_t>(-88.0F); bits += 977) {
    x.push_back(std::bit_cast<float>(bits));
  }
  const std::vector<float> got = exp_of(x);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    if (exact < static_cast<double>(kSmallestNormal)) {
      ASSERT_LE(got[i], kSmallestNormal) << x[i];
    } else if (!(units_off(got[i], exact) <= worst)) {
      worst = units_off(got[i], exact);
      ASSERT_LE(worst, 2) << "exp(" << x[i] << ") = " << got[i] << ", not " << exact;
    }
  }
  EXPECT_GT(x.size(), 500'000U);
  RecordProperty("worst", std::to_string(worst));
}

TEST_P(VectorExp, OfZeroInfinityAndNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> got =
      exp_of({0, -0.0F, -kInfinity, -1e30F, -88, -0x1p-149F, std::nanf(""), -std::nanf("")});
  EXPECT_EQ(got[0], 1);
  EXPECT_EQ(got[1], 1);
  EXPECT_EQ(got[2], 0);
  EXPECT_EQ(got[3], 0);
  EXPECT_EQ(got[4], 0);
  EXPECT_EQ(got[5], 1);
  EXPECT_TRUE(std::isnan(got[6])) << got[6];
  EXPECT_TRUE(std::isnan(got[7])) << got[7];
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, VectorExp,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

}  // namespace
}  // namespace semitone::kernels

#endif
