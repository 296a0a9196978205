// Semitone's kernels in place of LibTorch's: functions, pointwise operators, dropout, attention.

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_policy.h"
#include "src/core/libtorch_release.h"
#include "src/kernels/attention.h"
#include "src/nn/new_dropout.h"
#include "tests/autocast/fast_kernels_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::fast_kernels_test {
namespace {

// A function of an input, and its results with and without Semitone's kernels.
struct FunctionCase {
  std::string op;
  Tensors inputs;
  Function run;
  std::int64_t terms = 1;  // of the longest sum that is rounded
};

void PrintTo(const FunctionCase& function, std::ostream* stream) {
  *stream << function.op;
}

std::vector<FunctionCase> functions() {
  torch::manual_seed(3);
  const at::Tensor target = torch::randint(11, {6});
  return {
      {"layer_norm",
       {torch::randn({6, 40}), torch::rand({40}) + 0.5, torch::randn({40})},
       [](const Tensors& in) { return torch::layer_norm(in[0], {40}, in[1], in[2]); },
       40},
      {"rms_norm",
       {torch::randn({6, 40}), torch::rand({40}) + 0.5},
       [](const Tensors& in) { return torch::rms_norm(in[0], {40}, in[1]); },
       40},
      // LibTorch's 1 + erf(x) in fp32 loses digits where x is negative.
      {"gelu", {torch::randn({6, 40})}, [](const Tensors& in) { return torch::gelu(in[0]); }, 4},
      {"gelu",
       {torch::randn({6, 40})},
       [](const Tensors& in) { return torch::gelu(in[0], "tanh"); }},
      {"cross_entropy_loss",
       {torch::randn({6, 11}) * 3},
       [target](const Tensors& in) { return torch::cross_entropy_loss(in[0], target); },
       11},
      {"cross_entropy_loss",
       {torch::randn({6, 11}) * 3},
       [target](const Tensors& in) {
         return torch::cross_entropy_loss(in[0], target, {}, at::Reduction::None, 3, 0.1);
       },
       11},
  };
}

class FastFunctions : public testing::TestWithParam<FunctionCase> {};

INSTANTIATE_TEST_SUITE_P(All, FastFunctions, testing::ValuesIn(functions()));

TEST_P(FastFunctions, ComputeWhatLibTorchDoes) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    SCOPED_TRACE(dtype);
    Tensors inputs = GetParam().inputs;
    inputs[0] = inputs[0].to(dtype);
    const auto [got, want] = outcomes_of(inputs, GetParam().run);
    const Outcome exact = exact_outcome_of(inputs, GetParam().run);
    expect_rounded({got.result}, {exact.result}, GetParam().terms);
    expect_rounded(got.gradients, exact.gradients, GetParam().terms);
    const double tolerance = test::reduction_tolerance(dtype, GetParam().terms);
    expect_close(got.result, want.result, tolerance);
    expect_close(got.gradients, want.gradients, tolerance);
  }
}

TEST_P(FastFunctions, CanBeDifferentiatedAgain) {
  expect_close_second_gradients(GetParam().inputs, GetParam().run,
                                test::reduction_tolerance(torch::kFloat, 40 * 40));
}

// Operators on one or two tensors, of which the first may be written.
struct PointwiseCase {
  const char* name;
  std::function<at::Tensor(at::Tensor, const at::Tensor&)> function;
};

const std::vector<PointwiseCase>& pointwise_cases() {
  static const std::vector<PointwiseCase> kCases{
      {"relu", [](const at::Tensor& x, const at::Tensor&) { return torch::relu(x); }},
      {"relu_", [](at::Tensor x, const at::Tensor&) { return torch::relu_(x); }},
      {"add", [](const at::Tensor& x, const at::Tensor& y) { return torch::add(x, y); }},
      {"add_", [](const at::Tensor& x, const at::Tensor& y) { return x.add_(y); }},
      {"both", [](const at::Tensor& x, const at::Tensor& y) { return torch::relu_(x.add_(y)); }},
      {"twice", [](const at::Tensor& x, const at::Tensor&) { return x.add_(x); }},
  };
  return kCases;
}

