// The weight-cast cache, observed through the events that it causes.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/device.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/support/casts.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::amp::cast_cache_test {
namespace {

using test::CastRecording;
using test::expect_bitwise_equal;
using test::expect_close;

constexpr auto kBf16 = torch::kBFloat16;
constexpr auto kFp16 = torch::kHalf;

// Sizes of no other tensor here, so that casts of the weight are recognised by their size.
constexpr std::int64_t kIn = 6;
constexpr std::int64_t kOut = 5;
constexpr std::int64_t kWeight = kIn * kOut;

class CastCacheTest : public testing::Test {
 protected:
  CastCacheTest() { torch::manual_seed(7); }

  // x @ weight without a cache: the expected result of every use.
  at::Tensor product(c10::ScalarType dtype = kBf16) const {
    return at::mm(x.to(dtype), weight.detach().to(dtype));
  }
  void expect_current(const at::Tensor& got, c10::ScalarType dtype = kBf16) const {
    const DisableCasts no_casts;
    expect_close(got, product(dtype), test::reduction_tolerance(dtype, kIn));
  }

  at::Tensor x = torch::rand({3, kIn});
  at::Tensor weight = torch::rand({kIn, kOut}).requires_grad_();
  CastPolicy bf16 = CastPolicy::semitone({torch::kCPU, kBf16});
  CastPolicy fp16 = CastPolicy::semitone({torch::kCPU, kFp16});
};

TEST_F(CastCacheTest, AWeightUsedTwiceIsCastOnce) {
  const CastRecording casts;
  const Autocast region(bf16);
  at::mm(x, weight);
  EXPECT_EQ(casts->computed(kWeight), 1U);
  EXPECT_EQ(casts->cached(kWeight), 0U);
  at::mm(x, weight);
  at::matmul(x, weight);
  EXPECT_EQ(casts->computed(kWeight), 1U);
  EXPECT_EQ(casts->cached(kWeight), 2U);
  const auto heard = casts->heard();
  EXPECT_EQ(heard[0].op, "mm");
  EXPECT_EQ(heard[0].from, torch::kFloat);
  EXPECT_EQ(heard[0].to, kBf16);
}

TEST_F(CastCacheTest, LinearsTransposedWeightCountsAsTheWeight) {
  torch::nn::Linear linear(kIn, kOut);
  for (const bool grad : {true, false}) {
    const torch::AutoGradMode mode(grad);
    SCOPED_TRACE(grad ? "with gradients" : "under no_grad");
    const CastRecording casts;
    const Autocast region(bf16);
    const at::Tensor flat = linear(x);                            // addmm
    const at::Tensor batched = linear(x.view({1, 3, kIn}));       // matmul
    const at::Tensor functional = at::linear(x, linear->weight);  // linear
    EXPECT_EQ(casts->computed(kWeight), 1U);
    EXPECT_EQ(casts->cached(kWeight), 2U);
    EXPECT_EQ(flat.requires_grad(), grad);
    EXPECT_EQ(batched.requires_grad(), grad);
    expect_close(batched.view({3, kOut}), flat, test::reduction_tolerance(kBf16, kIn));
  }
}

TEST_F(CastCacheTest, OtherViewsOfAWeightAreNotTakenForIt) {
  const auto square = torch::rand({4, 4}).requires_grad_();
  const auto y = torch::rand({2, 4});
  const auto plain = [&](const at::Tensor& view) {
    return at::mm(y.to(kBf16), view.detach().to(kBf16));
  };
  std::vector<std::pair<at::Tensor, at::Tensor>> results;
  {
    const Autocast region(bf16);
    for (const auto& view : {square, square.t(), square.flip(0), square.view({2, 8}).view({4, 4}),
                             square.narrow(0, 0, 4).t(), at::_neg_view(square.t())}) {
      results.emplace_back(at::mm(y, view), view);
    }
  }
  for (const auto& [got, view] : results)
    expect_close(got, plain(view), test::reduction_tolerance(kBf16, 4));
}

TEST_F(CastCacheTest, AViewOfMemoryThatTheWeightHasLeftIsNotTakenForIt) {
  const auto transposed = weight.t();
  const auto before = weight.detach().clone();
  weight.set_data(torch::rand({kIn, kOut}));
  const auto y = torch::rand({2, kOut});
  const Autocast region(bf16);
  const auto got = at::mm(y, transposed);
  const DisableCasts no_casts;
  expect_close(got, at::mm(y.to(kBf16), before.t().to(kBf16)),
               test::reduction_tolerance(kBf16, kOut));
}

// ---- never stale -------------------------------------------------------------------------------

struct Change {
  const char* name;
  void (*make)(at::Tensor& weight);
};

class CastCacheChanges : public CastCacheTest, public testing::WithParamInterface<Change> {};

TEST_P(CastCacheChanges, DropTheCast) {
  const Autocast region(bf16);
  expect_current(at::mm(x, weight));
  GetParam().make(weight);
  expect_current(at::mm(x, weight));
  GetParam().make(weight);  // once more, where memory may be reused
  expect_current(at::mm(x, weight));
}

INSTANTIATE_TEST_SUITE_P(
    CastCache, CastCacheChanges,
    testing::Values(
        Change{"InPlaceUpdate",
               [](at::Tensor& weight) {
                 const torch::NoGradGuard no_grad;
                 weight.add_(1);
               }},
        Change{"InPlaceUpdateOfADetachedAlias",
               [](at::Tensor& weight) { weight.detach().mul_(2); }},
        Change{"InPlaceUpdateOfAPart",
               [](at::Tensor& weight) {
                 const torch::NoGradGuard no_grad;
                 weight[0].zero_();
               }},
        Change{"Copy",
               [](at::Tensor& weight) {
                 const torch::NoGradGuard no_grad;
                 weight.copy_(torch::rand_like(weight));
               }},
        Change{"SetData", [](at::Tensor& weight) { weight.set_data(torch::rand({kIn, kOut})); }},
        // The third weight gets the freed memory of the first: same address, same version.
        Change{"SetDataRoundAndRound",
               [](at::Tensor& weight) {
                 for (int i = 0; i < 4; ++i) weight.set_data(torch::rand({kIn, kOut}));
               }},
        Change{"SetDataToAnotherLayoutOfTheSameMemory",
               [](at::Tensor& weight) {
                 const auto data = weight.detach();
                 weight.set_data(data.as_strided({kIn, kOut}, {1, kIn}));
               }}),
    [](const auto& tested) { return tested.param.name; });

template <typename Optimizer>
class CastCacheOptimizers : public CastCacheTest {};
using Optimizers = testing::Types<torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW,
                                  torch::optim::RMSprop, torch::optim::Adagrad>;
TYPED_TEST_SUITE(CastCacheOptimizers, Optimizers);

// torch::optim::SGD writes through tensor.data(), which no version counter shows.
TYPED_TEST(CastCacheOptimizers, AStepInsideTheRegionIsSeen) {
  TypeParam optimizer({this->weight}, 0.5);
  const Autocast region(this->bf16);
  for (int step = 0; step < 3; ++step) {
    at::mm(this->x, this->weight).sum().backward();
    this->expect_current(at::mm(this->x, this->weight));  // between backward and step
    const at::Tensor before = this->weight.detach().clone();
    optimizer.step();
    ASSERT_FALSE(at::equal(before, this->weight));
    this->expect_current(at::mm(this->x, this->weight));
    if (step == 1) optimizer.zero_grad(/*set_to_none=*/false);
    if (step == 2) optimizer.zero_grad();
    this->expect_current(at::mm(this->x, this->weight));
  }
}

// One element of many, between the sampled ones, by an optimizer without any notification.
TEST_F(CastCacheTest, ASparseStepOfSgdInsideTheRegionIsSeen) {
  const auto eye = torch::eye(256);
  for (const char* preset : {"semitone", "torch", "apex", "paddle", "none"}) {
    for (const double momentum : {0.0, 0.9}) {
      SCOPED_TRACE(preset);
      const auto large = torch::zeros({256, 256}).requires_grad_();
      torch::optim::SGD optimizer({large}, torch::optim::SGDOptions(0.5).momentum(momentum));
      const Autocast region(CastPolicy::by_name(preset, {torch::kCPU, kBf16}).lower("mm"));
      large.mutable_grad() = torch::zeros({256, 256});
      large.mutable_grad()[3][5] = 1;
      at::mm(eye, large);
      optimizer.step();
      expect_bitwise_equal(at::mm(eye, large).detach(), large.detach().to(kBf16));
    }
  }
}

TEST_F(CastCacheTest, HandWrittenStepsThroughDataAreSeen) {
  const auto large = torch::zeros({256, 256}).requires_grad_();
  const auto eye = torch::eye(256);
  const Autocast region(bf16);
  large.mutable_grad() = torch::zeros({256, 256});
  large.mutable_grad()[3][5] = 1;
  const auto expect_seen = [&] {
    expect_bitwise_equal(at::mm(eye, large).detach(), large.detach().to(kBf16));
  };
  expect_seen();
  large.data() -= 0.5 * large.grad();
  expect_seen();
  large.data().add_(large.grad(), -0.5);
  expect_seen();
}

// Two ways in which SGD steps without a backward pass through the cast.
TEST_F(CastCacheTest, AStepOfSgdAfterABackwardWithCastsOffIsSeen) {
  torch::optim::SGD optimizer({weight}, 0.5);
  const Autocast region(bf16);
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    expect_current(at::mm(x, weight));
  };
  evaluate();
  {
    const DisableCasts no_casts;
    at::mm(x, weight).sum().backward();
  }
  optimizer.step();
  optimizer.zero_grad();
  evaluate();
}

