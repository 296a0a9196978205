#include "semitone/scaling/grad_scaler.h"

#include "semitone/core/error.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

namespace semitone::amp::grad_scaler_test {
namespace {

using test::message_of;
using test::near;
using test::pointwise_tolerance;
using test::RecordedEvents;
using test::reduction_tolerance;
using test::same_bits;
using test::saved;
using testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Powers of two, so that scaling is exact and results can be compared bit for bit.
const LossScaleOptions kRule = LossScaleOptions().init_scale(128).growth_interval(1);

at::Tensor parameter(std::initializer_list<float> values, c10::ScalarType dtype = torch::kFloat) {
  return torch::tensor(c10::ArrayRef<float>(values)).to(dtype).requires_grad_(true);
}

// An optimizer over one parameter, whose gradient is set by hand.
struct One {
  explicit One(float grad = 1.0F) : weight(parameter({1, 2})), optimizer({weight}, /*lr=*/1.0) {
    set_grad(grad);
  }
  void set_grad(float value) { weight.mutable_grad() = torch::full({2}, value); }
  at::Tensor weight;
  torch::optim::SGD optimizer;
};

GradScaler used_once(const LossScaleOptions& options = kRule) {
  GradScaler scaler(options);
  scaler.scale(torch::ones({}));
  return scaler;
}

// ------------------------------------------------------------------ the same training with and
// without a scaler

struct Net : torch::nn::Module {
  Net() {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::relu(a(x))); }
  torch::nn::Linear a{4, 8};
  torch::nn::Linear b{8, 3};
};

struct Training {
  explicit Training(const test::OptimizerKind& kind) {
    torch::manual_seed(3);
    net = std::make_shared<Net>();
    optimizer = kind.make(net->parameters());
    for (int i = 0; i < 4; ++i) batches.push_back(torch::randn({5, 4}));
    target = torch::randn({5, 3});
  }
  at::Tensor loss(std::size_t batch) {
    return torch::mse_loss(net->forward(batches[batch]), target);
  }

  std::shared_ptr<Net> net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<at::Tensor> batches;
  at::Tensor target;
};

std::string state_of(torch::optim::Optimizer& optimizer) {
  // Keys are addresses, so it is the state of each parameter in turn that is compared.
  std::stringstream text;
  text << std::hexfloat;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      torch::serialize::OutputArchive archive;
      found->second->serialize(archive);
      std::stringstream stream;
      archive.save_to(stream);
      text << stream.str().size() << ' ';
      torch::serialize::InputArchive in;
      in.load_from(stream);
      for (const std::string& key : in.keys()) {
        c10::IValue value;
        in.read(key, value);
        text << key << '=';
        if (value.isTensor()) {
          const at::Tensor flat = value.toTensor().to(torch::kDouble).flatten();
          for (std::int64_t i = 0; i < flat.numel(); ++i) text << flat[i].item<double>() << ',';
        } else {
          text << value;
        }
        text << ';';
      }
    }
  }
  return text.str();
}

class GradScalerWithEachOptimizer : public testing::TestWithParam<test::OptimizerKind> {};

// torch's test_grad_scaling_autocast: four batches, the third with an inf. Scaling by powers of two
// changes nothing, and the skipped batch is as if it had not been.
TEST_P(GradScalerWithEachOptimizer, ScalingChangesNothingButSkipsTheStepWithInf) {
  for (const bool unscale_early : {false, true}) {
    Training plain(GetParam());
    Training scaled(GetParam());
    GradScaler scaler(kRule);
    for (std::size_t i = 0; i < 4; ++i) {
      if (i != 2) {
        plain.optimizer->zero_grad();
        plain.loss(i).backward();
        plain.optimizer->step();
      }
      scaled.optimizer->zero_grad();
      scaler.scale(scaled.loss(i)).backward();
      if (i == 2) scaled.net->a->weight.mutable_grad()[1][1] = kInf;
      if (unscale_early) scaler.unscale_(*scaled.optimizer);
      EXPECT_EQ(scaler.step(*scaled.optimizer), i == 2 ? Step::skipped : Step::stepped);
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 128 * 2 * 2 * 2 * 0.5);
    EXPECT_EQ(scaler.scaler().skipped_steps(), 1);
    for (std::size_t i = 0; i < plain.net->parameters().size(); ++i) {
      EXPECT_TRUE(same_bits(scaled.net->parameters()[i], plain.net->parameters()[i]));
    }
    EXPECT_EQ(state_of(*scaled.optimizer), state_of(*plain.optimizer));
  }
}

