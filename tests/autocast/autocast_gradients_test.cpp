// Gradients through regions, of operators, composite modules and recurrent networks.

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "tests/autocast/autocast_fixture.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace semitone::amp::autocast_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

class AutocastGradients : public testing::TestWithParam<c10::ScalarType> {
 protected:
  void SetUp() override { torch::manual_seed(4); }
  CastPolicy semitone() const { return CastPolicy::semitone({kCpu, GetParam()}); }
};

TEST_P(AutocastGradients, HaveTheDtypeOfTheirLeafAndOfTheirInput) {
  for (const auto input_dtype : {kFp32, GetParam()}) {
    for (const char* preset : {"semitone", "apex", "paddle", "torch"}) {
      SCOPED_TRACE(std::string(preset) + ", " + dtype_name(input_dtype));
      torch::nn::Linear linear(4, 4);
      torch::nn::Conv2d conv(torch::nn::Conv2dOptions(1, 2, 3));
      const auto x = torch::rand({4, 4}).to(input_dtype).requires_grad_();
      const auto picture = torch::rand({1, 1, 5, 5}).to(input_dtype).requires_grad_();
      at::Tensor loss;
      {
        const Autocast region(CastPolicy::by_name(preset, {kCpu, GetParam()}));
        const auto y = at::softmax(at::relu(linear(x)), 1);
        loss = at::mse_loss(y, torch::zeros_like(y)) + conv(picture).sum();
      }
      loss.backward();
      EXPECT_EQ(x.grad().scalar_type(), input_dtype);
      EXPECT_EQ(picture.grad().scalar_type(), input_dtype);
      for (const auto& parameter : linear->parameters())
        EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
      for (const auto& parameter : conv->parameters())
        EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
    }
  }
}

TEST_P(AutocastGradients, AreTheSameWhetherBackwardRunsInTheRegionOrAfter) {
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  const auto x = torch::rand({5, 8});
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool inside : {false, true}) {
    net->zero_grad();
    {
      std::optional<Autocast> region(semitone());
      const auto loss = at::cross_entropy_loss(net->forward(x), torch::tensor({0, 1, 2, 0, 1}));
      if (!inside) region.reset();
      loss.backward();
    }
    auto& found = gradients.emplace_back();
    for (const auto& parameter : net->parameters()) found.push_back(parameter.grad().clone());
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    expect_bitwise_equal(gradients[0][i], gradients[1][i]);
}

// Their derivatives have products too.
TEST_P(AutocastGradients, OfFp32OperatorsAreInFp32WhereverBackwardRuns) {
  torch::nn::Linear kept(8, 8);
  const auto x = torch::randn({64, 8}) + 10;  // far from the origin
  const auto policy = semitone().keep_fp32_params("*").bind(kept);
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> losses{
      [](const at::Tensor& w) {
        return at::linalg_inv(w.slice(0, 0, 8) + 8 * torch::eye(8)).sum();
      },
      [&](const at::Tensor& w) { return at::cdist(w, x + 1).mean(); },
      [&](const at::Tensor& w) {
        const DisableCasts exact;
        return at::mm(w, x.t()).square().mean();
      },
      [&](const at::Tensor& w) { return kept(w).square().mean(); }};
  for (std::size_t i = 0; i < losses.size(); ++i) {
    SCOPED_TRACE(i);
    std::vector<at::Tensor> gradients;
    for (const bool inside : {false, true}) {
      const auto w = x.clone().requires_grad_();
      kept->zero_grad();
      std::optional<Autocast> region(policy);
      const auto loss = losses[i](w);
      if (!inside) region.reset();
      loss.backward();
      gradients.push_back(w.grad());
      if (kept->weight.grad().defined()) gradients.push_back(kept->weight.grad().clone());
    }
    ASSERT_EQ(gradients.size(), i == 3 ? 4U : 2U);
    for (std::size_t k = 0; k < gradients.size() / 2; ++k)
      expect_bitwise_equal(gradients[k], gradients[k + gradients.size() / 2]);
  }
}

TEST_P(AutocastGradients, OfAGradientWork) {
  const auto w = torch::rand({4, 4}).requires_grad_();
  const auto x = torch::rand({4, 4}).requires_grad_();
  at::Tensor penalty;
  {
    const Autocast region(semitone());
    const auto y = at::mm(x, w).sum();
    const auto grad = torch::autograd::grad({y}, {x}, {}, true, true)[0];
    EXPECT_EQ(grad.scalar_type(), kFp32);
    penalty = grad.pow(2).sum();
  }
  penalty.backward();
  // d/dw of sum((rowsum w)^2) * 4 rows = 8 * rowsum.
  const auto want = (8 * w.detach().sum(1)).unsqueeze(1).expand({4, 4});
  expect_close(w.grad(), want, 4 * test::pointwise_tolerance(GetParam()));
}

// fp32 values that the dtype represents, so casting does not change them.
at::Tensor held(const at::Tensor& values, c10::ScalarType dtype) {
  return values.to(dtype).to(kFp32);
}
void hold(torch::nn::Module& module, c10::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) parameter.copy_(held(parameter, dtype));
}

