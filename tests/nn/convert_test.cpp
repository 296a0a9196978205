#include "src/nn/convert.h"

#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace semitone::nn::convert_test {
namespace {

using test::expect_bitwise_equal;

constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16};

TEST(Convert, HasLibTorchsResultAndGradient) {
  torch::manual_seed(1);
  for (const std::int64_t rows : {3, 300}) {  // LibTorch's, and ours
    for (const auto from : kDtypes) {
      for (const auto to : kDtypes) {
        const at::Tensor values = torch::randn({rows, 512}).to(from);
        const at::Tensor ours = values.clone().requires_grad_();
        const at::Tensor theirs = values.clone().requires_grad_();
        const at::Tensor got = convert(ours, to);
        const at::Tensor want = theirs.to(to);
        expect_bitwise_equal(got.detach(), want.detach());
        const at::Tensor grad = torch::randn({rows, 512}).to(to);
        got.mul(2).backward(grad);
        want.mul(2).backward(grad);
        expect_bitwise_equal(ours.grad(), theirs.grad());
      }
    }
  }
}

TEST(RoundTo, HasTheResultAndGradientOfTwoConversions) {
  torch::manual_seed(2);
  for (const std::int64_t rows : {3, 300}) {  // LibTorch's, and ours
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      const at::Tensor values = torch::randn({rows, 512});
      const at::Tensor ours = values.clone().requires_grad_();
      const at::Tensor theirs = values.clone().requires_grad_();
      const at::Tensor got = round_to(ours, dtype);
      const at::Tensor want = theirs.to(dtype).to(torch::kFloat);
      expect_bitwise_equal(got.detach(), want.detach());
      const at::Tensor grad = torch::randn({rows, 512});
      got.mul(2).backward(grad);
      want.mul(2).backward(grad);
      expect_bitwise_equal(ours.grad(), theirs.grad());
      const torch::NoGradGuard no_grad;
      expect_bitwise_equal(round_to(ours, dtype), want);
      EXPECT_FALSE(round_to(ours, dtype).requires_grad());
    }
  }
}

TEST(RoundTo, CanBeDifferentiatedTwice) {
  const at::Tensor tensor = torch::randn({300, 512}).requires_grad_();
  const at::Tensor cube = round_to(tensor, torch::kBFloat16).to(torch::kDouble).pow(3).sum();
  const at::Tensor first = torch::autograd::grad({cube}, {tensor}, {}, true, true)[0];
  const at::Tensor second = torch::autograd::grad({first.sum()}, {tensor})[0];
  const at::Tensor rounded = tensor.detach().to(torch::kBFloat16).to(torch::kDouble);
  test::expect_close(second, (6 * rounded).to(torch::kFloat), 0x1p-7);
}

TEST(Convert, IsTheTensorItselfWhereNothingIsToBeDone) {
  const at::Tensor tensor = torch::randn({300, 512});
  EXPECT_TRUE(convert(tensor, torch::kFloat).is_same(tensor));
}

TEST(Convert, IsNotRecordedWhereNobodyAsks) {
  const at::Tensor tensor = torch::randn({300, 512}).requires_grad_();
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(convert(tensor, torch::kBFloat16).requires_grad());
}

// Its result counts for nothing.
struct Ignored : torch::autograd::Function<Ignored> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& x) {
    return x.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                                 const torch::autograd::variable_list& /*grads*/) {
    return {at::Tensor()};
  }
};

TEST(Convert, HasNoGradientWhereThereIsNone) {
  const at::Tensor tensor = torch::randn({300, 512}).requires_grad_();
  Ignored::apply(convert(tensor, torch::kBFloat16)).backward();
  EXPECT_FALSE(tensor.grad().defined());
}

TEST(Convert, CanBeDifferentiatedTwice) {
  const at::Tensor tensor = torch::randn({300, 512}).requires_grad_();
  const at::Tensor cube = convert(tensor, torch::kBFloat16).to(torch::kDouble).pow(3).sum();
  const at::Tensor first = torch::autograd::grad({cube}, {tensor}, {}, true, true)[0];
  const at::Tensor second = torch::autograd::grad({first.sum()}, {tensor})[0];
  const at::Tensor rounded = tensor.detach().to(torch::kBFloat16).to(torch::kDouble);
  test::expect_close(second, (6 * rounded).to(torch::kFloat), 0x1p-7);
}

}  // namespace
}  // namespace semitone::nn::convert_test
