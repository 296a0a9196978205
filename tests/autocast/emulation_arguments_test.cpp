// Emulated products: all kinds of arguments, functions of the program, and training.

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/functions.h"
#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"
#include "tests/autocast/emulation_fixture.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <utility>

namespace semitone::amp::emulation_test {
namespace {

using test::expect_bitwise_equal;

class EmulatedArguments : public testing::TestWithParam<c10::ScalarType> {
 protected:
  EmulatedArguments() { torch::manual_seed(12); }

  at::Tensor product(const at::Tensor& a, const at::Tensor& b) const {
    const Autocast region(semitone(GetParam()));
    return at::mm(a, b);
  }
  // mm of a and b by the definition.
  at::Tensor defined(const at::Tensor& a, const at::Tensor& b) const {
    return at::mm(rounded(a, GetParam()), rounded(b, GetParam())).to(GetParam());
  }
};

TEST_P(EmulatedArguments, OverflowUnderflowAndPassNanOnAsTheDtypeDoes) {
  const auto limits = dtype_limits(GetParam());
  const auto ones = torch::ones({1, 1});
  const auto largest = torch::full({1, 1}, limits.max);
  expect_bitwise_equal(product(largest, ones), largest.to(GetParam()));
  const auto too_large = product(torch::full({1, 2}, limits.max), torch::ones({2, 1}));
  EXPECT_EQ(too_large.item<double>(), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(product(ones * NAN, ones).isnan().item<bool>());
  for (const double value : {1e-3, 6e-5, 3e-6, 6e-8, 2e-8, 1e-39, 1e-41}) {
    SCOPED_TRACE(value);
    const auto small = torch::full({1, 1}, value);
    expect_bitwise_equal(product(small, ones), small.to(GetParam()));
  }
}

// The sum is rounded, not its terms: 2048 + 1 + 1 is 2048 if each sum is rounded to fp16.
TEST_P(EmulatedArguments, AccumulateInFp32) {
  const double step = 2 / dtype_limits(GetParam()).epsilon;  // whose successor is step + 2
  const auto a = torch::tensor({step, 1.0, 1.0}, kFp32).view({1, 3});
  EXPECT_EQ(product(a, torch::ones({3, 1})).item<double>(), step + 2);
}

TEST_P(EmulatedArguments, MayHaveDifferentDtypes) {
  const auto a = torch::randn({3, 4});
  const auto b = torch::randn({4, 5});
  for (const auto first : {kFp32, kFp16, kBf16}) {
    for (const auto second : {kFp32, kFp16, kBf16})
      expect_bitwise_equal(product(a.to(first), b.to(second)), defined(a.to(first), b.to(second)));
  }
}

TEST_P(EmulatedArguments, InDoubleAreLeftAlone) {
  const auto a = torch::randn({3, 4}, torch::kDouble);
  expect_bitwise_equal(product(a, a.t()), at::mm(a, a.t()));
  const Autocast region(none(GetParam()));
  EXPECT_THROW(at::mm(a.to(GetParam()), a.t()), c10::Error) << "mixed arguments raise as outside";
}

TEST_P(EmulatedArguments, MayBeEmpty) {
  const auto a = torch::randn({0, 4});
  const auto b = torch::randn({4, 5});
  expect_bitwise_equal(product(a, b), torch::empty({0, 5}, GetParam()));
  expect_bitwise_equal(product(b.slice(1, 0, 0), torch::randn({0, 3})),
                       torch::zeros({4, 3}, GetParam()));
  const Autocast region(semitone(GetParam()));
  expect_bitwise_equal(at::conv2d(torch::randn({0, 2, 5, 5}), torch::randn({3, 2, 3, 3})),
                       torch::empty({0, 3, 3, 3}, GetParam()));
}

TEST_P(EmulatedArguments, MayBeNonContiguous) {
  const auto a = torch::randn({8, 6});
  const auto b = torch::randn({6, 8});
  expect_bitwise_equal(product(b.t(), a.t()), defined(b.t(), a.t()));
  const auto wide = torch::randn({6, 16}).slice(1, 0, 16, 2);
  expect_bitwise_equal(product(a, wide), defined(a, wide));
  const auto expanded = torch::randn({6, 1}).expand({6, 8});
  expect_bitwise_equal(product(a, expanded), defined(a, expanded));

  const auto image = torch::randn({2, 4, 6, 6}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto weight = torch::randn({3, 4, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
  const Autocast region(semitone(GetParam()));
  const auto got = at::conv2d(image, weight);
  const DisableCasts no_casts;
  EXPECT_TRUE(got.is_contiguous(at::MemoryFormat::ChannelsLast));
  expect_bitwise_equal(
      got, at::conv2d(rounded(image, GetParam()), rounded(weight, GetParam())).to(GetParam()));
}

TEST_P(EmulatedArguments, InPlaceAndOutFormsAreLibTorchsOwn) {
  const auto a = torch::randn({4, 4}).to(GetParam());
  auto stock = torch::zeros({4, 4}, GetParam());
  at::mm_out(stock, a, a);
  auto got = torch::zeros({4, 4}, GetParam());
  const Autocast region(none(GetParam()));
  at::mm_out(got, a, a);
  expect_bitwise_equal(got, stock);
}

// Two products, the second of a 16-bit result: each is rounded.
at::Tensor cube(const at::Tensor& x) {
  return at::mm(at::mm(x, x), x);
}

at::Tensor cube_by_definition(const at::Tensor& x, c10::ScalarType dtype) {
  const at::Tensor wide = rounded(x, dtype);
  return at::mm(rounded(at::mm(wide, wide), dtype), wide).to(dtype);
}

TEST_P(EmulatedArguments, OfAHalfFunctionAndItsBackward) {
  const auto x = torch::randn({5, 5});
  const auto leaf = x.clone().requires_grad_();
  const auto gradient = torch::randn({5, 5}).to(GetParam());
  at::Tensor got;
  {
    const Autocast region(semitone(GetParam()));
    got = half_function(cube)(leaf);
  }
  expect_bitwise_equal(got.detach(), cube_by_definition(x, GetParam()));
  got.backward(gradient);

  const auto low = x.to(GetParam()).requires_grad_();
  {
    const Autocast region(none(GetParam()));
    cube(low.clone()).backward(gradient);  // no leaf, as the cast: each product rounds a gradient
  }
  expect_bitwise_equal(leaf.grad(), low.grad().to(kFp32));
}

TEST_P(EmulatedArguments, OfFunctionsThatGet16BitTensors) {
  const auto x = torch::randn({5, 5}).to(GetParam());
  const auto want = cube_by_definition(x, GetParam());
  const Autocast region(semitone(GetParam()));
  expect_bitwise_equal(promote_function(cube)(x), want);
  const auto scope = AutocastState::current().without_casts().enter();
  expect_bitwise_equal(cube(x), want);
  EXPECT_EQ(cube(x.to(kFp32)).scalar_type(), kFp32) << "nothing is cast";
  EXPECT_FALSE(autocast_enabled(kCpu));
}

TEST_P(EmulatedArguments, FunctionsInsideFunctionsAreCalledAsTheyAre) {
  const auto dtype_of = [](const at::Tensor& x) { return x.scalar_type(); };
  const auto nested = float_function([&](const at::Tensor& x) {
    return std::pair(half_function(dtype_of)(x), promote_function(dtype_of)(x.to(GetParam())));
  });
  const Autocast region(semitone(GetParam()));
  EXPECT_EQ(nested(torch::ones({2})), std::pair(kFp32, GetParam()));
  EXPECT_TRUE(autocast_enabled(kCpu)) << "on again afterwards";
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            c10::ScalarType dtype) {
    const CustomForward scope(ctx, dtype);
    const at::Tensor input = scope.cast(x);
    ctx->save_for_backward({input});
    return at::mm(input, input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const CustomBackward scope(ctx);
    const auto x = ctx->get_saved_variables()[0];
    return {at::mm(grads[0], x.t()), {}};
  }
};

TEST_P(EmulatedArguments, OfAnAutogradFunctionAndItsBackward) {
  const auto x = torch::randn({5, 5}).requires_grad_();
  const auto gradient = torch::randn({5, 5}).to(GetParam());
  at::Tensor got;
  {
    const Autocast region(semitone(GetParam()));
    got = Square::apply(x, GetParam());
  }
  expect_bitwise_equal(got.detach(), defined(x, x));
  got.backward(gradient);
  expect_bitwise_equal(x.grad(), defined(gradient, x.t()).to(kFp32));
}

// Whole steps, with a loss scale, in the dtypes that they should have.
TEST_P(EmulatedArguments, AreEnoughToTrainAModel) {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)), torch::nn::ReLU(),
                            torch::nn::Flatten(), torch::nn::Linear(4 * 36, 16), torch::nn::ReLU(),
                            torch::nn::Linear(16, 3));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto target = torch::arange(24).remainder(3);
  const auto x = torch::randn({24, 1, 8, 8}) + target.view({24, 1, 1, 1});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const Autocast region(semitone(GetParam()));
      const auto scores = net->forward(x);
      EXPECT_EQ(scores.scalar_type(), GetParam());
      loss = at::cross_entropy_loss(scores, target);
    }
    EXPECT_EQ(loss.scalar_type(), kFp32);
    (loss * 256).backward();
    for (const auto& parameter : net->parameters()) {
      EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
      parameter.mutable_grad().div_(256);
    }
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.2 * first);
}

// Weights in 16 bits, as at O3.
TEST_P(EmulatedArguments, AreEnoughToTrainA16BitModel) {
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  net->to(GetParam());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto x = torch::randn({32, 8}).to(GetParam());
  const auto target = x.to(kFp32).sum(1, true).tanh();
  double first = 0;
  double last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const Autocast region(none(GetParam()));
      loss = at::mse_loss(net->forward(x).to(kFp32), target);
    }
    loss.backward();
    for (const auto& parameter : net->parameters())
      EXPECT_EQ(parameter.grad().scalar_type(), GetParam());
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.3 * first);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, EmulatedArguments, testing::Values(kFp16, kBf16),
                         [](const auto& tested) { return dtype_name(tested.param); });

}  // namespace
}  // namespace semitone::amp::emulation_test
