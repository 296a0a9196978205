#include "semitone/optim/fused_sgd.h"

#include "tests/optim/against_torch.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <vector>

namespace semitone::test {
namespace {

using optim::FusedSGD;
using optim::FusedSGDOptions;
using Tensors = std::vector<at::Tensor>;

TEST(FusedSGD, IsTorchsSGD) {
  struct Case {
    double momentum, dampening, weight_decay;
    bool nesterov;
  };
  for (const Case& c : {Case{0, 0, 0, false},
                        {0, 0, 0.1, false},
                        {0.9, 0, 0.01, false},
                        {0.9, 0.3, 0.01, false},
                        {0.9, 0, 0.01, true}}) {
    SCOPED_TRACE(c10::str(c.momentum, " ", c.dampening, " ", c.weight_decay, " ", c.nesterov));
    expect_as_torch(
        [&](const Tensors& ours, const Tensors& theirs) -> Pair {
          return {std::make_unique<FusedSGD>(ours, FusedSGDOptions(0.02)
                                                       .momentum(c.momentum)
                                                       .dampening(c.dampening)
                                                       .weight_decay(c.weight_decay)
                                                       .nesterov(c.nesterov)),
                  std::make_unique<torch::optim::SGD>(theirs, torch::optim::SGDOptions(0.02)
                                                                  .momentum(c.momentum)
                                                                  .dampening(c.dampening)
                                                                  .weight_decay(c.weight_decay)
                                                                  .nesterov(c.nesterov))};
        },
        // Decay 2, buffer 3, Nesterov 2, learning rate 1.
        {.of_update = 8});
  }
}

TEST(FusedSGD, KeepsNoStateWithoutMomentum) {
  const auto weight = torch::ones({3}).requires_grad_();
  FusedSGD optimizer({weight}, FusedSGDOptions(0.5));
  weight.mutable_grad() = torch::ones({3});
  optimizer.step();
  EXPECT_FALSE(optimizer.state_of(weight, "momentum_buffer").defined());
  EXPECT_TRUE(torch::equal(weight, torch::full({3}, 0.5)));
}

TEST(FusedSGD, MakesTheBufferInTheFirstStepThatIsTaken) {
  const auto weight = torch::ones({3}).requires_grad_();
  FusedSGD optimizer({weight}, FusedSGDOptions(0.5).momentum(0.9).dampening(0.5));
  weight.mutable_grad() = torch::full({3}, 4.0);
  optimizer.step(optim::FusedStep().found_inf(torch::ones({1})));
  EXPECT_FALSE(optimizer.state_of(weight, "momentum_buffer").defined());
  optimizer.step();
  expect_bitwise_equal(optimizer.state_of(weight, "momentum_buffer"), torch::full({3}, 4.0));
  optimizer.step();
  expect_bitwise_equal(optimizer.state_of(weight, "momentum_buffer"),
                       torch::full({3}, 4.0F * 0.9F + 2.0F));
}

TEST(FusedSGD, MaximizeIsTheNegativeGradient) {
  const auto up = torch::randn({100}).requires_grad_();
  const auto down = up.detach().clone().requires_grad_();
  FusedSGD a({up}, FusedSGDOptions(0.1).weight_decay(0.1).momentum(0.9).maximize(true));
  FusedSGD b({down}, FusedSGDOptions(0.1).weight_decay(0.1).momentum(0.9));
  for (int i = 0; i < 3; ++i) {
    up.mutable_grad() = torch::randn({100});
    down.mutable_grad() = -up.grad();
    a.step();
    b.step();
    expect_bitwise_equal(up.detach(), down.detach());
  }
}

TEST(FusedSGD, ExchangesArchivesWithTorchsSGD) {
  const auto theirs = torch::randn({10}).requires_grad_();
  const auto ours = theirs.detach().clone().requires_grad_();
  torch::optim::SGD source({theirs}, torch::optim::SGDOptions(0.02).momentum(0.8));
  theirs.mutable_grad() = torch::randn({10});
  source.step();
  std::stringstream file;
  torch::save(source, file);
  FusedSGD middle({ours});
  torch::load(middle, file);
  std::stringstream again;
  torch::save(middle, again);
  torch::optim::SGD target({theirs}, 0.5);
  torch::load(target, again);
  const auto buffer = [&](const torch::optim::SGD& optimizer) {
    return static_cast<const torch::optim::SGDParamState&>(
               *optimizer.state().at(theirs.unsafeGetTensorImpl()))
        .momentum_buffer();
  };
  expect_bitwise_equal(middle.state_of(ours, "momentum_buffer"), buffer(source));
  expect_bitwise_equal(buffer(target), buffer(source));
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.02);
}

TEST(FusedSGD, SplitMastersAreThoseOfFp32Training) {
  torch::manual_seed(13);
  const auto split = torch::randn({333}).to(at::kBFloat16).requires_grad_();
  const auto master = split.detach().to(at::kFloat).requires_grad_();
  const auto options = FusedSGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.01);
  FusedSGD a({split}, FusedSGDOptions(options).split_master(true));
  FusedSGD b({master}, options);
  for (int i = 0; i < 20; ++i) {
    split.mutable_grad() = torch::randn({333}).to(at::kBFloat16);
    master.mutable_grad() = split.grad().to(at::kFloat);
    a.step();
    b.step();
    expect_bitwise_equal(a.master_of(split), master.detach());
  }
}

