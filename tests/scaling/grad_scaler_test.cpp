// GradScaler: what gradients can look like, the scale, and found_inf of other ranks.

#include "semitone/scaling/grad_scaler.h"

#include "semitone/core/error.h"
#include "tests/scaling/grad_scaler_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::grad_scaler_test {
namespace {

using test::message_of;
using test::near;
using test::RecordedEvents;
using test::same_bits;
using testing::HasSubstr;

TEST(GradScaler, GradientsBrokenAfterUnscaleAreNotLookedAtAgain) {
  One one(128);
  GradScaler scaler = used_once();
  scaler.unscale_(one.optimizer);
  one.set_grad(kNan);
  EXPECT_EQ(scaler.step(one.optimizer), Step::stepped);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 256);
  EXPECT_TRUE(one.weight.isnan().all().item<bool>());
}

TEST(GradScaler, AScaleWithoutAFiniteInverseSkipsInsteadOfSteppingOnNan) {
  for (const double init : {0x1p-149, 0x1p-140}) {
    GradScaler scaler(LossScaleOptions::torch().init_scale(init));
    One one;
    scaler.scale(torch::ones({}));
    one.set_grad(static_cast<float>(init));
    EXPECT_EQ(scaler.step(one.optimizer), Step::skipped);
    scaler.update();
    EXPECT_TRUE(same_bits(one.weight, parameter({1, 2})));
  }
}

TEST(GradScaler, WithoutAnyGradientTheOptimizerJustSteps) {
  const auto weight = parameter({1});
  torch::optim::SGD optimizer({weight}, 1.0);
  torch::optim::SGD empty(std::vector<at::Tensor>{}, 1.0);
  GradScaler scaler = used_once();
  scaler.unscale_(empty);
  const test::CapturedLog log;
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_EQ(scaler.step(empty), Step::stepped);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 256);
  const std::string text = log.text();
  const auto first = text.find("scaler.step(optimizer) without any gradient");
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("scaler.step(optimizer)", first + 1), std::string::npos) << text;
}

// Its gradients would be added to unscaled ones, or be all scaled.
TEST(GradScaler, ABackwardPassAfterUnscaleIsAnError) {
  for (const bool zeroes : {false, true}) {
    SCOPED_TRACE(zeroes);
    const auto weight = parameter({1});
    torch::optim::SGD optimizer({weight}, 1.0);
    GradScaler scaler(LossScaleOptions::fixed(128));
    scaler.scale((3 * weight).sum()).backward();
    scaler.unscale_(optimizer);
    if (zeroes) optimizer.zero_grad();
    scaler.scale((5 * weight).sum()).backward();
    test::expect_error([&] { scaler.step(optimizer); },
                       {"[amp.grad_scaler.step]", "a backward pass after unscale_()",
                        "after the last backward pass"});
    EXPECT_TRUE(same_bits(weight, parameter({1})));
    optimizer.zero_grad();
    scaler.update();
    scaler.scale((5 * weight).sum()).backward();
    EXPECT_EQ(scaler.step(optimizer), Step::stepped);
    EXPECT_EQ(weight.item<float>(), 1 - 5);
  }
}

// Clipped, replaced, or neither: passes of other losses do not concern it.
TEST(GradScaler, PassesOfOtherLossesLeaveUnscaledGradientsUnscaled) {
  const auto mine = parameter({1});
  const auto other = parameter({1});
  torch::optim::SGD optimizer({mine}, 1.0);
  torch::optim::SGD others({other}, 1.0);
  GradScaler scaler(LossScaleOptions::fixed(128));
  scaler.scale((4 * mine).sum()).backward();
  scaler.unscale_(optimizer);
  mine.mutable_grad().mul_(0.5);
  scaler.scale((3 * other).sum()).backward();
  mine.mutable_grad() = mine.grad() * 0.5;
  scaler.scale((3 * other).sum()).backward();
  mine.mutable_grad().mul_(0.5);
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_EQ(scaler.step(others), Step::stepped);
  EXPECT_EQ(mine.item<float>(), 0.5);
  EXPECT_EQ(other.item<float>(), -5);
}

