// What is a finding of NonFiniteCheck, and what is not.

#include "semitone/report/nonfinite_check.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace semitone::nonfinite_rules_test {
namespace {

using report::NonFiniteCheck;
using report::NonFiniteFinding;
using testing::HasSubstr;
using testing::StartsWith;
using Origin = NonFiniteFinding::Origin;

// The text of the finding of a check; empty if there is none.
std::string text_of(const NonFiniteCheck& check) {
  const auto finding = check.finding();
  EXPECT_EQ(finding.has_value(), [&] {
    try {
      check.throw_if_found();
    } catch (const report::NonFiniteError&) {
      return true;
    }
    return false;
  }());
  return finding.has_value() ? finding->to_string() : std::string();
}

at::Tensor zeros() {
  return torch::zeros({3}, torch::requires_grad());
}

TEST(NonFiniteRules, WhatAGradientFormulaMasksIsNoFinding) {
  for (const bool create_graph : {false, true}) {
    const NonFiniteCheck check;
    const at::Tensor x = zeros();
    x.norm().backward({}, true, create_graph);
    EXPECT_EQ(text_of(check), "");
    const at::Tensor y = torch::ones({2, 4}, torch::requires_grad());
    y.std(1).sum().backward({}, true, create_graph);
    EXPECT_EQ(text_of(check), "");
    EXPECT_TRUE(torch::isfinite(x.grad()).all().item<bool>());
    EXPECT_TRUE(torch::isfinite(y.grad()).all().item<bool>());
  }
}

TEST(NonFiniteRules, WhatAGradientFormulaReturnsIsAFinding) {
  for (const bool create_graph : {false, true}) {
    const NonFiniteCheck check;
    zeros().sqrt().sum().backward({}, true, create_graph);
    EXPECT_THAT(text_of(check), StartsWith("operator 'div.Tensor' made 3 inf in result"));
    EXPECT_THAT(text_of(check), HasSubstr("of 'sqrt' (SqrtBackward0)"));
  }
}

TEST(NonFiniteRules, WhatAGradientFormulaMakesOfAnInfIsItsFirstOperatorsFault) {
  const NonFiniteCheck check;
  zeros().pow(0.5).sum().backward();
  EXPECT_THAT(text_of(check), StartsWith("operator 'pow.Tensor_Scalar' made 3 inf in result"));
}

TEST(NonFiniteRules, GradientsThatNoNodeGetsAreFindings) {
  const at::Tensor x = zeros();
  const NonFiniteCheck check;
  torch::autograd::grad({x.sqrt().sum()}, {x});
  EXPECT_THAT(text_of(check), StartsWith("operator 'div.Tensor' made 3 inf in result"));
  EXPECT_THAT(text_of(check), HasSubstr("of 'sqrt' (SqrtBackward0)"));
}

TEST(NonFiniteRules, AnArgumentMayBeTheOneThatIsChangedInPlace) {
  NonFiniteCheck check;
  at::Tensor x = torch::zeros({3});
  x.div_(x);
  EXPECT_THAT(text_of(check), HasSubstr("made 3 nan in"));
  EXPECT_THAT(text_of(check), HasSubstr("div"));
  check.next_step();
  x = torch::full({3}, 1e30);
  x.mul_(x);
  EXPECT_THAT(text_of(check), HasSubstr("made 3 inf in"));
}

TEST(NonFiniteRules, RunningStatisticsAreResultsOfABatchNorm) {
  const at::Tensor x = torch::tensor({-1e30F, 1e30F}).view({2, 1});
  torch::nn::BatchNorm1d norm(1);
  const NonFiniteCheck check(*norm);
  norm(x);
  EXPECT_THAT(text_of(check), StartsWith("operator 'native_batch_norm' made 1 inf in running_var"));
}

TEST(NonFiniteRules, NestedTensorsAreLeftAlone) {
  const at::Tensor nested = at::_nested_tensor_from_tensor_list(
      {torch::full({2}, std::nan("")), torch::ones({3})}, torch::kFloat);
  const NonFiniteCheck check;
  at::Tensor changed = nested.clone();
  changed.mul_(2);
  EXPECT_EQ(text_of(check), "");
}

}  // namespace
}  // namespace semitone::nonfinite_rules_test
