#include "semitone/optim/fused_adam.h"

#include "tests/optim/against_torch.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <sstream>
#include <vector>

namespace semitone::test {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using Tensors = std::vector<at::Tensor>;

TEST(FusedAdam, HasApexsDefaults) {
  const FusedAdamOptions options;
  EXPECT_EQ(options.lr(), 1e-3);
  EXPECT_EQ(options.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(options.eps(), 1e-8);
  EXPECT_EQ(options.weight_decay(), 0);
  EXPECT_TRUE(options.adam_w_mode());
  EXPECT_TRUE(options.bias_correction());
  EXPECT_FALSE(options.amsgrad());
  EXPECT_FALSE(options.split_master());
  EXPECT_FALSE(options.bf16_state());
}

TEST(FusedAdam, IsTorchsAdamW) {
  for (const bool amsgrad : {false, true}) {
    expect_as_torch(
        [&](const Tensors& ours, const Tensors& theirs) -> Pair {
          return {std::make_unique<FusedAdam>(
                      ours, FusedAdamOptions(0.01).weight_decay(0.1).amsgrad(amsgrad)),
                  std::make_unique<torch::optim::AdamW>(
                      theirs, torch::optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(amsgrad))};
        },
        // Moments 3 and 4, root 2, corrections and eps 3, quotient 1; the weight is decayed and
        // moved.
        {.of_weight = 2, .of_update = 13});
  }
}

TEST(FusedAdam, IsTorchsAdamWithoutAdamWMode) {
  for (const bool amsgrad : {false, true}) {
    expect_as_torch(
        [&](const Tensors& ours, const Tensors& theirs) -> Pair {
          return {std::make_unique<FusedAdam>(ours, FusedAdamOptions(0.01)
                                                        .betas({0.8, 0.95})
                                                        .eps(1e-4)
                                                        .weight_decay(0.1)
                                                        .adam_w_mode(false)
                                                        .amsgrad(amsgrad)),
                  std::make_unique<torch::optim::Adam>(theirs, torch::optim::AdamOptions(0.01)
                                                                   .betas({0.8, 0.95})
                                                                   .eps(1e-4)
                                                                   .weight_decay(0.1)
                                                                   .amsgrad(amsgrad))};
        },
        {.of_update = 15});  // as above, and 2 for the decay of the gradient
  }
}

TEST(FusedAdam, MaximizeIsTheNegativeGradient) {
  const auto up = torch::randn({100}).requires_grad_();
  const auto down = up.detach().clone().requires_grad_();
  FusedAdam a({up}, FusedAdamOptions(0.1).weight_decay(0.1).maximize(true));
  FusedAdam b({down}, FusedAdamOptions(0.1).weight_decay(0.1));
  for (int i = 0; i < 3; ++i) {
    up.mutable_grad() = torch::randn({100});
    down.mutable_grad() = -up.grad();
    a.step();
    b.step();
    expect_bitwise_equal(up.detach(), down.detach());
  }
}

TEST(FusedAdam, BiasCorrectionCanBeLeftOut) {
  const auto weight = torch::ones({1}, at::kDouble).requires_grad_();
  FusedAdam optimizer({weight}, FusedAdamOptions(0.1).bias_correction(false));
  weight.mutable_grad() = torch::full({1}, 2.0, at::kDouble);
  optimizer.step();
  // m = 0.1 * 2, v = 0.001 * 4
  EXPECT_DOUBLE_EQ(weight.item<double>(), 1 - 0.1 * 0.2 / (std::sqrt(0.004) + 1e-8));
}

TEST(FusedAdam, ReadsTheArchivesOfTorchsAdamW) {
  torch::manual_seed(1);
  const auto theirs = torch::randn({10}).requires_grad_();
  const auto ours = theirs.detach().clone().requires_grad_();
  torch::optim::AdamW source({theirs}, torch::optim::AdamWOptions(0.02).weight_decay(0.3));
  for (int i = 0; i < 3; ++i) {
    theirs.mutable_grad() = torch::randn({10});
    source.step();
  }
  std::stringstream file;
  torch::save(source, file);
  FusedAdam target({ours});
  torch::load(target, file);
  EXPECT_EQ(target.steps_of(ours), 3);
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *source.state().at(theirs.unsafeGetTensorImpl()));
  expect_bitwise_equal(target.state_of(ours, "exp_avg"), state.exp_avg());
  expect_bitwise_equal(target.state_of(ours, "exp_avg_sq"), state.exp_avg_sq());
  const auto& options = static_cast<const FusedAdamOptions&>(target.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.02);
  EXPECT_EQ(options.weight_decay(), 0.3);
  EXPECT_TRUE(options.adam_w_mode()) << "not in the file: as before";
}

TEST(FusedAdam, WritesArchivesThatTorchsAdamWReads) {
  const auto ours = torch::randn({10}).requires_grad_();
  const auto theirs = ours.detach().clone().requires_grad_();
  FusedAdam source({ours}, FusedAdamOptions(0.02).weight_decay(0.3));
  ours.mutable_grad() = torch::randn({10});
  source.step();
  std::stringstream file;
  torch::save(source, file);
  torch::optim::AdamW target({theirs});
  torch::load(target, file);
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *target.state().at(theirs.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 1);
  expect_bitwise_equal(state.exp_avg(), source.state_of(ours, "exp_avg"));
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.02);
}