TEST_F(CastCacheTest, AStepOfSgdWithGradientsSetByHandIsSeen) {
  torch::optim::SGD optimizer({weight}, 0.5);
  const Autocast region(bf16);
  expect_current(at::mm(x, weight));
  weight.mutable_grad() = torch::ones({kIn, kOut});
  optimizer.step();
  optimizer.zero_grad();
  expect_current(at::mm(x, weight));
}

// Small weights are compared whole, in every layout.
TEST_F(CastCacheTest, AWriteThroughDataToAnyElementOfASmallWeightIsSeen) {
  const auto storage = torch::rand({2, 2 * kWeight});
  const std::vector<std::pair<const char*, at::Tensor>> layouts{
      {"contiguous", torch::rand({kIn, kOut})},
      {"transposed", torch::rand({kOut, kIn}).t()},
      {"with gaps", storage.slice(1, 0, 2 * kWeight, 2)[1].view({kIn, kOut})},
      {"expanded", torch::rand({kIn, 1}).expand({kIn, kOut})}};
  const Autocast region(bf16);
  for (const auto& [name, layout] : layouts) {
    SCOPED_TRACE(name);
    weight = layout.detach().set_requires_grad(true);
    for (std::int64_t i = 0; i < kWeight; ++i) {
      expect_current(at::mm(x, weight));
      weight.data()[i / kOut][i % kOut].add_(1);
      expect_current(at::mm(x, weight));
    }
  }
}