TEST(FastKernels, ReluAndAdditionComputeWhatLibTorchDoes) {
  torch::manual_seed(7);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& [name, function] : pointwise_cases()) {
      SCOPED_TRACE(c10::str(name, " ", dtype));
      const Tensors inputs{image(torch::randn({4, 16, 33, 32}), dtype),
                           image(torch::randn({4, 16, 33, 32}), dtype)};
      const at::Tensor grad = image(torch::randn({4, 16, 33, 32}), dtype);
      // Not a leaf, and not saved by any function for its gradient.
      const auto run = [&function = function](const Tensors& in) {
        return function(in[0] * 1, in[1]);
      };
      const auto [got, want] = outcomes_of(inputs, run, [&](const at::Tensor&) { return grad; });
      expect_bitwise_equal(got.result, want.result);
      EXPECT_EQ(got.result.strides(), want.result.strides());
      for (std::size_t i = 0; i < want.gradients.size(); ++i)
        expect_bitwise_equal(got.gradients[i], want.gradients[i]);
      const at::NoGradGuard no_grad;
      const Autocast region(with_kernels());
      expect_bitwise_equal(function(inputs[0].clone(), inputs[1]), want.result);
    }
  }
}

TEST(FastKernels, ReluAndAdditionOfOtherArgumentsAreLibTorchs) {
  const at::Tensor x = torch::randn({2, 16, 64, 64}, torch::kBFloat16).requires_grad_();
  const at::Tensor y = torch::randn({2, 16, 64, 64}, torch::kBFloat16);
  const Autocast region(with_kernels());
  EXPECT_TRUE(is_ours(torch::relu(x)));
  EXPECT_TRUE(is_ours(x + y));
  EXPECT_FALSE(is_ours(torch::relu(x.to(torch::kFloat))));
  EXPECT_FALSE(is_ours(torch::relu(x[0].slice(0, 0, 1))));  // few elements
  EXPECT_FALSE(is_ours(torch::relu(x.slice(3, 0, 63))));    // gaps
  EXPECT_FALSE(is_ours(torch::add(x, y, 2)));
  EXPECT_FALSE(is_ours(x + 1));
  EXPECT_FALSE(is_ours(x + y[0]));
  EXPECT_FALSE(is_ours(x + y.to(torch::kFloat)));
  EXPECT_FALSE(is_ours(x + y.transpose(2, 3)));
  const at::Tensor rows = torch::randn({512, 256}, torch::kBFloat16);
  const Autocast stock(without_kernels());
  const at::Tensor want = rows + rows.to_sparse_csr();
  {
    const Autocast ours(with_kernels());
    expect_bitwise_equal(rows + rows.to_sparse_csr(), want);
    const at::Tensor memory = torch::zeros({3 * 65536}, torch::kBFloat16);
    EXPECT_THROW(memory.narrow(0, 0, 2 * 65536).detach().add_(memory.narrow(0, 1, 2 * 65536)),
                 c10::Error);
  }
  const Autocast again(with_kernels());
  at::Tensor base = x * 1;
  EXPECT_FALSE(is_ours(base.view({-1}).relu_()));
  EXPECT_TRUE(torch::autograd::grad({base.sum()}, {x})[0].equal(x.gt(0).to(torch::kBFloat16)));
}

