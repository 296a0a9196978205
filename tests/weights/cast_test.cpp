#include "src/weights/cast.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace semitone::weights {
namespace {

template <typename T>
bool loses(T number, c10::ScalarType from, c10::ScalarType to) {
  return lost_in_cast(torch::tensor({number}, torch::kDouble).to(from), to).has_value();
}

TEST(LostInCast, FiniteNumbersBecomeInfinite) {
  EXPECT_TRUE(loses(1e300, torch::kDouble, torch::kFloat));
  EXPECT_TRUE(loses(70000.0, torch::kInt, torch::kHalf));
  EXPECT_TRUE(loses(70000.0, torch::kFloat, torch::kFloat8_e4m3fn));
  EXPECT_TRUE(loses(-465.0, torch::kFloat, torch::kFloat8_e4m3fn));
  EXPECT_FALSE(loses(464.0, torch::kFloat, torch::kFloat8_e4m3fn));
  EXPECT_FALSE(loses(70000.0, torch::kInt, torch::kBFloat16));
  EXPECT_FALSE(loses(1.0 / 3, torch::kDouble, torch::kHalf));
  EXPECT_FALSE(loses(std::numeric_limits<double>::infinity(), torch::kFloat, torch::kHalf));
  EXPECT_FALSE(loses(std::nan(""), torch::kFloat, torch::kHalf));
}

TEST(LostInCast, IntegersMustStayTheSame) {
  EXPECT_TRUE(loses(300.0, torch::kLong, torch::kByte));
  EXPECT_TRUE(loses(-1.0, torch::kLong, torch::kUInt64));
  EXPECT_TRUE(loses(2.0, torch::kLong, torch::kBool));
  EXPECT_FALSE(loses(200.0, torch::kLong, torch::kByte));
  EXPECT_FALSE(loses(1.0, torch::kLong, torch::kBool));
  EXPECT_TRUE(loses(0.5, torch::kFloat, torch::kLong));
  EXPECT_TRUE(loses(1e19, torch::kDouble, torch::kLong));
  EXPECT_TRUE(loses(std::nan(""), torch::kFloat, torch::kInt));
  EXPECT_FALSE(loses(3.0, torch::kHalf, torch::kLong));
  // fp64 does not tell these two.
  const auto large = torch::tensor({(std::int64_t{1} << 53) + 1}, torch::kLong);
  EXPECT_FALSE(lost_in_cast(large, torch::kUInt64).has_value());
  EXPECT_TRUE(lost_in_cast(large, torch::kInt).has_value());
}

TEST(LostInCast, ImaginaryPartsAreNotDropped) {
  const auto complex = torch::complex(torch::tensor({1.0}), torch::tensor({2.0}));
  EXPECT_EQ(lost_in_cast(complex, torch::kFloat), "imaginary parts");
  EXPECT_FALSE(lost_in_cast(torch::real(complex), torch::kComplexFloat).has_value());
  const auto real = torch::complex(torch::tensor({1.0}), torch::tensor({0.0}));
  EXPECT_FALSE(lost_in_cast(real, torch::kFloat).has_value());
  const auto large =
      torch::complex(torch::tensor({1.0}, torch::kDouble), torch::tensor({1e300}, torch::kDouble));
  EXPECT_EQ(lost_in_cast(large, torch::kComplexFloat), "larger ones");
}

}  // namespace
}  // namespace semitone::weights
