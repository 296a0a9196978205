// fused_gelu and fused_bias_gelu against LibTorch's at::gelu.

#include "semitone/nn/fused_gelu.h"

#include "semitone/core/dtype.h"
#include "tests/nn/gradients.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace semitone::nn::fused_gelu_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;
using test::gradients_of;
using test::in_fp64;
using Tensors = std::vector<at::Tensor>;

auto ours(const std::string& form) {
  return [form](const Tensors& of) {
    return of.size() > 1 ? fused_bias_gelu(of[0], of[1], form) : fused_gelu(of[0], form);
  };
}

auto libtorchs(const std::string& form) {
  return [form](const Tensors& of) {
    return torch::gelu(of.size() > 1 ? of[0] + of[1] : of[0], form);
  };
}

class FusedGelu : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TEST_F(FusedGelu, IsLibTorchsWithItsGradients) {
  const std::vector<std::vector<std::int64_t>> shapes{
      {40}, {3, 40}, {2, 5, 768}, {0, 40}, {70, 33}};
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    const auto wide = dtype == torch::kDouble ? dtype : torch::kFloat;
    for (const auto& shape : shapes) {
      const at::Tensor input = (torch::randn(shape) * 2).to(dtype);
      const at::Tensor grad = torch::randn(shape).to(dtype);
      for (const std::string form : {"none", "tanh"}) {
        for (const Tensors& inputs :
             {Tensors{input}, Tensors{input, torch::randn({shape.back()}).to(dtype)},
              Tensors{input, torch::randn({shape.back()}).to(wide)}}) {
          SCOPED_TRACE(c10::str(dtype_name(dtype), " ", shape, " ", form, " ", inputs.size()));
          const auto got = gradients_of(ours(form), inputs, grad);
          const auto want = gradients_of(libtorchs(form), in_fp64(inputs), grad.to(torch::kDouble));
          const double tolerance =
              test::rounding_tolerance(dtype) + test::reduction_tolerance(wide, 70);
          EXPECT_EQ(got.output.scalar_type(), dtype);
          EXPECT_TRUE(test::near(got.output, want.output, tolerance));
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            EXPECT_EQ(got.inputs[i].scalar_type(), inputs[i].scalar_type());
            EXPECT_TRUE(test::near(got.inputs[i], want.inputs[i], tolerance)) << "argument " << i;
          }
        }
      }
    }
  }
}

TEST_F(FusedGelu, ScalarsAndChannelsLastKeepTheirShapeAndLayout) {
  EXPECT_EQ(fused_gelu(torch::ones({})).dim(), 0);
  const at::Tensor input =
      torch::randn({2, 5, 3, 7}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const at::Tensor output = fused_gelu(input);
  EXPECT_EQ(output.strides(), input.strides());
  output.sum().backward();
  EXPECT_TRUE(test::near(
      input.grad(), gradients_of(libtorchs("none"), {input}, torch::ones_like(input)).inputs[0],
      test::pointwise_tolerance(torch::kFloat)));
}

TEST_F(FusedGelu, OnlyWhatIsAskedForHasAGradient) {
  for (const bool of_input : {false, true}) {
    const at::Tensor input = torch::randn({5, 33}).requires_grad_(of_input);
    const at::Tensor bias = torch::randn({33}).requires_grad_(!of_input);
    fused_bias_gelu(input, bias).sum().backward();
    EXPECT_EQ(input.grad().defined(), of_input);
    EXPECT_EQ(bias.grad().defined(), !of_input);
  }
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(fused_gelu(torch::randn({3}).requires_grad_()).requires_grad());
}

TEST_F(FusedGelu, GradientsCanBeDifferentiated) {
  for (const std::string form : {"none", "tanh"}) {
    const Tensors values{torch::randn({4, 9}, torch::kDouble), torch::randn({9}, torch::kDouble)};
    const auto penalty = [&](const auto& function) {
      const Tensors leaves{values[0].clone().requires_grad_(), values[1].clone().requires_grad_()};
      const at::Tensor output = function(leaves);
      const auto first = torch::autograd::grad({output.pow(3).sum()}, leaves, {}, true, true);
      return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, leaves, {},
                                   true);
    };
    const auto got = penalty(ours(form));
    const auto want = penalty(libtorchs(form));
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(test::near(got[i], want[i], 1e-11));
  }
}

TEST_F(FusedGelu, WrongArgumentsAreErrors) {
  const at::Tensor input = torch::randn({5, 33});
  expect_error([&] { fused_gelu({}); }, {"[nn.fused_gelu]", "an undefined tensor"});
  expect_error([&] { fused_gelu(torch::ones({3}, torch::kInt)); }, {"[nn.fused_gelu]", "int32"});
  expect_error([&] { fused_gelu(input, "erf"); }, {"[nn.fused_gelu]", "'none' or 'tanh'", "'erf'"});
  const std::string component = "[nn.fused_bias_gelu]";
  expect_error([&] { fused_bias_gelu(input, {}); }, {component, "a bias", "fused_gelu"});
  expect_error([&] { fused_bias_gelu(input, torch::ones({5})); }, {component, "[33]", "[5]"});
  expect_error([&] { fused_bias_gelu(input, torch::ones({33}, torch::kDouble)); },
               {component, "bias", "float64"});
  expect_error([&] { fused_bias_gelu(torch::ones({}), torch::ones({1})); },
               {component, "a scalar"});
}

}  // namespace
}  // namespace semitone::nn::fused_gelu_test
