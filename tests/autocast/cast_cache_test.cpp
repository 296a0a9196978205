// The weight-cast cache, observed through the events that it causes: hits, gradients, regions.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/device.h"
#include "src/core/native_kernels.h"
#include "tests/autocast/cast_cache_fixture.h"
#include "tests/support/casts.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::amp::cast_cache_test {
namespace {

using test::CastRecording;
using test::expect_bitwise_equal;

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

// Returns its argument, and multiplies the gradient.
struct ScaledGradient : torch::autograd::Function<ScaledGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& weight,
                            bool transposed) {
    return transposed ? weight.t() : weight.view_as(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    (void)ctx;
    const at::Tensor grad = grads[0].size(0) == kIn ? grads[0].t() : grads[0];
    return {grad * 8, {}};
  }
};

TEST_F(CastCacheTest, GradientsPassThroughWhatReturnsAViewOfAWeight) {
  for (const bool transposed : {false, true}) {
    const auto gradient_of = [&](double factor) {
      torch::nn::Linear linear(kIn, kOut);
      const at::Tensor& stored = linear->weight;
      const Autocast region(bf16);
      at::linear(x, stored);  // its cast is in the cache
      const auto used = factor == 1 ? (transposed ? stored.t() : stored)
                                    : ScaledGradient::apply(stored, transposed);
      at::mm(x, transposed ? used : used.t()).sum().backward();
      return stored.grad().clone();
    };
    expect_bitwise_equal(gradient_of(8), gradient_of(1) * 8);
  }
}

TEST_F(CastCacheTest, HooksOnAViewOfAWeightRun) {
  torch::nn::Linear linear(kIn, kOut);
  const Autocast region(bf16);
  at::linear(x, linear->weight);
  const auto view = linear->weight.view_as(linear->weight);
  int calls = 0;
  view.register_hook([&](const at::Tensor& /*grad*/) { ++calls; });
  at::addmm(linear->bias, x, view.t()).sum().backward();
  EXPECT_EQ(calls, 1);
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