// torch's test_grad_scaling_unscale: layouts, sizes, dtypes, inf and NaN anywhere.
TEST(GradScaler, UnscalesEveryLayoutAndFindsInfAnywhere) {
  torch::manual_seed(1);
  const auto base = torch::randn({6, 8});
  const std::vector<at::Tensor> grads{
      torch::randn({10, 10}),
      torch::randn({10, 10}).t(),
      torch::randn({3, 4, 5}).permute({2, 0, 1}),
      torch::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast),
      base.slice(1, 0, 8, 2),  // strided, with gaps
      base.narrow(0, 1, 2),
      torch::randn({}),
      torch::empty({0}),
      torch::empty({3, 0, 2}),
      torch::randn({40001}),  // several chunks of work, and a tail
      torch::randn({7, 3}, torch::kDouble),
      torch::randn({9}).to(torch::kHalf),
      torch::randn({33}).to(torch::kBFloat16),
  };
  for (std::size_t broken = 0; broken <= grads.size(); ++broken) {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> expected;
    bool injected = false;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      auto p = torch::zeros(grads[i].sizes(), grads[i].options()).requires_grad_(true);
      auto grad = torch::empty_strided(grads[i].sizes(), grads[i].strides(), grads[i].options());
      grad.copy_(grads[i]);
      if (i == broken && grad.numel() > 0) {
        constexpr float kNonFinite[] = {kInf, -kInf, kNan};
        (grad.dim() == 0 ? grad : grad.select(0, grad.size(0) - 1)).fill_(kNonFinite[broken % 3]);
        injected = true;
      }
      p.mutable_grad() = grad;
      expected.push_back(grad.to(torch::kDouble) / 4);
      parameters.push_back(p);
    }
    torch::optim::SGD optimizer(parameters, 1.0);
    GradScaler scaler = used_once(LossScaleOptions::fixed(4));
    scaler.unscale_(optimizer);
    for (std::size_t i = 0; i < grads.size(); ++i) {
      EXPECT_EQ(parameters[i].grad().scalar_type(), grads[i].scalar_type());
      EXPECT_EQ(parameters[i].grad().strides(), grads[i].strides());
      EXPECT_TRUE(near(parameters[i].grad(), expected[i], 0)) << "gradient " << i;
    }
    EXPECT_EQ(scaler.step(optimizer), injected ? Step::skipped : Step::stepped)
        << "gradient " << broken;
  }
}

at::Tensor sparse(std::vector<std::int64_t> rows, std::vector<float> values,
                  c10::ScalarType dtype = torch::kFloat) {
  const auto count = static_cast<std::int64_t>(rows.size());
  return torch::sparse_coo_tensor(torch::tensor(rows).view({1, count}),
                                  torch::tensor(values).to(dtype), {5});
}

TEST(GradScaler, SparseGradients) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    const auto unscaled = [dtype](const at::Tensor& grad) {
      auto weight = torch::zeros({5}, dtype).requires_grad_(true);
      weight.mutable_grad() = grad;
      torch::optim::SGD optimizer({weight}, 1.0);
      GradScaler scaler = used_once(LossScaleOptions::fixed(4));
      scaler.unscale_(optimizer);
      return std::pair(weight.grad(), scaler.step(optimizer));
    };
    const auto [grad, step] = unscaled(sparse({0, 2, 2}, {4, 8, 12}, dtype));
    EXPECT_EQ(step, Step::stepped);
    EXPECT_TRUE(grad.is_sparse());
    EXPECT_EQ(grad.scalar_type(), dtype);
    EXPECT_TRUE(near(grad, torch::tensor({1.0, 0.0, 5.0, 0.0, 0.0}), 0));
    EXPECT_EQ(unscaled(sparse({1}, {kNan}, dtype)).second, Step::skipped);
    EXPECT_EQ(unscaled(sparse({1, 3}, {1, kInf}, dtype)).second, Step::skipped);
    EXPECT_EQ(unscaled(sparse({}, {}, dtype)).second, Step::stepped);
  }
}

