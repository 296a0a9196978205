// Masters in an optimizer: training with them, and their gradients.

#include "semitone/scaling/master_weights.h"

#include "semitone/core/error.h"
#include "tests/scaling/master_weights_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::master_weights_test {
namespace {

using test::archived;
using test::message_of;
using test::near;
using test::same_bits;
using test::saved;
using testing::HasSubstr;

TEST(MasterWeights, StandInTheOptimizerInPlaceOfSixteenBitParameters) {
  const auto bf16 = parameter({3, 2});
  const auto fp16 = parameter({4}, torch::kHalf);
  const auto fp32 = parameter({2}, torch::kFloat);
  const auto frozen = parameter({2}).requires_grad_(false);
  const auto image = parameter({2, 3, 4, 4}).detach().contiguous(at::MemoryFormat::ChannelsLast);
  const auto weight = image.requires_grad_(true);
  torch::optim::SGD optimizer({bf16, fp16, fp32, frozen, weight}, 0.1);
  const MasterWeights masters(optimizer);
  EXPECT_EQ(masters.size(), 3U);
  for (const auto& [place, original] :
       {std::pair(0U, bf16), std::pair(1U, fp16), std::pair(4U, weight)}) {
    const at::Tensor& master = in_group(optimizer, 0, place);
    EXPECT_TRUE(masters.is_master(master));
    EXPECT_TRUE(masters.master_of(original).is_same(master));
    EXPECT_TRUE(master.requires_grad());
    EXPECT_TRUE(master.is_leaf());
    EXPECT_TRUE(same_bits(master, original.detach().to(torch::kFloat)));
    EXPECT_EQ(master.strides(), original.strides());
  }
  EXPECT_TRUE(in_group(optimizer, 0, 2).is_same(fp32));
  EXPECT_TRUE(in_group(optimizer, 0, 3).is_same(frozen));
  EXPECT_FALSE(masters.is_master(fp32));
  EXPECT_FALSE(masters.master_of(frozen).defined());
}

TEST(MasterWeights, StartFromExactValuesWhereThereAreSome) {
  const auto exact = torch::randn({5});
  const auto weight = exact.to(torch::kHalf).requires_grad_(true);
  torch::optim::SGD optimizer({weight}, 0.1);
  const MasterWeights masters(optimizer, {{weight.unsafeGetTensorImpl(), exact}});
  EXPECT_TRUE(same_bits(masters.master_of(weight), exact));
}

class MasterWeightsWithEachOptimizer : public testing::TestWithParam<test::OptimizerKind> {};

// Masters with the gradients of a 16-bit model are trained like fp32 weights with the same
// gradients.
TEST_P(MasterWeightsWithEachOptimizer, TrainAsFp32WeightsDoBitForBit) {
  torch::manual_seed(0);
  const std::vector<at::Tensor> model{parameter({3, 4}), parameter({5}, torch::kHalf),
                                      parameter({2}, torch::kFloat)};
  std::vector<at::Tensor> reference;
  for (const auto& p : model)
    reference.push_back(p.detach().to(torch::kFloat, false, true).requires_grad_(true));
  auto optimizer = GetParam().make(model);
  auto reference_optimizer = GetParam().make(reference);
  MasterWeights masters(*optimizer);
  for (int step = 0; step < 5; ++step) {
    optimizer->zero_grad();
    for (std::size_t i = 0; i < model.size(); ++i) {
      model[i].mutable_grad() = torch::randn(model[i].sizes()).to(model[i].scalar_type());
      reference[i].mutable_grad() = model[i].grad().to(torch::kFloat, false, true) * 0.25;
    }
    EXPECT_FALSE(masters.take_gradients(0.25F));
    optimizer->step();
    masters.write_model();
    reference_optimizer->step();
    for (std::size_t i = 0; i < model.size(); ++i) {
      EXPECT_TRUE(same_bits(in_group(*optimizer, 0, i), reference[i]));
      EXPECT_TRUE(same_bits(model[i], rounded(reference[i], model[i])));
    }
  }
}

// LibTorch's SGD writes through tensor.data() without version counters: all its steps must be seen.
TEST_P(MasterWeightsWithEachOptimizer, AStepBehindTheirBackIsRepairedBySync) {
  torch::manual_seed(0);
  const auto weight = parameter({6});
  auto optimizer = GetParam().make({weight});
  MasterWeights masters(*optimizer);
  for (int step = 0; step < 4; ++step) {
    weight.mutable_grad() = torch::ones({6}, torch::kBFloat16);
    masters.take_gradients();
    masters.pull();
    const auto before = masters.master_of(weight).clone();
    optimizer->step();
    step % 2 == 0 ? optimizer->zero_grad() : masters.clear_gradients();
    masters.sync();
    EXPECT_FALSE(same_bits(masters.master_of(weight), before));
    EXPECT_TRUE(same_bits(weight, rounded(masters.master_of(weight), weight)));
  }
}

TEST_P(MasterWeightsWithEachOptimizer, StateThatTheOptimizerHadMovesAlong) {
  torch::manual_seed(0);
  const std::vector<at::Tensor> model{parameter({6}), parameter({2}, torch::kFloat)};
  auto optimizer = GetParam().make(model);
  for (const auto& p : model) p.mutable_grad() = torch::ones_like(p);
  optimizer->step();
  const auto before = optimizer->state().size();
  std::vector<const void*> states;
  for (const auto& p : model) {
    const auto state = optimizer->state().find(p.unsafeGetTensorImpl());
    states.push_back(state == optimizer->state().end() ? nullptr : state->second.get());
  }
  const MasterWeights masters(*optimizer);
  EXPECT_EQ(optimizer->state().size(), before);
  EXPECT_EQ(optimizer->state().count(model[0].unsafeGetTensorImpl()), 0U);
  for (std::size_t i = 0; i < model.size(); ++i) {
    const auto state = optimizer->state().find(in_group(*optimizer, 0, i).unsafeGetTensorImpl());
    EXPECT_EQ(state == optimizer->state().end() ? nullptr : state->second.get(), states[i]);
  }
}

// Optimizer and masters together are the whole state: saved and loaded in either order, training
// goes on bit for bit.
TEST_P(MasterWeightsWithEachOptimizer, ResumeIsBitwise) {
  torch::manual_seed(0);
  const auto first = parameter({3, 4});
  const auto grads = torch::randn({6, 3, 4}).to(torch::kBFloat16);
  const auto iterate = [&](const at::Tensor& weight, torch::optim::Optimizer& optimizer,
                           MasterWeights& masters, int step) {
    optimizer.zero_grad();
    weight.mutable_grad() = grads[step].clone();
    masters.take_gradients();
    optimizer.step();
    masters.write_model();
  };
  auto optimizer = GetParam().make({first});
  MasterWeights masters(*optimizer);
  for (int step = 0; step < 3; ++step) iterate(first, *optimizer, masters, step);
  const auto save_optimizer = [&](torch::serialize::OutputArchive& archive) {
    optimizer->save(archive);
  };
  auto optimizer_state = archived(save_optimizer);
  auto masters_state = saved(masters);
  for (const bool used : {false, true}) {
    for (const bool masters_first : {false, true}) {
      const auto second = parameter({3, 4});
      auto resumed_optimizer = GetParam().make({second});
      MasterWeights resumed(*resumed_optimizer);
      if (used) iterate(second, *resumed_optimizer, resumed, 5);
      if (masters_first) resumed.load(masters_state);
      auto archive = archived(save_optimizer);
      resumed_optimizer->load(archive);
      if (!masters_first) resumed.load(masters_state);
      EXPECT_TRUE(same_bits(second, first));
      EXPECT_TRUE(same_bits(resumed.master_of(second), masters.master_of(first)));

      const auto straight = parameter({3, 4});
      auto straight_optimizer = GetParam().make({straight});
      MasterWeights straight_masters(*straight_optimizer);
      auto again = archived(save_optimizer);
      straight_optimizer->load(again);
      straight_masters.load(masters_state);
      for (int step = 3; step < 6; ++step) {
        iterate(second, *resumed_optimizer, resumed, step);
        iterate(straight, *straight_optimizer, straight_masters, step);
      }
      EXPECT_TRUE(same_bits(second, straight));
      EXPECT_TRUE(same_bits(resumed.master_of(second), straight_masters.master_of(straight)));
    }
  }
  // And as the run that was never interrupted.
  const auto third = parameter({3, 4});
  auto third_optimizer = GetParam().make({third});
  MasterWeights third_masters(*third_optimizer);
  third_optimizer->load(optimizer_state);
  third_masters.load(masters_state);
  for (int step = 3; step < 6; ++step) {
    iterate(third, *third_optimizer, third_masters, step);
    iterate(first, *optimizer, masters, step);
  }
  EXPECT_TRUE(same_bits(third_masters.master_of(third), masters.master_of(first)));
}

INSTANTIATE_TEST_SUITE_P(All, MasterWeightsWithEachOptimizer,
                         testing::ValuesIn(test::all_optimizers()),
                         [](const auto& tested) { return tested.param.name; });

TEST(MasterWeights, TheOptimizersStateIsFp32WhateverItWas) {
  for (const auto& kind : test::all_optimizers()) {
    const auto weight = parameter({6});
    auto optimizer = kind.make({weight});
    weight.mutable_grad() = torch::ones({6}, torch::kBFloat16);
    optimizer->step();
    const MasterWeights masters(*optimizer);
    std::stringstream file;
    torch::save(*optimizer, file);
    for (const auto& [key, state] : optimizer->state()) {
      auto archive = archived(
          [&, kept = state.get()](torch::serialize::OutputArchive& out) { kept->serialize(out); });
      for (const std::string& name : archive.keys()) {
        c10::IValue value;
        archive.read(name, value);
        if (!value.isTensor()) continue;
        EXPECT_EQ(value.toTensor().scalar_type(), torch::kFloat) << kind.name << " " << name;
      }
    }
  }
}

TEST(MasterWeights, LbfgsIsRefused) {
  torch::optim::LBFGS optimizer({parameter({2})});
  EXPECT_THAT(message_of<Error>([&] { std::ignore = MasterWeights{optimizer}; }),
              HasSubstr("got LBFGS"));
}

TEST(MasterWeights, SmallUpdatesAddUp) {
  const auto train = [](bool with_masters) {
    const auto weight = torch::ones({1}, torch::kBFloat16).requires_grad_(true);
    torch::optim::SGD optimizer({weight}, 1e-4);
    std::unique_ptr<MasterWeights> masters;
    if (with_masters) masters = std::make_unique<MasterWeights>(optimizer);
    for (int i = 0; i < 1000; ++i) {
      weight.mutable_grad() = torch::ones({1}, torch::kBFloat16);
      if (masters) masters->take_gradients();
      optimizer.step();
      if (masters) masters->write_model();
      optimizer.zero_grad();
    }
    return weight.item<float>();
  };
  EXPECT_EQ(train(false), 1.0F);       // 1 - 1e-4 is 1 in bf16
  EXPECT_EQ(train(true), 0.8984375F);  // bf16 of 0.9
}

TEST(MasterWeights, TakingGradientsDividesAccumulatesAndDropsTheModels) {
  const auto weight = parameter({2}, torch::kHalf);
  const auto fp32 = parameter({2}, torch::kFloat);
  torch::optim::SGD optimizer({weight, fp32}, 0.1);
  MasterWeights masters(optimizer);
  const auto& master = in_group(optimizer, 0, 0);
  weight.mutable_grad() = torch::tensor({8.0F, 16.0F}).to(torch::kHalf);
  fp32.mutable_grad() = torch::tensor({4.0F, 8.0F});
  EXPECT_FALSE(masters.take_gradients(0.25F));
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(same_bits(master.grad(), torch::tensor({2.0F, 4.0F})));
  EXPECT_TRUE(same_bits(fp32.grad(), torch::tensor({1.0F, 2.0F})));
  weight.mutable_grad() = torch::tensor({1.0F, 2.0F}).to(torch::kHalf);
  EXPECT_FALSE(masters.take_gradients(0.5F));
  EXPECT_TRUE(same_bits(master.grad(), torch::tensor({2.5F, 5.0F})));
  EXPECT_FALSE(masters.take_gradients(0.5F));  // nothing new in the model's weight
  EXPECT_TRUE(same_bits(master.grad(), torch::tensor({2.5F, 5.0F})));
  masters.clear_gradients();
  EXPECT_FALSE(master.grad().defined());
}

TEST(MasterWeights, Fp16GradientsBelowItsRangeSurviveInTheMaster) {
  const auto weight = parameter({1}, torch::kHalf);
  torch::optim::SGD optimizer({weight}, 0.1);
  MasterWeights masters(optimizer);
  weight.mutable_grad() = torch::full({1}, 0x1p-20, torch::kHalf);
  masters.take_gradients(0x1p-16F);
  EXPECT_EQ(in_group(optimizer, 0, 0).grad().item<float>(), 0x1p-36F);
}

TEST(MasterWeights, InfAndNanAreFoundInEveryParameter) {
  for (const std::size_t place : {0U, 1U, 2U}) {
    for (const float value : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
      const std::vector<at::Tensor> model{parameter({3}), parameter({3}, torch::kHalf),
                                          parameter({3}, torch::kFloat)};
      torch::optim::SGD optimizer(model, 0.1);
      MasterWeights masters(optimizer);
      for (const auto& p : model) p.mutable_grad() = torch::ones_like(p);
      model[place].mutable_grad()[1] = value;
      EXPECT_TRUE(masters.take_gradients());
    }
  }
}

at::Tensor sparse(std::vector<std::int64_t> rows, std::vector<float> values) {
  const auto count = static_cast<std::int64_t>(rows.size());
  return torch::sparse_coo_tensor(torch::tensor(rows).view({1, count}),
                                  torch::tensor(values).to(torch::kBFloat16), {4});
}

TEST(MasterWeights, SparseGradientsStaySparseAndAddUp) {
  const auto weight = parameter({4});
  torch::optim::SGD optimizer({weight}, 1.0);
  MasterWeights masters(optimizer);
  const auto& master = in_group(optimizer, 0, 0);
  weight.mutable_grad() = sparse({1, 1, 3}, {2, 4, 8});
  EXPECT_FALSE(masters.take_gradients(0.5F));
  EXPECT_TRUE(master.grad().is_sparse());
  EXPECT_EQ(master.grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(near(master.grad(), torch::tensor({0.0, 3.0, 0.0, 4.0}), 0));
  weight.mutable_grad() = sparse({0, 3}, {2, 2});
  EXPECT_FALSE(masters.take_gradients(0.5F));
  EXPECT_TRUE(master.grad().is_sparse());
  EXPECT_TRUE(near(master.grad(), torch::tensor({1.0, 3.0, 0.0, 5.0}), 0));
  weight.mutable_grad() = torch::ones({4}, torch::kBFloat16);  // a dense one among them
  EXPECT_FALSE(masters.take_gradients());
  EXPECT_TRUE(near(master.grad(), torch::tensor({2.0, 4.0, 1.0, 6.0}), 0));
  weight.mutable_grad() = sparse({2}, {1});
  EXPECT_FALSE(masters.take_gradients());
  EXPECT_TRUE(near(master.grad(), torch::tensor({2.0, 4.0, 2.0, 6.0}), 0));
  weight.mutable_grad() = sparse({2}, {kInf});
  EXPECT_TRUE(masters.take_gradients());
}

TEST(MasterWeights, SparseEmbeddingsTrain) {
  for (const auto& kind : {test::all_optimizers()[0], test::all_optimizers()[4]}) {  // SGD, Adagrad
    torch::manual_seed(0);
    torch::nn::Embedding low(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    torch::nn::Embedding reference(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    low->to(torch::kBFloat16);
    {
      const torch::NoGradGuard no_grad;
      reference->weight.copy_(low->weight);
    }
    auto optimizer = kind.make(low->parameters());
    auto reference_optimizer = kind.make(reference->parameters());
    MasterWeights masters(*optimizer);
    const auto ids = torch::tensor({1, 4, 1});
    for (int i = 0; i < 3; ++i) {
      optimizer->zero_grad();
      reference_optimizer->zero_grad();
      (low(ids) * 2).sum().backward();
      (reference(ids) * 2).sum().backward();
      EXPECT_FALSE(masters.take_gradients());
      optimizer->step();
      masters.write_model();
      reference_optimizer->step();
    }
    EXPECT_TRUE(near(masters.master_of(low->weight), reference->weight,
                     test::pointwise_tolerance(torch::kFloat)));
    EXPECT_TRUE(same_bits(low->weight, rounded(masters.master_of(low->weight), low->weight)));
  }
}

}  // namespace
}  // namespace semitone::amp::master_weights_test
