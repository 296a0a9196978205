// Products in fp8 against the definition: LibTorch's casts, products in fp32, and scales by hand.

#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/core/dtype_limits.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <ATen/Context.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::fp8_test {
namespace {

using test::error_of;
using test::expect_bitwise_equal;
using testing::HasSubstr;

constexpr auto kE4m3 = torch::kFloat8_e4m3fn;
constexpr auto kE5m2 = torch::kFloat8_e5m2;

CastPolicy fp8_policy(torch::nn::Module& model, const Fp8Options& options = {},
                      c10::ScalarType dtype = torch::kBFloat16) {
  return CastPolicy::semitone({torch::kCPU, dtype}).fp8(options).bind(model);
}

double amax_of(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

float scale_of(double amax, c10::ScalarType format) {
  return static_cast<float>(dtype_limits(format).max / amax);
}

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

class Fp8 : public testing::Test {
 protected:
  Fp8() { torch::manual_seed(3); }
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
    const at::Tensor in_fp32 = [&] {
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
TEST_F(Fp8, ScalesAreThoseOfTheStepsBefore) {
  for (const std::int64_t history : {1, 4, 100}) {
    SCOPED_TRACE(history);
    torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
    const CastPolicy policy =
        fp8_policy(*layer, Fp8Options().amax_history(history).margin(2), torch::kHalf);
    Fp8Scaling scaling = policy.fp8_scaling();
    std::vector<double> inputs;
    std::vector<double> gradients;
    float of_inputs = 0;
    float of_gradients = 0;
    for (int step = 0; step < 50; ++step) {
      ASSERT_EQ(scaling.scales().at(0).input_scale, of_inputs) << step;
      ASSERT_EQ(scaling.scales().at(0).grad_output_scale, of_gradients) << step;
      double of_step = 0;
      double of_gradient = 0;
      // Two batches, as in gradient accumulation; in some steps the layer does not run, or gets 0.
      for (int batch = 0; batch < 2 && step % 7 != 3; ++batch) {
        const at::Tensor input = torch::randn({4, 8}) * std::ldexp(1.0, step % 9) * (step % 5 != 4);
        const at::Tensor result = [&] {
          const Autocast region(policy);
          return layer->forward(input);
        }();
        const at::Tensor gradient = torch::randn({4, 8}).to(torch::kHalf);
        result.backward(gradient);
        of_step = std::max(of_step, amax_of(input));
        of_gradient = std::max(of_gradient, amax_of(gradient));
      }
      scaling.update();
      inputs.push_back(of_step);
      gradients.push_back(of_gradient);
      const auto largest = [&](const std::vector<double>& amaxes) {
        const auto first = amaxes.size() > static_cast<std::size_t>(history)
                               ? amaxes.end() - history
                               : amaxes.begin();
        return *std::max_element(first, amaxes.end());
      };
      if (largest(inputs) > 0) of_inputs = scale_of(largest(inputs), kE4m3) / 4;
      if (largest(gradients) > 0) of_gradients = scale_of(largest(gradients), kE5m2) / 4;
    }
  }
}

TEST_F(Fp8, ValuesBeyondTheHistoryAreLimited) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
  torch::nn::init::eye_(layer->weight);
  const CastPolicy policy = fp8_policy(*layer);
  const auto forward = [&](float value) {
    const Autocast region(policy);
    return layer->forward(torch::full({1, 4}, value))[0][0].item<float>();
  };
  EXPECT_EQ(forward(2), 2);
  policy.fp8_scaling().update();
  EXPECT_EQ(forward(1), 1);
  EXPECT_EQ(forward(100), 2);  // delayed scaling: the largest that the scale allows
  policy.fp8_scaling().update();
  EXPECT_EQ(forward(100), 100);
}

TEST_F(Fp8, EvaluationDoesNotChangeTheScales) {
  torch::nn::Linear layer(8, 8);
  const CastPolicy policy = fp8_policy(*layer);
  const auto run = [&](const at::Tensor& input) {
    const Autocast region(policy);
    return layer->forward(input);
  };
  run(torch::ones({2, 8}));
  policy.fp8_scaling().update();
  const auto before = policy.fp8_scaling().scales();
  {
    const at::NoGradGuard no_grad;
    const at::Tensor result = run(torch::full({2, 8}, 100.0));
    EXPECT_LT(amax_of(result), 10) << "limited to what training has seen";
  }
  {
    const c10::InferenceMode inference;
    EXPECT_EQ(run(torch::full({2, 8}, 100.0)).scalar_type(), torch::kBFloat16);
  }
  policy.fp8_scaling().update();
  EXPECT_EQ(before.at(0).input_scale, policy.fp8_scaling().scales().at(0).input_scale);
}

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

struct Net : torch::nn::Module {
  Net()
      : conv(register_module("conv", torch::nn::Conv2d(1, 4, 3))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        body(register_module("body", torch::nn::Linear(16, 16))),
        head(register_module("head", torch::nn::Linear(16, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::relu(norm(conv(x))).flatten(2).mean(1);
    return head(torch::relu(body(y)));
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear body;
  torch::nn::Linear head;
};

// The dtypes to which each operator rounded while a function ran.
std::multiset<std::string> casts_to_fp8_in(const std::function<void()>& run) {
  struct Log : events::Listener {
    using Listener::on;
    void on(const events::Cast& cast) override {
      const std::lock_guard lock(mutex);
      if (cast.to == kE4m3 || cast.to == kE5m2)
        casts.insert(std::string(cast.op) + (cast.to == kE4m3 ? " e4m3" : " e5m2"));
    }
    std::mutex mutex;
    std::multiset<std::string> casts;
  };
  const auto log = std::make_shared<Log>();
  {
    const events::Listen listen(log);
    run();
  }
  return log->casts;
}

// In one forward and backward.
std::multiset<std::string> casts_to_fp8(const CastPolicy& policy, Net& net) {
  return casts_to_fp8_in([&] {
    const at::Tensor result = [&] {
      const Autocast region(policy);
      return net.forward(torch::randn({2, 1, 6, 6}));
    }();
    result.sum().backward();
  });
}

TEST_F(Fp8, LayersThatAPolicyKeepsAreNotRounded) {
  Net net;
  const std::multiset<std::string> all{"conv2d e4m3", "conv2d e4m3", "conv2d e5m2",
                                       "addmm e4m3",  "addmm e4m3",  "addmm e5m2",
                                       "addmm e4m3",  "addmm e4m3",  "addmm e5m2"};
  EXPECT_EQ(casts_to_fp8(fp8_policy(net), net), all);
  const std::multiset<std::string> without_conv{"addmm e4m3", "addmm e4m3", "addmm e5m2",
                                                "addmm e4m3", "addmm e4m3", "addmm e5m2"};
  const auto semitone = CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).fp8();
  EXPECT_EQ(casts_to_fp8(CastPolicy(semitone).keep_fp32("conv2d").bind(net), net), without_conv);
  EXPECT_EQ(casts_to_fp8(CastPolicy(semitone).keep_fp32_params("conv.*").bind(net), net),
            without_conv);
  EXPECT_EQ(casts_to_fp8(semitone.bind(net).keep_fp32_params("conv.*"), net), without_conv);
  const auto chosen = Fp8Options().keep_16bit_params({"conv.*"});
  EXPECT_EQ(casts_to_fp8(fp8_policy(net, chosen), net), without_conv);
  EXPECT_EQ(casts_to_fp8(
                CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).bind(net).fp8(chosen), net),
            without_conv);
}

TEST_F(Fp8, WeightsOf16BitsAreRoundedUnderPresetNone) {
  Net net;
  for (at::Tensor& parameter : net.parameters()) parameter.set_data(parameter.to(torch::kBFloat16));
  const CastPolicy policy = CastPolicy::none({torch::kCPU, torch::kBFloat16}).fp8().bind(net);
  const Autocast region(policy);
  at::Tensor result;
  EXPECT_EQ(casts_to_fp8_in([&] {
              result = net.forward(torch::randn({2, 1, 6, 6}).to(torch::kBFloat16));
            }).size(),
            6U);
  EXPECT_EQ(result.scalar_type(), torch::kBFloat16);
  result.sum().backward();
  EXPECT_EQ(net.head->weight.grad().scalar_type(), torch::kBFloat16);
}

// A weight in two calls has one scale, of the larger amax, and the sum of both gradients.
TEST_F(Fp8, ASharedWeightHasOneScale) {
  torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
  const CastPolicy policy = fp8_policy(*layer);
  const at::Tensor result = [&] {
    const Autocast region(policy);
    return layer->forward(torch::full({2, 8}, 3.0)) + layer->forward(torch::full({2, 8}, 7.0));
  }();
  result.sum().backward();
  policy.fp8_scaling().update();
  ASSERT_EQ(policy.fp8_scaling().scales().size(), 1U);
  EXPECT_EQ(policy.fp8_scaling().scales()[0].input_scale, scale_of(7, kE4m3));
  EXPECT_TRUE(at::allclose(layer->weight.grad(), torch::full({8, 8}, 20.0), 0.01));
}

// The gradient of a gradient: roundings count as exact.
TEST_F(Fp8, GradientsCanBeDifferentiated) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
  const CastPolicy policy = fp8_policy(*layer);
  const at::Tensor input = torch::randn({3, 4}).requires_grad_();
  const auto penalty_grad = [&](bool in_fp8) {
    at::Tensor result;
    if (in_fp8) {
      const Autocast region(policy);
      result = layer->forward(input).to(torch::kFloat).tanh();
    } else {
      result = layer->forward(input).tanh();
    }
    const at::Tensor grad =
        torch::autograd::grad({result.sum()}, {input}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({grad.square().sum()}, {layer->weight})[0];
  };
  const at::Tensor exact = penalty_grad(false);
  const at::Tensor in_fp8 = penalty_grad(true);
  EXPECT_LT(((in_fp8 - exact).norm() / exact.norm()).item<float>(), 0.2F);
  EXPECT_GT(((in_fp8 - exact).norm() / exact.norm()).item<float>(), 1e-4F);
}

// A function of the user multiplies gradients in its backward: not with the scales of inputs.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const CastPolicy* policy) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["policy"] = reinterpret_cast<std::intptr_t>(policy);
    return at::mm(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Autocast region(*reinterpret_cast<const CastPolicy*>(ctx->saved_data["policy"].toInt()));
    return {at::mm(grads[0], saved[1].t()), at::mm(saved[0].t(), grads[0]), {}};
  }
};

TEST_F(Fp8, ProductsWithinABackwardPassStayIn16Bits) {
  torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
  const CastPolicy policy = fp8_policy(*layer);
  const at::Tensor input = torch::randn({3, 8}).requires_grad_();
  {
    const Autocast region(policy);
    layer->forward(torch::full({1, 8}, 1e-3));  // a scale that gradients would not fit
  }
  policy.fp8_scaling().update();
  const at::Tensor result = [&] {
    const Autocast region(policy);
    return OwnLinear::apply(input, layer->weight, &policy);
  }();
  result.sum().backward();
  const at::Tensor want = torch::ones({3, 8}).mm(layer->weight.detach().t());
  EXPECT_TRUE(at::allclose(input.grad(), want, 0.02, 0.02)) << input.grad() - want;
}

// Products of a gradient and a weight are up to 57344 x 448, which fp16 does not hold.
TEST_F(Fp8, ABackwardPassWithinARegionIsTheSame) {
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{64, 64}, std::vector<std::int64_t>{4, 16, 64}}) {
    SCOPED_TRACE(sizes.size());
    torch::nn::Linear layer(64, 64);
    const at::Tensor input = torch::randn(sizes).requires_grad_();
    std::vector<at::Tensor> gradients;
    for (const bool is_within : {false, true}) {
      const CastPolicy policy = fp8_policy(*layer, {}, torch::kHalf);
      auto region = std::make_unique<Autocast>(policy);
      const at::Tensor loss = layer->forward(input).to(torch::kFloat).mean();
      if (!is_within) region.reset();
      loss.backward();
      region.reset();
      for (at::Tensor tensor : {at::Tensor(input), layer->weight, layer->bias}) {
        EXPECT_TRUE(tensor.grad().isfinite().all().item<bool>());
        gradients.push_back(tensor.grad());
        tensor.mutable_grad() = at::Tensor();
      }
    }
    for (std::size_t i = 0; i < 3; ++i) expect_bitwise_equal(gradients[i], gradients[i + 3]);
  }
}

// On every processor: on some, a layer is one operator of oneDNN, on others a chain of products.
TEST_F(Fp8, RecurrentLayersAreNotRounded) {
  const auto expect_none = [](auto layer, const at::Tensor& input) {
    for (const char* const preset : {"semitone", "torch", "apex", "paddle", "paddle-o2"}) {
      for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
        for (at::Tensor& parameter : layer->parameters()) parameter.set_data(parameter.to(dtype));
        const CastPolicy policy =
            CastPolicy::by_name(preset, {torch::kCPU, torch::kBFloat16}).fp8().bind(*layer);
        const auto casts = casts_to_fp8_in([&] {
          const Autocast region(policy);
          layer->forward(input.to(dtype));
        });
        EXPECT_TRUE(casts.empty()) << preset << ' ' << layer->name() << ' ' << casts.size();
      }
    }
  };
  const at::Tensor sequence = torch::randn({3, 2, 8});
  expect_none(torch::nn::LSTM(8, 8), sequence);
  expect_none(torch::nn::GRU(8, 8), sequence);
  expect_none(torch::nn::RNN(8, 8), sequence);
  expect_none(torch::nn::LSTMCell(8, 8), sequence[0]);
  expect_none(torch::nn::GRUCell(8, 8), sequence[0]);
  expect_none(torch::nn::RNNCell(8, 8), sequence[0]);
}

// A product of two parameters, as of learned queries.
TEST_F(Fp8, AProductWithALayerIn16BitsIsNotRounded) {
  struct Queries : torch::nn::Module {
    Queries()
        : queries(register_parameter("queries", torch::randn({4, 8}))),
          head(register_module("head", torch::nn::Linear(8, 8))) {}
    at::Tensor queries;
    torch::nn::Linear head;
  };
  const auto model = std::make_shared<Queries>();
  const auto casts = [&](const Fp8Options& options) {
    const CastPolicy policy = fp8_policy(*model, options);
    return casts_to_fp8_in([&] {
             const Autocast region(policy);
             model->head(model->queries);
             at::mm(model->queries, model->head->weight.t());
           })
        .size();
  };
  EXPECT_EQ(casts(Fp8Options().keep_16bit_params({"head.*"})), 0U);
  EXPECT_EQ(casts({}), 4U);
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
        return c10::str(result.sizes(), result.scalar_type());
      } catch (const c10::Error&) {
        return "an error";
      }
    };
    EXPECT_EQ(shape_or_error(in_fp8), shape_or_error(plain));
  }
}

