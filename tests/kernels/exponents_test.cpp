#include "src/kernels/exponents.h"

#include "src/core/thread_count.h"
#include "tests/support/errors.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace semitone::kernels::exponents_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::int64_t count_at(const ExponentCounts& counts, int exponent) {
  return counts.counts.at(static_cast<std::size_t>(exponent - ExponentCounts::kFirst));
}

// One value after the other, with the functions of <cmath>.
ExponentCounts counted(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to_dense().to(at::kFloat).to(at::kDouble).reshape(-1);
  ExponentCounts counts;
  counts.numel = values.numel();
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const double value = std::abs(values[i].item<double>());
    if (std::isnan(value)) {
      ++counts.nans;
    } else if (std::isinf(value)) {
      ++counts.infs;
    } else if (value == 0) {
      ++counts.zeros;
    } else {
      ++counts.counts.at(static_cast<std::size_t>(std::ilogb(value) - ExponentCounts::kFirst));
      counts.max_abs = std::max(counts.max_abs, value);
    }
  }
  return counts;
}

void expect_counts(const at::Tensor& tensor, const ExponentCounts& want) {
  EXPECT_EQ(exponents_of(tensor), want) << tensor.sizes() << " in " << tensor.scalar_type();
  EXPECT_EQ(ref::exponents_of(tensor), want) << "the reference, " << tensor.scalar_type();
}

class ExponentsTest : public testing::TestWithParam<at::ScalarType> {};

TEST_P(ExponentsTest, EveryBitPatternIsCounted) {
  const std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(GetParam()));
  at::Tensor tensor = torch::arange(256, torch::kByte).view(GetParam());
  if (bytes == 2) {
    const at::Tensor all = torch::arange(1 << 16, torch::kInt).view({-1, 1});
    tensor = torch::cat({all.bitwise_and(255), all.div(256, "trunc")}, 1)
                 .to(torch::kByte)
                 .contiguous()
                 .view(GetParam());
  }
  expect_counts(tensor, counted(tensor));
}

INSTANTIATE_TEST_SUITE_P(Formats, ExponentsTest,
                         testing::Values(torch::kHalf, torch::kBFloat16, torch::kFloat8_e5m2,
                                         torch::kFloat8_e4m3fn));

TEST(Exponents, ValuesOfFp32AreCountedFromTheSmallestSubnormalToTheLargest) {
  const double smallest = std::ldexp(1, -149);
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  const auto values = torch::tensor({smallest, -3 * smallest, std::ldexp(1, -126), 1.0, -1.999, 2.0,
                                     -largest, 0.0, -0.0, kInf, -kInf, kNan},
                                    torch::kDouble);
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const ExponentCounts counts = exponents_of(values.to(dtype));
    EXPECT_EQ(counts, ref::exponents_of(values.to(dtype)));
    EXPECT_EQ(counts.numel, 12);
    EXPECT_EQ(counts.zeros, 2);
    EXPECT_EQ(counts.infs, 2);
    EXPECT_EQ(counts.nans, 1);
    EXPECT_EQ(counts.max_abs, largest);
    EXPECT_EQ(count_at(counts, -149), 1);
    EXPECT_EQ(count_at(counts, -148), 1);
    EXPECT_EQ(count_at(counts, -126), 1);
    EXPECT_EQ(count_at(counts, 0), 2);
    EXPECT_EQ(count_at(counts, 1), 1);
    EXPECT_EQ(count_at(counts, 127), 1);
  }
}

TEST(Exponents, Fp64BeyondFp32CountsAtTheEnds) {
  const auto values = torch::tensor({1e-320, 1e-100, 1e100, 1.7e308}, torch::kDouble);
  ExponentCounts want;
  want.numel = 4;
  want.max_abs = 1.7e308;
  want.counts.front() = 2;
  want.counts.back() = 2;
  expect_counts(values, want);
}

TEST(Exponents, RandomNumbersAreCountedWhateverTheThreads) {
  torch::manual_seed(1);
  const at::Tensor base = torch::randn({100'003}).mul(torch::randn({100'003}).mul(20).exp());
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    const at::Tensor values = base.to(dtype);
    const ExponentCounts want = counted(values);
    for (const int threads : {1, 3}) {
      const ThreadCount count(threads);
      expect_counts(values, want);
    }
  }
}

TEST(Exponents, AnyLayoutIsRead) {
  torch::manual_seed(2);
  const at::Tensor image = torch::randn({2, 3, 4, 5});
  expect_counts(image.contiguous(at::MemoryFormat::ChannelsLast), counted(image));
  expect_counts(image.slice(3, 1, 4), counted(image.slice(3, 1, 4).contiguous()));
  expect_counts(image.transpose(0, 3), counted(image));
  expect_counts(torch::full({1}, 3.0).expand({7}), counted(torch::full({7}, 3.0)));
  expect_counts(torch::_neg_view(image), counted(image));
  expect_counts(torch::eye(3).to_sparse(), counted(torch::eye(3)));
  expect_counts(torch::tensor(0.25), counted(torch::tensor(0.25)));
  expect_counts(torch::ones({2}, torch::requires_grad()), counted(torch::ones({2})));
  expect_counts(torch::empty({0}), ExponentCounts{});
}

TEST(Exponents, CountsOfTensorsAddUp) {
  torch::manual_seed(3);
  const at::Tensor a = torch::randn({50});
  const at::Tensor b = torch::tensor({0.0, kInf, kNan, 1e9}, torch::kFloat);
  ExponentCounts sum = exponents_of(a);
  sum += exponents_of(b);
  EXPECT_EQ(sum, exponents_of(torch::cat({a, b})));
}

TEST(Exponents, OtherDtypesAreAnError) {
  EXPECT_THROW(exponents_of(torch::ones({2}, torch::kLong)), Error);
  EXPECT_THROW(exponents_of(torch::ones({2}, torch::kComplexFloat)), Error);
  EXPECT_THROW(exponents_of(at::Tensor()), Error);
}

}  // namespace
}  // namespace semitone::kernels::exponents_test
