#include "semitone/nn/fused_dropout.h"

#include "semitone/core/dtype.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <vector>

namespace semitone::nn::fused_dropout_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16,
                                       torch::kDouble};

class FusedDropoutTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TEST_F(FusedDropoutTest, SetsToZeroOrScales) {
  for (const auto dtype : kDtypes) {
    const at::Tensor input = torch::randn({100, 100}).to(dtype);
    const at::Tensor output = fused_dropout(input, 0.25);
    EXPECT_EQ(output.scalar_type(), dtype);
    const at::Tensor scaled =
        input.to(torch::kDouble).mul(static_cast<double>(static_cast<float>(1 / 0.75))).to(dtype);
    const at::Tensor kept = output.ne(0);
    if (dtype != torch::kDouble) {
      expect_bitwise_equal(output.masked_select(kept), scaled.masked_select(kept));
    }
    const double share = kept.to(torch::kDouble).mean().item<double>();
    EXPECT_LE(std::abs(share - 0.75), 5 * std::sqrt(0.75 * 0.25 / 10000));
  }
}

TEST_F(FusedDropoutTest, ExpectationIsTheInput) {
  for (const double p : {0.1, 0.3, 0.9}) {
    const double mean = fused_dropout(torch::ones({1'000'000}), p).mean().item<double>();
    EXPECT_LE(std::abs(mean - 1), 5 * std::sqrt(p / (1 - p) / 1e6)) << p;
  }
}

// The masks of successive calls, and of ranks, which seed with their numbers, are independent: at
// the same place, at neighbouring places, and in total.
TEST_F(FusedDropoutTest, MasksOfCallsAndOfRanksAreIndependent) {
  constexpr std::int64_t kSize = 1 << 18;
  constexpr double kP = 0.3;
  std::vector<at::Tensor> masks;
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    torch::manual_seed(1000 + rank);
    for (int call = 0; call < 3; ++call) {
      const at::Tensor dropped = fused_dropout(torch::ones({kSize}), kP).eq(0).to(torch::kDouble);
      // Of mean 0 and variance 1.
      masks.push_back(dropped.sub(kP).div(std::sqrt(kP * (1 - kP))));
    }
  }
  // Five standard deviations of a mean of products; p itself is rounded to 2^-16.
  const double most = 5 / std::sqrt(static_cast<double>(kSize)) + 0x1p-15;
  for (std::size_t i = 0; i < masks.size(); ++i) {
    EXPECT_LT(std::abs(masks[i].mean().item<double>()), most) << i;
    for (std::size_t j = 0; j <= i; ++j) {
      for (const std::int64_t shift : {0, 1, 8, 128, 1024}) {
        if (i == j && shift == 0) continue;
        const at::Tensor product = masks[i].mul(masks[j].roll(shift));
        EXPECT_LT(std::abs(product.mean().item<double>()), most)
            << i << " and " << j << ", shifted by " << shift;
      }
    }
  }
}

TEST_F(FusedDropoutTest, GradientHasTheSameMask) {
  for (const auto dtype : kDtypes) {
    for (const bool channels_last : {false, true}) {
      at::Tensor input = torch::ones({2, 5, 7, 11}, dtype);
      if (channels_last) input = input.contiguous(at::MemoryFormat::ChannelsLast);
      input.requires_grad_();
      const at::Tensor output = fused_dropout(input, 0.4);
      // In another layout than the output.
      const at::Tensor grad = torch::ones({2, 5, 7, 11}, dtype);
      output.backward(grad);
      expect_bitwise_equal(input.grad(), output);
    }
  }
}