// The update of a step if one input is always zero, or one output never active: all elements except
// a row or a column.
TEST_F(CastCacheTest, AWriteThroughDataToMostOfALargeWeightIsSeen) {
  constexpr std::int64_t kSide = 256;
  const auto large = torch::rand({kSide, kSide}).requires_grad_();
  const auto y = torch::eye(kSide);
  const auto expect_seen = [&] {
    expect_bitwise_equal(at::mm(y, large).detach(), large.detach().to(kBf16));
  };
  const Autocast region(bf16);
  for (std::int64_t dead = 0; dead < kSide; ++dead) {
    for (const std::int64_t dim : {0, 1}) {
      expect_seen();
      const auto keep = large.detach().select(dim, dead).clone();
      large.data().add_(1);
      large.data().select(dim, dead).copy_(keep);
      expect_seen();
    }
  }
}

// One element of many, between the sampled ones.
TEST_F(CastCacheTest, ASparseStepThroughAScalerIsSeen) {
  const auto large = torch::zeros({256, 256}).requires_grad_();
  const auto eye = torch::eye(256);
  for (const bool enabled : {false, true}) {
    SCOPED_TRACE(enabled);
    torch::optim::SGD optimizer({large}, 0.5);
    GradScaler scaler({}, enabled);
    const Autocast region(bf16);
    at::mm(eye, large);
    large.mutable_grad() = torch::zeros({256, 256});
    large.mutable_grad()[3][5] = scaler.get_scale();
    scaler.scale(torch::ones({}));
    scaler.step(optimizer);
    optimizer.zero_grad();
    expect_bitwise_equal(at::mm(eye, large).detach(), large.detach().to(kBf16));
  }
}