// A function that computes its forward pass again in its backward, to save memory.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            torch::nn::Linear* layer, const CastPolicy* policy) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] = reinterpret_cast<std::intptr_t>(layer);
    ctx->saved_data["policy"] = reinterpret_cast<std::intptr_t>(policy);
    return (*layer)->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    auto& layer = *reinterpret_cast<torch::nn::Linear*>(ctx->saved_data["layer"].toInt());
    const at::Tensor result = [&] {
      const Autocast region(
          *reinterpret_cast<const CastPolicy*>(ctx->saved_data["policy"].toInt()));
      return layer->forward(x);
    }();
    result.backward(grads[0]);
    return {x.grad(), {}, {}};
  }
};

TEST_F(Fp8, ARecomputedForwardPassIsTheSame) {
  torch::nn::Linear layer(8, 8);
  const at::Tensor input = torch::randn({3, 8}).requires_grad_();
  std::vector<at::Tensor> gradients;
  for (const bool recomputes : {false, true}) {
    const CastPolicy policy = fp8_policy(*layer);
    for (int step = 0; step < 2; ++step) {
      layer->zero_grad();
      const at::Tensor result = [&] {
        const Autocast region(policy);
        return recomputes ? Recomputed::apply(input, &layer, &policy) : layer->forward(input);
      }();
      result.sum().backward();
      policy.fp8_scaling().update();
    }
    EXPECT_GT(policy.fp8_scaling().scales().at(0).grad_output_scale, 0);
    gradients.push_back(layer->weight.grad().clone());
  }
  expect_bitwise_equal(gradients[0], gradients[1]);
}