TEST_P(GradScalerWithEachOptimizer, ADisabledScalerOnlyPassesOn) {
  Training plain(GetParam());
  Training passed(GetParam());
  GradScaler scaler(kRule, /*enabled=*/false);
  for (std::size_t i = 0; i < 4; ++i) {
    plain.optimizer->zero_grad();
    plain.loss(i).backward();
    plain.optimizer->step();
    passed.optimizer->zero_grad();
    const at::Tensor loss = passed.loss(i);
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    loss.backward();
    scaler.unscale_(*passed.optimizer);
    EXPECT_EQ(scaler.step(*passed.optimizer), Step::stepped);
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.is_enabled());
  for (std::size_t i = 0; i < plain.net->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(passed.net->parameters()[i], plain.net->parameters()[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GradScalerWithEachOptimizer,
                         testing::ValuesIn(test::all_optimizers()),
                         [](const auto& tested) { return tested.param.name; });

TEST(GradScaler, ClippingAfterUnscaleSeesTrueGradients) {
  const auto kind = test::all_optimizers()[0];
  Training plain(kind);
  Training scaled(kind);
  GradScaler scaler(kRule);
  for (std::size_t i = 0; i < 4; ++i) {
    plain.optimizer->zero_grad();
    plain.loss(i).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(plain.net->parameters(), 0.1);
    plain.optimizer->step();
    scaled.optimizer->zero_grad();
    scaler.scale(scaled.loss(i)).backward();
    scaler.unscale_(*scaled.optimizer);
    EXPECT_EQ(torch::nn::utils::clip_grad_norm_(scaled.net->parameters(), 0.1), norm);
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  EXPECT_TRUE(same_bits(scaled.net->a->weight, plain.net->a->weight));
}

TEST(GradScaler, AccumulatedGradientsAreUnscaledOnce) {
  const auto kind = test::all_optimizers()[1];
  Training plain(kind);
  Training scaled(kind);
  GradScaler scaler(kRule);
  for (const std::size_t i : {0U, 2U}) {
    plain.optimizer->zero_grad();
    scaled.optimizer->zero_grad();
    for (const std::size_t k : {i, i + 1}) {
      (plain.loss(k) / 2).backward();
      scaler.scale(scaled.loss(k) / 2).backward();
    }
    plain.optimizer->step();
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  EXPECT_TRUE(same_bits(scaled.net->a->weight, plain.net->a->weight));
}

// torch's test_grad_scaling_penalty: gradients of the scaled loss, unscaled by hand, whose norm is
// part of a second scaled loss.
TEST(GradScaler, GradientPenaltyThroughDoubleBackward) {
  const auto kind = test::all_optimizers()[0];
  Training plain(kind);
  Training scaled(kind);
  GradScaler scaler(kRule);
  const auto penalty = [](const std::vector<at::Tensor>& grads) {
    at::Tensor sum = torch::zeros({});
    for (const at::Tensor& grad : grads) sum = sum + grad.pow(2).sum();
    return sum.sqrt();
  };
  for (std::size_t i = 0; i < 3; ++i) {
    plain.optimizer->zero_grad();
    const auto loss = plain.loss(i);
    const auto grads = torch::autograd::grad({loss}, plain.net->parameters(), {}, true, true);
    (loss + penalty(grads)).backward();
    plain.optimizer->step();

    scaled.optimizer->zero_grad();
    const auto scaled_loss = scaled.loss(i);
    auto scaled_grads = torch::autograd::grad({scaler.scale(scaled_loss)}, scaled.net->parameters(),
                                              {}, true, true);
    for (at::Tensor& grad : scaled_grads) grad = grad / scaler.get_scale();
    scaler.scale(scaled_loss + penalty(scaled_grads)).backward();
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  EXPECT_TRUE(
      near(scaled.net->a->weight, plain.net->a->weight, reduction_tolerance(torch::kFloat, 5)));
}

TEST(GradScaler, GradientsWithAGraphAreUnscaledToo) {
  const auto weight = parameter({3});
  torch::optim::SGD optimizer({weight}, 1.0);
  GradScaler scaler(kRule);
  scaler.scale(weight.pow(3).sum()).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_TRUE(weight.grad().requires_grad());
  scaler.unscale_(optimizer);
  EXPECT_EQ(weight.grad().item<float>(), 27);
}

// ------------------------------------------------------------------ several optimizers and losses

TEST(GradScaler, OnlyTheOptimizerThatOverflowedSkipsAndTheScaleBacksOffForAll) {
  for (const bool unscale_early : {false, true}) {
    One good;
    One bad;
    GradScaler scaler = used_once();
    good.set_grad(128);
    bad.set_grad(kNan);
    if (unscale_early) {
      scaler.unscale_(good.optimizer);
      scaler.unscale_(bad.optimizer);
    }
    EXPECT_EQ(scaler.step(good.optimizer), Step::stepped);
    EXPECT_EQ(scaler.step(bad.optimizer), Step::skipped);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 64);
    EXPECT_TRUE(same_bits(good.weight, parameter({0, 1})));
    EXPECT_TRUE(same_bits(bad.weight, parameter({1, 2})));
  }
}

TEST(GradScaler, TwoLossesInTwoModelsWithTwoOptimizers) {
  const auto kind = test::all_optimizers()[1];
  Training plain_a(kind);
  Training plain_b(kind);
  Training a(kind);
  Training b(kind);
  GradScaler scaler(kRule);
  for (std::size_t i = 0; i < 4; ++i) {
    const bool overflow = i == 1;
    for (Training* one : {&plain_a, &plain_b, &a, &b}) one->optimizer->zero_grad();
    const auto losses = [i](Training& first, Training& second) {
      const at::Tensor x = first.net->forward(first.batches[i]);
      const at::Tensor y = second.net->forward(second.batches[3 - i]);
      return std::vector<at::Tensor>{torch::mse_loss(x, y), x.sum() - 0.5 * y.sum()};
    };
    auto plain = losses(plain_a, plain_b);
    plain[0].backward({}, true);
    plain[1].backward();
    if (!overflow) plain_a.optimizer->step();
    plain_b.optimizer->step();

    auto scaled = scaler.scale(losses(a, b));
    ASSERT_EQ(scaled.size(), 2U);
    scaled[0].backward({}, true);
    scaled[1].backward();
    if (overflow) a.net->b->bias.mutable_grad()[0] = -kInf;
    if (i == 2) scaler.unscale_(*b.optimizer);
    EXPECT_EQ(scaler.step(*a.optimizer), overflow ? Step::skipped : Step::stepped);
    EXPECT_EQ(scaler.step(*b.optimizer), Step::stepped);
    scaler.update();
  }
  EXPECT_TRUE(same_bits(a.net->a->weight, plain_a.net->a->weight));
  EXPECT_TRUE(same_bits(b.net->a->weight, plain_b.net->a->weight));
}

// ------------------------------------------------------------------ what gradients can look like

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
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_EQ(scaler.step(empty), Step::stepped);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 256);
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

// ------------------------------------------------------------------ the scale

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

// ------------------------------------------------------------------ wrong order of calls

TEST(GradScaler, EverythingButScaleWantsScaleFirst) {
  GradScaler scaler;
  One one;
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(one.optimizer); }),
              HasSubstr("[amp.grad_scaler.unscale_] expected scale() to be called before"));
  EXPECT_THAT(message_of<Error>([&] { scaler.step(one.optimizer); }),
              HasSubstr("[amp.grad_scaler.step] expected scale()"));
  EXPECT_THAT(message_of<Error>([&] { scaler.update(); }),
              HasSubstr("[amp.grad_scaler.update] expected scale()"));
  EXPECT_THROW(scaler.update(2.0), Error);
}

TEST(GradScaler, UnscaleTwiceIsAnError) {
  One one(128);
  GradScaler scaler = used_once();
  scaler.unscale_(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(one.optimizer); }),
              HasSubstr("a second call"));
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 1);
  scaler.step(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(one.optimizer); }),
              HasSubstr("a call after step()"));
}