TEST_F(CastCacheTest, ASparseStepOfMixedPrecisionIsSeen) {
  torch::nn::Linear linear(256, 256);
  torch::optim::SGD optimizer(linear->parameters(), 0.5);
  auto mixed = initialize(linear, optimizer, Options(OptLevel::O1).dtype(kBf16).verbosity(0));
  const auto eye = torch::eye(256);
  const auto region = mixed.autocast();
  const auto product = [&] { return at::mm(eye, linear->weight).detach(); };
  product();
  linear->weight.mutable_grad() = torch::zeros({256, 256});
  linear->weight.mutable_grad()[3][5] = 1;
  mixed.step(optimizer);
  optimizer.zero_grad();
  expect_bitwise_equal(product(), linear->weight.detach().to(kBf16));
}

TEST_F(CastCacheTest, AnEmptyWeightIsNoTrouble) {
  const auto empty = torch::rand({kIn, 0}).requires_grad_();
  const Autocast region(bf16);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(at::mm(x, empty).sizes(), (at::IntArrayRef{3, 0}));
}

TEST_F(CastCacheTest, AWriteThroughDataIsSeenAfterClearCastCache) {
  const Autocast region(bf16);
  at::mm(x, weight);
  weight.data().add_(1);
  clear_cast_cache();
  expect_current(at::mm(x, weight));
}

TEST_F(CastCacheTest, AWriteToTheCastItselfIsNotCached) {
  // A row with which an operator returns its argument, so that its caller may write to it.
  const auto policy = CastPolicy::semitone({torch::kCPU, kBf16}).lower("dropout");
  const Autocast region(policy);
  {
    const torch::NoGradGuard no_grad;
    at::Tensor alias = at::dropout(weight, 0.5, /*train=*/false);
    ASSERT_EQ(alias.scalar_type(), kBf16);
    alias.zero_();
  }
  expect_current(at::mm(x, weight));
}

TEST_F(CastCacheTest, RequiresGradToggled) {
  const Autocast region(bf16);
  EXPECT_TRUE(at::mm(x, weight).requires_grad());
  weight.requires_grad_(false);
  EXPECT_FALSE(at::mm(x, weight).requires_grad())
      << "a frozen weight must not train by an old cast";
  weight.requires_grad_(true);
  const auto y = at::mm(x, weight);
  ASSERT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST_F(CastCacheTest, RequiresGradToggledOnABoundWeight) {
  torch::nn::Linear linear(kIn, kOut);
  const Autocast region(bf16.bind(linear));
  for (const bool train : {false, true, false, true}) {
    linear->weight.requires_grad_(train);
    linear->bias.requires_grad_(train);
    EXPECT_EQ(linear(x).requires_grad(), train);
  }
}

// During gradient accumulation every weight has a gradient.
TEST_F(CastCacheTest, AWeightThatHasAGradientIsCastOnce) {
  for (const bool outer_region : {false, true}) {
    SCOPED_TRACE(outer_region ? "in one region" : "in a region each");
    weight.mutable_grad().reset();
    std::optional<Autocast> outer;
    if (outer_region) outer.emplace(bf16);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const CastRecording casts;
      at::Tensor sum = torch::zeros({});
      {
        const Autocast region(bf16);
        for (int use = 0; use < 5; ++use) sum = sum + at::mm(x, weight).to(torch::kFloat).sum();
      }
      sum.backward();
      EXPECT_EQ(casts->computed(kWeight), 1U) << "micro-batch " << micro_batch;
      EXPECT_EQ(casts->cached(kWeight), 4U) << "micro-batch " << micro_batch;
    }
  }
}