TEST(FastKernels, WritingToALeafOrToWhatAGradientNeedsIsAnErrorAsEver) {
  at::Tensor x = torch::randn({2, 16, 64, 64}, torch::kBFloat16).requires_grad_();
  const at::Tensor y = torch::randn({2, 16, 64, 64}, torch::kBFloat16);
  const Autocast region(with_kernels());
  const at::Tensor before = x.detach().clone();
  EXPECT_THROW(torch::relu_(x), c10::Error);
  EXPECT_THROW(x.add_(y), c10::Error);
  expect_bitwise_equal(x.detach(), before);
  const at::Tensor squared = x * x;
  const at::Tensor result = torch::relu(squared);
  result.add_(y);  // which relu has kept
  EXPECT_THROW(result.sum().backward(), c10::Error);
}

TEST(FastKernels, ReluCanBeDifferentiatedAgain) {
  torch::manual_seed(8);
  const Tensors inputs{torch::randn({2, 16, 64, 64}, torch::kBFloat16)};
  const auto cube = [](const Tensors& leaves) {
    return torch::relu(leaves[0] * leaves[0] * leaves[0] + leaves[0]);
  };
  const Tensors got = second_gradients(with_kernels(), inputs, cube);
  const Tensors want = second_gradients(without_kernels(), inputs, cube);
  ASSERT_TRUE(want[0].defined());
  expect_bitwise_equal(got[0], want[0]);
}

TEST(FastKernels, DropoutIsOursInTrainingAlone) {
  const at::Tensor input = torch::ones({64, 100}, torch::kBFloat16).requires_grad_();
  const Autocast region(with_kernels());
  const at::Tensor result = torch::dropout(input, 0.25, true);
  EXPECT_TRUE(is_ours(result));
  const double kept = result.ne(0).to(torch::kFloat).mean().item<double>();
  EXPECT_NEAR(kept, 0.75, 5 * std::sqrt(0.75 * 0.25 / 6400));
  EXPECT_TRUE(torch::dropout(input, 0.25, false).is_same(input));
}

// Relative, of all elements together.
double distance(const at::Tensor& got, const at::Tensor& exact) {
  EXPECT_EQ(got.sizes(), exact.sizes());
  const double off = (got.to(torch::kDouble).sub(exact).norm() / exact.norm()).item<double>();
  EXPECT_TRUE(std::isfinite(off));
  return off;
}

// Causal or not, and the size of a head: 8 has no kernel in blocks.
class AttentionWithDropout : public testing::TestWithParam<std::tuple<bool, std::int64_t>> {};