TEST(GradScaler, SparseDuplicatesThatOverflowFp16TogetherAreFound) {
  auto weight = torch::zeros({5}, torch::kHalf).requires_grad_(true);
  torch::optim::SGD optimizer({weight}, 1.0);
  GradScaler scaler = used_once(LossScaleOptions::fixed(4));
  weight.mutable_grad() = sparse({2, 3}, {64000, 64000}, torch::kHalf);
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  scaler.update();
  weight.mutable_grad() = sparse({2, 2}, {64000, 64000}, torch::kHalf);
  EXPECT_EQ(scaler.step(optimizer), Step::skipped);
}

TEST(GradScaler, SparseEmbeddingTrainsAsWithoutScaler) {
  const auto train = [](bool scaled) {
    torch::manual_seed(0);
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(6, 3).sparse(true));
    torch::optim::SGD optimizer(embedding->parameters(), 0.5);
    GradScaler scaler(kRule);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      const auto loss = embedding(torch::tensor({1, 4, 1})).pow(2).sum();
      if (scaled) {
        scaler.scale(loss).backward();
        EXPECT_EQ(scaler.step(optimizer), Step::stepped);
        scaler.update();
      } else {
        loss.backward();
        optimizer.step();
      }
    }
    return embedding->weight;
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

TEST(GradScaler, Fp16GradientsAreUnscaledInFp32) {
  auto weight = torch::zeros({2}, torch::kHalf).requires_grad_(true);
  torch::optim::SGD optimizer({weight}, 1.0);
  GradScaler scaler = used_once(LossScaleOptions::fixed(65536));
  // 1/65536 is below fp16's normal numbers; in fp16 arithmetic 60000 * 2^-16 would lose bits.
  weight.mutable_grad() = torch::tensor({60000.0F, 3.0F}).to(torch::kHalf);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(
      same_bits(weight.grad(), torch::tensor({60000.0F / 65536, 3.0F / 65536}).to(torch::kHalf)));
}

TEST(GradScaler, AParameterThatIsInTheOptimizerTwiceIsUnscaledOnce) {
  const auto weight = parameter({1});
  torch::optim::SGD optimizer({weight, weight}, 1.0);
  GradScaler scaler = used_once();
  weight.mutable_grad() = torch::full({1}, 128.0F);
  scaler.unscale_(optimizer);
  EXPECT_EQ(weight.grad().item<float>(), 1);
}

// Two optimizers that have a parameter in common, with a learning rate of 1.
struct TwoThatShare {
  at::Tensor shared = parameter({0});
  at::Tensor of_a = parameter({0});
  at::Tensor of_b = parameter({0});
  torch::optim::SGD a{{shared, of_a}, 1.0};
  torch::optim::SGD b{{of_b, shared}, 1.0};

  at::Tensor loss() const { return 3 * shared.sum() + 5 * of_a.sum() + 7 * of_b.sum(); }
  // What the steps since the last call have subtracted from shared, of_a and of_b.
  std::vector<float> steps() {
    std::vector<float> steps;
    const at::NoGradGuard no_grad;
    for (at::Tensor& one : std::vector<at::Tensor>{shared, of_a, of_b}) {
      steps.push_back(-one.item<float>());
      one.zero_();
    }
    return steps;
  }
};

TEST(GradScaler, AParameterThatIsInTwoOptimizersIsUnscaledOnce) {
  for (const bool unscale_early : {false, true}) {
    TwoThatShare two;
    GradScaler scaler(LossScaleOptions::fixed(128));
    for (int i = 0; i < 3; ++i) {  // with gradients that stay the same tensors
      two.a.zero_grad(/*set_to_none=*/false);
      two.b.zero_grad(/*set_to_none=*/false);
      scaler.scale(two.loss()).backward();
      if (unscale_early) {
        scaler.unscale_(two.b);
        scaler.unscale_(two.a);
      }
      EXPECT_EQ(scaler.step(two.a), Step::stepped);
      EXPECT_EQ(scaler.step(two.b), Step::stepped);
      scaler.update();
      EXPECT_EQ(two.steps(), (std::vector<float>{6, 5, 7}));
    }
  }
}

