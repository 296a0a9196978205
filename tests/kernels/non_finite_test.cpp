#include "src/kernels/non_finite.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace semitone::kernels::non_finite_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void expect_non_finite(const at::Tensor& tensor, bool wanted) {
  EXPECT_EQ(has_non_finite(tensor), wanted) << tensor.sizes() << " in " << tensor.scalar_type();
  EXPECT_EQ(ref::has_non_finite(tensor), wanted) << "the reference";
}

class NonFiniteTest : public testing::TestWithParam<at::ScalarType> {};

TEST_P(NonFiniteTest, OneValueAnywhereIsFound) {
  for (const std::int64_t size : {1, 3, 31, 64, 65, 257, 16 * 1024 + 5}) {
    for (const float value : {kInf, -kInf, kNan, -kNan}) {
      for (const std::int64_t place : {std::int64_t{0}, size / 2, size - 1}) {
        const at::Tensor numbers = torch::linspace(-3, 3, size);
        numbers[place] = value;
        const at::Tensor tensor = numbers.to(GetParam());
        // e4m3 has no inf: conversions saturate or give NaN.
        const float stored = tensor[place].to(torch::kFloat).item<float>();
        expect_non_finite(tensor, !std::isfinite(stored));
        if (std::isnan(value)) {
          EXPECT_TRUE(has_non_finite(tensor));
        }
      }
    }
  }
}

TEST_P(NonFiniteTest, LargestAndSmallestNumbersAreFinite) {
  for (const std::int64_t size : {1, 31, 257}) {
    // From the bits, since rounding to the largest number could overflow.
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(GetParam()));
    for (const int low : {0x7b, 0xfb, 0x00, 0x7e, 0x01}) {
      const at::Tensor bits = torch::full({size * bytes}, low, torch::kByte);
      const at::Tensor tensor = bits.view(GetParam());
      const bool is_finite = std::isfinite(tensor[0].to(torch::kDouble).item<double>());
      expect_non_finite(tensor, !is_finite);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, NonFiniteTest,
                         testing::Values(torch::kFloat, torch::kDouble, torch::kHalf,
                                         torch::kBFloat16, torch::kFloat8_e5m2,
                                         torch::kFloat8_e4m3fn, torch::kFloat8_e5m2fnuz,
                                         torch::kFloat8_e4m3fnuz));

TEST(NonFinite, AnyLayoutIsRead) {
  const at::Tensor image = torch::ones({2, 3, 4, 5});
  image[1][2][3][4] = kNan;
  expect_non_finite(image.contiguous(at::MemoryFormat::ChannelsLast), true);
  expect_non_finite(image.select(0, 1), true);
  expect_non_finite(image.select(0, 0), false);
  expect_non_finite(image.slice(3, 0, 4), false);
  expect_non_finite(image.slice(3, 3, 5), true);
  expect_non_finite(torch::full({1}, kInf).expand({7}), true);
  expect_non_finite(torch::empty({0}), false);
}

TEST(NonFinite, BothPartsOfComplexNumbersAreRead) {
  const at::Tensor number = torch::ones({3}, torch::kComplexFloat);
  expect_non_finite(number, false);
  at::real(number)[2] = kInf;
  expect_non_finite(number, true);
  expect_non_finite(number.conj(), true);
  const at::Tensor other = torch::ones({3}, torch::kComplexDouble);
  at::imag(other)[0] = kNan;
  expect_non_finite(other, true);
}

}  // namespace
}  // namespace semitone::kernels::non_finite_test