TEST_P(AttentionWithDropout, ComputesWhatLibTorchDoes) {
  torch::manual_seed(4);
  const auto [causal, size] = GetParam();
  const Tensors inputs{torch::randn({2, 3, 17, size}), torch::randn({2, 3, 19, size}),
                       torch::randn({2, 3, 19, size})};
  const auto run = [&, causal = causal](const CastPolicy& policy, double p) {
    return outcome_of(policy, inputs, [=](const Tensors& in) {
      return torch::scaled_dot_product_attention(in[0], in[1], in[2], {}, p, causal);
    });
  };
  // With such a small probability hardly any element is dropped, and finally none.
  const Outcome got = run(with_kernels(), 1e-9);
  const Outcome want = run(without_kernels(), 0);
  // Scaled query, scores, their softmax, dropout and product; LibTorch's kernel rounds some of
  // them.
  expect_close(got.result, want.result, test::rounding_tolerance(torch::kBFloat16, 5));
  // Gradients cancel, so single elements may be off by more.
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_LE(distance(got.gradients[i], want.gradients[i].to(torch::kDouble)),
              test::rounding_tolerance(torch::kBFloat16, 2))
        << i;
  }
  // The mean over many masks is the result without any.
  at::Tensor sum = torch::zeros_like(want.result, torch::kFloat);
  constexpr int kTimes = 400;
  for (int i = 0; i < kTimes; ++i) sum += run(with_kernels(), 0.25).result.detach();
  const at::Tensor off = (sum / kTimes - want.result.to(torch::kFloat)).abs();
  EXPECT_LT(off.mean().item<double>(), 0.05);
  EXPECT_GT(off.mean().item<double>(), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(FastKernels, AttentionWithDropout,
                         testing::Combine(testing::Bool(), testing::Values(8, 16)),
                         [](const auto& test) {
                           return (std::get<0>(test.param) ? "Causal" : "Whole") +
                                  std::to_string(std::get<1>(test.param));
                         });

// Of two sequences.
at::Tensor padding(std::int64_t keys) {
  return torch::arange(keys) < torch::tensor({keys, keys / 3}).view({2, 1, 1, 1});
}

TEST(FastKernels, AttentionWithDropoutAndAMaskComputesWhatLibTorchDoes) {
  torch::manual_seed(16);
  const Tensors inputs{torch::randn({2, 3, 17, 8}), torch::randn({2, 3, 19, 8}),
                       torch::randn({2, 3, 19, 8})};
  at::Tensor none = padding(19).clone();
  none[1].fill_(false);
  const at::Tensor slope = torch::arange(19).mul(-0.25F).unsqueeze(0);
  for (const at::Tensor& mask : {padding(19), none, slope}) {
    const auto run = [&](const CastPolicy& policy, double p) {
      return outcome_of(policy, inputs, [&](const Tensors& in) {
        return torch::scaled_dot_product_attention(in[0], in[1], in[2], mask, p);
      });
    };
    const Outcome got = run(with_kernels(), 1e-9);
    const Outcome want = run(without_kernels(), 0);
    EXPECT_LE(distance(got.result, want.result.to(torch::kDouble)),
              test::rounding_tolerance(torch::kBFloat16, 2));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LE(distance(got.gradients[i], want.gradients[i].to(torch::kDouble)),
                test::rounding_tolerance(torch::kBFloat16, 2))
          << i;
    }
  }
}

// In blocks where the processor has products in bf16.
bool has_blocked_attention() {
  const at::Tensor one = torch::ones({1, 1, 1, 16}, torch::kBFloat16);
  return kernels::has_attention_kernel(one, one, one, {.scale = 1});
}

TEST(FastKernels, AttentionWithoutDropoutComputesWhatLibTorchDoes) {
  torch::manual_seed(11);
  const auto heads = [](std::int64_t count, std::int64_t length) {
    return torch::randn({2, length, count, 32}).transpose(1, 2);
  };
  struct Call {
    std::string name;
    Tensors inputs;
    std::function<at::Tensor(const Tensors&)> run;
  };
  const std::vector<Call> calls{
      {"plain",
       {heads(3, 70), heads(3, 90), heads(3, 90)},
       [](const Tensors& in) { return at::scaled_dot_product_attention(in[0], in[1], in[2]); }},
      {"causal, with a scale",
       {heads(3, 70), heads(3, 90), heads(3, 90)},
       [](const Tensors& in) {
         return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0, true, 0.3);
       }},
      {"grouped",
       {heads(4, 40), heads(2, 40), heads(2, 40)},
       [](const Tensors& in) {
         return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0, true, std::nullopt,
                                                 true);
       }},
      {"padded",
       {heads(3, 70), heads(3, 90), heads(3, 90)},
       [](const Tensors& in) {
         return at::scaled_dot_product_attention(in[0], in[1], in[2], padding(90));
       }},
      {"with numbers", {heads(3, 70), heads(3, 90), heads(3, 90)}, [](const Tensors& in) {
         const at::Tensor distance = torch::arange(90) - torch::arange(70).unsqueeze(1);
         return at::scaled_dot_product_attention(in[0], in[1], in[2],
                                                 distance.abs().mul(-0.25).to(in[0].scalar_type()));
       }}};
  for (const Call& call : calls) {
    SCOPED_TRACE(call.name);
    Tensors inputs;
    for (const at::Tensor& input : call.inputs) inputs.push_back(input.to(torch::kBFloat16));
    const GradOutput grad_output = [](const at::Tensor& result) {
      torch::manual_seed(12);
      return torch::randn(result.sizes()).to(result.scalar_type());
    };
    const Outcome got = outcome_of(with_kernels(), inputs, call.run, grad_output);
    EXPECT_EQ(is_ours(got.result), has_blocked_attention());
    const Outcome stock = outcome_of(without_kernels(), inputs, call.run, grad_output);
    const Outcome exact = exact_outcome_of(inputs, call.run, grad_output);
    EXPECT_EQ(got.result.scalar_type(), stock.result.scalar_type());
    EXPECT_EQ(got.result.strides(), stock.result.strides());
    // No less exact than LibTorch's own kernel.
    EXPECT_LE(distance(got.result, exact.result), 1.1 * distance(stock.result, exact.result));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LE(distance(got.gradients[i], exact.gradients[i]),
                1.1 * distance(stock.gradients[i], exact.gradients[i]))
          << i;
    }
  }
}

