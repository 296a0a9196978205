// Operators that run in Semitone's kernels inside a region, in unmodified models.

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_policy.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::fast_kernels_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

CastPolicy with_kernels() {
  return CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
}
CastPolicy without_kernels() {
  return with_kernels().fast_kernels(false);
}
// On a processor without bf16 convolutions they are emulated, without Semitone's kernels.
// LibTorch's own slow ones compute the same.
CastPolicy never_emulated() {
  return with_kernels().emulation(Emulation::never);
}

bool is_ours(const at::Tensor& result) {
  return result.grad_fn() != nullptr &&
         result.grad_fn()->name().find("semitone") != std::string::npos;
}

at::Tensor leaf(const at::Tensor& values) {
  return values.detach().clone(at::MemoryFormat::Preserve).requires_grad_();
}

Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(leaf(input));
  return leaves;
}

// A result, the gradients of its inputs, and other changed tensors.
struct Outcome {
  at::Tensor result;
  Tensors gradients;
  Tensors changed;
};

// The gradient that comes back to a result.
using GradOutput = std::function<at::Tensor(const at::Tensor& result)>;
at::Tensor ones(const at::Tensor& result) {
  return torch::ones_like(result);
}

Outcome outcome_of(const CastPolicy& policy, const Tensors& inputs, const Function& function,
                   const GradOutput& grad_output = ones) {
  const Tensors leaves = leaves_of(inputs);
  const Autocast region(policy);
  const at::Tensor result = function(leaves);
  return {result,
          torch::autograd::grad({result}, leaves, {grad_output(result)}, {}, false,
                                /*allow_unused=*/true),
          {}};
}

struct Outcomes {
  Outcome got;   // with our kernels
  Outcome want;  // without
};

// Of two different kernels.
Outcomes outcomes_of(const Tensors& inputs, const Function& function,
                     const GradOutput& grad_output = ones,
                     const CastPolicy& policy = with_kernels()) {
  Outcomes both{outcome_of(policy, inputs, function, grad_output),
                outcome_of(CastPolicy(policy).fast_kernels(false), inputs, function, grad_output)};
  EXPECT_TRUE(is_ours(both.got.result));
  EXPECT_FALSE(is_ours(both.want.result));
  return both;
}

void expect_close(const Tensors& got, const Tensors& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(want[i].defined());
    expect_close(got[i], want[i], tolerance);
  }
}

// The same in fp64, from the same (16-bit) numbers.
Outcome exact_outcome_of(const Tensors& inputs, const Function& function,
                         const GradOutput& grad_output = ones) {
  Tensors leaves;
  for (const at::Tensor& input : inputs)
    leaves.push_back(input.to(torch::kDouble).detach().requires_grad_());
  const at::Tensor result = function(leaves);
  return {
      result,
      torch::autograd::grad({result}, leaves, {grad_output(result).to(torch::kDouble)}, {}, false,
                            /*allow_unused=*/true),
      {}};
}

// Computed in fp32, with sums of this many terms, and rounded to its dtype this many times.
void expect_rounded(const at::Tensor& got, const at::Tensor& exact, std::int64_t terms,
                    int times = 1) {
  const double rounded =
      test::is_16_bits(got.scalar_type()) ? test::rounding_tolerance(got.scalar_type(), times) : 0;
  EXPECT_TRUE(test::near(got, exact, rounded + test::reduction_tolerance(torch::kFloat, terms)));
}
void expect_rounded(const Tensors& got, const Tensors& exact, std::int64_t terms, int times = 1) {
  ASSERT_EQ(got.size(), exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    SCOPED_TRACE(c10::str("tensor ", i));
    ASSERT_TRUE(exact[i].defined());
    expect_rounded(got[i], exact[i], terms, times);
  }
}

struct BatchNormCase {
  at::Tensor input;
  at::Tensor weight = torch::rand({6}) + 0.5;
  at::Tensor bias = torch::randn({6});
  at::Tensor mean = torch::zeros({6});
  at::Tensor var = torch::ones({6});
  at::Tensor grad = torch::randn_like(input);

  Outcome run(const CastPolicy& policy, bool training = true) const {
    const Tensors leaves = leaves_of({input, weight, bias});
    Outcome outcome{.result = {}, .gradients = {}, .changed = {mean.clone(), var.clone()}};
    {
      const Autocast region(policy);
      outcome.result = torch::batch_norm(leaves[0], leaves[1], leaves[2], outcome.changed[0],
                                         outcome.changed[1], training, 0.1, 1e-5, false);
    }
    outcome.gradients = torch::autograd::grad({outcome.result}, leaves, {grad});
    return outcome;
  }
};