TEST(GradScaler, AnOverflowInASharedParameterSkipsBothOptimizers) {
  for (const float broken : {kInf, kNan}) {
    TwoThatShare two;
    GradScaler scaler(kRule);
    scaler.scale(two.loss()).backward();
    two.shared.mutable_grad().fill_(broken);
    EXPECT_EQ(scaler.step(two.a), Step::skipped);
    EXPECT_EQ(scaler.step(two.b), Step::skipped);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 64);
    EXPECT_EQ(two.steps(), (std::vector<float>{0, 0, 0}));
    // In another parameter, it skips that one's optimizer.
    two.a.zero_grad();
    two.b.zero_grad();
    scaler.scale(two.loss()).backward();
    two.of_a.mutable_grad().fill_(broken);
    EXPECT_EQ(scaler.step(two.a), Step::skipped);
    EXPECT_EQ(scaler.step(two.b), Step::stepped);
    EXPECT_EQ(two.steps(), (std::vector<float>{3, 0, 7}));
  }
}

// The hook of one loss runs after the other's gradients are there.
TEST(GradScaler, ASharedGradientOfOneOfTwoLossesInAPassIsUnscaled) {
  for (const bool shared_first : {false, true}) {
    TwoThatShare two;
    GradScaler scaler(LossScaleOptions::fixed(128));
    scaler.scale(two.loss()).backward();
    EXPECT_EQ(scaler.step(two.a), Step::stepped);
    two.steps();
    two.a.zero_grad();
    two.b.zero_grad();
    std::vector<at::Tensor> scaled;
    for (const bool is_shared : {shared_first, !shared_first}) {
      scaled.push_back(
          scaler.scale(is_shared ? (2 * two.shared).exp().sum() : 11 * two.of_b.sum()));
    }
    (scaled[0] + scaled[1]).backward();
    EXPECT_EQ(scaler.step(two.b), Step::stepped);
    EXPECT_EQ(two.steps(), (std::vector<float>{2, 0, 11}));
    scaler.update();
  }
}

TEST(GradScaler, ASharedGradientThatWasClippedIsNotUnscaledAgain) {
  TwoThatShare two;
  GradScaler scaler(LossScaleOptions::fixed(128));
  scaler.scale(two.loss()).backward();
  scaler.unscale_(two.a);
  two.shared.mutable_grad().mul_(0.5);
  EXPECT_EQ(scaler.step(two.a), Step::stepped);
  // A loss that does not concern it.
  two.of_b.mutable_grad().reset();
  scaler.scale(11 * two.of_b.sum()).backward();
  EXPECT_EQ(scaler.step(two.b), Step::stepped);
  EXPECT_EQ(two.steps(), (std::vector<float>{3, 5, 11}));
}

TEST(GradScaler, TheGradientOfAnotherLossInASharedParameterIsUnscaledToo) {
  for (const bool set_to_none : {true, false}) {
    for (const bool scale_early : {true, false}) {
      SCOPED_TRACE(c10::str("set_to_none ", set_to_none, ", scale_early ", scale_early));
      TwoThatShare two;
      GradScaler scaler(LossScaleOptions::fixed(128));
      const at::Tensor first = scaler.scale(two.loss());
      at::Tensor second = scale_early ? scaler.scale(2 * two.loss()) : at::Tensor();
      first.backward();
      EXPECT_EQ(scaler.step(two.a), Step::stepped);
      two.b.zero_grad(set_to_none);
      if (!scale_early) second = scaler.scale(2 * two.loss());
      second.backward();
      EXPECT_EQ(scaler.step(two.b), Step::stepped);
      scaler.update();
      EXPECT_EQ(two.steps(), (std::vector<float>{3 + 6, 5, 14}));
    }
  }
}

TEST(GradScaler, ParameterGroupsAddedLaterTakePart) {
  const auto first = parameter({1});
  const auto second = parameter({1});
  torch::optim::SGD optimizer({first}, 1.0);
  GradScaler scaler = used_once();
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({second}));
  second.mutable_grad() = torch::full({1}, kInf);
  EXPECT_EQ(scaler.step(optimizer), Step::skipped);
}