// One tensor as several arguments, and arguments that are computed from others.
TEST(FastKernels, AttentionHasTheSameGradientsInARecordedBackwardPass) {
  torch::manual_seed(14);
  const Tensors inputs{torch::randn({1, 2, 24, 16}).to(torch::kBFloat16)};
  const std::vector<Function> calls{
      [](const Tensors& in) {
        return at::scaled_dot_product_attention(in[0], in[0], in[0], {}, 0, true);
      },
      [](const Tensors& in) {
        const at::Tensor key = in[0].sin();
        return at::scaled_dot_product_attention(in[0], key, key.mul(2).add(in[0]));
      }};
  for (const Function& call : calls) {
    const Tensors leaves = leaves_of(inputs);
    const Autocast region(with_kernels());
    const at::Tensor result = call(leaves);
    const auto gradient = [&](bool create_graph) {
      const at::Tensor grad = torch::ones_like(result).cumsum(2).div(24);
      return torch::autograd::grad({result}, leaves, {grad}, /*retain_graph=*/true, create_graph)[0]
          .detach();
    };
    EXPECT_LE(distance(gradient(true), gradient(false).to(torch::kDouble)),
              test::rounding_tolerance(torch::kBFloat16, 3));
  }
}

// As with LibTorch's, which saves numbers.
TEST(FastKernels, AttentionLetsAProgramReuseAMaskOfBools) {
  torch::manual_seed(14);
  const at::Tensor x = torch::randn({2, 2, 20, 16}).to(torch::kBFloat16).requires_grad_();
  const at::Tensor shown = torch::rand({20, 20}) < 0.7;
  shown.fill_diagonal_(true);
  const auto gradient = [&](const at::Tensor& mask, bool reuses) {
    const Autocast region(with_kernels());
    const at::Tensor result = at::scaled_dot_product_attention(x, x, x, mask);
    if (reuses) mask.fill_(true);
    return torch::autograd::grad({result.sum()}, {x})[0];
  };
  const at::Tensor want = gradient(shown, /*reuses=*/false);
  EXPECT_TRUE(at::equal(gradient(shown.clone(), /*reuses=*/true), want));
  const at::Tensor expanded = shown.clone().expand({2, 1, 20, 20});
  EXPECT_TRUE(at::equal(gradient(expanded, /*reuses=*/false), want));
  at::Tensor of_inference;
  {
    const c10::InferenceMode inference;
    of_inference = shown.clone();
  }
  EXPECT_TRUE(at::equal(gradient(of_inference, /*reuses=*/false), want));
}