// In fp64, from the same numbers.
Outcome exact_outcome_of(const BatchNormCase& layer) {
  const auto fp64 = [](const at::Tensor& tensor) { return tensor.to(torch::kDouble); };
  const Tensors leaves = leaves_of({fp64(layer.input), fp64(layer.weight), fp64(layer.bias)});
  Outcome outcome{.result = {},
                  .gradients = {},
                  .changed = {fp64(layer.mean).clone(), fp64(layer.var).clone()}};
  outcome.result = torch::batch_norm(leaves[0], leaves[1], leaves[2], outcome.changed[0],
                                     outcome.changed[1], true, 0.1, 1e-5, false);
  outcome.gradients = torch::autograd::grad({outcome.result}, leaves, {fp64(layer.grad)});
  return outcome;
}

BatchNormCase batch_norm_case(c10::ScalarType dtype) {
  return {.input = torch::randn({5, 6, 7, 9})
                       .mul(2)
                       .add(3)
                       .to(dtype)
                       .contiguous(at::MemoryFormat::ChannelsLast)};
}

TEST(FastKernels, BatchNormComputesWhatLibTorchDoes) {
  torch::manual_seed(0);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    SCOPED_TRACE(dtype);
    const BatchNormCase layer = batch_norm_case(dtype);
    const Outcome got = layer.run(with_kernels());
    const Outcome want = layer.run(without_kernels());
    EXPECT_TRUE(is_ours(got.result));
    EXPECT_FALSE(is_ours(want.result));
    EXPECT_EQ(got.result.strides(), want.result.strides());
    constexpr std::int64_t kTerms = 5 * 7 * 9;
    const Outcome exact = exact_outcome_of(layer);
    expect_rounded({got.result}, {exact.result}, kTerms);
    expect_rounded(got.gradients, exact.gradients, kTerms);
    expect_rounded(got.changed, exact.changed, kTerms);
    expect_close(got.result, want.result, test::pointwise_tolerance(dtype));
    expect_close(got.gradients, want.gradients, test::reduction_tolerance(dtype, kTerms));
    expect_close(got.changed, want.changed, test::reduction_tolerance(torch::kFloat, kTerms));
  }
}

TEST(FastKernels, BatchNormInEvaluationIsLibTorchs) {
  torch::manual_seed(1);
  const BatchNormCase layer = batch_norm_case(torch::kBFloat16);
  const Outcome got = layer.run(with_kernels(), /*training=*/false);
  const Outcome want = layer.run(without_kernels(), /*training=*/false);
  EXPECT_FALSE(is_ours(got.result));
  expect_bitwise_equal(got.result, want.result);
}

TEST(FastKernels, BatchNormThatSomebodyHooksIsLibTorchs) {
  const at::Tensor weight = torch::ones({6}).requires_grad_();
  const auto hook = weight.register_hook([](const at::Tensor& grad) { return grad; });
  const at::Tensor input = torch::randn({4, 6, 3, 3}).requires_grad_();
  const auto run = [&] {
    const Autocast region(with_kernels());
    return torch::batch_norm(input, weight, {}, {}, {}, true, 0.1, 1e-5, false);
  };
  EXPECT_FALSE(is_ours(run()));
  weight.remove_hook(hook);
  EXPECT_TRUE(is_ours(run()));
}

// A gradient penalty: the gradient of a function of a gradient.
Tensors second_gradients(const CastPolicy& policy, const Tensors& inputs,
                         const Function& function) {
  const Tensors leaves = leaves_of(inputs);
  const Autocast region(policy);
  const at::Tensor result = function(leaves);
  const Tensors first = torch::autograd::grad({result.pow(4).sum()}, {leaves[0]}, {}, true,
                                              /*create_graph=*/true);
  return torch::autograd::grad({first[0].mul(first[0]).sum()}, leaves, {}, {}, false,
                               /*allow_unused=*/true);
}

void expect_close_second_gradients(const Tensors& inputs, const Function& function,
                                   double tolerance) {
  expect_close(second_gradients(with_kernels(), inputs, function),
               second_gradients(without_kernels(), inputs, function), tolerance);
}

TEST(FastKernels, GradientsCanBeDifferentiatedAgain) {
  torch::manual_seed(2);
  const Tensors inputs{torch::randn({8, 6, 4, 4}), torch::rand({6}) + 0.5, torch::randn({6})};
  const auto normalize = [](const Tensors& leaves) {
    return torch::batch_norm(leaves[0], leaves[1], leaves[2], {}, {}, true, 0.1, 1e-5, false);
  };
  expect_close_second_gradients(inputs, normalize,
                                test::reduction_tolerance(torch::kFloat, 8 * 6 * 16));
}

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