TEST(GradScaler, StepTwiceIsAnError) {
  One one;
  GradScaler scaler = used_once();
  scaler.step(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { scaler.step(one.optimizer); }), HasSubstr("a second call"));
  scaler.update();
  EXPECT_NO_THROW(scaler.step(one.optimizer));
}

TEST(GradScaler, UpdateWithoutAStepIsAnError) {
  GradScaler scaler = used_once();
  EXPECT_THAT(message_of<Error>([&] { scaler.update(); }),
              HasSubstr("expected step() or unscale_() before"));
  One one(kInf);
  scaler.unscale_(one.optimizer);
  EXPECT_NO_THROW(scaler.update());  // what unscale_() found counts
  EXPECT_EQ(scaler.get_scale(), 64);
}

TEST(GradScaler, LbfgsIsRefused) {
  const auto weight = parameter({1});
  torch::optim::LBFGS optimizer({weight});
  GradScaler scaler = used_once();
  EXPECT_THAT(message_of<Error>([&] { scaler.step(optimizer); }), HasSubstr("got LBFGS"));
  static_assert(
      !std::is_invocable_v<
          decltype([](auto& s,
                      auto& o) -> decltype(s.step(o, torch::optim::Optimizer::LossClosure())) {}),
          GradScaler&, torch::optim::SGD&>,
      "a closure must not compile");
}

