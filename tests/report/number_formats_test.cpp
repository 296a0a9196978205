#include "src/report/number_formats.h"

#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"

#include <c10/core/ScalarType.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

namespace semitone::report {
namespace {

ValueCounts one_value(int exponent) {
  ValueCounts values;
  values.first_exponent = exponent;
  values.counts = {1};
  return values;
}

TEST(NumberFormats, HaveTheLimitsOfTheirDtypes) {
  for (const c10::ScalarType dtype :
       {c10::kHalf, c10::kBFloat16, c10::kFloat8_e4m3fn, c10::kFloat8_e5m2}) {
    bool is_listed = false;
    for (const NumberFormat& format : kNumberFormats) {
      if (format.name != dtype_name(dtype)) continue;
      is_listed = true;
      const DtypeLimits limits = dtype_limits(dtype);
      EXPECT_EQ(format.max, limits.max);
      EXPECT_EQ(format.max_exponent, std::ilogb(limits.max));
      EXPECT_EQ(std::ldexp(1.0, format.min_normal), limits.min_normal);
      EXPECT_EQ(std::ldexp(1.0, format.min_subnormal), limits.min_subnormal);
    }
    EXPECT_TRUE(is_listed) << dtype;
  }
}

// The middle of each binade, rounded by LibTorch's own conversion.
TEST(NumberFormats, CountAsTheConversionRounds) {
  const NumberFormat& format = kNumberFormats[kFloat16];
  for (int exponent = -40; exponent <= 20; ++exponent) {
    const auto value = static_cast<float>(std::ldexp(1.25, exponent));
    const auto rounded = torch::tensor(value).to(torch::kHalf).item<float>();
    const FormatCounts counts = counts_in(format, one_value(exponent), 0);
    EXPECT_EQ(counts.zero == 1, rounded == 0) << exponent;
    EXPECT_EQ(counts.overflow == 1, std::isinf(rounded)) << exponent;
    EXPECT_EQ(counts.subnormal == 1, rounded != 0 && value < 0x1p-14F) << exponent;
    EXPECT_EQ(counts.total, 1);
  }
}

TEST(NumberFormats, ShiftByTheLossScale) {
  EXPECT_EQ(exponent_of_scale(65536), 16);
  EXPECT_EQ(exponent_of_scale(0.25), -2);
  EXPECT_EQ(exponent_of_scale(60000), 16);  // the nearest power of two
  EXPECT_EQ(exponent_of_scale(0), 0);
  EXPECT_EQ(exponent_of_scale(std::nan("")), 0);
  const NumberFormat& format = kNumberFormats[kFloat16];
  EXPECT_EQ(counts_in(format, one_value(-30), 0).zero, 1);
  EXPECT_EQ(counts_in(format, one_value(-30), 5).subnormal, 1);
  EXPECT_EQ(counts_in(format, one_value(-30), 16).zero_share(), 0);
  EXPECT_EQ(counts_in(format, one_value(-30), 46).overflow, 1);
}

TEST(NumberFormats, AnInfOverflowsInEachFormat) {
  ValueCounts values = one_value(0);
  values.infs = 3;
  for (const NumberFormat& format : kNumberFormats)
    EXPECT_EQ(counts_in(format, values, 0).overflow_share(), 0.75) << format.name;
}

TEST(NumberFormats, AddCountsOfDifferentRanges) {
  ValueCounts sum;
  for (const int exponent : {3, -5, 10, 3}) {
    ValueCounts values = one_value(exponent);
    values.numel = 2;
    values.zeros = 1;
    values.samples = 1;
    values.max_abs = std::ldexp(1.0, exponent);
    values.step = exponent;
    sum.add(values);
  }
  EXPECT_EQ(sum.first_exponent, -5);
  EXPECT_EQ(sum.last_exponent(), 10);
  EXPECT_EQ(sum.non_zero(), 4);
  EXPECT_EQ(sum.counts[8], 2);
  EXPECT_EQ(sum.numel, 8);
  EXPECT_EQ(sum.samples, 4);
  EXPECT_EQ(sum.max_abs, 1024);
  EXPECT_EQ(sum.step, 3);
}

TEST(NumberFormats, KnowTheNamesOfDtypes) {
  for (const char* const name : {"Half", "fp16", "float16", "half"})
    EXPECT_EQ(python_dtype(name), "float16");
  EXPECT_EQ(python_dtype("BFloat16"), "bfloat16");
  EXPECT_EQ(python_dtype("Float"), "float32");
  EXPECT_EQ(python_dtype("Float8_e4m3fn"), "float8_e4m3fn");
  EXPECT_EQ(python_dtype(""), "");
  EXPECT_EQ(python_dtype("ComplexFloat"), "ComplexFloat");
  EXPECT_EQ(sixteen_bit_format("float32"), nullptr);
  EXPECT_EQ(sixteen_bit_format("bfloat16"), &kNumberFormats[kBFloat16]);
}

}  // namespace
}  // namespace semitone::report
