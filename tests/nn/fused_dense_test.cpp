#include "semitone/nn/fused_dense.h"

#include "tests/nn/gradients.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::nn::fused_dense_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

template <typename From, typename To>
void expect_state_travels(From from, To to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
  const auto want = from->named_parameters();
  const auto got = to->named_parameters();
  ASSERT_EQ(got.keys(), want.keys());
  for (const auto& parameter : want) expect_bitwise_equal(got[parameter.key()], parameter.value());
}

// The same weights in LibTorch's layers, in fp64.
torch::nn::Linear linear_of(const at::Tensor& weight, const at::Tensor& bias) {
  torch::nn::Linear result(
      torch::nn::LinearOptions(weight.size(1), weight.size(0)).bias(bias.defined()));
  result->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  result->weight.copy_(weight);
  if (bias.defined()) result->bias.copy_(bias);
  return result;
}

template <typename Ours>
void expect_same(Ours ours, torch::nn::Sequential theirs, const at::Tensor& values,
                 double tolerance) {
  const at::Tensor input = values.clone().requires_grad_();
  const at::Tensor exact = values.to(torch::kDouble).requires_grad_();
  const at::Tensor got = ours(input);
  const at::Tensor want = theirs->forward(exact);
  EXPECT_TRUE(test::near(got, want, tolerance));
  const at::Tensor grad = torch::randn(want.sizes());
  got.backward(grad);
  want.backward(grad.to(torch::kDouble));
  EXPECT_TRUE(test::near(input.grad(), exact.grad(), tolerance));
  const auto got_parameters = ours->parameters();
  const auto want_parameters = theirs->parameters();
  ASSERT_EQ(got_parameters.size(), want_parameters.size());
  for (std::size_t i = 0; i < got_parameters.size(); ++i)
    EXPECT_TRUE(test::near(got_parameters[i].grad(), want_parameters[i].grad(), tolerance)) << i;
}

class FusedDenseTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
  const double tolerance_ = 2 * test::reduction_tolerance(torch::kFloat, 64);
};

TEST_F(FusedDenseTest, IsLinear) {
  for (const bool bias : {true, false}) {
    FusedDense dense(FusedDenseOptions(40, 30).bias(bias));
    for (const at::Tensor& input : {torch::randn({5, 40}), torch::randn({2, 3, 40})}) {
      dense->zero_grad();
      expect_same(dense, torch::nn::Sequential(linear_of(dense->weight, dense->bias)), input,
                  tolerance_);
    }
  }
}

TEST_F(FusedDenseTest, StateIsThatOfLibTorchsLayer) {
  expect_state_travels(FusedDense(40, 30), torch::nn::Linear(40, 30));
  expect_state_travels(torch::nn::Linear(40, 30), FusedDense(40, 30));
  torch::manual_seed(3);
  const FusedDense ours(40, 30);
  torch::manual_seed(3);
  const torch::nn::Linear theirs(40, 30);
  expect_bitwise_equal(ours->weight, theirs->weight);
  expect_bitwise_equal(ours->bias, theirs->bias);
}

TEST_F(FusedDenseTest, DenseGeluDenseIsTwoLinearsAroundAGelu) {
  for (const bool bias : {true, false}) {
    for (const std::string form : {"none", "tanh"}) {
      FusedDenseGeluDense dense(
          FusedDenseGeluDenseOptions(40, 64, 20).bias(bias).approximate(form));
      for (const at::Tensor& input : {torch::randn({5, 40}), torch::randn({2, 3, 40})}) {
        dense->zero_grad();
        expect_same(
            dense,
            torch::nn::Sequential(linear_of(dense->weight1, dense->bias1),
                                  torch::nn::GELU(torch::nn::GELUOptions().approximate(form)),
                                  linear_of(dense->weight2, dense->bias2)),
            input, tolerance_);
      }
    }
  }
  EXPECT_EQ(FusedDenseGeluDense(4, 6, 2)->named_parameters().keys(),
            (std::vector<std::string>{"weight1", "bias1", "weight2", "bias2"}));
}

