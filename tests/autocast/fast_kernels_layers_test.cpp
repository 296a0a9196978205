// Semitone's kernels in place of LibTorch's: batch norm, max pooling and 1x1 convolutions.

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_policy.h"
#include "src/nn/batch_norm_mark.h"
#include "tests/autocast/fast_kernels_fixture.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace semitone::amp::fast_kernels_test {
namespace {

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
Outcome exact_outcome_of_batch_norm(const BatchNormCase& layer) {
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
    const Outcome exact = exact_outcome_of_batch_norm(layer);
    expect_rounded({got.result}, {exact.result}, kTerms);
    expect_rounded(got.gradients, exact.gradients, kTerms);
    expect_rounded(got.changed, exact.changed, kTerms);
    // The mean and the variance are sums, whose order depends on the number of threads.
    expect_close(got.result, want.result, test::reduction_tolerance(dtype, kTerms));
    expect_close(got.gradients, want.gradients, test::reduction_tolerance(dtype, kTerms));
    expect_close(got.changed, want.changed, test::reduction_tolerance(torch::kFloat, kTerms));
  }
}

TEST(FastKernels, BatchNormHasTheStridesOfLibTorchs) {
  torch::manual_seed(0);
  const auto channels_last = torch::randn({5, 12, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  for (const at::Tensor& input :
       {torch::randn({5, 9, 6}).transpose(1, 2), torch::randn({6, 40}).t(),
        channels_last.chunk(2, 1)[0], torch::randn({5, 7, 6, 9}).transpose(1, 2),
        torch::randn({2, 6, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast3d)}) {
    SCOPED_TRACE(input.sizes());
    const BatchNormCase layer{.input = input};
    const Outcome got = layer.run(with_kernels());
    const Outcome want = layer.run(without_kernels());
    EXPECT_TRUE(is_ours(got.result));
    EXPECT_EQ(got.result.strides(), want.result.strides());
    const double tolerance = test::reduction_tolerance(torch::kFloat, input.numel() / 6);
    expect_close(got.result, want.result, tolerance);
    expect_close(got.gradients, want.gradients, tolerance);
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

TEST(FastKernels, BatchNormWithAMarkIsLibTorchs) {
  const at::Tensor input = torch::randn({4, 6, 3, 3});
  const auto run = [&](const at::Tensor& weight, const at::Tensor& mean) {
    const Autocast region(with_kernels());
    const at::Tensor var = torch::ones({6});
    return torch::batch_norm(input, weight, {}, mean, var, true, 0.1, 1e-5, false);
  };
  const at::Tensor weight = torch::ones({6}).requires_grad_();
  const at::Tensor mean = torch::zeros({6});
  for (const at::Tensor& marked : {weight, mean}) {
    EXPECT_TRUE(is_ours(run(weight, mean)));
    nn::set_batch_norm_mark(marked, {});
    EXPECT_FALSE(is_ours(run(weight, mean)));
    nn::remove_batch_norm_mark(marked);
  }
}

TEST(FastKernels, BatchNormRunsTheHooksOfItsWeight) {
  const at::Tensor weight = (torch::rand({6}) + 0.5).requires_grad_();
  const at::Tensor input = torch::randn({4, 6, 3, 3});
  const auto gradient = [&] {
    const Autocast region(with_kernels());
    const at::Tensor result = torch::batch_norm(input, weight, {}, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(is_ours(result));
    weight.mutable_grad().reset();
    result.square().sum().backward();
    return weight.grad();
  };
  const at::Tensor plain = gradient();
  weight.register_hook([](const at::Tensor& grad) { return 2 * grad; });
  expect_bitwise_equal(gradient(), 2 * plain);
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
    const auto convolve = [&, &stride = stride, with_bias = with_bias](const Tensors& in) {
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

}  // namespace
}  // namespace semitone::amp::fast_kernels_test
