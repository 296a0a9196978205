#include "src/report/histogram.h"

#include "semitone/amp.h"
#include "tests/support/errors.h"

#include <torch/types.h>

#include <gmock/gmock.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace semitone::report::histogram_test {
namespace {

using semitone::test::expect_error;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kMax = std::numeric_limits<double>::max();

TEST(Histogram, HasTheSumsOfTheFiniteValues) {
  const auto histogram = histogram_of(torch::tensor({1.0, -2.0, kNan, kInfinity, -kInfinity, 0.5}));
  EXPECT_EQ(histogram.num, 3);
  EXPECT_EQ(histogram.min, -2);
  EXPECT_EQ(histogram.max, 1);
  EXPECT_EQ(histogram.sum, -0.5);
  EXPECT_EQ(histogram.sum_squares, 5.25);
  EXPECT_EQ(histogram.non_finite, 3);
}

// The limits around 1 are 1.1^k * 1e-12.
TEST(Histogram, HasTensorFlowsBuckets) {
  const auto histogram = histogram_of(torch::tensor({0.0, 5e-13, 1e-12, 2e-12}, torch::kDouble));
  ASSERT_EQ(histogram.limits.size(), histogram.counts.size());
  EXPECT_EQ(histogram.limits[0], 1e-12);
  EXPECT_EQ(histogram.counts[0], 2);
  EXPECT_THAT(histogram.limits[1], DoubleEq(1.1e-12));
  EXPECT_EQ(histogram.counts[1], 1);
  EXPECT_EQ(histogram.counts.back(), 1);
  EXPECT_GT(histogram.limits.back(), 2e-12);
  EXPECT_LE(histogram.limits[histogram.limits.size() - 2], 2e-12);
}

TEST(Histogram, PutsEachValueBelowItsLimit) {
  const at::Tensor values = torch::randn({1000}, torch::kDouble) * 100;
  const auto histogram = histogram_of(values);
  double below = 0;
  for (std::size_t i = 0; i < histogram.limits.size(); ++i) {
    below += histogram.counts[i];
    EXPECT_EQ((values < histogram.limits[i]).sum().item<double>(), below);
  }
  EXPECT_EQ(below, 1000);
}

TEST(Histogram, HasTheLargestNumbers) {
  const auto histogram = histogram_of(torch::tensor({-kMax, kMax}, torch::kDouble));
  EXPECT_EQ(histogram.num, 2);
  EXPECT_EQ(histogram.counts.front(), 1);
  EXPECT_EQ(histogram.counts.back(), 1);
  EXPECT_EQ(histogram.limits.back(), kMax);
}

TEST(Histogram, AddsThePiecesOfALargeTensor) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 20) + 3;
  const auto histogram = histogram_of(torch::ones({kCount}, torch::kHalf));
  EXPECT_EQ(histogram.num, kCount);
  EXPECT_EQ(histogram.sum, kCount);
  EXPECT_THAT(histogram.counts, ElementsAre(kCount));
}

TEST(Histogram, TakesAnyRealTensor) {
  const at::Tensor values = torch::tensor({0.0, 1.0, 0.0, 1.0}).reshape({2, 2});
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kInt, torch::kByte, torch::kBool})
    EXPECT_EQ(histogram_of(values.to(dtype)).sum, 2) << dtype;
  EXPECT_EQ(histogram_of(values.t()).num, 4);
  EXPECT_EQ(histogram_of(values.clone().requires_grad_()).num, 4);
  EXPECT_EQ(histogram_of(values.to_sparse()).num, 2);  // the values that it has
}

TEST(Histogram, IsEmptyIfNoValueIsFinite) {
  const auto histogram = histogram_of(torch::tensor({kNan, kInfinity}));
  EXPECT_EQ(histogram.num, 0);
  EXPECT_THAT(histogram.counts, IsEmpty());
  EXPECT_EQ(histogram.non_finite, 2);
}

TEST(Histogram, DoesNotDependOnAutocast) {
  const amp::Autocast autocast(torch::kCPU, torch::kBFloat16);
  const auto histogram = histogram_of(torch::full({1000}, 0.1, torch::kDouble));
  EXPECT_NEAR(histogram.sum, 100, 1e-9);
}

TEST(Histogram, RefusesWhatHasNoRealValues) {
  expect_error([] { histogram_of(at::Tensor()); }, {"real numbers", "undefined"});
  expect_error([] { histogram_of(torch::empty({0})); }, {"no elements"});
  expect_error([] { histogram_of(torch::ones({1}, torch::kComplexFloat)); }, {"complex"});
}

}  // namespace
}  // namespace semitone::report::histogram_test