// On inf, perhaps, and never with another scale.
TEST(GradScaler, AStepOfTheOptimizerItselfIsAnError) {
  for (const auto& kind : test::all_optimizers()) {
    if (kind.name == "SGD") continue;  // keeps no state that shows a step
    SCOPED_TRACE(kind.name);
    const auto weight = parameter({1, 1});
    const auto optimizer = kind.make({weight});
    GradScaler scaler = used_once();
    weight.mutable_grad() = torch::ones({2});
    scaler.unscale_(*optimizer);
    optimizer->step();
    EXPECT_THAT(test::error_of([&] { scaler.update(); }), HasSubstr("call scaler.step(optimizer)"));
    EXPECT_NO_THROW(scaler.update());
    weight.mutable_grad() = torch::ones({2});
    EXPECT_EQ(scaler.step(*optimizer), Step::stepped);
    EXPECT_NO_THROW(scaler.update());
  }
}

TEST(GradScaler, ALoadedStateIsNoStepOfTheOptimizer) {
  for (const auto& kind : test::all_optimizers()) {
    for (const int steps : {1, 3}) {
      SCOPED_TRACE(kind.name);
      const auto saved_weight = parameter({1, 1});
      const auto saved = kind.make({saved_weight});
      saved_weight.mutable_grad() = torch::ones({2});
      for (int i = 0; i < steps; ++i) saved->step();
      auto file = test::saved(*saved);
      const auto weight = parameter({1, 1});
      const auto optimizer = kind.make({weight});
      GradScaler scaler = used_once();
      weight.mutable_grad() = torch::ones({2});
      scaler.unscale_(*optimizer);
      optimizer->load(file);
      EXPECT_NO_THROW(scaler.update());
    }
  }
}

TEST(GradScaler, GradientsOfTheWrongKindAreAnErrorThatLeavesItUsable) {
  const auto weight = parameter({2, 2});
  weight.mutable_grad() = torch::eye(2).to_sparse_csr();
  torch::optim::SGD optimizer({weight}, 1.0);
  GradScaler scaler = used_once();
  EXPECT_THROW(scaler.step(optimizer), Error);
  EXPECT_THROW(scaler.update(), Error);  // nothing was looked at
  weight.mutable_grad().reset();
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_NO_THROW(scaler.update());
}

TEST(GradScaler, TheScaleNeverGrowsPastFp32) {
  GradScaler scaler(LossScaleOptions().init_scale(0x1p126).growth_interval(1));
  One one;
  for (int i = 0; i < 4; ++i) {
    one.set_grad(1);
    scaler.scale(torch::ones({}));
    EXPECT_EQ(scaler.step(one.optimizer), Step::stepped);
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 0x1p127);
}

TEST(GradScaler, UpdateWithANumberReplacesTheScaleAndForgetsWhatWasFound) {
  One one(kInf);
  GradScaler scaler = used_once(LossScaleOptions(kRule).growth_interval(5));
  EXPECT_EQ(scaler.step(one.optimizer), Step::skipped);
  scaler.update(1000);
  EXPECT_EQ(scaler.get_scale(), 1000);
  EXPECT_THROW(scaler.update(), Error);
  one.set_grad(1);
  scaler.step(one.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1000);
  EXPECT_THROW(scaler.update(0), Error);
  EXPECT_THROW(scaler.update(-1), Error);
  EXPECT_THROW(scaler.update(std::nan("")), Error);
  EXPECT_THROW(scaler.update(1e39), Error);
}

TEST(GradScaler, OptionsCanChangeWhileTraining) {
  GradScaler scaler = used_once(LossScaleOptions(kRule).growth_interval(100));
  scaler.set_options(LossScaleOptions().growth_factor(8).growth_interval(1));
  One one;
  scaler.step(one.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1024);
}