// The tolerance for this number of successive roundings, each by up to half a unit in any
// direction. Their sum has a standard deviation of 0.58 sqrt(count) half units, and one of some
// hundred elements is 3.5 times that away. Sums are in fp32 and add nothing.
double roundings(c10::ScalarType dtype, int count) {
  return test::rounding_tolerance(dtype) * 2 * std::sqrt(count);
}

// Compares a module on x in fp32 and in a region, with the gradients of both; the 16-bit dtype
// represents weights and x exactly. The two differ only by the roundings of intermediate results.
template <typename Run>
void expect_only_roundings(torch::nn::Module& module, at::Tensor x, const CastPolicy& policy,
                           const Run& run, double results_apart, double gradients_apart,
                           std::optional<c10::ScalarType> result_dtype = std::nullopt) {
  hold(module, policy.dtype());
  x = held(x, policy.dtype()).requires_grad_();
  std::vector<at::Tensor> leaves{x};
  std::vector<std::string> names{"x"};
  for (const auto& item : module.named_parameters()) {
    leaves.push_back(item.value());
    names.push_back(item.key());
  }
  // Each element of a result counts differently: sums of equal gradients can cancel.
  const auto gradients = [&](const std::vector<at::Tensor>& results) {
    std::vector<at::Tensor> grad_outputs;
    for (const at::Tensor& result : results) {
      grad_outputs.push_back(
          held(torch::linspace(0.5, 1.5, result.numel()).view(result.sizes()), policy.dtype())
              .to(result.scalar_type()));
    }
    return torch::autograd::grad(results, leaves, grad_outputs);
  };
  const std::vector<at::Tensor> want = run(x);
  const std::vector<at::Tensor> want_gradients = gradients(want);
  std::vector<at::Tensor> got;
  {
    const Autocast region(policy);
    got = run(x);
  }
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE("result " + std::to_string(i));
    if (result_dtype.has_value()) {
      EXPECT_EQ(got[i].scalar_type(), *result_dtype);
    }
    expect_close(got[i].to(kFp32), want[i], results_apart);
  }
  const std::vector<at::Tensor> got_gradients = gradients(got);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    SCOPED_TRACE("gradient of " + names[i]);
    expect_close(got_gradients[i], want_gradients[i], gradients_apart);
  }
}

TEST_P(AutocastGradients, FlowThroughAttention) {
  torch::manual_seed(4);
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2));
  // Projection, scaling, scores, probabilities, their product, projection.
  expect_only_roundings(
      *attention, torch::randn({5, 3, 8}), semitone(),
      [&](const at::Tensor& x) { return std::vector<at::Tensor>{std::get<0>(attention(x, x, x))}; },
      roundings(GetParam(), 6), roundings(GetParam(), 12), GetParam());
}

TEST_P(AutocastGradients, FlowThroughATransformerLayer) {
  torch::manual_seed(4);
  // Smooth: where ReLU's argument is near 0, a rounding switches a gradient on or off.
  torch::nn::TransformerEncoderLayer layer(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dropout(0).dim_feedforward(16).activation(
          torch::kGELU));
  // Attention, two linear layers, two sums and two layer norms.
  expect_only_roundings(
      *layer, torch::randn({5, 3, 8}), semitone(),
      [&](const at::Tensor& x) { return std::vector<at::Tensor>{layer(x)}; },
      roundings(GetParam(), 12), roundings(GetParam(), 24));
}

TEST_P(AutocastGradients, FlowThroughEinsumAndItsRelatives) {
  const auto a = torch::rand({3, 4}).requires_grad_();
  const auto b = torch::rand({4, 5}).requires_grad_();
  const auto c = torch::rand({5, 2}).requires_grad_();
  at::Tensor loss;
  {
    const Autocast region(semitone());
    const auto einsum = at::einsum("ij,jk,kl->il", {a, b, c});
    const auto chain = at::linalg_multi_dot({a, b, c});
    const auto dots = at::tensordot(a, b, {1}, {0});
    EXPECT_EQ(einsum.scalar_type(), GetParam());
    EXPECT_EQ(chain.scalar_type(), GetParam());
    EXPECT_EQ(dots.scalar_type(), kFp32) << "promote: its arguments are fp32";
    loss = einsum.sum() + chain.sum() + dots.sum();
  }
  loss.backward();
  for (const auto& leaf : {a, b, c}) EXPECT_EQ(leaf.grad().scalar_type(), kFp32);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, AutocastGradients, testing::Values(kBf16, kFp16),
                         dtype_param_name);

struct Recurrent {
  const char* kind;
  int layers;
  bool bidirectional;
  bool packed;
  const char* preset;
  c10::ScalarType dtype;
};

class RecurrentNetworks : public testing::TestWithParam<Recurrent> {
 protected:
  void SetUp() override { torch::manual_seed(5); }

