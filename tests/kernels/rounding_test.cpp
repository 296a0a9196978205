#include "src/kernels/rounding.h"

#include "tests/support/conformance.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>

namespace semitone::kernels::rounding_test {
namespace {

using nlohmann::json;

// A 16-bit format with its conversions.
struct Fp16 {
  static constexpr const char* kName = "fp16";
  static constexpr std::uint32_t kInfinity = 0x7C00;
  static std::uint16_t round(std::uint32_t bits) { return fp16_from_fp32(bits); }
  static std::uint32_t widen(std::uint16_t code) { return fp32_from_fp16(code); }
};
struct Bf16 {
  static constexpr const char* kName = "bf16";
  static constexpr std::uint32_t kInfinity = 0x7F80;
  static std::uint16_t round(std::uint32_t bits) { return bf16_from_fp32(bits); }
  static std::uint32_t widen(std::uint16_t code) { return fp32_from_bf16(code); }
};

bool is_nan(std::uint32_t fp32) {
  return (fp32 & 0x7FFFFFFF) > 0x7F800000;
}

template <typename Format>
bool is_nan_code(std::uint32_t code) {
  return (code & 0x7FFF) > Format::kInfinity;
}

// fmix32 of the author's MurmurHash3.cpp.
static_assert(hash_bits(0) == 0);
static_assert(hash_bits(1) == 0x514E28B7);

template <typename Format>
class Rounding : public testing::Test {};

struct Names {
  template <typename Format>
  static std::string GetName(int) {
    return Format::kName;
  }
};
using Formats = testing::Types<Fp16, Bf16>;
TYPED_TEST_SUITE(Rounding, Formats, Names);

TYPED_TEST(Rounding, RoundsEveryConformanceValueAsThePeersDo) {
  const json data = test::conformance("rounding.json");
  const json& columns = data.at("columns");
  const auto column = [&](const std::string& name) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (columns[i] == name) return i;
    }
    throw std::runtime_error("rounding.json has no column " + name);
  };
  const std::size_t from = column("fp32");
  const std::size_t to = column(TypeParam::kName);
  ASSERT_FALSE(data.at("rows").empty());
  for (const json& row : data.at("rows")) {
    const auto bits = row.at(from).template get<std::uint32_t>();
    const auto want = row.at(to).template get<std::uint32_t>();
    const std::uint16_t got = TypeParam::round(bits);
    if (is_nan(bits)) {
      EXPECT_TRUE(is_nan_code<TypeParam>(got)) << "fp32 " << bits << " gives " << got;
      EXPECT_TRUE(is_nan_code<TypeParam>(want)) << "fp32 " << bits;
    } else {
      EXPECT_EQ(got, want) << "fp32 " << bits;
    }
  }
}

TYPED_TEST(Rounding, EveryCodeSurvivesTheWayToFp32AndBack) {
  for (std::uint32_t code = 0; code <= 0xFFFF; ++code) {
    const std::uint32_t wide = TypeParam::widen(static_cast<std::uint16_t>(code));
    if (is_nan_code<TypeParam>(code)) {
      ASSERT_TRUE(is_nan(wide)) << code;
      ASSERT_TRUE(is_nan_code<TypeParam>(TypeParam::round(wide))) << code;
      ASSERT_EQ(TypeParam::round(wide) & 0x8000U, code & 0x8000U) << "sign of NaN " << code;
    } else {
      ASSERT_EQ(TypeParam::round(wide), code);
    }
  }
}