TEST_F(FusedDropoutTest, GradientOfAGradientHasTheSameMask) {
  const at::Tensor input = torch::randn({1000}).requires_grad_();
  const at::Tensor ones = torch::ones({1000});
  const at::Tensor output = fused_dropout(input * input, 0.4);
  const at::Tensor mask = output.detach() / (input * input).detach();
  const at::Tensor gradient =
      torch::autograd::grad({output}, {input}, {ones}, true, /*create_graph=*/true)[0];
  const at::Tensor second = torch::autograd::grad({gradient}, {input}, {ones})[0];
  test::expect_close(gradient.detach(), 2 * input.detach() * mask, 1e-6);
  test::expect_close(second, 2 * mask, 1e-6);

  // Also for the gradient with respect to its argument.
  at::Tensor cotangent = torch::randn({1000}).requires_grad_();
  const at::Tensor x = torch::randn({1000}).requires_grad_();
  const at::Tensor y = fused_dropout(x, 0.4);
  const at::Tensor back = torch::autograd::grad({y}, {x}, {cotangent}, true, true)[0];
  const at::Tensor again = torch::autograd::grad({back}, {cotangent}, {x.detach()})[0];
  expect_bitwise_equal(again, y.detach());
}

TEST_F(FusedDropoutTest, ResidualIsAddedInOnePass) {
  for (const auto dtype : kDtypes) {
    for (const auto residual_dtype : kDtypes) {
      SCOPED_TRACE(c10::str(dtype_name(dtype), " + ", dtype_name(residual_dtype)));
      at::Tensor input = torch::randn({10, 333}).to(dtype).requires_grad_();
      at::Tensor residual = torch::randn({10, 333}).to(residual_dtype).requires_grad_();
      torch::manual_seed(7);
      const at::Tensor output = fused_dropout_add(input, residual, 0.4);
      EXPECT_EQ(output.scalar_type(), c10::promoteTypes(dtype, residual_dtype));
      torch::manual_seed(7);
      const at::Tensor factors = fused_dropout(torch::ones({10, 333}, torch::kDouble), 0.4);
      const auto wide = output.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
      expect_bitwise_equal(output.detach(),
                           (input.detach().to(wide) * factors.to(wide) + residual.detach().to(wide))
                               .to(output.scalar_type()));

      const at::Tensor grad = torch::randn({10, 333}).to(output.scalar_type());
      output.backward(grad);
      expect_bitwise_equal(residual.grad(), grad.to(residual_dtype));
      expect_bitwise_equal(input.grad(), (grad.to(wide) * factors.to(wide)).to(dtype));
    }
  }
}

TEST_F(FusedDropoutTest, OnlyTheGradientsThatAreWantedAreMade) {
  at::Tensor input = torch::randn({50});
  at::Tensor residual = torch::randn({50}).requires_grad_();
  fused_dropout_add(input, residual).sum().backward();
  expect_bitwise_equal(residual.grad(), torch::ones({50}));
  EXPECT_FALSE(input.grad().defined());

  at::Tensor other = torch::randn({50}).requires_grad_();
  fused_dropout_add(other, residual.detach()).sum().backward();
  EXPECT_TRUE(other.grad().defined());
}

TEST_F(FusedDropoutTest, IsTheIdentityInEvaluationAndWithoutProbabilityOrElements) {
  const at::Tensor input = torch::randn({50});
  const at::Tensor empty = torch::randn({0, 3});
  const at::Tensor residual = torch::randn({50}, torch::kDouble);
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_TRUE(fused_dropout(input, 0.5, /*train=*/false).is_same(input));
  EXPECT_TRUE(fused_dropout(input, 0).is_same(input));
  EXPECT_TRUE(fused_dropout(empty, 0.5).is_same(empty));
  expect_bitwise_equal(fused_dropout_add(input, residual, 0.5, false), input + residual);
  expect_bitwise_equal(fused_dropout_add(input, residual, 0), input + residual);
  // It draws nothing from the generator.
  expect_bitwise_equal(at::detail::getDefaultCPUGenerator().get_state(), state);
}

TEST_F(FusedDropoutTest, ASumHasTheInputsStrides) {
  const at::Tensor images = torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  for (const bool train : {false, true})
    EXPECT_EQ(fused_dropout_add(images, torch::ones({2, 3, 4, 5}), 0.5, train).strides(),
              images.strides());
}

TEST_F(FusedDropoutTest, DropsAllWithProbabilityOne) {
  const at::Tensor input = torch::randn({50}).requires_grad_();
  const at::Tensor output = fused_dropout(input, 1);
  expect_bitwise_equal(output, at::dropout(input, 1, true));
  output.sum().backward();
  expect_bitwise_equal(input.grad(), torch::zeros({50}));
}

