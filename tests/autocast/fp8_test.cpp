// Products in fp8 against the definition: LibTorch's casts, products in fp32, and scales by hand.

#include "semitone/autocast/autocast.h"
#include "src/core/dtype_limits.h"
#include "tests/autocast/fp8_fixture.h"
#include "tests/support/tensors.h"

#include <ATen/Context.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::fp8_test {
namespace {

using test::expect_bitwise_equal;

// The numbers of a format, as fp32.
at::Tensor rounded(const at::Tensor& tensor, c10::ScalarType format, float scale) {
  const double max = dtype_limits(format).max;
  return (tensor.detach().to(torch::kFloat) * scale).clamp(-max, max).to(format).to(torch::kFloat);
}

float inverse(float a, float b) {
  return static_cast<float>(1 / (static_cast<double>(a) * static_cast<double>(b)));
}

// A layer's result and gradients by hand, with scales from the tensors themselves.
struct ByHand {
  ByHand(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
         const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& product,
         const at::Tensor& gradient) {
    const float of_input = scale_of(amax_of(input), kE4m3);
    const float of_weight = scale_of(amax_of(weight), kE4m3);
    const float of_gradient = scale_of(amax_of(gradient), kE5m2);
    const at::Tensor x = rounded(input, kE4m3, of_input).requires_grad_();
    const at::Tensor w = rounded(weight, kE4m3, of_weight).requires_grad_();
    const at::Tensor y = product(x, w);
    result = y.detach() * inverse(of_input, of_weight);
    if (bias.defined()) {
      std::vector<std::int64_t> sizes(static_cast<std::size_t>(weight.dim() - 1), 1);
      sizes[0] = -1;
      result = result + bias.detach().view(sizes);
    }
    y.backward(rounded(gradient, kE5m2, of_gradient));
    input_grad = x.grad() * inverse(of_gradient, of_weight);
    weight_grad = w.grad() * inverse(of_gradient, of_input);
  }
  at::Tensor result;  // fp32
  at::Tensor input_grad;
  at::Tensor weight_grad;
};

TEST_F(Fp8, LinearIsTheDefinition) {
  for (const bool bias : {true, false}) {
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{6, 16}, std::vector<std::int64_t>{2, 3, 16}}) {
      SCOPED_TRACE(c10::str(sizes, bias));
      torch::nn::Linear layer(torch::nn::LinearOptions(16, 8).bias(bias));
      const at::Tensor input = torch::randn(sizes).requires_grad_();
      const CastPolicy policy = fp8_policy(*layer);
      const at::Tensor result = [&] {
        const Autocast region(policy);
        // LibTorch's layer adds a bias to 3-D results itself, in 16 bits.
        return input.dim() == 2 ? layer->forward(input)
                                : at::linear(input, layer->weight, layer->bias);
      }();
      ASSERT_EQ(result.scalar_type(), torch::kBFloat16);
      const at::Tensor gradient = torch::randn(result.sizes()).to(torch::kBFloat16);
      result.backward(gradient);
      const ByHand by_hand(
          input, layer->weight, layer->bias,
          [](const at::Tensor& x, const at::Tensor& w) { return at::matmul(x, w.t()); }, gradient);
      expect_bitwise_equal(result.detach(), by_hand.result.to(torch::kBFloat16));
      expect_bitwise_equal(input.grad(), by_hand.input_grad);
      expect_bitwise_equal(layer->weight.grad(), by_hand.weight_grad);
      if (!bias) continue;
      // Of gradients that are not rounded to fp8.
      expect_bitwise_equal(layer->bias.grad(), gradient.to(torch::kFloat).reshape({-1, 8}).sum(0));
    }
  }
}

TEST_F(Fp8, ConvolutionIsTheDefinition) {
  torch::nn::Conv2d layer(torch::nn::Conv2dOptions(4, 6, 3).padding(1).stride(2));
  const at::Tensor input = torch::randn({2, 4, 9, 9}).requires_grad_();
  const CastPolicy policy = fp8_policy(*layer, {}, torch::kHalf);
  const at::Tensor result = [&] {
    const Autocast region(policy);
    return layer->forward(input);
  }();
  ASSERT_EQ(result.scalar_type(), torch::kHalf);
  const at::Tensor gradient = torch::randn(result.sizes()).to(torch::kHalf);
  result.backward(gradient);
  const ByHand by_hand(
      input, layer->weight, layer->bias,
      [](const at::Tensor& x, const at::Tensor& w) { return at::conv2d(x, w, {}, 2, 1); },
      gradient);
  expect_bitwise_equal(result.detach(), by_hand.result.to(torch::kHalf));
  expect_bitwise_equal(input.grad(), by_hand.input_grad);
  expect_bitwise_equal(layer->weight.grad(), by_hand.weight_grad);
}

