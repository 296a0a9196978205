// FusedLayerNorm and fused_layer_norm against LibTorch's.

#include "semitone/nn/fused_layer_norm.h"

#include "semitone/core/dtype.h"
#include "tests/nn/gradients.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::nn::fused_layer_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;
using test::gradients_of;
using test::in_fp64;
using Tensors = std::vector<at::Tensor>;

auto ours(std::vector<std::int64_t> shape, double eps = 1e-5) {
  return
      [shape, eps](const Tensors& of) { return fused_layer_norm(of[0], shape, of[1], of[2], eps); };
}

auto libtorchs(std::vector<std::int64_t> shape, double eps = 1e-5) {
  return [shape, eps](const Tensors& of) {
    return torch::layer_norm(of[0], shape, of[1], of[2], eps);
  };
}

class FusedLayerNormTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TEST_F(FusedLayerNormTest, IsLibTorchsWithItsGradients) {
  struct Shape {
    std::vector<std::int64_t> input;
    std::vector<std::int64_t> normalized;
  };
  const std::vector<Shape> shapes{{{40}, {40}},           {{3, 40}, {40}}, {{2, 5, 768}, {768}},
                                  {{2, 3, 4, 5}, {4, 5}}, {{0, 40}, {40}}, {{6, 0, 40}, {40}},
                                  {{70, 33}, {33}}};
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    const auto wide = dtype == torch::kDouble ? dtype : torch::kFloat;
    for (const auto& [shape, normalized] : shapes) {
      const at::Tensor input = (torch::randn(shape) * 2 + 1).to(dtype);
      const at::Tensor grad = torch::randn(shape).to(dtype);
      for (const auto weights : {dtype, wide}) {
        const at::Tensor weight = (torch::randn(normalized) + 2).to(weights);
        const at::Tensor bias = torch::randn(normalized).to(weights);
        for (const Tensors& inputs : {Tensors{input, weight, bias}, Tensors{input, weight, {}},
                                      Tensors{input, {}, bias}, Tensors{input, {}, {}}}) {
          SCOPED_TRACE(c10::str(dtype_name(dtype), " ", shape, " weights ", dtype_name(weights),
                                inputs[1].defined(), inputs[2].defined()));
          const auto got = gradients_of(ours(normalized), inputs, grad);
          const auto want =
              gradients_of(libtorchs(normalized), in_fp64(inputs), grad.to(torch::kDouble));
          const double tolerance = test::rounded_sum_tolerance(dtype, input.numel());
          EXPECT_EQ(got.output.scalar_type(), dtype);
          EXPECT_TRUE(got.output.is_contiguous());
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

TEST_F(FusedLayerNormTest, OnlyWhatIsAskedForHasAGradient) {
  for (int asked = 1; asked < 8; ++asked) {
    Tensors inputs{torch::randn({5, 33}), torch::randn({33}), torch::randn({33})};
    for (std::size_t i = 0; i < 3; ++i) inputs[i].requires_grad_((asked >> i & 1) != 0);
    const at::Tensor output = ours({33})(inputs);
    EXPECT_TRUE(output.requires_grad());
    output.sum().backward();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(inputs[i].grad().defined(), inputs[i].requires_grad());
    }
  }
}

TEST_F(FusedLayerNormTest, NothingIsRecordedWithoutGradients) {
  const Tensors inputs{torch::randn({5, 33}).requires_grad_(), torch::randn({33}), {}};
  const at::Tensor want = ours({33})(inputs).detach();
  {
    const torch::NoGradGuard no_grad;
    const at::Tensor output = ours({33})(inputs);
    EXPECT_FALSE(output.requires_grad());
    expect_bitwise_equal(output, want);
  }
  const c10::InferenceMode inference;
  const at::Tensor output = ours({33})(inputs);
  EXPECT_TRUE(output.is_inference());
  expect_bitwise_equal(output.clone(), want);
}

TEST_F(FusedLayerNormTest, AnyStridesWillDo) {
  const at::Tensor dense = torch::randn({6, 40});
  const at::Tensor weight = torch::randn({40});
  const at::Tensor grad = torch::randn({1, 40}).expand({6, 40});
  const auto want = gradients_of(ours({40}), {dense, weight, {}}, grad);
  for (const at::Tensor& leaf :
       {dense.t().contiguous().t(), dense.repeat({1, 2}).slice(1, 0, 40)}) {
    const at::Tensor input = leaf.detach().requires_grad_();
    const at::Tensor output = fused_layer_norm(input, {40}, weight);
    output.backward(grad);
    expect_bitwise_equal(output, want.output);
    expect_bitwise_equal(input.grad(), want.inputs[0]);
  }
}

TEST_F(FusedLayerNormTest, GradientsCanBeDifferentiated) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const Tensors inputs{torch::randn({4, 9}), torch::randn({9}), torch::randn({9})};
    const auto penalty = [&](const auto& function, const Tensors& values) {
      Tensors leaves;
      for (const at::Tensor& value : values) leaves.push_back(value.clone().requires_grad_());
      const at::Tensor output = function(leaves);
      const auto first = torch::autograd::grad({output.pow(3).sum()}, leaves, {}, true, true);
      return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()},
                                   {leaves[0], leaves[1]}, {}, true);
    };
    Tensors values;
    for (const at::Tensor& input : inputs) values.push_back(input.to(dtype));
    const auto got = penalty(ours({9}), values);
    const auto want = penalty(libtorchs({9}), in_fp64(values));
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), dtype);
      EXPECT_TRUE(test::near(got[i], want[i], 100 * test::reduction_tolerance(dtype, 36)));
    }
  }
}