TEST(FusedAdam, ExchangesArchivesWithTorchsAdamAndItsLargestMoments) {
  torch::manual_seed(2);
  const auto theirs = torch::randn({10}).requires_grad_();
  const auto ours = theirs.detach().clone().requires_grad_();
  torch::optim::Adam source({theirs}, torch::optim::AdamOptions(0.02).amsgrad(true));
  for (int i = 0; i < 3; ++i) {
    theirs.mutable_grad() = torch::randn({10});
    source.step();
  }
  std::stringstream file;
  torch::save(source, file);
  FusedAdam middle({ours}, FusedAdamOptions().adam_w_mode(false));
  torch::load(middle, file);
  std::stringstream again;
  torch::save(middle, again);
  torch::optim::Adam target({theirs});
  torch::load(target, again);
  const auto state = [&](const torch::optim::Adam& optimizer) -> const auto& {
    return static_cast<const torch::optim::AdamParamState&>(
        *optimizer.state().at(theirs.unsafeGetTensorImpl()));
  };
  const auto& options = static_cast<const FusedAdamOptions&>(middle.param_groups()[0].options());
  EXPECT_TRUE(options.amsgrad());
  EXPECT_FALSE(options.adam_w_mode());
  EXPECT_EQ(state(target).step(), 3);
  expect_bitwise_equal(middle.state_of(ours, "max_exp_avg_sq"), state(source).max_exp_avg_sq());
  expect_bitwise_equal(state(target).max_exp_avg_sq(), state(source).max_exp_avg_sq());
  expect_bitwise_equal(state(target).exp_avg(), state(source).exp_avg());
}