// Different tensors over one memory, as a tied weight can be: each step counts, on any number of
// threads.
TEST(FusedSGD, UpdatesTiedMemoryOneAfterTheOther) {
  const at::Tensor memory = torch::randn({100'000});
  const at::Tensor before = memory.clone();
  Tensors tied;
  for (int i = 0; i < 4; ++i) {
    tied.push_back(memory.variable_data().requires_grad_());
    tied.back().mutable_grad() = torch::randn_like(memory);
  }
  at::Tensor want = before.clone();
  for (const at::Tensor& one : tied) want = want - one.grad() * 0.5;
  FusedSGD(tied, FusedSGDOptions(0.5)).step();
  expect_bitwise_equal(memory, want);
}

// As a head that is tied to a table without its first row.
TEST(FusedSGD, UpdatesMemoryInCommonOneAfterTheOther) {
  const at::Tensor memory = torch::randn({200'000});
  const at::Tensor want = memory.clone();
  Tensors tied;
  for (const int begin : {0, 1, 7, 100}) {
    tied.push_back(memory.narrow(0, begin, 150'000).variable_data().requires_grad_());
    tied.back().mutable_grad() = torch::randn({150'000});
    const at::Tensor part = want.narrow(0, begin, 150'000);
    part.copy_(part - tied.back().grad() * 0.5);
  }
  FusedSGD(tied, FusedSGDOptions(0.5)).step();
  expect_bitwise_equal(memory, want);
}

TEST(FusedSGD, RefusesOptionsOutOfRange) {
  const auto make = [](const FusedSGDOptions& options) {
    return [options] { FusedSGD optimizer(Tensors{torch::ones({2})}, options); };
  };
  expect_error(make(FusedSGDOptions(-1)), {"[optim.fused_sgd]", "lr of at least 0", "-1"});
  expect_error(make(FusedSGDOptions().momentum(-1)), {"momentum", "-1"});
  expect_error(make(FusedSGDOptions().weight_decay(-1)), {"weight_decay", "-1"});
  expect_error(make(FusedSGDOptions().nesterov(true)), {"with nesterov", "momentum 0"});
  expect_error(make(FusedSGDOptions().momentum(0.9).dampening(std::nan(""))),
               {"a finite dampening", "nan"});
  expect_error(make(FusedSGDOptions().momentum(0.9).dampening(0.1).nesterov(true)),
               {"dampening 0.1"});
}

}  // namespace
}  // namespace semitone::test