// ---- LibTorch's own cache, which kernels of other libraries fill -------------------------------

at::Tensor scaled(const at::Tensor& x, const at::Tensor& weight) {
  return at::mm(x, weight);
}
at::Tensor scaled_autocast(const at::Tensor& x, const at::Tensor& weight) {
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::DispatchKey::AutocastCPU);
  const auto cast = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(kBf16, tensor, torch::kCPU);
  };
  return scaled(cast(x), cast(weight));
}
at::Tensor call_scaled(const at::Tensor& x, const at::Tensor& weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("semitone_cast_cache_test::scaled", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, weight);
}

TORCH_LIBRARY(semitone_cast_cache_test, library) {
  library.def("scaled(Tensor x, Tensor weight) -> Tensor", scaled);
}
TORCH_LIBRARY_IMPL(semitone_cast_cache_test, AutocastCPU, library) {
  library.impl("scaled", scaled_autocast);
}

TEST_F(CastCacheTest, OperatorsThatUseLibTorchsCacheSeeNewWeightsInEveryRegion) {
  for (int i = 0; i < 3; ++i) {
    {
      const Autocast region(bf16);
      const Autocast inner(bf16);
      const auto got = call_scaled(x, weight).to(torch::kFloat);
      expect_current(got.to(kBf16));
    }
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
}

TEST_F(CastCacheTest, OperatorsThatUseLibTorchsCacheTrain) {
  struct Net : torch::nn::Module {
    explicit Net(const at::Tensor& initial) { weight = register_parameter("weight", initial); }
    at::Tensor forward(const at::Tensor& x) { return call_scaled(x, weight); }
    at::Tensor weight;
  };
  Net net(weight.detach().clone());
  torch::optim::SGD optimizer(net.parameters(), 0.25);
  auto mixed = initialize(net, optimizer, Options(OptLevel::O1).dtype(kBf16).verbosity(0));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto got = mixed.forward(net, x);
    expect_bitwise_equal(got.detach(),
                         at::mm(x.to(kBf16), net.weight.detach().to(kBf16)).to(torch::kFloat));
    mixed.scale_loss(got.sum(), optimizer).backward();
    mixed.step(optimizer);
  }
}

TEST_F(CastCacheTest, BackwardAndClearCastCacheEmptyLibTorchsCacheToo) {
  const Autocast region(bf16);
  for (const bool by_backward : {false, true}) {
    (void)call_scaled(x, weight);
    if (by_backward) {
      at::mm(x, weight).sum().backward();
      weight.data().add_(1);
    } else {
      weight.data().add_(1);
      clear_cast_cache();
    }
    expect_current(call_scaled(x, weight).detach());
  }
}

// ---- gradients ---------------------------------------------------------------------------------

TEST_F(CastCacheTest, NoGradFirstThenGrad) {
  const Autocast region(bf16);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(at::mm(x, weight).requires_grad());
  }
  at::mm(x, weight).sum().backward();
  ASSERT_TRUE(weight.grad().defined());
  EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
}