TEST_F(FusedDropoutTest, InfinitiesAndNansGoOnAsInLibTorch) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double value : {kInf, -kInf, std::nan("")}) {
    for (const auto& output : {fused_dropout(torch::full({1000}, value), 0.5),
                               at::dropout(torch::full({1000}, value), 0.5, true)}) {
      EXPECT_FALSE(output.isfinite().any().item<bool>());
      EXPECT_TRUE(output.isnan().any().item<bool>());
    }
  }
}

TEST_F(FusedDropoutTest, SeedsAreThoseOfTheDefaultGenerator) {
  const at::Tensor ones = torch::ones({1000});
  torch::manual_seed(3);
  const at::Tensor first = fused_dropout(ones);
  const at::Tensor second = fused_dropout(ones);
  EXPECT_FALSE(first.equal(second));
  torch::manual_seed(3);
  expect_bitwise_equal(fused_dropout(ones), first);
  // As activation checkpointing does.
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  expect_bitwise_equal(fused_dropout(ones), second);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(state);
  expect_bitwise_equal(fused_dropout(ones), second);
  torch::manual_seed(4);
  EXPECT_FALSE(fused_dropout(ones).equal(first));
}

TEST_F(FusedDropoutTest, WithoutGradientsNothingIsRecorded) {
  const at::Tensor input = torch::randn({50}).requires_grad_();
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(fused_dropout(input).requires_grad());
  EXPECT_FALSE(fused_dropout_add(input, input).requires_grad());
  const c10::InferenceMode inference;
  EXPECT_EQ(fused_dropout(torch::randn({50})).numel(), 50);
}

TEST_F(FusedDropoutTest, AutocastLeavesTheDtypes) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor input = torch::randn({50}, torch::kBFloat16).requires_grad_();
  const at::Tensor residual = torch::randn({50}).requires_grad_();
  const at::Tensor output = fused_dropout_add(input, residual);
  const at::Tensor alone = fused_dropout(input);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(output.scalar_type(), torch::kFloat);
  EXPECT_EQ(alone.scalar_type(), torch::kBFloat16);
  output.sum().backward();
  EXPECT_EQ(input.grad().scalar_type(), torch::kBFloat16);
}

TEST_F(FusedDropoutTest, ModuleDropsInTrainingOnly) {
  FusedDropout dropout(0.9);
  const at::Tensor input = torch::ones({1000});
  EXPECT_FALSE(dropout(input).equal(input));
  EXPECT_TRUE(dropout(input, input).ge(1).all().item<bool>());
  dropout->eval();
  EXPECT_TRUE(dropout(input).is_same(input));
  expect_bitwise_equal(dropout(input, input), input * 2);
  std::stringstream text;
  text << *dropout;
  EXPECT_EQ(text.str(), "semitone::nn::FusedDropout(p=0.9)");
  torch::nn::Sequential sequence{FusedDropout(0.0)};
  expect_bitwise_equal(sequence->forward(input), input);
  EXPECT_NE(std::dynamic_pointer_cast<FusedDropoutImpl>(dropout->clone()), nullptr);
}

TEST_F(FusedDropoutTest, BadArgumentsAreErrors) {
  const at::Tensor input = torch::randn({5});
  for (const double p : {-0.1, 1.1, std::nan("")}) {
    expect_error([&] { fused_dropout(input, p); }, {"nn.fused_dropout", "p in [0, 1]"});
    expect_error([&] { fused_dropout(input, p, false); }, {"p in [0, 1]"});
    expect_error([&] { fused_dropout_add(input, input, p); }, {"p in [0, 1]"});
    expect_error([&] { FusedDropout{p}; }, {"p in [0, 1]"});
  }
  expect_error([&] { fused_dropout({}); }, {"nn.fused_dropout", "undefined"});
  expect_error([&] { fused_dropout_add({}, input); }, {"undefined"});
  expect_error([&] { fused_dropout_add(input, {}); }, {"nn.fused_dropout_add", "undefined"});
  expect_error([&] { fused_dropout_add(input, torch::randn({6})); }, {"[5]", "[6]"});
}

}  // namespace
}  // namespace semitone::nn::fused_dropout_test