TEST_F(Fp8, AHookLeavesWhatItGot) {
  torch::nn::Linear layer(8, 8);
  const CastPolicy policy = fp8_policy(*layer);
  Fp8Scaling scaling = policy.fp8_scaling();
  {
    const Autocast region(policy);
    layer->forward(torch::ones({2, 8}));
  }
  using Hook = Fp8Scaling::AmaxHook;
  for (const Hook& hook : {Hook([](at::Tensor& amax) { amax = amax.max().reshape({1}); }),
                           Hook([](at::Tensor& amax) { amax = amax.to(torch::kDouble); }),
                           Hook([](at::Tensor& amax) { amax.fill_(INFINITY); }),
                           Hook([](at::Tensor& amax) { amax.neg_(); }),
                           Hook([](at::Tensor& amax) { amax = at::Tensor(); })}) {
    scaling.set_amax_hook(hook);
    EXPECT_THAT(error_of([&] { scaling.update(); }), HasSubstr("expected a hook that leaves"));
    EXPECT_EQ(scaling.scales().at(0).input_scale, 0);
  }
  scaling.set_amax_hook([&](at::Tensor& amax) {
    EXPECT_EQ(scaling.scales().size(), 1U);  // it may ask
    amax.mul_(2);
  });
  scaling.update();
  EXPECT_EQ(scaling.scales().at(0).input_scale, 224);
}