at::Tensor image(const at::Tensor& values, c10::ScalarType dtype = torch::kFloat) {
  return values.to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
}

TEST(FastKernels, MaxPool2dComputesWhatLibTorchDoes) {
  torch::manual_seed(5);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    SCOPED_TRACE(dtype);
    const at::Tensor input = image(torch::randn({3, 20, 11, 9}), dtype);
    const auto graded = [](const at::Tensor& result) {
      return torch::linspace(-1, 1, result.numel()).view(result.sizes()).to(result.scalar_type());
    };
    const std::vector<Function> pools{
        [](const Tensors& in) { return torch::max_pool2d(in[0], 2); },
        [](const Tensors& in) { return torch::max_pool2d(in[0], {3}, {2}, {1}); },
        [](const Tensors& in) { return torch::max_pool2d(in[0], {3, 2}, {1, 3}, {1, 0}); },
    };
    for (const auto& pool : pools) {
      const auto [got, want] = outcomes_of({input}, pool, graded);
      expect_bitwise_equal(got.result, want.result);
      EXPECT_EQ(got.result.strides(), want.result.strides());
      EXPECT_EQ(got.gradients[0].strides(), want.gradients[0].strides());
      // LibTorch rounds after each of up to nine additions, Semitone once, so it is not a
      // reference.
      const Outcome exact = exact_outcome_of(
          {input}, pool, [&](const at::Tensor& result) { return graded(result.to(dtype)); });
      expect_rounded(got.gradients, exact.gradients, 9);
      const at::NoGradGuard no_grad;
      const Autocast region(with_kernels());
      expect_bitwise_equal(pool({input}), want.result);
    }
  }
}

TEST(FastKernels, MaxPool2dOfOtherArgumentsIsLibTorchs) {
  const at::Tensor x = image(torch::randn({2, 8, 40, 40})).requires_grad_();
  const Autocast region(with_kernels());
  EXPECT_TRUE(is_ours(torch::max_pool2d(x, 2)));
  EXPECT_TRUE(is_ours(torch::max_pool2d(x, {15, 17})));
  EXPECT_FALSE(is_ours(torch::max_pool2d(x, {16, 16})));
  EXPECT_FALSE(is_ours(torch::max_pool2d(x, 2, 2, 0, /*dilation=*/2)));
  EXPECT_FALSE(is_ours(torch::max_pool2d(x, 2, 2, 0, 1, /*ceil_mode=*/true)));
  EXPECT_FALSE(is_ours(torch::max_pool2d(x.contiguous(), 2)));
  EXPECT_FALSE(is_ours(torch::max_pool2d(x.to(torch::kDouble), 2)));
  EXPECT_FALSE(is_ours(torch::max_pool2d(x[0], 2)));
  EXPECT_FALSE(is_ours(torch::max_pool2d(image(x.slice(1, 0, 7)), 2)));
  EXPECT_THROW(torch::max_pool2d(x, 2, 2, /*padding=*/2), c10::Error);
  EXPECT_THROW(torch::max_pool2d(x, 41), c10::Error);
}

TEST(FastKernels, MaxPool2dCanBeDifferentiatedAgain) {
  torch::manual_seed(6);
  const Tensors inputs{image(torch::randn({2, 8, 7, 6}))};
  const auto pool = [](const Tensors& leaves) {
    return torch::max_pool2d(leaves[0], {3}, {2}, {1});
  };
  expect_close_second_gradients(inputs, pool, test::reduction_tolerance(torch::kFloat, 9));
}

struct Conv1x1Case {
  std::int64_t channels;
  std::int64_t out;
  std::vector<std::int64_t> stride;
  bool bias;
};

TEST(FastKernels, ConvolutionsOf1x1ComputeWhatLibTorchDoes) {
  torch::manual_seed(9);
  const std::vector<Conv1x1Case> cases{{24, 40, {1}, false}, {24, 40, {1, 1}, true},
                                       {40, 24, {2}, false}, {33, 17, {2, 1}, true},
                                       {64, 1, {1}, false},  {32, 48, {3}, true}};
  for (const auto& [channels, out, stride, with_bias] : cases) {
    SCOPED_TRACE(c10::str(channels, " to ", out, ", stride ", stride));
    Tensors inputs{image(torch::randn({5, channels, 27, 28}), torch::kBFloat16),
                   torch::randn({out, channels, 1, 1}).div(std::sqrt(channels))};
    if (with_bias) inputs.push_back(torch::randn({out}));
    const auto convolve = [&](const Tensors& in) {
      return torch::conv2d(in[0], in[1], with_bias ? in[2] : at::Tensor(), stride);
    };
    const GradOutput grad_output = [](const at::Tensor& result) {
      torch::manual_seed(10);
      return torch::randn_like(result);
    };
    const auto [got, want] = outcomes_of(inputs, convolve, grad_output, never_emulated());
    expect_bitwise_equal(got.result, want.result);
    EXPECT_EQ(got.result.strides(), want.result.strides());
    // Sums in fp32 and one rounding on both sides.
    expect_close(got.gradients, want.gradients, test::pointwise_tolerance(torch::kBFloat16));
  }
}