TEST(FusedAdam, RefusesOptionsOutOfRange) {
  const auto make = [](const FusedAdamOptions& options) {
    return [options] { FusedAdam optimizer(Tensors{torch::ones({2})}, options); };
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_error(make(FusedAdamOptions(-1)), {"[optim.fused_adam]", "lr of at least 0", "-1"});
  expect_error(make(FusedAdamOptions().eps(nan)), {"eps", "nan"});
  expect_error(make(FusedAdamOptions().weight_decay(-0.1)), {"weight_decay", "-0.1"});
  expect_error(make(FusedAdamOptions().betas({1.0, 0.9})),
               {"the first of betas in [0, 1)", "got 1"});
  expect_error(make(FusedAdamOptions().betas({0.9, -0.5})), {"the second of betas", "-0.5"});
}

// ---- split masters ------------------------------------------------------------------------------

// Compares bf16 parameters with fp32 masters of the same values, with the same gradients.
TEST(FusedAdamSplitMaster, HoldsTheMastersOfFp32TrainingBitForBit) {
  torch::manual_seed(12);
  const auto split = torch::randn({70, 31}).to(at::kBFloat16).requires_grad_();
  const auto master = split.detach().to(at::kFloat).requires_grad_();
  FusedAdam a({split}, FusedAdamOptions(1e-4).weight_decay(0.1).split_master(true));
  FusedAdam b({master}, FusedAdamOptions(1e-4).weight_decay(0.1));
  std::int64_t ties = 0;
  for (int i = 0; i < 20; ++i) {
    split.mutable_grad() = torch::randn({70, 31}).to(at::kBFloat16);
    master.mutable_grad() = split.grad().to(at::kFloat);
    a.step();
    b.step();
    expect_bitwise_equal(a.master_of(split), master.detach());
    // The parameter is its master rounded: to nearest, but for ties, which go away from zero.
    const auto tie = master.detach().view(at::kInt).bitwise_and(0xFFFF).eq(0x8000);
    ties += tie.sum().item<std::int64_t>();
    const auto same = split.detach().eq(master.detach().to(at::kBFloat16)).logical_or(tie);
    EXPECT_TRUE(same.all().item<bool>());
    EXPECT_EQ(a.state_of(split, "exp_avg").scalar_type(), at::kFloat);
  }
  EXPECT_LT(ties, 20) << "one in 65536";
}

TEST(FusedAdamSplitMaster, LearnsFromUpdatesThatAreTooSmallForBf16) {
  const auto split = torch::ones({100}, at::kBFloat16).requires_grad_();
  const auto plain = torch::ones({100}, at::kBFloat16).requires_grad_();
  FusedAdam a({split}, FusedAdamOptions(1e-4).split_master(true));
  FusedAdam b({plain}, FusedAdamOptions(1e-4));
  for (int i = 0; i < 100; ++i) {
    split.mutable_grad() = torch::ones({100}, at::kBFloat16);
    plain.mutable_grad() = torch::ones({100}, at::kBFloat16);
    a.step();
    b.step();
  }
  expect_close(a.master_of(split), torch::full({100}, 0.99), 1e-5);
  EXPECT_TRUE(torch::equal(plain.detach(), torch::ones({100}, at::kBFloat16)));
}

TEST(FusedAdamSplitMaster, StartsFromExactWeights) {
  const auto exact = torch::randn({50});
  const auto split = exact.to(at::kBFloat16).requires_grad_();
  const auto master = exact.clone().requires_grad_();
  FusedAdam a({split}, FusedAdamOptions(0.01).split_master(true));
  FusedAdam b({master}, FusedAdamOptions(0.01));
  a.set_master(split, exact);
  expect_bitwise_equal(a.master_of(split), exact);
  EXPECT_EQ(a.steps_of(split), 0);
  split.mutable_grad() = torch::ones({50}, at::kBFloat16);
  master.mutable_grad() = torch::ones({50});
  a.step();
  b.step();
  expect_bitwise_equal(a.master_of(split), master.detach());
}

TEST(FusedAdamSplitMaster, TakesWeightsThatAreWrittenFromOutside) {
  const auto split = torch::randn({50}).to(at::kBFloat16).requires_grad_();
  FusedAdam optimizer({split}, FusedAdamOptions(1e-3).split_master(true));
  for (int i = 0; i < 3; ++i) {
    split.mutable_grad() = torch::randn({50}).to(at::kBFloat16);
    optimizer.step();
  }
  const auto loaded = torch::tensor({0.0, -0.0, 1.0, -2.0, 1e-30}, at::kBFloat16).repeat({10});
  {
    const at::NoGradGuard no_grad;
    split.copy_(loaded);
  }
  const auto master = optimizer.master_of(split);
  EXPECT_TRUE(master.isfinite().all().item<bool>());
  // At most half a unit of bf16 away.
  EXPECT_TRUE(((master - loaded).abs() <= loaded.abs() / 256 + 1e-38).all().item<bool>());
}

TEST(FusedAdamSplitMaster, EndsWhereTheParameterIsCast) {
  auto weight = torch::ones({3}, at::kBFloat16).requires_grad_();
  FusedAdam optimizer({weight}, FusedAdamOptions(1e-4).split_master(true));
  weight.mutable_grad() = torch::ones({3}, at::kBFloat16);
  optimizer.step();
  const auto master = optimizer.master_of(weight);
  weight.mutable_grad().reset();
  weight.set_data(master);
  EXPECT_TRUE(optimizer.master_of(weight).is_same(weight));
  weight.mutable_grad() = torch::ones({3});
  optimizer.step();
  expect_close(weight.detach(), torch::full({3}, 1 - 2e-4F), 1e-6);
}

TEST(FusedAdamSplitMaster, EndsWithTheFirstStepThatDoesNotSplit) {
  const auto weight = torch::randn({50}).to(at::kBFloat16).requires_grad_();
  FusedAdam optimizer({weight}, FusedAdamOptions(1e-3).split_master(true));
  const auto step = [&](bool splits) {
    static_cast<FusedAdamOptions&>(optimizer.param_groups()[0].options()).split_master(splits);
    weight.mutable_grad() = torch::randn({50}).to(at::kBFloat16);
    optimizer.step();
  };
  step(true);
  EXPECT_FALSE(torch::equal(optimizer.master_of(weight), weight.detach().to(at::kFloat)));
  step(false);
  EXPECT_TRUE(optimizer.master_of(weight).is_same(weight));
}

TEST(FusedAdamSplitMaster, IsForBf16) {
  const auto half = torch::ones({3}, at::kHalf).requires_grad_();
  const auto single = torch::ones({3}).requires_grad_();
  FusedAdam optimizer({single, half}, FusedAdamOptions().split_master(true));
  single.mutable_grad() = torch::ones({3});
  optimizer.step();  // fp32 is its own master
  EXPECT_TRUE(optimizer.master_of(single).is_same(single));
  half.mutable_grad() = torch::ones({3}, at::kHalf);
  const auto before = single.detach().clone();
  expect_error([&] { optimizer.step(); },
               {"[optim.fused_adam]", "float16 for parameter 1 of group 0"});
  expect_bitwise_equal(single.detach(), before);
  expect_error([&] { optimizer.set_master(single, torch::ones({3})); }, {"split_master"});
  const auto narrow = torch::ones({3}, at::kBFloat16);
  FusedAdam plain(Tensors{narrow});
  expect_error([&] { plain.set_master(narrow, torch::ones({3})); }, {"split_master"});
  FusedAdam good(Tensors{narrow}, FusedAdamOptions().split_master(true));
  expect_error([&] { good.set_master(narrow, torch::ones({4})); }, {"[3]", "[4]"});
}

}  // namespace
}  // namespace semitone::test