TEST_F(Fp8, ScalesHoldForTheirOptions) {
  torch::nn::Linear layer(8, 8);
  std::stringstream saved;
  {
    torch::serialize::OutputArchive out;
    fp8_policy(*layer).fp8_scaling().save(out);
    out.save_to(saved);
  }
  torch::serialize::InputArchive in;
  in.load_from(saved);
  fp8_policy(*layer).fp8_scaling().load(in);
  const std::pair<Fp8Options, const char*> others[] = {
      {Fp8Options().forward(kE5m2), "expected 'forward' of float8_e5m2, got float8_e4m3fn"},
      {Fp8Options().backward(kE4m3), "expected 'backward' of float8_e4m3fn, got float8_e5m2"},
      {Fp8Options().margin(1), "expected 'margin' of 1, got 0"}};
  for (const auto& [options, message] : others) {
    const CastPolicy policy = fp8_policy(*layer, options);
    EXPECT_THAT(error_of([&] { policy.fp8_scaling().load(in); }), HasSubstr(message));
  }
}

TEST_F(Fp8, SavedScalesGoOnBitForBit) {
  const auto train = [](const CastPolicy& policy, Net& net, int from, int to) {
    for (int step = from; step < to; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(step));
      const at::Tensor input = torch::randn({2, 1, 6, 6}) * std::ldexp(1.0, step % 3);
      at::Tensor loss;
      {
        const Autocast region(policy);
        loss = net.forward(input).square().sum();
      }
      loss.backward();
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : net.parameters()) {
        parameter.sub_(parameter.grad(), 1e-3);
        parameter.mutable_grad().reset();
      }
      policy.fp8_scaling().update();
    }
  };
  torch::manual_seed(1);
  auto whole = std::make_shared<Net>();
  const CastPolicy of_whole = fp8_policy(*whole, Fp8Options().amax_history(4));
  train(of_whole, *whole, 0, 7);
  std::stringstream model;
  std::stringstream scales;
  torch::save(whole, model);
  torch::serialize::OutputArchive out;
  of_whole.fp8_scaling().save(out);
  out.save_to(scales);
  train(of_whole, *whole, 7, 15);

  auto resumed = std::make_shared<Net>();
  torch::load(resumed, model);
  const CastPolicy of_resumed = fp8_policy(*resumed, Fp8Options().amax_history(4));
  torch::serialize::InputArchive in;
  in.load_from(scales);
  of_resumed.fp8_scaling().load(in);
  train(of_resumed, *resumed, 7, 15);
  const auto expected = whole->named_parameters();
  for (const auto& item : resumed->named_parameters())
    expect_bitwise_equal(item.value().detach(), expected[item.key()].detach());

  const CastPolicy longer = fp8_policy(*resumed, Fp8Options().amax_history(5));
  EXPECT_THAT(error_of([&] { longer.fp8_scaling().load(in); }),
              HasSubstr("expected 'amax_history' of 5, got 4"));
  const CastPolicy fewer =
      fp8_policy(*resumed, Fp8Options().amax_history(4).keep_16bit_params({"head.weight"}));
  EXPECT_THAT(error_of([&] { fewer.fp8_scaling().load(in); }),
              HasSubstr("expected 2 weights in fp8"));
}