TEST(GradScaler, LossesThatAreNotFloatingAreRefused) {
  GradScaler scaler;
  EXPECT_THROW(scaler.scale(torch::ones({}, torch::kLong)), Error);
  EXPECT_THROW(scaler.scale(at::Tensor()), Error);
  One one;
  EXPECT_THROW(scaler.step(one.optimizer), Error);  // still nothing was scaled
}

// ------------------------------------------------------------------ exceptions

struct Faulty : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(broken, false)) throw std::runtime_error("no power");
    return SGD::step(closure);
  }
  bool broken = true;
};

TEST(GradScaler, AnOptimizerThatThrowsLeavesItUsable) {
  const auto weight = parameter({1});
  Faulty optimizer({weight}, 1.0);
  GradScaler scaler = used_once();
  weight.mutable_grad() = torch::full({1}, 128.0F);
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 256);
  weight.mutable_grad() = torch::full({1}, 256.0F);
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_EQ(weight.item<float>(), 0);
}

TEST(GradScaler, AHookThatThrowsLeavesTheStepToBeTriedAgain) {
  One one(128);
  GradScaler scaler = used_once();
  scaler.set_found_inf_hook([](at::Tensor&) { throw std::runtime_error("connection lost"); });
  EXPECT_THROW(scaler.step(one.optimizer), std::runtime_error);
  scaler.set_found_inf_hook(nullptr);
  EXPECT_EQ(scaler.step(one.optimizer), Step::stepped);
  EXPECT_TRUE(same_bits(one.weight, parameter({0, 1})));  // unscaled once
}

// ------------------------------------------------------------------ found_inf of other ranks

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

// ------------------------------------------------------------------ names

TEST(GradScaler, TheOverflowIsNamedByTheParameterNearestTheLoss) {
  auto net = std::make_shared<Net>();
  // Not in the model's order, and in two groups: the order of the model counts.
  torch::optim::SGD optimizer({net->b->weight, net->a->bias}, 1.0);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({net->b->bias, net->a->weight}));
  for (const at::Tensor& p : net->parameters()) p.mutable_grad() = torch::zeros_like(p);
  net->a->weight.mutable_grad().fill_(kNan);
  net->b->weight.mutable_grad().fill_(kInf);
  GradScaler scaler = used_once(LossScaleOptions(kRule).max_consecutive_skips(1));
  scaler.name_parameters(net);
  const RecordedEvents events;
  EXPECT_EQ(scaler.step(optimizer), Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "b.weight");
  EXPECT_EQ(events.skips()[0].non_finite, 2);
  EXPECT_EQ(events.skips()[0].loss_scale, 128);
  EXPECT_THAT(message_of<DivergedError>([&] { scaler.update(); }), HasSubstr("'b.weight'"));
}

TEST(GradScaler, AnUnknownParameterIsNamedByItsPlace) {
  torch::optim::SGD optimizer({parameter({1})}, 1.0);
  const auto weight = parameter({1});
  weight.mutable_grad() = torch::full({1}, kNan);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameter({1}), weight}));
  GradScaler scaler = used_once();
  const RecordedEvents events;
  scaler.step(optimizer);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "group 1, parameter 1");
}