TEST(FastKernels, OtherConvolutionsAreLibTorchs) {
  const at::Tensor x = image(torch::randn({4, 32, 33, 32}), torch::kBFloat16).requires_grad_();
  const at::Tensor weight = torch::randn({16, 32, 1, 1}).requires_grad_();
  {
    const Autocast emulated(with_kernels().emulation(Emulation::always));
    EXPECT_FALSE(is_ours(torch::conv2d(x, weight)));
  }
  const Autocast region(never_emulated());
  EXPECT_TRUE(is_ours(torch::conv2d(x, weight)));
  EXPECT_FALSE(is_ours(torch::conv2d(x.contiguous(), weight)));
  EXPECT_FALSE(is_ours(torch::conv2d(x, weight, {}, 1, /*padding=*/1)));
  EXPECT_FALSE(is_ours(torch::conv2d(x, torch::randn({16, 32, 3, 3}))));
  EXPECT_FALSE(is_ours(torch::conv2d(x, torch::randn({16, 16, 1, 1}), {}, at::IntArrayRef{1},
                                     at::IntArrayRef{0}, at::IntArrayRef{1}, /*groups=*/2)));
  EXPECT_FALSE(is_ours(torch::conv2d(x.slice(0, 0, 1), weight)));  // few elements
  EXPECT_THROW(torch::conv2d(x, weight.slice(1, 0, 31)), c10::Error);
  EXPECT_THROW(torch::conv2d(x, weight, {}, 0), c10::Error);
  const at::NoGradGuard no_grad;
  expect_bitwise_equal(torch::conv2d(x, weight), [&] {
    const Autocast stock(never_emulated().fast_kernels(false));
    return torch::conv2d(x, weight);
  }());
}

TEST(FastKernels, ConvolutionsOf1x1CanBeDifferentiatedAgain) {
  torch::manual_seed(11);
  const Tensors inputs{image(torch::randn({4, 32, 33, 32}), torch::kBFloat16),
                       torch::randn({8, 32, 1, 1}, torch::kBFloat16)};
  const auto square = [](const Tensors& leaves) {
    return torch::conv2d(leaves[0] * leaves[0], leaves[1], {}, 2);
  };
  expect_close_second_gradients(inputs, square, test::pointwise_tolerance(torch::kBFloat16));
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
      const auto run = [&](const Tensors& in) { return function(in[0] * 1, in[1]); };
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

TEST(FastKernels, AttentionWithDropoutComputesWhatLibTorchDoes) {
  torch::manual_seed(4);
  const Tensors inputs{torch::randn({2, 3, 17, 8}), torch::randn({2, 3, 19, 8}),
                       torch::randn({2, 3, 19, 8})};
  const auto run = [&](const CastPolicy& policy, double p) {
    return outcome_of(policy, inputs, [p](const Tensors& in) {
      return torch::scaled_dot_product_attention(in[0], in[1], in[2], {}, p);
    });
  };
  // With such a small probability hardly any element is dropped, and finally none.
  const Outcome got = run(with_kernels(), 1e-9);
  const Outcome want = run(without_kernels(), 0);
  // Scaled query, scores, their softmax, dropout and product; LibTorch's kernel rounds some of
  // them.
  expect_close(got.result, want.result, test::rounding_tolerance(torch::kBFloat16, 5));
  expect_close(got.gradients, want.gradients, test::rounding_tolerance(torch::kBFloat16, 10));
  // The mean over many masks is the result without any.
  at::Tensor sum = torch::zeros_like(want.result, torch::kFloat);
  constexpr int kTimes = 400;
  for (int i = 0; i < kTimes; ++i) sum += run(with_kernels(), 0.25).result.detach();
  const at::Tensor off = (sum / kTimes - want.result.to(torch::kFloat)).abs();
  EXPECT_LT(off.mean().item<double>(), 0.05);
  EXPECT_GT(off.mean().item<double>(), 1e-4);
}

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