TEST(FastKernels, AttentionsResultMayBeChangedInPlaceLikeAnyOther) {
  torch::manual_seed(15);
  const at::Tensor x = torch::randn({1, 2, 24, 16}).to(torch::kBFloat16).requires_grad_();
  const Autocast region(with_kernels());
  at::Tensor frozen;
  {
    const torch::NoGradGuard no_grad;
    frozen = at::scaled_dot_product_attention(x, x, x);
  }
  EXPECT_FALSE(frozen.is_view());
  const at::Tensor weight = torch::ones({16}, torch::kBFloat16).requires_grad_();
  EXPECT_TRUE(frozen.mul_(weight).requires_grad());
  // The backward pass needs the result as it was. Where it is computed in fp32 and rounded, LibTorch
  // has kept another one.
  const at::Tensor result = at::scaled_dot_product_attention(x, x, x);
  result.mul_(2);
  if (has_blocked_attention()) {
    EXPECT_THROW(result.sum().backward(), c10::Error);
  } else {
    result.sum().backward();
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
  }
}

TEST(FastKernels, AttentionIsLibTorchsIfItsFlashKernelIsSwitchedOff) {
  const at::Tensor x = torch::randn({1, 2, 24, 16}).to(torch::kBFloat16).requires_grad_();
  const Autocast region(with_kernels());
  at::globalContext().setSDPUseFlash(false);
  const at::Tensor result = at::scaled_dot_product_attention(x, x, x);
  at::globalContext().setSDPUseFlash(true);
  EXPECT_FALSE(is_ours(result));
  EXPECT_EQ(is_ours(at::scaled_dot_product_attention(x, x, x)), has_blocked_attention());
}

TEST(FastKernels, WrongArgumentsOfAttentionAreLibTorchsErrors) {
  const at::Tensor x = torch::randn({1, 2, 24, 16}).to(torch::kBFloat16);
  const Autocast region(with_kernels());
  EXPECT_THROW(at::scaled_dot_product_attention(x, x, x, {}, -0.5), c10::Error);
  EXPECT_THROW(at::scaled_dot_product_attention(x, x, x, {}, 2), c10::Error);
  EXPECT_THROW(at::scaled_dot_product_attention(x, x.flatten(), x, {}, 0.5), c10::Error);
  EXPECT_THROW(at::scaled_dot_product_attention(x, x.slice(1, 0, 1).repeat({1, 3, 1, 1}), x),
               c10::Error);
  const at::Tensor mask = torch::ones({24, 24}, torch::kBool);
  for (const double p : {0.0, 0.5}) {
    EXPECT_THROW(at::scaled_dot_product_attention(x, x, x, mask.slice(0, 0, 7), p), c10::Error);
    EXPECT_THROW(at::scaled_dot_product_attention(x, x, x, mask.to(torch::kLong), p), c10::Error);
  }
}

// A learned bias of positions.
TEST(FastKernels, AMaskWithAGradientIsLibTorchs) {
  torch::manual_seed(17);
  const Tensors inputs{torch::randn({2, 2, 24, 16}).to(torch::kBFloat16),
                       torch::randn({2, 24, 24}).to(torch::kBFloat16)};
  const Function run = [](const Tensors& in) {
    return at::scaled_dot_product_attention(in[0], in[0], in[0], in[1]);
  };
  const Outcome got = outcome_of(with_kernels(), inputs, run);
  const Outcome exact = exact_outcome_of(inputs, run);
  EXPECT_FALSE(is_ours(got.result));
  ASSERT_TRUE(got.gradients[1].defined());
  EXPECT_LE(distance(got.gradients[1], exact.gradients[1]),
            test::rounding_tolerance(torch::kBFloat16, 3));
  // Whose gradient nobody wants.
  const torch::NoGradGuard no_grad;
  const Autocast region(with_kernels());
  const Tensors leaves = leaves_of(inputs);
  EXPECT_LE(distance(run(leaves), exact.result.detach()),
            test::rounding_tolerance(torch::kBFloat16, 2));
}

class AttentionTwice : public testing::TestWithParam<bool> {};

