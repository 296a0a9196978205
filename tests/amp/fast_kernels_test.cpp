// Operators that run in kernels of our own inside a region, in models that know nothing of it.

#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_policy.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace semitone::amp {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using Tensors = std::vector<at::Tensor>;

CastPolicy with_kernels() {
  return CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
}
CastPolicy without_kernels() {
  return with_kernels().fast_kernels(false);
}

bool is_ours(const at::Tensor& result) {
  return result.grad_fn() != nullptr &&
         result.grad_fn()->name().find("semitone") != std::string::npos;
}

at::Tensor leaf(const at::Tensor& values) {
  return values.detach().clone(at::MemoryFormat::Preserve).requires_grad_();
}

// A result, the gradients of its inputs, and whatever else it changed.
struct Outcome {
  at::Tensor result;
  Tensors gradients;
  Tensors changed;
};

struct BatchNormCase {
  at::Tensor input;
  at::Tensor weight = torch::rand({6}) + 0.5;
  at::Tensor bias = torch::randn({6});
  at::Tensor mean = torch::zeros({6});
  at::Tensor var = torch::ones({6});
  at::Tensor grad = torch::randn_like(input);

  Outcome run(const CastPolicy& policy, bool training = true) const {
    const Tensors leaves{leaf(input), leaf(weight), leaf(bias)};
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
    const double sum = test::reduction_tolerance(dtype, 5 * 7 * 9);
    expect_close(got.result, want.result, test::pointwise_tolerance(dtype));
    for (std::size_t i = 0; i < want.gradients.size(); ++i)
      expect_close(got.gradients[i], want.gradients[i], sum);
    for (std::size_t i = 0; i < want.changed.size(); ++i)
      expect_close(got.changed[i], want.changed[i], test::reduction_tolerance(torch::kFloat, 315));
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
                         const std::function<at::Tensor(const Tensors&)>& function) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(leaf(input));
  const Autocast region(policy);
  const at::Tensor result = function(leaves);
  const Tensors first = torch::autograd::grad({result.pow(4).sum()}, {leaves[0]}, {}, true,
                                              /*create_graph=*/true);
  return torch::autograd::grad({first[0].mul(first[0]).sum()}, leaves, {}, {}, false,
                               /*allow_unused=*/true);
}

TEST(FastKernels, GradientsCanBeDifferentiatedAgain) {
  torch::manual_seed(2);
  const Tensors inputs{torch::randn({8, 6, 4, 4}), torch::rand({6}) + 0.5, torch::randn({6})};
  const auto normalize = [](const Tensors& leaves) {
    return torch::batch_norm(leaves[0], leaves[1], leaves[2], {}, {}, true, 0.1, 1e-5, false);
  };
  const Tensors got = second_gradients(with_kernels(), inputs, normalize);
  const Tensors want = second_gradients(without_kernels(), inputs, normalize);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(want[i].defined());
    expect_close(got[i], want[i], test::reduction_tolerance(torch::kFloat, 8 * 6 * 16));
  }
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
  test::expect_error([] { CastPolicy::semitone().fast_kernel("conv2d"); },
                     {"[amp.cast_policy]", "'conv2d'", "batch_norm"});
}

}  // namespace
}  // namespace semitone::amp