TEST(GradScaler, AFixedScaleSkipsOverflowsAndStays) {
  GradScaler scaler = used_once(LossScaleOptions::fixed(8));
  One one(kInf);
  EXPECT_EQ(scaler.step(one.optimizer), Step::skipped);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST(GradScaler, HysteresisDelaysTheBackoffNotTheSkip) {
  GradScaler scaler = used_once(LossScaleOptions(kRule).hysteresis(2));
  One one(kInf);
  EXPECT_EQ(scaler.step(one.optimizer), Step::skipped);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 128);
  EXPECT_EQ(scaler.step(one.optimizer), Step::skipped);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 64);
}

TEST(GradScaler, AnotherRanksOverflowSkipsThisRanksStepToo) {
  One one(128);
  GradScaler scaler = used_once(LossScaleOptions(kRule).max_consecutive_skips(1));
  int calls = 0;
  scaler.set_found_inf_hook([&](at::Tensor& found_inf) {
    EXPECT_EQ(found_inf.numel(), 1);
    EXPECT_EQ(found_inf.scalar_type(), torch::kFloat);
    EXPECT_EQ(found_inf.item<float>(), 0);
    found_inf.fill_(1);  // MAX with what the other rank has
    ++calls;
  });
  const RecordedEvents events;
  EXPECT_EQ(scaler.step(one.optimizer), Step::skipped);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(same_bits(one.weight, parameter({1, 2})));
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].non_finite, 0);
  EXPECT_EQ(events.skips()[0].parameter, "");
  EXPECT_THAT(message_of<DivergedError>([&] { scaler.update(); }), HasSubstr("another rank"));
  EXPECT_EQ(scaler.get_scale(), 64);
}

TEST(GradScaler, TheHookIsCalledWithoutGradientsAndWithoutAStepToo) {
  torch::optim::SGD no_gradients({parameter({1})}, 1.0);
  torch::optim::SGD no_parameters(std::vector<at::Tensor>{}, 1.0);
  GradScaler scaler = used_once();
  int calls = 0;
  scaler.set_found_inf_hook([&](at::Tensor& found_inf) {
    found_inf.fill_(1);
    ++calls;
  });
  EXPECT_EQ(scaler.step(no_gradients), Step::skipped);
  EXPECT_EQ(scaler.step(no_parameters), Step::skipped);
  EXPECT_EQ(calls, 2);
  scaler.update();
  scaler.unscale_(no_gradients);
  EXPECT_EQ(calls, 2);
  scaler.update();
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(scaler.get_scale(), 32);
}

TEST(GradScaler, ListenersGetTheGradientsOfEachStep) {
  for (const float grad : {128.0F, kInf}) {
    One one(grad);
    GradScaler scaler = used_once();
    const RecordedEvents events;
    scaler.step(one.optimizer);
    ASSERT_EQ(events.gradients().size(), 1);
    const test::RecordedGradients& event = events.gradients().front();
    ASSERT_EQ(event.parameters.size(), 1);
    EXPECT_TRUE(event.parameters[0].is_same(one.weight));
    EXPECT_TRUE(event.weights[0].is_same(one.weight));
    EXPECT_TRUE(same_bits(event.gradients[0], torch::full({2}, grad / 128)));
    EXPECT_EQ(event.scale, 1);
    EXPECT_EQ(events.skips().size(), grad == kInf ? 1 : 0);
  }
}

TEST(GradScaler, DisabledItReportsTheGradientsToo) {
  One one(3);
  GradScaler scaler(kRule, /*enabled=*/false);
  const RecordedEvents events;
  scaler.step(one.optimizer);
  ASSERT_EQ(events.gradients().size(), 1);
  EXPECT_TRUE(same_bits(events.gradients()[0].gradients[0], torch::full({2}, 3.0F)));
  EXPECT_EQ(events.phases(), "optimizer()");
}

TEST(GradScaler, AStepIsInTheseParts) {
  One one(128);
  GradScaler scaler = used_once();
  scaler.set_found_inf_hook([](at::Tensor&) {});
  const RecordedEvents events;
  scaler.step(one.optimizer);
  EXPECT_EQ(events.phases(), "unscale() unscale(communication()) optimizer()");
}

}  // namespace
}  // namespace semitone::amp::grad_scaler_test
