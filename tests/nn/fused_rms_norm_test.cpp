// FusedRMSNorm and fused_rms_norm against LibTorch's at::rms_norm.

#include "semitone/nn/fused_rms_norm.h"

#include "semitone/core/dtype.h"
#include "tests/nn/gradients.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::nn::fused_rms_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;
using test::gradients_of;
using test::in_fp64;
using Tensors = std::vector<at::Tensor>;

auto ours(std::vector<std::int64_t> shape, std::optional<double> eps = 1e-5) {
  return [shape, eps](const Tensors& of) { return fused_rms_norm(of[0], shape, of[1], eps); };
}

auto libtorchs(std::vector<std::int64_t> shape, std::optional<double> eps = 1e-5) {
  return [shape, eps](const Tensors& of) {
    return torch::rms_norm(of[0], shape, of[1].defined() ? std::optional(of[1]) : std::nullopt,
                           eps);
  };
}

class FusedRMSNormTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TEST_F(FusedRMSNormTest, IsLibTorchsWithItsGradients) {
  struct Shape {
    std::vector<std::int64_t> input;
    std::vector<std::int64_t> normalized;
  };
  const std::vector<Shape> shapes{{{40}, {40}},           {{3, 40}, {40}}, {{2, 5, 768}, {768}},
                                  {{2, 3, 4, 5}, {4, 5}}, {{0, 40}, {40}}, {{70, 33}, {33}}};
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    const auto wide = dtype == torch::kDouble ? dtype : torch::kFloat;
    for (const auto& [shape, normalized] : shapes) {
      const at::Tensor input = (torch::randn(shape) * 2 + 1).to(dtype);
      const at::Tensor grad = torch::randn(shape).to(dtype);
      for (const auto weights : {dtype, wide}) {
        const at::Tensor weight = (torch::randn(normalized) + 2).to(weights);
        for (const Tensors& inputs : {Tensors{input, weight}, Tensors{input, {}}}) {
          SCOPED_TRACE(c10::str(dtype_name(dtype), " ", shape, " weight ", dtype_name(weights),
                                inputs[1].defined()));
          const auto got = gradients_of(ours(normalized), inputs, grad);
          const auto want =
              gradients_of(libtorchs(normalized), in_fp64(inputs), grad.to(torch::kDouble));
          const double tolerance = test::rounded_sum_tolerance(dtype, input.numel());
          EXPECT_EQ(got.output.scalar_type(), dtype);
          EXPECT_TRUE(test::near(got.output, want.output, tolerance));
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            ASSERT_EQ(got.inputs[i].defined(), inputs[i].defined());
            if (!inputs[i].defined()) continue;
            EXPECT_EQ(got.inputs[i].scalar_type(), inputs[i].scalar_type());
            EXPECT_TRUE(test::near(got.inputs[i], want.inputs[i], tolerance)) << "argument " << i;
          }
        }
      }
    }
  }
}

TEST_F(FusedRMSNormTest, WithoutEpsItIsThatOfTheDtypeComputedIn) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    SCOPED_TRACE(dtype_name(dtype));
    // So small that eps decides.
    const at::Tensor input = (torch::randn({4, 16}) * 1e-4).to(dtype);
    const Tensors inputs{input, torch::randn({16}).to(dtype)};
    const at::Tensor got = ours({16}, std::nullopt)(inputs);
    EXPECT_TRUE(test::near(
        got, libtorchs({16}, std::nullopt)(inputs),
        2 * test::rounding_tolerance(dtype) +
            test::reduction_tolerance(dtype == torch::kDouble ? dtype : torch::kFloat, 16)));
    EXPECT_FALSE(test::near(got, ours({16}, 1e-6)(inputs), 0.1));
  }
}

TEST_F(FusedRMSNormTest, GradientsCanBeDifferentiated) {
  const Tensors values{torch::randn({4, 9}, torch::kDouble), torch::randn({9}, torch::kDouble)};
  const auto penalty = [&](const auto& function) {
    const Tensors leaves{values[0].clone().requires_grad_(), values[1].clone().requires_grad_()};
    const at::Tensor output = function(leaves);
    const auto first = torch::autograd::grad({output.pow(3).sum()}, leaves, {}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, leaves, {},
                                 true);
  };
  const auto got = penalty(ours({9}));
  const auto want = penalty(libtorchs({9}));
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(test::near(got[i], want[i], 1e-11));
}

TEST_F(FusedRMSNormTest, WrongArgumentsAreErrors) {
  const at::Tensor input = torch::randn({5, 33});
  const std::string component = "[nn.fused_rms_norm]";
  expect_error([&] { fused_rms_norm({}, {33}); }, {component, "an undefined tensor"});
  expect_error([&] { fused_rms_norm(input, {5}); }, {component, "(..., [5])", "[5, 33]"});
  expect_error([&] { fused_rms_norm(input, {}); }, {component, "1 dimension or more"});
  expect_error([&] { fused_rms_norm(input, {33}, torch::ones({3, 11})); },
               {component, "a weight of shape [33]", "[3, 11]"});
  expect_error([&] { fused_rms_norm(input, {33}, torch::ones({33}, torch::kInt)); },
               {component, "weight", "int32"});
}

TEST_F(FusedRMSNormTest, ModuleIsTheFunctionWithItsOptions) {
  FusedRMSNorm norm(FusedRMSNormOptions({12}).eps(0.1));
  expect_bitwise_equal(norm->weight, torch::ones({12}));
  const at::Tensor input = torch::randn({5, 12});
  expect_bitwise_equal(norm(input), fused_rms_norm(input, {12}, norm->weight, 0.1));
  EXPECT_EQ(c10::str(*norm), "semitone::nn::FusedRMSNorm([12], eps=0.1, elementwise_affine=true)");

  FusedRMSNorm plain(FusedRMSNormOptions({12}).elementwise_affine(false));
  EXPECT_TRUE(plain->parameters().empty());
  expect_bitwise_equal(plain(input), fused_rms_norm(input, {12}));
  EXPECT_EQ(c10::str(*plain),
            "semitone::nn::FusedRMSNorm([12], eps=None, elementwise_affine=false)");

  {
    const torch::NoGradGuard no_grad;
    norm->weight.uniform_();
  }
  std::stringstream stream;
  torch::save(norm, stream);
  FusedRMSNorm other(FusedRMSNormOptions({12}));
  torch::load(other, stream);
  expect_bitwise_equal(other->weight, norm->weight);
}

}  // namespace
}  // namespace semitone::nn::fused_rms_norm_test