TEST_F(FusedLayerNormTest, RegionsOfAutocastDoNotReachInside) {
  const auto cpu = c10::DeviceType::CPU;
  const Tensors inputs{torch::randn({5, 33}).to(torch::kBFloat16), torch::randn({33}),
                       torch::randn({33})};
  const at::Tensor grad = torch::randn({5, 33}).to(torch::kBFloat16);
  const auto want = gradients_of(ours({33}), inputs, grad);
  at::autocast::set_autocast_enabled(cpu, true);
  const auto got = gradients_of(ours({33}), inputs, grad);
  at::autocast::set_autocast_enabled(cpu, false);
  expect_bitwise_equal(got.output, want.output);
  for (std::size_t i = 0; i < 3; ++i) expect_bitwise_equal(got.inputs[i], want.inputs[i]);
}

TEST_F(FusedLayerNormTest, WrongArgumentsAreErrors) {
  const at::Tensor input = torch::randn({5, 33});
  const std::string component = "[nn.fused_layer_norm]";
  expect_error([&] { fused_layer_norm({}, {33}); }, {component, "an undefined tensor"});
  expect_error([&] { fused_layer_norm(torch::ones({5, 33}, torch::kInt), {33}); },
               {component, "float16, bfloat16, float32 or float64", "int32"});
  expect_error([&] { fused_layer_norm(input.to_sparse(), {33}); }, {component, "Sparse"});
  expect_error([&] { fused_layer_norm(input, {}); }, {component, "1 dimension or more", "none"});
  expect_error([&] { fused_layer_norm(input, {5}); }, {component, "(..., [5])", "[5, 33]"});
  expect_error([&] { fused_layer_norm(input, {2, 5, 33}); }, {component, "[2, 5, 33]"});
  expect_error([&] { fused_layer_norm(torch::randn({}), {1}); }, {component, "shape []"});
  expect_error([&] { fused_layer_norm(input, {33}, torch::ones({32})); },
               {component, "a weight of shape [33]", "[32]"});
  expect_error([&] { fused_layer_norm(input, {33}, {}, torch::ones({1, 33})); },
               {component, "a bias of shape [33]", "[1, 33]"});
  expect_error([&] { fused_layer_norm(input, {33}, torch::ones({33}, torch::kDouble)); },
               {component, "weight", "float32", "float64"});
  expect_error(
      [&] { fused_layer_norm(input, {33}, {}, torch::ones({33}, torch::device(torch::kMeta))); },
      {component, "bias", "cpu", "meta"});
}

template <typename From, typename To>
void expect_state_travels(From from, To to) {
  {
    const torch::NoGradGuard no_grad;
    from->weight.uniform_();
    from->bias.uniform_();
  }
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
  expect_bitwise_equal(to->weight, from->weight);
  expect_bitwise_equal(to->bias, from->bias);
}

TEST_F(FusedLayerNormTest, StateIsThatOfLibTorchsLayer) {
  const FusedLayerNormOptions options({3, 4});
  expect_state_travels(FusedLayerNorm(options), torch::nn::LayerNorm(options));
  expect_state_travels(torch::nn::LayerNorm(options), FusedLayerNorm(options));
}

TEST_F(FusedLayerNormTest, ModuleIsTheFunctionWithItsOptions) {
  FusedLayerNorm norm(FusedLayerNormOptions({3, 4}).eps(0.1));
  expect_bitwise_equal(norm->weight, torch::ones({3, 4}));
  expect_bitwise_equal(norm->bias, torch::zeros({3, 4}));
  const at::Tensor input = torch::randn({5, 3, 4});
  expect_bitwise_equal(norm(input), fused_layer_norm(input, {3, 4}, norm->weight, norm->bias, 0.1));
  EXPECT_EQ(c10::str(*norm),
            "semitone::nn::FusedLayerNorm([3, 4], eps=0.1, elementwise_affine=true)");

  FusedLayerNorm plain(FusedLayerNormOptions({3, 4}).elementwise_affine(false));
  EXPECT_TRUE(plain->parameters().empty());
  expect_bitwise_equal(plain(input), fused_layer_norm(input, {3, 4}));

  const auto copy = std::dynamic_pointer_cast<FusedLayerNormImpl>(norm->clone());
  norm->to(torch::kBFloat16);
  EXPECT_EQ(norm(input.to(torch::kBFloat16)).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(copy->weight.scalar_type(), torch::kFloat);
}

// The weight depends on the input: each argument's gradient is that of its own place alone.
TEST_F(FusedLayerNormTest, HasTheSameGradientsInARecordedBackwardPass) {
  const at::Tensor input = torch::randn({5, 40}).requires_grad_();
  const auto run = [&] {
    return fused_layer_norm(input, {40}, input.sin().sum(0), input.select(0, 1)).pow(2).sum();
  };
  const auto gradient = [&](const at::Tensor& result, bool create_graph) {
    return torch::autograd::grad({result}, {input}, {}, /*retain_graph=*/true, create_graph)[0]
        .detach();
  };
  const at::Tensor want =
      torch::layer_norm(input, {40}, input.sin().sum(0), input.select(0, 1)).pow(2).sum();
  const at::Tensor result = run();
  EXPECT_TRUE(test::near(gradient(result, true), gradient(want, false),
                         test::reduction_tolerance(torch::kFloat, 200)));
  EXPECT_TRUE(test::near(gradient(result, false), gradient(want, false),
                         test::reduction_tolerance(torch::kFloat, 200)));
}

}  // namespace
}  // namespace semitone::nn::fused_layer_norm_test
