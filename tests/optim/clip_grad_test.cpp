#include "semitone/optim/clip_grad.h"

#include "semitone/optim/fused_sgd.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace semitone::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> with_grads(std::initializer_list<at::Tensor> grads) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& grad : grads) {
    parameters.push_back(torch::zeros_like(grad).requires_grad_());
    parameters.back().mutable_grad() = grad.clone();
  }
  return parameters;
}

TEST(ClipGradNorm, IsTorchs) {
  torch::manual_seed(31);
  const auto a = torch::randn({100});
  const auto b = torch::randn({3, 4}).t();
  const auto c = torch::randn({});
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.5, 3.0, 1000.0, 0.0}) {
      SCOPED_TRACE(c10::str("norm_type ", norm_type, ", max_norm ", max_norm));
      const auto ours = with_grads({a, b, c});
      const auto theirs = with_grads({a, b, c});
      const double got = optim::clip_grad_norm_(ours, max_norm, norm_type);
      const double want = torch::nn::utils::clip_grad_norm_(theirs, max_norm, norm_type);
      EXPECT_NEAR(got, want, 1e-5 * want);
      for (std::size_t i = 0; i < ours.size(); ++i)
        expect_close(ours[i].grad(), theirs[i].grad(), 4e-6);
      EXPECT_TRUE(optim::grad_norm(ours, norm_type) <= std::max(max_norm, 1e-30) * (1 + 1e-6) ||
                  max_norm > want);
    }
  }
}

TEST(ClipGradNorm, LeavesGradientsThatAreSmallEnoughBitForBit) {
  const auto grad = torch::tensor({3.0F, 4.0F});
  const auto parameters = with_grads({grad});
  const auto version = parameters[0].grad()._version();
  EXPECT_EQ(optim::clip_grad_norm_(parameters, 5.1), 5);
  expect_bitwise_equal(parameters[0].grad(), grad);
  EXPECT_EQ(parameters[0].grad()._version(), version) << "nothing was written";
}

TEST(ClipGradNorm, TakesGradientsOfDifferentDtypes) {
  const auto parameters =
      with_grads({torch::full({4}, 1.0), torch::full({4}, 1.0, at::kHalf),
                  torch::full({4}, 1.0, at::kBFloat16), torch::full({4}, 1.0, at::kDouble)});
  EXPECT_DOUBLE_EQ(optim::clip_grad_norm_(parameters, 2.0), 4);
  for (const at::Tensor& parameter : parameters) {
    const auto dtype = parameter.scalar_type();  // the factor is rounded, and the product
    expect_close(parameter.grad(), torch::full({4}, 2 / (4 + 1e-6), dtype),
                 2 * rounding_tolerance(dtype));
  }
}

TEST(ClipGradNorm, CountsAParameterOnceAndSkipsThoseWithoutGradient) {
  auto parameters = with_grads({torch::tensor({3.0F, 4.0F})});
  parameters.push_back(parameters[0]);
  parameters.push_back(torch::ones({3}).requires_grad_());
  EXPECT_EQ(optim::clip_grad_norm_(parameters, 2.5), 5);
  expect_close(parameters[0].grad(), torch::tensor({1.5F, 2.0F}), 1e-6);
  EXPECT_EQ(optim::clip_grad_norm_({torch::ones({3})}, 1), 0);
  EXPECT_EQ(optim::clip_grad_norm_({}, 1), 0);
}

// Autograd gives both the one gradient of their sum.
TEST(ClipGradNorm, ClipsAGradientThatTwoParametersShareOnce) {
  const auto a = torch::ones({300, 400}).requires_grad_();
  const auto b = torch::ones({400, 300}).requires_grad_();
  (a.view({-1}) + b.view({-1})).square().sum().backward();
  ASSERT_EQ(a.grad().data_ptr(), b.grad().data_ptr());
  const double norm = optim::clip_grad_norm_({a, b}, 1);
  expect_close(torch::tensor(norm), torch::tensor(4 * std::sqrt(240000.0)), 1e-6);
  for (const at::Tensor& parameter : {a, b}) {
    const double want = 4 / (norm + 1e-6);
    expect_close(parameter.grad(), torch::full_like(parameter.grad(), want), 1e-6);
  }
}

TEST(ClipGradNorm, RefusesNonFiniteGradientsOnRequestBeforeAnythingIsChanged) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const auto grad = torch::tensor({1.0F, bad, 2.0F});
    for (const double norm_type : {2.0, 1.0, kInfinity}) {
      const auto parameters = with_grads({torch::full({5}, 9.0), grad});
      expect_error([&] { optim::clip_grad_norm_(parameters, 1, norm_type, true); },
                   {"[optim.clip_grad_norm_]", "finite gradients", "a norm of"});
      expect_bitwise_equal(parameters[0].grad(), torch::full({5}, 9.0F));
      expect_bitwise_equal(parameters[1].grad(), grad);
      EXPECT_FALSE(std::isfinite(optim::clip_grad_norm_(parameters, 1, norm_type)));
    }
  }
}

TEST(ClipGradNorm, OfNonFiniteGradientsIsTorchsWithoutRequest) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const auto grad = torch::tensor({1.0F, bad, 2.0F});
    const auto ours = with_grads({grad});
    const auto theirs = with_grads({grad});
    optim::clip_grad_norm_(ours, 1);
    torch::nn::utils::clip_grad_norm_(theirs, 1);
    expect_bitwise_equal(ours[0].grad(), theirs[0].grad());
  }
}

