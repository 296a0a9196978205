#include "src/report/scaled_counts.h"

#include "tests/report/samples.h"

#include <torch/types.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

namespace semitone::report::scaled_counts_test {
namespace {

using test::counted;

nlohmann::json described(const at::Tensor& tensor, double scale) {
  return describe_counts("gradient", "w", tensor.scalar_type(), divided_counts(tensor, scale));
}

TEST(ScaledCounts, AreThoseOfTheQuotientsForAnyScale) {
  torch::manual_seed(6);
  const at::Tensor values = torch::randn({3000}) * torch::randn({3000}).mul(30).exp2();
  for (const double scale : {1.0, 65536.0, 0.25, 1000.0, 3.0}) {
    for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
      const at::Tensor scaled = values.to(dtype);
      EXPECT_EQ(counted(described(scaled, scale)), counted(scaled.to(torch::kFloat) / scale))
          << scale << " " << dtype;
    }
  }
}

TEST(ScaledCounts, AScaleThatIsNoNumberLeavesValuesAsTheyAre) {
  const at::Tensor values = torch::randn({10});
  for (const double scale : {0.0, -2.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(counted(described(values, scale)), counted(values)) << scale;
}

TEST(ScaledCounts, Fp64IsDividedInFp64) {
  const at::Tensor values = torch::tensor({3e40, -1e-60, 5.0}, torch::kDouble);
  EXPECT_EQ(described(values, 1000).at("max_abs"), 3e40 / 1000);
  EXPECT_EQ(described(values, 1000).at("infs"), 0);
  EXPECT_EQ(described(values, 1000).at("zeros"), 0);
}

TEST(ScaledCounts, WhatIsBelowFp32IsZero) {
  const at::Tensor values =
      torch::tensor({std::ldexp(1.0, -149), std::ldexp(1.0, -140), 0.0}, torch::kDouble)
          .to(torch::kFloat);
  const nlohmann::json sampled = described(values, 256);
  EXPECT_EQ(sampled.at("zeros"), 2);
  EXPECT_EQ(sampled.at("first_exponent"), -148);
  EXPECT_EQ(sampled.at("counts"), nlohmann::json({1}));
}

TEST(ScaledCounts, AreTrimmedAtBothEnds) {
  const nlohmann::json some = described(torch::tensor({0.25, 1.0, 1.5, 0.0}), 1);
  EXPECT_EQ(some.at("dtype"), "Float");
  EXPECT_EQ(some.at("first_exponent"), -2);
  EXPECT_EQ(some.at("counts"), nlohmann::json({1, 0, 2}));
  const nlohmann::json none = described(torch::zeros({2}), 1);
  EXPECT_EQ(none.at("first_exponent"), 0);
  EXPECT_EQ(none.at("counts"), nlohmann::json::array());
}

}  // namespace
}  // namespace semitone::report::scaled_counts_test