TEST_F(FusedDenseTest, DenseGeluDenseRunsInBf16) {
  FusedDenseGeluDense dense(40, 64, 20);
  const at::Tensor input = torch::randn({5, 40}).to(torch::kBFloat16);
  dense->to(torch::kBFloat16);
  const at::Tensor got = dense(input);
  EXPECT_EQ(got.scalar_type(), torch::kBFloat16);
  // In fp32, from the same numbers.
  dense->to(torch::kFloat);
  const at::Tensor want = dense(input.to(torch::kFloat));
  // The first product, GELU and the second product are rounded.
  EXPECT_TRUE(test::near(got, want, test::rounding_tolerance(torch::kBFloat16, 3)));
}

TEST_F(FusedDenseTest, MlpIsLinearsEachWithItsActivation) {
  for (const bool bias : {true, false}) {
    for (const std::string activation : {"none", "relu", "sigmoid", "gelu"}) {
      SCOPED_TRACE(activation);
      MLP mlp(MLPOptions({40, 64, 32, 8}).bias(bias).activation(activation));
      torch::nn::Sequential theirs;
      for (std::size_t i = 0; i < mlp->weights.size(); ++i) {
        theirs->push_back(linear_of(mlp->weights[i], mlp->biases[i]));
        if (activation == "relu") theirs->push_back(torch::nn::ReLU());
        if (activation == "sigmoid") theirs->push_back(torch::nn::Sigmoid());
        if (activation == "gelu") theirs->push_back(torch::nn::GELU());
      }
      expect_same(mlp, theirs, torch::randn({5, 40}), tolerance_);
    }
  }
}

TEST_F(FusedDenseTest, MlpBeginsAsApexs) {
  const MLP mlp(MLPOptions({400, 600, 8}));
  EXPECT_EQ(mlp->named_parameters().keys(),
            (std::vector<std::string>{"weight_0", "bias_0", "weight_1", "bias_1"}));
  EXPECT_NEAR(mlp->weights[0].std().item<double>(), std::sqrt(2.0 / 1000), 1e-3);
  EXPECT_NEAR(mlp->biases[0].std().item<double>(), std::sqrt(1.0 / 600), 4e-3);
  expect_state_travels(mlp, MLP(MLPOptions({400, 600, 8})));
  const auto copy = std::dynamic_pointer_cast<MLPImpl>(mlp->clone());
  ASSERT_EQ(copy->weights.size(), 2U);
  expect_bitwise_equal(copy->weights[1], mlp->weights[1]);
}

TEST_F(FusedDenseTest, WrongOptionsAreErrors) {
  expect_error([] { MLP(MLPOptions({40})); }, {"[nn.mlp]", "2 positive sizes or more", "[40]"});
  expect_error([] { MLP(MLPOptions({40, 0})); }, {"[nn.mlp]", "[40, 0]"});
  expect_error([] { MLP(MLPOptions({40, 8}).activation("tanh")); },
               {"[nn.mlp]", "'none', 'relu', 'sigmoid' or 'gelu'", "'tanh'"});
  expect_error(
      [] {
        FusedDenseGeluDense(FusedDenseGeluDenseOptions(4, 4, 4).approximate("erf"))(
            torch::randn({4}));
      },
      {"[nn.fused_bias_gelu]", "'erf'"});
}

TEST_F(FusedDenseTest, ModulesPrintThemselves) {
  EXPECT_EQ(c10::str(*FusedDense(4, 3)),
            "semitone::nn::FusedDense(in_features=4, out_features=3, bias=true)");
  EXPECT_EQ(c10::str(*FusedDenseGeluDense(4, 6, 3)),
            "semitone::nn::FusedDenseGeluDense(in_features=4, intermediate_features=6, "
            "out_features=3, bias=true, approximate=none)");
  EXPECT_EQ(c10::str(*MLP(MLPOptions({4, 3}))),
            "semitone::nn::MLP(sizes=[4, 3], bias=true, activation=relu)");
}

}  // namespace
}  // namespace semitone::nn::fused_dense_test