TEST_F(Fp8, MistakesAreErrors) {
  Net net;
  auto policy = CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().forward(torch::kHalf)); }),
              HasSubstr("expected float8_e4m3fn or float8_e5m2, got float16"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().amax_history(0)); }), HasSubstr("got 0"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().margin(-1)); }), HasSubstr("got -1"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().margin(17)); }), HasSubstr("got 17"));
  EXPECT_FALSE(policy.fp8_options().has_value());
  EXPECT_THAT(error_of([&] { policy.fp8_scaling(); }), HasSubstr("without fp8()"));
  policy.fp8();
  EXPECT_THAT(error_of([&] { policy.fp8_scaling(); }), HasSubstr("not bound"));
  EXPECT_THAT(error_of([&] { Autocast region(policy); }), HasSubstr("policy.bind(model)"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().keep_16bit_params({"hed.*"})).bind(net); }),
              HasSubstr("'hed.*'"));
  auto bound = CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).bind(net);
  EXPECT_THAT(error_of([&] { bound.fp8(Fp8Options().keep_16bit_params({"hed.*"})); }),
              HasSubstr("'hed.*'"));
  EXPECT_FALSE(bound.fp8_options().has_value());
  const Autocast region(bound);
}

}  // namespace
}  // namespace semitone::amp::fp8_test