// Every other operator that layers and users call with a parameter.
TEST_F(Fp8, EveryOperatorOfAWeightIsRounded) {
  struct Weights : torch::nn::Module {
    Weights()
        : matrix(register_parameter("matrix", torch::randn({8, 8}))),
          kernel(register_parameter("kernel", torch::randn({4, 4, 3}))) {}
    at::Tensor matrix;
    at::Tensor kernel;
  };
  const auto weights = std::make_shared<Weights>();
  const CastPolicy policy = fp8_policy(*weights);
  const at::Tensor x = torch::randn({8, 8});
  const at::Tensor signal = torch::randn({2, 4, 12});
  const at::Tensor bias = torch::randn({8});
  const auto rounded_to_grid = [](const at::Tensor& tensor) {
    const float scale = scale_of(amax_of(tensor), kE4m3);
    return rounded(tensor, kE4m3, scale) / scale;
  };
  const at::Tensor wide_matrix = rounded_to_grid(weights->matrix);
  const at::Tensor wide_kernel = rounded_to_grid(weights->kernel);
  using Two = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  const std::vector<std::pair<std::string, Two>> operators{
      {"mm", [](auto& a, auto& w) { return at::mm(a, w); }},
      {"mm of the transposed weight", [](auto& a, auto& w) { return at::mm(a, w.t()); }},
      {"mm from the left", [](auto& a, auto& w) { return at::mm(w, a); }},
      {"matmul", [](auto& a, auto& w) { return at::matmul(a, w); }},
      {"a view", [](auto& a, auto& w) { return at::mm(a.slice(1, 0, 4), w.slice(0, 2, 6)); }},
      {"addmm", [&](auto& a, auto& w) { return at::addmm(bias, a, w, 0.5, 2); }},
      {"addmm without beta",
       [&](auto& a, auto& w) { return at::addmm(torch::full({8}, NAN), a, w, 0, 1); }},
      {"linear", [&](auto& a, auto& w) { return at::linear(a, w, bias); }}};
  const auto expect_close = [](const at::Tensor& got, const at::Tensor& want) {
    ASSERT_EQ(got.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(at::allclose(got.to(torch::kFloat), want, 0x1p-8, 1e-2))
        << (got.to(torch::kFloat) - want).abs().max();
  };
  const at::NoGradGuard no_grad;
  for (const auto& [name, compute] : operators) {
    SCOPED_TRACE(name);
    // A view's amax is its own.
    const at::Tensor want =
        name == "a view" ? compute(x, weights->matrix) : compute(rounded_to_grid(x), wide_matrix);
    const Autocast region(policy);
    const at::Tensor got = compute(x, weights->matrix);
    if (name != "a view") expect_close(got, want);
    // fp8's error is far above that of bf16.
    const at::Tensor in_fp32 = [&, &compute = compute] {
      const DisableCasts none;
      return compute(x, weights->matrix);
    }();
    EXPECT_GT((got - in_fp32).norm().item<float>() / in_fp32.norm().item<float>(), 0.01F);
  }
  using Convolution = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  const std::vector<Convolution> convolutions{
      [](auto& a, auto& w) { return at::conv1d(a, w); },
      [](auto& a, auto& w) { return at::conv1d(a, w, {}, 1, "same"); },
      [](auto& a, auto& w) { return at::conv_transpose1d(a, w); },
      [](auto& a, auto& w) {
        return at::convolution(a, w, {}, {1}, {1}, {1}, /*transposed=*/false, {0}, 1);
      },
      [](auto& a, auto& w) { return at::conv1d(a[0], w); }};
  for (const Convolution& compute : convolutions) {
    const at::Tensor want = compute(rounded_to_grid(signal), wide_kernel);
    const Autocast region(policy);
    if (want.dim() == 3) expect_close(compute(signal, weights->kernel), want);
    EXPECT_EQ(compute(signal, weights->kernel).sizes(), want.sizes());
  }
}

// LibTorch's kernels without oneDNN. LibTorch leaves products of fp8 tensors to oneDNN on every
// processor with AMX, also below a limit of ONEDNN_MAX_CPU_ISA, where oneDNN refuses them.
class WithoutOnednn {
 public:
  WithoutOnednn() : was_enabled_(at::globalContext().userEnabledMkldnn()) {
    at::globalContext().setUserEnabledMkldnn(false);
  }
  ~WithoutOnednn() { at::globalContext().setUserEnabledMkldnn(was_enabled_); }
  WithoutOnednn(const WithoutOnednn&) = delete;
  WithoutOnednn& operator=(const WithoutOnednn&) = delete;

 private:
  bool was_enabled_;
};

// LibTorch's own product of fp8 tensors.
TEST_F(Fp8, AgreesWithScaledMm) {
  torch::nn::Linear layer(torch::nn::LinearOptions(32, 16).bias(false));
  const at::Tensor input = torch::randn({16, 32});
  const CastPolicy policy = fp8_policy(*layer);
  const at::NoGradGuard no_grad;
  const float of_input = scale_of(amax_of(input), kE4m3);
  const float of_weight = scale_of(amax_of(layer->weight), kE4m3);
  const at::Tensor want = [&] {
    const WithoutOnednn guard;
    return at::_scaled_mm((input * of_input).clamp(-448, 448).to(kE4m3),
                          (layer->weight * of_weight).clamp(-448, 448).to(kE4m3).t(),
                          torch::tensor(1 / of_input), torch::tensor(1 / of_weight), {}, {},
                          torch::kBFloat16);
  }();
  const Autocast region(policy);
  const at::Tensor got = layer->forward(input);
  EXPECT_TRUE(at::allclose(got.to(torch::kFloat), want.to(torch::kFloat), 0x1p-7, 1e-4))
      << (got - want).abs().max();
}

// Scales of 50 steps against a plain loop over the amaxes of tensors.
TEST_F(Fp8, NonFiniteValuesReachTheGradients) {
  torch::nn::Linear layer(4, 4);
  const CastPolicy policy = fp8_policy(*layer, {}, torch::kHalf);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    layer->zero_grad();
    const at::Tensor input = torch::randn({3, 4});
    const at::Tensor result = [&] {
      const Autocast region(policy);
      return layer->forward(input);
    }();
    at::Tensor gradient = torch::randn({3, 4}).to(torch::kHalf);
    gradient[1][2] = bad;
    result.backward(gradient);
    EXPECT_FALSE(layer->weight.grad().isfinite().all().item<bool>());
    policy.fp8_scaling().update();
    for (const auto& scales : policy.fp8_scaling().scales())
      EXPECT_TRUE(std::isfinite(scales.grad_output_scale)) << scales.parameter;
  }
}

