#include "semitone/core/dtype.h"

#include "semitone/core/error.h"
#include "src/core/dtype_limits.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace semitone {
namespace {

class DtypeLimitsTest : public testing::TestWithParam<c10::ScalarType> {};

// The limits are checked against LibTorch's own rounding: each is representable, its neighbour is
// not.
TEST_P(DtypeLimitsTest, AgreeWithRounding) {
  const c10::ScalarType dtype = GetParam();
  const DtypeLimits limits = dtype_limits(dtype);
  const auto rounded = [&](double value) {
    return torch::tensor(value, torch::kDouble).to(dtype).to(torch::kDouble).item<double>();
  };
  for (const double value :
       {limits.max, limits.min_normal, limits.min_subnormal, 1 + limits.epsilon}) {
    EXPECT_EQ(rounded(value), value);
  }
  if (dtype != torch::kDouble) {
    EXPECT_NE(rounded(limits.min_subnormal * 0.49), limits.min_subnormal);
    EXPECT_EQ(rounded(limits.min_subnormal * 0.49), 0);
    EXPECT_NE(rounded(1 + limits.epsilon * 0.49), 1 + limits.epsilon);
    // Without infinities, LibTorch 2.15 saturates and 2.11 makes a NaN.
    const double above = rounded(limits.max * (1 + limits.epsilon));
    EXPECT_TRUE(!std::isfinite(above) || (dtype == torch::kFloat8_e4m3fn && above == limits.max))
        << above;
  }
  EXPECT_EQ(limits.epsilon, std::ldexp(1.0, -limits.mantissa_bits));
}

INSTANTIATE_TEST_SUITE_P(All, DtypeLimitsTest,
                         testing::Values(torch::kDouble, torch::kFloat, torch::kHalf,
                                         torch::kBFloat16, torch::kFloat8_e4m3fn,
                                         torch::kFloat8_e5m2),
                         [](const auto& tested) { return dtype_name(tested.param); });

TEST(Dtype, LimitsOfAnIntegerAreAnError) {
  EXPECT_THROW(dtype_limits(torch::kInt), Error);
}

TEST(Dtype, ParsesTheNamesPeopleUse) {
  EXPECT_EQ(parse_dtype("bf16"), torch::kBFloat16);
  EXPECT_EQ(parse_dtype("BFloat16"), torch::kBFloat16);
  EXPECT_EQ(parse_dtype("half"), torch::kHalf);
  EXPECT_EQ(parse_dtype("fp16"), torch::kHalf);
  EXPECT_EQ(parse_dtype("float32"), torch::kFloat);
  EXPECT_EQ(parse_dtype("double"), torch::kDouble);
}

TEST(Dtype, RefusesOtherNames) {
  try {
    parse_dtype("fp12");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[core.dtype] expected one of fp32, fp16, bf16, fp64, got 'fp12'");
  }
}

TEST(Dtype, NamesRoundTrip) {
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(dtype_name(torch::kLong), "int64");
}

}  // namespace
}  // namespace semitone