  // The output and the last hidden state of a network on padded or packed sequences.
  template <typename Net>
  static std::vector<at::Tensor> run(Net& net, const at::Tensor& x) {
    namespace rnn = torch::nn::utils::rnn;
    std::vector<at::Tensor> results;
    if (GetParam().packed) {
      const auto packed = rnn::pack_padded_sequence(x, torch::tensor({5, 3, 2}));
      const auto [output, hidden] = net->forward_with_packed_input(packed);
      results.push_back(output.data());
      append(results, hidden);
    } else {
      const auto [output, hidden] = net->forward(x);
      results.push_back(output);
      append(results, hidden);
    }
    return results;
  }

  static void append(std::vector<at::Tensor>& results, const at::Tensor& hidden) {
    results.push_back(hidden);
  }
  static void append(std::vector<at::Tensor>& results,
                     const std::tuple<at::Tensor, at::Tensor>& hidden) {
    results.push_back(std::get<0>(hidden));
    results.push_back(std::get<1>(hidden));
  }

  // At each of 5 steps some 4 numbers are rounded on the way from one state to the next.
  template <typename Net>
  static void check(Net net) {
    const int count = 5 * 4 * GetParam().layers;
    const bool torch = std::string(GetParam().preset) == "torch";  // returns some of them in fp32
    at::Tensor x = torch::randn({5, 3, 4});
    if (std::string(GetParam().kind) == "rnn_relu") {
      // Away from where ReLU's gradient jumps.
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& parameter : net->parameters()) parameter.abs_();
      x.abs_();
    }
    expect_only_roundings(
        *net, x, CastPolicy::by_name(GetParam().preset, {kCpu, GetParam().dtype}),
        [&](const at::Tensor& in) { return run(net, in); }, roundings(GetParam().dtype, count),
        roundings(GetParam().dtype, 2 * count),
        torch ? std::nullopt : std::optional(GetParam().dtype));
  }
};

TEST_P(RecurrentNetworks, Give16BitResultsAndFp32Gradients) {
  const auto [kind, layers, bidirectional, packed, preset, dtype] = GetParam();
  const std::string name = kind;
  if (name == "lstm")
    check(torch::nn::LSTM(
        torch::nn::LSTMOptions(4, 6).num_layers(layers).bidirectional(bidirectional)));
  if (name == "gru")
    check(torch::nn::GRU(
        torch::nn::GRUOptions(4, 6).num_layers(layers).bidirectional(bidirectional)));
  if (name == "rnn_tanh" || name == "rnn_relu") {
    auto options = torch::nn::RNNOptions(4, 6).num_layers(layers).bidirectional(bidirectional);
    if (name == "rnn_relu") options.nonlinearity(torch::kReLU);
    check(torch::nn::RNN(options));
  }
}

INSTANTIATE_TEST_SUITE_P(Autocast, RecurrentNetworks, testing::ValuesIn([] {
                           std::vector<Recurrent> cases;
                           for (const char* kind : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
                             for (const char* preset : {"semitone", "apex", "torch"}) {
                               for (const auto dtype : {kBf16, kFp16}) {
                                 cases.push_back({kind, 1, false, false, preset, dtype});
                                 cases.push_back({kind, 2, true, false, preset, dtype});
                                 cases.push_back({kind, 2, false, true, preset, dtype});
                               }
                             }
                           }
                           return cases;
                         }()),
                         [](const auto& tested) {
                           const Recurrent& one = tested.param;
                           return std::string(one.kind) + "_" + std::to_string(one.layers) +
                                  (one.bidirectional ? "_bidirectional" : "") +
                                  (one.packed ? "_packed_" : "_") + one.preset + "_" +
                                  dtype_name(one.dtype);
                         });

class RecurrentCells : public testing::TestWithParam<c10::ScalarType> {
 protected:
  template <typename Cell, typename First>
  static void check(Cell cell, First first) {
    for (const char* preset : {"semitone", "apex"}) {
      SCOPED_TRACE(preset);
      expect_only_roundings(
          *cell, torch::randn({3, 4}), CastPolicy::by_name(preset, {kCpu, GetParam()}),
          [&](const at::Tensor& x) { return std::vector<at::Tensor>{first(cell(x))}; },
          roundings(GetParam(), 6), roundings(GetParam(), 12), GetParam());
    }
  }
};

TEST_P(RecurrentCells, Give16BitResultsAndFp32Gradients) {
  torch::manual_seed(6);
  check(torch::nn::LSTMCell(4, 6), [](const auto& state) { return std::get<0>(state); });
  check(torch::nn::GRUCell(4, 6), [](const at::Tensor& state) { return state; });
  check(torch::nn::RNNCell(4, 6), [](const at::Tensor& state) { return state; });
  torch::nn::RNNCell relu(torch::nn::RNNCellOptions(4, 6).nonlinearity(torch::kReLU));
  {
    const torch::NoGradGuard no_grad;
    relu->bias_ih.fill_(4);  // away from where ReLU's gradient jumps
  }
  check(relu, [](const at::Tensor& state) { return state; });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RecurrentCells, testing::Values(kBf16, kFp16), dtype_param_name);

}  // namespace
}  // namespace semitone::amp::autocast_test