TEST(ClipGradNorm, ClipsTheValuesOfSparseGradients) {
  const auto indices = torch::tensor({{0, 2, 0}});
  const auto parameters = with_grads({torch::zeros({4})});
  parameters[0].mutable_grad() =
      torch::sparse_coo_tensor(indices, torch::tensor({1.0F, 4.0F, 2.0F}), {4});
  EXPECT_EQ(optim::clip_grad_norm_(parameters, 2.5), 5) << "repeated indices are added up first";
  expect_close(parameters[0].grad().to_dense(), torch::tensor({1.5F, 0.0F, 2.0F, 0.0F}), 1e-6);
}

TEST(ClipGradNorm, RefusesNormsThatMakeNoSense) {
  const auto parameters = with_grads({torch::ones({2})});
  expect_error([&] { optim::clip_grad_norm_(parameters, -1); }, {"max_norm of at least 0", "-1"});
  expect_error([&] { optim::clip_grad_norm_(parameters, std::nan("")); }, {"max_norm", "nan"});
  expect_error([&] { optim::clip_grad_norm_(parameters, 1, 0); }, {"norm_type above 0"});
  expect_error([&] { optim::grad_norm(parameters, -2); }, {"norm_type above 0"});
}

TEST(ClipGradsWithNorm, ClipsAsClipGradNormDoes) {
  torch::manual_seed(33);
  const auto a = torch::randn({100});
  const auto b = torch::randn({3, 4}).t().to(torch::kHalf);
  const auto c = torch::randn({}, torch::kDouble);
  const auto d = torch::randn({5}, torch::kComplexFloat);
  for (const double norm_type : {2.0, 1.0, kInfinity}) {
    for (const double max_norm : {0.5, 1000.0}) {
      SCOPED_TRACE(c10::str("norm_type ", norm_type, ", max_norm ", max_norm));
      const auto got = with_grads({a, b, c, d});
      const auto want = with_grads({a, b, c, d});
      const auto norm = optim::get_total_norm({a, {}, b, c, d}, norm_type);
      optim::clip_grads_with_norm_(got, max_norm, norm);
      EXPECT_EQ(norm.item<double>(), optim::clip_grad_norm_(want, max_norm, norm_type));
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].grad().equal(want[i].grad()));
    }
  }
  EXPECT_EQ(optim::get_total_norm({}).item<double>(), 0);
}

TEST(ClipGradsWithNorm, TreatsNormsThatAreNotFiniteAsTorch) {
  const auto infinite = with_grads({torch::tensor({1.0F, 2.0F})});
  optim::clip_grads_with_norm_(infinite, 1, torch::tensor(kInfinity));
  EXPECT_TRUE(infinite[0].grad().equal(torch::zeros({2})));
  const auto nan = with_grads({torch::tensor({1.0F, 2.0F})});
  optim::clip_grads_with_norm_(nan, 1, torch::tensor(std::nan("")));
  EXPECT_TRUE(nan[0].grad().isnan().all().item<bool>());
}

TEST(ClipGradsWithNorm, RefusesWhatMakesNoSense) {
  const auto parameters = with_grads({torch::ones({2})});
  const auto norm = torch::ones({1});
  expect_error([&] { optim::clip_grads_with_norm_(parameters, -1, norm); }, {"max_norm", "-1"});
  expect_error([&] { optim::clip_grads_with_norm_(parameters, 1, torch::ones({2})); },
               {"one floating-point element"});
  expect_error([&] { optim::clip_grads_with_norm_(parameters, 1, {}); }, {"undefined"});
  expect_error([&] { optim::scale_grads_(parameters, torch::ones({1}, torch::kLong)); },
               {"one floating-point element"});
  expect_error([&] { optim::get_total_norm(parameters, 0); }, {"norm_type above 0"});
  EXPECT_TRUE(parameters[0].grad().equal(torch::ones({2})));
}

TEST(ClipFactor, IsTorchs) {
  EXPECT_EQ(optim::clip_factor(0.5, 1), 1);
  EXPECT_EQ(optim::clip_factor(0, 1), 1);
  EXPECT_DOUBLE_EQ(optim::clip_factor(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(optim::clip_factor(kInfinity, 1), 0);
  EXPECT_TRUE(std::isnan(optim::clip_factor(std::nan(""), 1)));
}

// The header's example: one read-only pass and one step do what unscaling, clipping and stepping
// do.
TEST(ClipFactor, ClipsInsideAStep) {
  torch::manual_seed(32);
  const auto grad = torch::randn({50}) * 10;
  const auto a = torch::randn({50}).requires_grad_();
  const auto b = a.detach().clone().requires_grad_();
  a.mutable_grad() = grad * 1024;
  b.mutable_grad() = grad.clone();
  optim::FusedSGD one({a}, optim::FusedSGDOptions(0.1));
  optim::FusedSGD two({b}, optim::FusedSGDOptions(0.1));
  const double norm = optim::grad_norm({a}) / 1024;
  EXPECT_TRUE(one.step(optim::FusedStep()
                           .inv_scale(1.0 / 1024)
                           .clip(optim::clip_factor(norm, 1.0))
                           .found_inf(torch::full({1}, !std::isfinite(norm)))));
  EXPECT_NEAR(optim::clip_grad_norm_({b}, 1.0), norm, 1e-6 * norm);
  two.step();
  expect_close(a.detach(), b.detach(), 1e-6);

  a.mutable_grad() = torch::full({50}, kInfinity);
  const double bad = optim::grad_norm({a});
  EXPECT_FALSE(one.step(optim::FusedStep()
                            .clip(optim::clip_factor(bad, 1.0))
                            .found_inf(torch::full({1}, !std::isfinite(bad)))));
}

}  // namespace
}  // namespace semitone::test