TEST_P(AttentionTwice, CanBeDifferentiatedAgain) {
  torch::manual_seed(13);
  const Tensors inputs{torch::randn({1, 2, 9, 16}), torch::randn({1, 2, 9, 16}),
                       torch::randn({1, 2, 9, 16})};
  at::Tensor mask = torch::ones({9, 9}, torch::kBool).tril();
  mask[4].fill_(false);
  const auto masked = GetParam() ? std::optional(mask) : std::nullopt;
  const auto numbers =
      GetParam()
          ? std::optional(torch::zeros({9, 9}, torch::kDouble).masked_fill_(~mask, -INFINITY))
          : std::nullopt;
  const auto run = [&](const Tensors& in) {
    return at::scaled_dot_product_attention(in[0], in[1], in[2], masked, 0, !GetParam());
  };
  if (!has_blocked_attention()) {  // LibTorch's kernel cannot
#if SEMITONE_LIBTORCH_SINCE(2, 10)
    using Refusal = c10::Error;
#else
    using Refusal = std::runtime_error;
#endif
    EXPECT_THROW(second_gradients(with_kernels(), inputs, run), Refusal);
    return;
  }
  const Tensors got = second_gradients(with_kernels(), inputs, run);
  Tensors exact;
  for (const at::Tensor& input : inputs) exact.push_back(input.to(torch::kDouble));
  const Tensors want = second_gradients(CastPolicy::none(), exact, [&](const Tensors& in) {
    return std::get<0>(
        at::_scaled_dot_product_attention_math(in[0], in[1], in[2], numbers, 0, !GetParam()));
  });
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(got[i].defined());
    EXPECT_LE(distance(got[i], want[i]), test::rounding_tolerance(torch::kBFloat16, 10)) << i;
  }
}