TEST_F(CastCacheTest, GradFirstThenNoGrad) {
  const CastRecording casts;
  const Autocast region(bf16);
  const auto y = at::mm(x, weight);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(at::mm(x, weight).requires_grad());
    EXPECT_EQ(casts->cached(kWeight), 1U) << "a cast with a gradient serves without one too";
  }
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST_F(CastCacheTest, InferenceModeFirstThenTraining) {
  torch::nn::Linear linear(kIn, kOut);
  linear->weight.requires_grad_(false);
  const Autocast region(bf16.bind(linear));
  {
    const c10::InferenceMode inference;
    (void)linear(x);
  }
  const auto input = x.clone().requires_grad_();
  linear(input).sum().backward();
  EXPECT_TRUE(input.grad().defined());
}

TEST_F(CastCacheTest, BackwardTwiceThroughOneCast) {
  const Autocast region(bf16);
  at::mm(x, weight).sum().backward();
  const at::Tensor once = weight.grad().clone();
  weight.mutable_grad().reset();
  at::mm(x, weight).sum().backward();
  expect_bitwise_equal(weight.grad(), once);
}

// Apex's test of its cache: train, evaluate under no_grad, train again, in one region and in three;
// for an operator that lowers, one that raises and one that promotes.
TEST_F(CastCacheTest, TrainEvaluateTrainGivesTheGradientsOfAnUncachedReference) {
  using Function = at::Tensor (*)(const at::Tensor&, const at::Tensor&);
  const std::vector<std::pair<const char*, Function>> functions{
      {"lower", [](const at::Tensor& a, const at::Tensor& w) { return at::mm(a, w); }},
      {"fp32", [](const at::Tensor& a, const at::Tensor& w) { return at::pow(at::mm(a, w), 2); }},
      {"promote",
       [](const at::Tensor& a, const at::Tensor& w) { return at::cat({at::mm(a, w), w}); }}};
  for (const auto& [name, function] : functions) {
    for (const auto weight_dtype : {torch::kFloat, kBf16}) {
      for (const bool one_region : {true, false}) {
        SCOPED_TRACE(
            c10::str(name, ", weight ", weight_dtype, one_region ? ", one region" : ", three"));
        const auto leaf = weight.detach().to(weight_dtype).requires_grad_();
        std::optional<Autocast> region(bf16);
        at::Tensor grad;
        for (const char* phase : {"train", "evaluate", "train"}) {
          if (!one_region) region.emplace(bf16);
          if (phase[0] == 'e') {
            const torch::NoGradGuard no_grad;
            (void)function(x, leaf);
            continue;
          }
          leaf.mutable_grad().reset();
          function(x, leaf).to(torch::kFloat).sum().backward();
          const auto rounded = leaf.detach().to(kBf16).requires_grad_();
          const DisableCasts no_casts;
          const auto product = at::mm(x.to(kBf16), rounded);
          const auto want =
              name[0] == 'l' ? product.to(torch::kFloat)
              : name[0] == 'f'
                  ? product.to(torch::kFloat).pow(2)
                  : at::cat({product.to(weight_dtype), leaf.detach()}).to(torch::kFloat);
          want.sum().backward();
          const auto extra = name[0] == 'p' ? 1.0 : 0.0;  // cat's own use of the weight
          expect_close(leaf.grad(), (rounded.grad().to(torch::kFloat) + extra).to(weight_dtype),
                       test::reduction_tolerance(kBf16, 3));
        }
      }
    }
  }
}

// ---- dtypes, regions, policies -----------------------------------------------------------------

TEST_F(CastCacheTest, DtypesDoNotMix) {
  const CastRecording casts;
  const Autocast outer(bf16);
  expect_current(at::mm(x, weight), kBf16);
  {
    const Autocast inner(fp16);
    expect_current(at::mm(x, weight), kFp16);
  }
  expect_current(at::mm(x, weight), kBf16);
  EXPECT_EQ(casts->computed(kWeight), 2U);
  EXPECT_EQ(casts->cached(kWeight), 1U);
}

