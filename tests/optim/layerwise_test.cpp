// LAMB, NovoGrad, LARC and Adagrad: behaviour that the conformance data do not cover.

#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/larc.h"
#include "tests/optim/against_torch.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <vector>

namespace semitone::test {
namespace {

using Tensors = std::vector<at::Tensor>;

template <typename Optimizer, typename Options>
auto constructing(const Options& options) {
  return [options] { Optimizer optimizer(Tensors{torch::ones({2})}, options); };
}

// ---- Adagrad ------------------------------------------------------------------------------------

TEST(FusedAdagrad, IsTorchsAdagrad) {
  expect_as_torch(
      [](const Tensors& ours, const Tensors& theirs) -> Pair {
        return {std::make_unique<optim::FusedAdagrad>(ours, optim::FusedAdagradOptions(0.1)
                                                                .lr_decay(0.1)
                                                                .weight_decay(0.01)
                                                                .initial_accumulator_value(0.5)
                                                                .eps(1e-6)),
                std::make_unique<torch::optim::Adagrad>(theirs, torch::optim::AdagradOptions(0.1)
                                                                    .lr_decay(0.1)
                                                                    .weight_decay(0.01)
                                                                    .initial_accumulator_value(0.5)
                                                                    .eps(1e-6))};
      },
      // Decay 2, sum 2, root 2, eps, quotient and learning rate 3.
      {.of_update = 9});
}

TEST(FusedAdagrad, ReadsTheArchivesOfTorchsAdagrad) {
  const auto theirs = torch::randn({10}).requires_grad_();
  const auto ours = theirs.detach().clone().requires_grad_();
  torch::optim::Adagrad source({theirs}, 0.02);
  theirs.mutable_grad() = torch::randn({10});
  source.step();
  std::stringstream file;
  torch::save(source, file);
  optim::FusedAdagrad target({ours});
  torch::load(target, file);
  EXPECT_EQ(target.steps_of(ours), 1);
  expect_bitwise_equal(target.state_of(ours, "sum"),
                       static_cast<const torch::optim::AdagradParamState&>(
                           *source.state().at(theirs.unsafeGetTensorImpl()))
                           .sum());
}

TEST(FusedAdagrad, TakesTheInitialValueOfTheGroup) {
  const auto weight = torch::ones({3}).requires_grad_();
  optim::FusedAdagrad optimizer({torch::optim::OptimizerParamGroup(
      {weight}, std::make_unique<optim::FusedAdagradOptions>(
                    optim::FusedAdagradOptions(0.1).initial_accumulator_value(2)))});
  weight.mutable_grad() = torch::ones({3});
  optimizer.step();
  expect_bitwise_equal(optimizer.state_of(weight, "sum"), torch::full({3}, 3.0));
}

TEST(FusedAdagrad, WritesArchivesThatTorchsAdagradReads) {
  const auto ours = torch::randn({10}).requires_grad_();
  const auto theirs = ours.detach().clone().requires_grad_();
  optim::FusedAdagrad source({ours}, optim::FusedAdagradOptions(0.02));
  for (int i = 0; i < 2; ++i) {
    ours.mutable_grad() = torch::randn({10});
    source.step();
  }
  std::stringstream file;
  torch::save(source, file);
  torch::optim::Adagrad target({theirs});
  torch::load(target, file);
  const auto& state = static_cast<const torch::optim::AdagradParamState&>(
      *target.state().at(theirs.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 2);
  expect_bitwise_equal(state.sum(), source.state_of(ours, "sum"));
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.02);
}

TEST(FusedAdagrad, RefusesOptionsOutOfRange) {
  using Options = optim::FusedAdagradOptions;
  expect_error(constructing<optim::FusedAdagrad>(Options(-1)), {"[optim.fused_adagrad]", "lr"});
  expect_error(constructing<optim::FusedAdagrad>(Options().lr_decay(-1)), {"lr_decay"});
  expect_error(constructing<optim::FusedAdagrad>(Options().initial_accumulator_value(-1)),
               {"initial_accumulator_value of at least 0", "-1"});
}

// ---- LAMB ---------------------------------------------------------------------------------------

// The formulas of Apex's code; its docstrings differ.
TEST(LayerwiseOptimizers, HaveApexsDefaults) {
  const optim::FusedLAMBOptions lamb;
  EXPECT_EQ(lamb.lr(), 1e-3);
  EXPECT_EQ(lamb.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(lamb.eps(), 1e-6);
  EXPECT_EQ(lamb.weight_decay(), 0.01);
  EXPECT_EQ(lamb.max_grad_norm(), 1);
  EXPECT_TRUE(lamb.adam_w_mode() && lamb.bias_correction() && lamb.grad_averaging());
  EXPECT_FALSE(lamb.use_nvlamb());
  const optim::FusedNovoGradOptions novograd;
  EXPECT_EQ(novograd.lr(), 1e-3);
  EXPECT_EQ(novograd.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(novograd.eps(), 1e-8);
  EXPECT_EQ(novograd.weight_decay(), 0);
  EXPECT_EQ(novograd.norm_type(), 2);
  EXPECT_TRUE(novograd.bias_correction() && novograd.grad_averaging());
  EXPECT_FALSE(novograd.reg_inside_moment() || novograd.init_zero());
  const optim::FusedAdagradOptions adagrad;
  EXPECT_EQ(adagrad.lr(), 1e-2);
  EXPECT_EQ(adagrad.lr_decay(), 0);
  EXPECT_EQ(adagrad.eps(), 1e-10);
  EXPECT_EQ(adagrad.weight_decay(), 0);
  EXPECT_EQ(adagrad.initial_accumulator_value(), 0);
  EXPECT_FALSE(adagrad.adagrad_w_mode());
  const optim::LARCOptions larc;
  EXPECT_EQ(larc.trust_coefficient(), 0.02);
  EXPECT_EQ(larc.eps(), 1e-8);
  EXPECT_TRUE(larc.clip());
}

TEST(FusedLAMB, ClipsByTheNormOfAllGroups) {
  torch::manual_seed(41);
  const auto make = [] {
    return Tensors{torch::linspace(-1, 1, 30).requires_grad_(),
                   torch::linspace(1, 3, 20).requires_grad_()};
  };
  const auto ours = make();
  const auto clipped = make();
  optim::FusedLAMB a(
      {torch::optim::OptimizerParamGroup({ours[0]}), torch::optim::OptimizerParamGroup({ours[1]})},
      optim::FusedLAMBOptions(0.1).max_grad_norm(0.5));
  optim::FusedLAMB b(clipped, optim::FusedLAMBOptions(0.1).max_grad_norm(0));
  for (int i = 0; i < 3; ++i) {
    double squares = 0;
    for (std::size_t k = 0; k < 2; ++k) {
      ours[k].mutable_grad() = torch::randn(ours[k].sizes());
      squares += ours[k].grad().to(at::kDouble).square().sum().item<double>();
    }
    for (std::size_t k = 0; k < 2; ++k)
      clipped[k].mutable_grad() = ours[k].grad() * (0.5 / std::sqrt(squares));
    a.step();
    b.step();
    for (std::size_t k = 0; k < 2; ++k) expect_close(ours[k].detach(), clipped[k].detach(), 2e-6);
  }
}

TEST(FusedLAMB, StepsAreScaledToTheWeights) {
  const auto small = torch::full({40}, 0.01).requires_grad_();
  const auto large = torch::full({40}, 100.0).requires_grad_();
  optim::FusedLAMB optimizer({small, large}, optim::FusedLAMBOptions(0.1).weight_decay(1e-6));
  small.mutable_grad() = torch::ones({40});
  large.mutable_grad() = torch::ones({40});
  optimizer.step();
  // |lr r u| = lr |p|
  expect_close(small.detach(), torch::full({40}, 0.009), 1e-5);
  expect_close(large.detach(), torch::full({40}, 90.0), 1e-5);
}

TEST(FusedLAMB, RefusesOptionsOutOfRange) {
  using Options = optim::FusedLAMBOptions;
  expect_error(constructing<optim::FusedLAMB>(Options(-1)), {"[optim.fused_lamb]", "lr"});
  expect_error(constructing<optim::FusedLAMB>(Options().max_grad_norm(-1)), {"max_grad_norm"});
  expect_error(constructing<optim::FusedLAMB>(Options().betas({0.9, 1.5})),
               {"the second of betas"});
}

// ---- NovoGrad -----------------------------------------------------------------------------------

TEST(FusedNovoGrad, KeepsOneNumberForEachParameter) {
  const auto weight = torch::ones({2}).requires_grad_();
  optim::FusedNovoGrad optimizer({weight}, optim::FusedNovoGradOptions(0.1).betas({0.9, 0.5}));
  EXPECT_FALSE(optimizer.state_of(weight, "grad_norm").defined());
  weight.mutable_grad() = torch::tensor({3.0F, 4.0F});
  optimizer.step();
  EXPECT_DOUBLE_EQ(optimizer.state_of(weight, "grad_norm").item<double>(), 5);
  weight.mutable_grad() = torch::tensor({0.0F, 1.0F});
  optimizer.step();
  EXPECT_DOUBLE_EQ(optimizer.state_of(weight, "grad_norm").item<double>(),
                   std::sqrt(0.5 * 25 + 0.5));
}

// The update does not depend on the size of the gradients, only on their direction.
TEST(FusedNovoGrad, NormalizesEachGradient) {
  torch::manual_seed(42);
  const auto a = torch::ones({50}).requires_grad_();
  const auto b = torch::ones({50}).requires_grad_();
  optim::FusedNovoGrad one({a}, optim::FusedNovoGradOptions(0.1).eps(0));
  optim::FusedNovoGrad two({b}, optim::FusedNovoGradOptions(0.1).eps(0));
  for (int i = 0; i < 3; ++i) {
    a.mutable_grad() = torch::randn({50});
    b.mutable_grad() = a.grad() * 1000;
    one.step();
    two.step();
    expect_close(b.detach(), a.detach(), 1e-6);
  }
}

TEST(FusedNovoGrad, RefusesOptionsOutOfRange) {
  using Options = optim::FusedNovoGradOptions;
  expect_error(constructing<optim::FusedNovoGrad>(Options().norm_type(1)),
               {"[optim.fused_novograd]", "norm_type 2 or 0", "got 1"});
  expect_error(constructing<optim::FusedNovoGrad>(Options().betas({-0.1, 0.9})),
               {"the first of betas"});
}

// ---- LARC ---------------------------------------------------------------------------------------

TEST(LARC, NeverExceedsTheLearningRateWhereItClips) {
  // |p| / |g| is large: the local rate would be, too.
  const auto weight = torch::full({10}, 100.0).requires_grad_();
  optim::LARC optimizer({weight}, optim::LARCOptions(0.1));
  weight.mutable_grad() = torch::full({10}, 1e-3);
  optimizer.step();
  expect_close(weight.detach(), torch::full({10}, 100 - 0.1 * 1e-3), 1e-6);
}

TEST(LARC, BoundsTheRelativeChangeOfALayer) {
  const auto weight = torch::full({10}, 2.0).requires_grad_();
  optim::LARC optimizer({weight}, optim::LARCOptions(0.5).trust_coefficient(0.02));
  weight.mutable_grad() = torch::full({10}, 1e4);  // an explosion
  optimizer.step();
  // lr * a * |g| = trust |p|
  expect_close(weight.detach(), torch::full({10}, 2 - 0.02 * 2), 1e-6);
}

TEST(LARC, RefusesOptionsOutOfRange) {
  using Options = optim::LARCOptions;
  expect_error(constructing<optim::LARC>(Options().trust_coefficient(0)),
               {"[optim.larc]", "trust_coefficient above 0 and finite", "got 0"});
  expect_error(constructing<optim::LARC>(Options().trust_coefficient(std::nan(""))),
               {"trust_coefficient above 0", "nan"});
  expect_error(constructing<optim::LARC>(Options().eps(-1)), {"eps of at least 0", "-1"});
  expect_error(constructing<optim::LARC>(Options().nesterov(true)), {"with nesterov"});
}

}  // namespace
}  // namespace semitone::test