// Between two neighbours: the halfway value goes to the even one, the values just below and above
// it to the nearer one. The neighbour of the largest finite value is infinity, at the distance that
// the next power of two would have.
TYPED_TEST(Rounding, HalfwayGoesToEvenAndItsNeighboursToTheNearer) {
  const auto value_of = [](std::uint32_t code) {
    return static_cast<double>(
        std::bit_cast<float>(TypeParam::widen(static_cast<std::uint16_t>(code))));
  };
  for (std::uint32_t code = 0; code < TypeParam::kInfinity; ++code) {
    const double below = value_of(code);
    const double above =
        code + 1 < TypeParam::kInfinity ? value_of(code + 1) : below + (below - value_of(code - 1));
    const double mean = (below + above) / 2;
    const auto halfway = static_cast<float>(mean);  // fp32 has more bits below than either format
    ASSERT_EQ(static_cast<double>(halfway), mean) << code;
    const auto half = std::bit_cast<std::uint32_t>(halfway);
    const std::uint32_t even = code % 2 == 0 ? code : code + 1;
    for (const std::uint32_t sign : {0U, 0x8000U}) {
      ASSERT_EQ(TypeParam::round((sign << 16) | half), sign | even) << code;
      ASSERT_EQ(TypeParam::round((sign << 16) | (half - 1)), sign | code) << code;
      ASSERT_EQ(TypeParam::round((sign << 16) | (half + 1)), sign | (code + 1)) << code;
    }
  }
}

TYPED_TEST(Rounding, InfinityStaysAndTheLargestFp32Overflows) {
  EXPECT_EQ(TypeParam::round(0x7F800000), TypeParam::kInfinity);
  EXPECT_EQ(TypeParam::round(0xFF800000), TypeParam::kInfinity | 0x8000U);
  EXPECT_EQ(TypeParam::round(0x7F7FFFFF), TypeParam::kInfinity);
  EXPECT_EQ(TypeParam::round(0x80000000), 0x8000U);
}

TEST(Fp16Rounding, Overflows65520AndNothingBelow) {
  EXPECT_EQ(fp16_from_fp32(std::bit_cast<std::uint32_t>(65520.0F)), 0x7C00);
  EXPECT_EQ(fp16_from_fp32(std::bit_cast<std::uint32_t>(65519.996F)), 0x7BFF);
}

TEST(Fp16Rounding, KeepsSubnormalsDownToHalfOfTheSmallest) {
  EXPECT_EQ(fp16_from_fp32(std::bit_cast<std::uint32_t>(0x1p-24F)), 1);
  EXPECT_EQ(fp16_from_fp32(std::bit_cast<std::uint32_t>(0x1p-25F)), 0);
  EXPECT_EQ(fp16_from_fp32(std::bit_cast<std::uint32_t>(0x1.000002p-25F)), 1);
  EXPECT_EQ(fp16_from_fp32(1), 0) << "the smallest fp32";
}

// ---- stochastic ---------------------------------------------------------------------------------

// Of all 2^16 random numbers, the number that rounds up equals the fraction.
TEST(StochasticRounding, GoesUpAsOftenAsTheNumberIsCloseToIt) {
  for (const std::uint32_t low : {0U, 1U, 0x1234U, 0x8000U, 0xFFFFU}) {
    for (const std::uint32_t high :
         {0x0000U, 0x3F80U, 0xBF81U, 0x7F7FU}) {  // 0, 1, -1.0078, the largest
      std::uint32_t up = 0;
      for (std::uint32_t random = 0; random < 0x10000; ++random) {
        const std::uint32_t code =
            bf16_from_fp32_stochastic((high << 16) | low, static_cast<std::uint16_t>(random));
        ASSERT_TRUE(code == high || code == high + 1) << std::hex << high << low;
        up += code - high;
      }
      EXPECT_EQ(up, low) << std::hex << high;
    }
  }
}

TEST(StochasticRounding, KeepsInfinitiesAndNans) {
  for (const std::uint16_t random :
       {std::uint16_t{0}, std::uint16_t{0x7FFF}, std::uint16_t{0xFFFF}}) {
    EXPECT_EQ(bf16_from_fp32_stochastic(0x7F800000, random), 0x7F80);
    EXPECT_EQ(bf16_from_fp32_stochastic(0xFF800000, random), 0xFF80);
    for (const std::uint32_t nan : {0x7F800001U, 0x7FFFFFFFU, 0xFF80FFFFU, 0xFFFFFFFFU}) {
      const std::uint16_t code = bf16_from_fp32_stochastic(nan, random);
      EXPECT_TRUE(is_nan_code<Bf16>(code)) << std::hex << nan;
      EXPECT_EQ(code >> 15, nan >> 31);
    }
  }
}

}  // namespace
}  // namespace semitone::kernels::rounding_test