TEST_F(CastCacheTest, EmulatedAndPlainCastsDoNotMix) {
  auto emulated = bf16;
  emulated.emulation(Emulation::always);
  auto plain = bf16;
  plain.emulation(Emulation::never);
  const Autocast outer(emulated);
  expect_current(at::mm(x, weight));
  const Autocast inner(plain);
  expect_current(at::mm(x, weight));
  const Autocast innermost(emulated);
  expect_current(at::mm(x, weight));
}

TEST_F(CastCacheTest, NestedPoliciesShareCastsAndTheInnerRegionDoesNotEndThem) {
  const CastRecording casts;
  const Autocast outer(bf16);
  at::mm(x, weight);
  {
    const Autocast inner(CastPolicy::apex({torch::kCPU, kBf16}));
    at::mm(x, weight);
  }
  at::mm(x, weight);
  EXPECT_EQ(casts->computed(kWeight), 1U);
  EXPECT_EQ(casts->cached(kWeight), 2U);
}

TEST_F(CastCacheTest, TheOutermostRegionsEndIsTheCachesEnd) {
  const CastRecording casts;
  for (int i = 0; i < 2; ++i) {
    const Autocast region(bf16);
    at::mm(x, weight);
  }
  EXPECT_EQ(casts->computed(kWeight), 2U);
}

TEST_F(CastCacheTest, ClearCastCacheForgets) {
  const CastRecording casts;
  clear_cast_cache();  // outside a region: nothing to do
  const Autocast region(bf16);
  at::mm(x, weight);
  clear_cast_cache();
  at::mm(x, weight);
  EXPECT_EQ(casts->computed(kWeight), 2U);
}

// ---- what is kept, and how long
// ------------------------------------------------------------------

TEST_F(CastCacheTest, FrozenWeightsAreCachedWhereThePolicyKnowsThem) {
  torch::nn::Linear linear(kIn, kOut);
  linear->weight.requires_grad_(false);
  for (const bool bound : {false, true}) {
    const CastRecording casts;
    const Autocast region(bound ? bf16.bind(linear) : bf16);
    (void)linear(x);
    (void)linear(x);
    EXPECT_EQ(casts->computed(kWeight), bound ? 1U : 2U);
    EXPECT_EQ(casts->cached(kWeight), bound ? 1U : 0U);
  }
}

// The memory of a tensor, observed from outside: whether anything still holds it.
c10::weak_intrusive_ptr<c10::StorageImpl> memory_of(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

TEST_F(CastCacheTest, ActivationsAreNotRetained) {
  const torch::NoGradGuard no_grad;
  const Autocast region(bf16);
  auto hidden = at::relu(at::mm(x, weight).to(torch::kFloat));
  const auto memory = memory_of(hidden);
  (void)at::mm(hidden, weight.t());
  hidden.reset();
  EXPECT_TRUE(memory.expired());
}

TEST_F(CastCacheTest, CastsAreFreedWithTheRegionAlsoIfAStateOutlivesIt) {
  // An operator that returns its argument shows the cast that the cache holds.
  const auto policy = CastPolicy::semitone({torch::kCPU, kBf16}).lower("dropout");
  c10::weak_intrusive_ptr<c10::StorageImpl> memory = memory_of(x);
  std::optional<AutocastState> state;
  {
    const torch::NoGradGuard no_grad;
    const Autocast region(policy);
    memory = memory_of(at::dropout(weight, 0.5, /*train=*/false));
    EXPECT_FALSE(memory.expired()) << "cached";
    state = AutocastState::current();
  }
  EXPECT_TRUE(memory.expired());
}

TEST_F(CastCacheTest, FreedWeightsLeaveNothingBehindAtTheirAddress) {
  const torch::NoGradGuard no_grad;
  const Autocast region(bf16);
  for (int i = 0; i < 200; ++i) {
    weight = torch::full({kIn, kOut}, static_cast<float>(i % 7)).requires_grad_();
    expect_current(at::mm(x, weight));
  }
}

// A cast with a gradient holds its weight, and would hold it until the region ends.
TEST_F(CastCacheTest, WeightsThatTheProgramDropsAreFreedInALongRegion) {
  const Autocast region(bf16);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 600; ++i) {
    const auto dropped = torch::rand({kIn, kOut}).requires_grad_();
    memory.push_back(memory_of(dropped));
    (void)at::mm(x, dropped);
    if (i % 100 == 0) kept.push_back(at::mm(x, dropped));  // whose backward pass is to come
  }
  std::int64_t alive = 0;
  for (const auto& left : memory) alive += left.expired() ? 0 : 1;
  EXPECT_LE(alive, 140) << "of 600";
  for (const at::Tensor& result : kept) result.sum().backward();
}