TEST(FastKernels, AttentionWithDropoutHasSecondDerivativesOfTheSameMask) {
  if (!has_blocked_attention()) GTEST_SKIP() << "composed of LibTorch's operators";
  torch::manual_seed(18);
  const Tensors inputs{torch::randn({1, 2, 9, 16}), torch::randn({1, 2, 9, 16}),
                       torch::randn({1, 2, 9, 16})};
  constexpr double kP = 0.3;
  torch::manual_seed(19);
  const kernels::Attention settings{.scale = 0.25, .causal = true, .dropout = nn::new_dropout(kP)};
  torch::manual_seed(19);
  const Tensors got = second_gradients(with_kernels(), inputs, [&](const Tensors& in) {
    return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, kP, true);
  });
  Tensors exact;
  for (const at::Tensor& input : inputs) exact.push_back(input.to(torch::kDouble));
  const Tensors want = second_gradients(CastPolicy::none(), exact, [&](const Tensors& in) {
    return kernels::ref::attention(in[0], in[1], in[2], settings).output;
  });
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(got[i].defined());
    EXPECT_LE(distance(got[i], want[i]), test::rounding_tolerance(torch::kBFloat16, 10)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(FastKernels, AttentionTwice, testing::Bool(),
                         [](const auto& mask) { return mask.param ? "Masked" : "Causal"; });

// Tracers and forward-mode derivatives support LibTorch's operators only.
TEST(FastKernels, LeaveTracingToLibTorch) {
  const auto traced = torch::jit::tracer::trace(
      {torch::randn({3, 4})},
      [](const torch::jit::Stack& inputs) {
        const Autocast region(with_kernels());
        return torch::jit::Stack{torch::gelu(inputs[0].toTensor())};
      },
      [](const torch::autograd::Variable&) { return ""; });
  EXPECT_NE(traced.first->graph->toString().find("aten::gelu"), std::string::npos);
}

// So large that Semitone's kernel would cast it.
TEST(FastKernels, LeaveCastsOfTracersAndDerivativesToLibTorch) {
  torch::manual_seed(0);
  const at::Tensor input = torch::randn({300, 512});
  const at::Tensor weight = torch::randn({8, 512});
  const auto run = [&](const at::Tensor& x) {
    const Autocast region(with_kernels());
    return torch::linear(x, weight);
  };
  const auto traced = torch::jit::tracer::trace(
      {input},
      [&](const torch::jit::Stack& inputs) { return torch::jit::Stack{run(inputs[0].toTensor())}; },
      [](const torch::autograd::Variable&) { return ""; });
  EXPECT_EQ(traced.first->graph->toString().find("aten::empty"), std::string::npos);
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  for (const bool recorded : {false, true}) {
    const at::Tensor tangent = torch::randn_like(input);
    const at::Tensor dual =
        at::_make_dual(recorded ? leaf(input) : input, tangent, static_cast<std::int64_t>(level));
    const at::Tensor got =
        std::get<1>(at::_unpack_dual(run(dual), static_cast<std::int64_t>(level)));
    ASSERT_TRUE(got.defined());
    expect_close(got.detach().to(torch::kFloat), run(tangent).to(torch::kFloat), 0.02);
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST(FastKernels, UseNoCopyOfAWeightThatHasATangent) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::randn({4, 16});
  const at::Tensor weight = leaf(torch::randn({8, 16}));
  const at::Tensor tangent = torch::randn({8, 16});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  {
    const at::Tensor dual = at::_make_dual(weight, tangent, static_cast<std::int64_t>(level));
    const Autocast region(with_kernels());
    at::mm(input, weight.t());  // the copy is made
    for (const bool of_input : {false, true}) {
      const at::Tensor factor = of_input ? at::_make_dual(input, torch::ones_like(input),
                                                          static_cast<std::int64_t>(level))
                                         : input;
      const at::Tensor got =
          std::get<1>(at::_unpack_dual(at::mm(factor, dual.t()), static_cast<std::int64_t>(level)));
      ASSERT_TRUE(got.defined());
      at::Tensor want = at::mm(input, tangent.t()).to(torch::kFloat);
      if (of_input) want = want + at::mm(torch::ones_like(input), weight.t()).to(torch::kFloat);
      expect_close(got.to(torch::kFloat), want, 0.02);
    }
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST(FastKernels, LeaveForwardDerivativesToLibTorch) {
  const at::Tensor input = torch::randn({3, 4});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  {
    const at::Tensor dual =
        at::_make_dual(input, torch::ones_like(input), static_cast<std::int64_t>(level));
    const Autocast region(with_kernels());
    const at::Tensor tangent =
        std::get<1>(at::_unpack_dual(torch::gelu(dual), static_cast<std::int64_t>(level)));
    ASSERT_TRUE(tangent.defined());
    const at::Tensor leaf_input = leaf(input);
    const auto want = torch::autograd::grad({torch::gelu(leaf_input).sum()}, {leaf_input});
    expect_close(tangent, want[0], test::reduction_tolerance(torch::kFloat, 4));
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST(FastKernels, ArePartOfThePolicy) {
  EXPECT_TRUE(CastPolicy::semitone().fast_kernels().contains("batch_norm"));
  EXPECT_TRUE(CastPolicy::none().fast_kernels().contains("batch_norm"));
  EXPECT_TRUE(CastPolicy::torch().fast_kernels().empty());
  EXPECT_TRUE(CastPolicy::apex().fast_kernels().empty());
  EXPECT_TRUE(CastPolicy::paddle().fast_kernels().empty());
  EXPECT_TRUE(
      CastPolicy::torch().fast_kernel("aten::batch_norm").fast_kernels().contains("batch_norm"));
  EXPECT_FALSE(CastPolicy::semitone()
                   .fast_kernel("batch_norm", false)
                   .fast_kernels()
                   .contains("batch_norm"));
}

TEST(FastKernels, OneThatDoesNotExistIsAnError) {
  test::expect_error([] { CastPolicy::semitone().fast_kernel("conv3d"); },
                     {"[amp.cast_policy]", "'conv3d'", "batch_norm"});
}

}  // namespace
}  // namespace semitone::amp::fast_kernels_test