// LibTorch decides on them, as without fp8: an error, or a result.
TEST_F(Fp8, UnusualSizesAreLibTorchs) {
  struct Weights : torch::nn::Module {
    Weights()
        : row(register_parameter("row", torch::randn({1, 16}))),
          matrix(register_parameter("matrix", torch::randn({16, 4}))),
          stack(register_parameter("stack", torch::randn({2, 16, 4}))),
          kernel(register_parameter("kernel", torch::randn({6, 2, 3}))) {}
    at::Tensor row;
    at::Tensor matrix;
    at::Tensor stack;
    at::Tensor kernel;
  };
  const auto weights = std::make_shared<Weights>();
  const at::Tensor x = torch::randn({5, 16});
  const at::Tensor signal = torch::randn({2, 2, 12});
  const at::Tensor wide_signal = torch::randn({2, 6, 12});
  const auto bias = [](at::IntArrayRef sizes) { return torch::randn(sizes); };
  using Call = std::function<at::Tensor()>;
  const std::vector<std::pair<std::string, Call>> calls{
      {"linear, bias of another size", [&] { return at::linear(x, weights->row, bias({3})); }},
      {"linear, bias of the result's shape",
       [&] { return at::linear(x, weights->matrix.t(), bias({5, 4})); }},
      {"linear, another width", [&] { return at::linear(x, weights->matrix); }},
      {"conv1d, bias of another size",
       [&] { return at::conv1d(signal, weights->kernel, bias({1})); }},
      {"conv_transpose1d",
       [&] { return at::conv_transpose1d(wide_signal, weights->kernel, bias({2})); }},
      {"conv_transpose1d in groups",
       [&] { return at::conv_transpose1d(wide_signal, weights->kernel, bias({4}), 1, 0, 0, 2); }},
      {"conv_transpose1d, bias of another size",
       [&] { return at::conv_transpose1d(wide_signal, weights->kernel, bias({6})); }},
      {"addmm, too large a bias",
       [&] { return at::addmm(bias({7, 4}), x[0].unsqueeze(0), weights->matrix); }},
      {"addmm, bias of three dimensions",
       [&] { return at::addmm(bias({2, 5, 4}), x, weights->matrix); }},
      {"addmm, a transposed matrix as bias",
       [&] { return at::addmm(bias({4, 5}).t(), x, weights->matrix); }},
      {"matmul of a vector", [&] { return at::matmul(x[0], weights->matrix); }},
      {"matmul by a vector", [&] { return at::matmul(weights->matrix, bias({4})); }},
      {"matmul from the left, in a batch",
       [&] { return at::matmul(weights->matrix.t(), bias({3, 16, 2})); }},
      {"matmul of a stack", [&] { return at::matmul(bias({2, 5, 16}), weights->stack); }}};
  const CastPolicy plain = CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).bind(*weights);
  const CastPolicy in_fp8 = fp8_policy(*weights);
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    const auto shape_or_error = [&call = call](const CastPolicy& policy) -> std::string {
      const Autocast region(policy);
      try {
        const at::Tensor result = call();
        return c10::str(result.sizes(), result.strides(), result.scalar_type());
      } catch (const c10::Error&) {
        return "an error";
      }
    };
    EXPECT_EQ(shape_or_error(in_fp8), shape_or_error(plain));
  }
}

}  // namespace
}  // namespace semitone::amp::fp8_test
