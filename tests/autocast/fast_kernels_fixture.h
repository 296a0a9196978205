#pragma once

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_policy.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Results with Semitone's kernels and with LibTorch's, and their comparison.
namespace semitone::amp::fast_kernels_test {

using test::expect_bitwise_equal;
using test::expect_close;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

inline CastPolicy with_kernels() {
  return CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
}
inline CastPolicy without_kernels() {
  return with_kernels().fast_kernels(false);
}
// On a processor without bf16 convolutions they are emulated, without Semitone's kernels.
// LibTorch's own slow ones compute the same.
inline CastPolicy never_emulated() {
  return with_kernels().emulation(Emulation::never);
}

inline bool is_ours(const at::Tensor& result) {
  return result.grad_fn() != nullptr &&
         result.grad_fn()->name().find("semitone") != std::string::npos;
}

inline at::Tensor leaf(const at::Tensor& values) {
  return values.detach().clone(at::MemoryFormat::Preserve).requires_grad_();
}

inline Tensors leaves_of(const Tensors& inputs) {
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
inline at::Tensor ones(const at::Tensor& result) {
  return torch::ones_like(result);
}

inline Outcome outcome_of(const CastPolicy& policy, const Tensors& inputs, const Function& function,
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
inline Outcomes outcomes_of(const Tensors& inputs, const Function& function,
                            const GradOutput& grad_output = ones,
                            const CastPolicy& policy = with_kernels()) {
  Outcomes both{outcome_of(policy, inputs, function, grad_output),
                outcome_of(CastPolicy(policy).fast_kernels(false), inputs, function, grad_output)};
  EXPECT_TRUE(is_ours(both.got.result));
  EXPECT_FALSE(is_ours(both.want.result));
  return both;
}

inline void expect_close(const Tensors& got, const Tensors& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(want[i].defined());
    expect_close(got[i], want[i], tolerance);
  }
}

// The same in fp64, from the same (16-bit) numbers.
inline Outcome exact_outcome_of(const Tensors& inputs, const Function& function,
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
inline void expect_rounded(const at::Tensor& got, const at::Tensor& exact, std::int64_t terms,
                           int times = 1) {
  const double rounded =
      test::is_16_bits(got.scalar_type()) ? test::rounding_tolerance(got.scalar_type(), times) : 0;
  EXPECT_TRUE(test::near(got, exact, rounded + test::reduction_tolerance(torch::kFloat, terms)));
}
inline void expect_rounded(const Tensors& got, const Tensors& exact, std::int64_t terms,
                           int times = 1) {
  ASSERT_EQ(got.size(), exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    SCOPED_TRACE(c10::str("tensor ", i));
    ASSERT_TRUE(exact[i].defined());
    expect_rounded(got[i], exact[i], terms, times);
  }
}

// A gradient penalty: the gradient of a function of a gradient.
inline Tensors second_gradients(const CastPolicy& policy, const Tensors& inputs,
                                const Function& function) {
  const Tensors leaves = leaves_of(inputs);
  const Autocast region(policy);
  const at::Tensor result = function(leaves);
  const Tensors first = torch::autograd::grad({result.pow(4).sum()}, {leaves[0]}, {}, true,
                                              /*create_graph=*/true);
  return torch::autograd::grad({first[0].mul(first[0]).sum()}, leaves, {}, {}, false,
                               /*allow_unused=*/true);
}

inline void expect_close_second_gradients(const Tensors& inputs, const Function& function,
                                          double tolerance) {
  expect_close(second_gradients(with_kernels(), inputs, function),
               second_gradients(without_kernels(), inputs, function), tolerance);
}

inline at::Tensor image(const at::Tensor& values, c10::ScalarType dtype = torch::kFloat) {
  return values.to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
}

}  // namespace semitone::amp::fast_kernels_test