TEST_F(CastCacheTest, WeightsWithoutMemoryOfTheirOwnAreCastButNotCached) {
  const auto sparse = torch::eye(kIn).to_sparse().requires_grad_();
  const CastRecording casts;
  const Autocast region(CastPolicy::none({torch::kCPU, kBf16}).lower("neg"));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(at::neg(sparse).scalar_type(), kBf16);
  for (const auto& cast : casts->heard()) EXPECT_FALSE(cast.cached);
}

// ---- threads -----------------------------------------------------------------------------------

TEST_F(CastCacheTest, IsSharedWithTheThreadsThatWorkForTheRegion) {
  const CastRecording casts;
  const Autocast region(bf16);
  at::mm(x, weight);
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    at::mm(x, weight);
  }).join();
  EXPECT_EQ(casts->cached(kWeight), 1U) << "carried by LibTorch";
  const auto recorder = std::make_shared<test::CastRecorder>();
  std::thread([&, state = AutocastState::current()] {
    const events::Listen listen(recorder);
    const auto scope = state.enter();
    at::mm(x, weight);
  }).join();
  EXPECT_EQ(recorder->cached(kWeight), 1U) << "carried by AutocastState";
}

TEST_F(CastCacheTest, OfTwoThreadsAreTwo) {
  const Autocast region(bf16);
  at::mm(x, weight);
  const auto recorder = std::make_shared<test::CastRecorder>();
  std::thread([&] {
    const events::Listen listen(recorder);
    const Autocast own(bf16);
    at::mm(x, weight);
  }).join();
  EXPECT_EQ(recorder->computed(kWeight), 1U);
  EXPECT_EQ(recorder->cached(kWeight), 0U);
}

// ---- events ------------------------------------------------------------------------------------

TEST_F(CastCacheTest, EventsTellOfEveryConversionAndOfNothingElse) {
  const CastRecording casts;
  const auto low = x.to(kBf16);
  for (const char* preset : {"torch", "semitone"}) {
    SCOPED_TRACE(preset);
    casts->clear();
    const Autocast region(CastPolicy::by_name(preset, {torch::kCPU, kBf16}));
    (void)at::mse_loss(low, x);
    (void)at::cat({low, x});
    (void)at::mm(low, low.t());
    const auto heard = casts->heard();
    // On a processor without bf16 products, mm converts both of its arguments to fp32.
    const bool emulated = !has_native_kernel(torch::kCPU, kBf16, OperatorKind::product);
    ASSERT_EQ(heard.size(), emulated ? 4U : 2U);
    for (std::size_t i = 2; i < heard.size(); ++i) {
      EXPECT_EQ(heard[i].op, "mm");
      EXPECT_EQ(heard[i].from, kBf16);
      EXPECT_EQ(heard[i].to, torch::kFloat);
    }
    EXPECT_EQ(heard[0].op, "mse_loss");
    EXPECT_EQ(heard[0].to, torch::kFloat);
    EXPECT_EQ(heard[1].op, "cat");
    EXPECT_EQ(heard[1].numel, x.numel());
  }
  casts->clear();
  const Autocast region(bf16);
  (void)at::softmax(low, 1);  // by its dtype argument
  (void)at::softmax(low, 1, kBf16);
  ASSERT_EQ(casts->heard().size(), 1U);
  EXPECT_EQ(casts->heard()[0].op, "softmax.int");
}

}  // namespace
}  // namespace semitone::amp::cast_cache_test