// ------------------------------------------------------------------ copies, saving, loading

TEST(GradScaler, ACopyGoesItsOwnWay) {
  One one(kInf);
  GradScaler scaler = used_once();
  GradScaler copy = scaler;
  scaler.step(one.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 64);
  EXPECT_EQ(copy.get_scale(), 128);
  EXPECT_THROW(copy.update(), Error);
  one.set_grad(1);
  copy.step(one.optimizer);
  copy.update();
  EXPECT_EQ(copy.get_scale(), 256);
}

TEST(GradScaler, SavedAndLoadedEveryStepItTrainsAsBefore) {
  const auto kind = test::all_optimizers()[2];
  Training straight(kind);
  Training resumed(kind);
  GradScaler scaler(LossScaleOptions(kRule).growth_interval(2));
  auto interrupted = std::make_unique<GradScaler>(LossScaleOptions(kRule).growth_interval(2));
  for (int i = 0; i < 8; ++i) {
    const auto iterate = [i](Training& training, GradScaler& with) {
      training.optimizer->zero_grad();
      with.scale(training.loss(static_cast<std::size_t>(i % 4))).backward();
      if (i == 3) training.net->a->bias.mutable_grad()[0] = kNan;
      with.step(*training.optimizer);
      with.update();
    };
    iterate(straight, scaler);
    iterate(resumed, *interrupted);
    auto archive = saved(*interrupted);
    interrupted = std::make_unique<GradScaler>();
    interrupted->load(archive);
    EXPECT_EQ(interrupted->scaler().state(), scaler.scaler().state());
    EXPECT_EQ(interrupted->scaler().skipped_steps(), scaler.scaler().skipped_steps());
  }
  EXPECT_TRUE(same_bits(resumed.net->a->weight, straight.net->a->weight));
}

TEST(GradScaler, LoadsBeforeAndAfterFirstUse) {
  GradScaler saved_one = used_once();
  saved_one.update(512);
  for (const bool used : {false, true}) {
    GradScaler scaler = used ? used_once() : GradScaler();
    auto archive = saved(saved_one);
    scaler.load(archive);
    EXPECT_EQ(scaler.get_scale(), 512);
    EXPECT_EQ(scaler.scale(torch::ones({})).item<float>(), 512);
  }
}

TEST(GradScaler, LoadForgetsWhatAnInterruptedIterationFound) {
  One one(kInf);
  GradScaler scaler = used_once();
  auto archive = saved(scaler);
  scaler.step(one.optimizer);
  scaler.load(archive);
  EXPECT_THROW(scaler.update(), Error);
  one.set_grad(1);
  EXPECT_EQ(scaler.step(one.optimizer), Step::stepped);
}

TEST(GradScaler, SavingInTheMiddleOfAnIterationIsAnError) {
  One one;
  GradScaler scaler = used_once();
  scaler.unscale_(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { saved(scaler); }), HasSubstr("save after update()"));
  scaler.step(one.optimizer);
  EXPECT_THROW(saved(scaler), Error);
  scaler.update();
  EXPECT_NO_THROW(saved(scaler));
}

TEST(GradScaler, DisabledOnesSaveAndLoadNothing) {
  const GradScaler disabled({}, false);
  GradScaler enabled;
  auto of_disabled = saved(disabled);
  EXPECT_THAT(message_of<FileError>([&] { enabled.load(of_disabled); }),
              HasSubstr("that of a disabled one"));
  auto of_enabled = saved(enabled);
  GradScaler other({}, false);
  EXPECT_NO_THROW(other.load(of_enabled));
  EXPECT_EQ(other.get_scale(), 1);
  auto again = saved(disabled);
  EXPECT_NO_THROW(other.load(again));
}

TEST(GradScaler, LoadingSomethingElseIsAnErrorThatChangesNothing) {
  GradScaler scaler = used_once();
  auto other = test::archived(
      [](torch::serialize::OutputArchive& archive) { archive.write("weight", torch::ones({2})); });
  EXPECT_THAT(message_of<FileError>([&] { scaler.load(other); }),
              HasSubstr("'enabled' in the archive"));
  EXPECT_EQ(scaler.get_scale(), 128);
}

}  // namespace
}  // namespace semitone::amp::grad_scaler_test
