#include "semitone/nn/fused_cross_entropy.h"

#include "semitone/core/dtype.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace semitone::nn::fused_cross_entropy_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::expect_error;
using Options = FusedCrossEntropyOptions;

constexpr std::int64_t kIgnored = 3;
constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16,
                                       torch::kDouble};

const std::vector<std::pair<Options::reduction_t, at::Reduction::Reduction>> kReductions{
    {torch::kMean, at::Reduction::Mean},
    {torch::kSum, at::Reduction::Sum},
    {torch::kNone, at::Reduction::None}};

c10::ScalarType wide(c10::ScalarType dtype) {
  return dtype == torch::kDouble ? dtype : torch::kFloat;
}

struct LossAndGradient {
  at::Tensor loss;
  at::Tensor gradient;
};

// The gradient of a weighted loss, so that rows have different gradients.
template <typename Loss>
LossAndGradient backward(const at::Tensor& values, const Loss& loss_of) {
  const at::Tensor logits = values.detach().clone().requires_grad_();
  const at::Tensor loss = loss_of(logits);
  loss.backward(torch::linspace(0.5, 2, loss.numel()).to(loss.scalar_type()).view_as(loss));
  return {loss.detach(), logits.grad()};
}

class FusedCrossEntropyTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TEST_F(FusedCrossEntropyTest, EqualsLibTorchsInFp64) {
  for (const auto dtype : kDtypes) {
    for (const auto& [reduction, code] : kReductions) {
      for (const double smoothing : {0.0, 0.1, 1.0}) {
        SCOPED_TRACE(c10::str(dtype_name(dtype), " reduction ", code, " smoothing ", smoothing));
        const at::Tensor logits = (torch::randn({50, 70}) * 2).to(dtype);
        const at::Tensor target = torch::randint(70, {50}, torch::kLong);
        target.slice(0, 0, 7).fill_(kIgnored);
        const auto got = backward(logits, [&, reduction = reduction](const at::Tensor& x) {
          return fused_cross_entropy(
              x, target,
              Options().reduction(reduction).ignore_index(kIgnored).label_smoothing(smoothing));
        });
        const auto want =
            backward(logits.to(torch::kDouble), [&, code = code](const at::Tensor& x) {
              return at::cross_entropy_loss(x, target, {}, code, kIgnored, smoothing);
            });
        EXPECT_EQ(got.loss.scalar_type(), wide(dtype));
        EXPECT_EQ(got.gradient.scalar_type(), dtype);
        const double tolerance = test::reduction_tolerance(wide(dtype), 70);
        EXPECT_TRUE(test::near(got.loss, want.loss, tolerance));
        EXPECT_TRUE(
            test::near(got.gradient, want.gradient, tolerance + test::pointwise_tolerance(dtype)));
      }
    }
  }
}

TEST_F(FusedCrossEntropyTest, TakesLogitsAndTargetsInAnyLayout) {
  const at::Tensor target = torch::randint(20, {30, 2}, torch::kLong).select(1, 0);
  for (const at::Tensor& logits :
       {torch::randn({20, 30}).t(), torch::randn({30, 50}).slice(1, 7, 27),
        torch::randn({1, 20}).expand({30, 20})}) {
    const auto loss_of = [&](const at::Tensor& x) { return fused_cross_entropy(x, target); };
    const auto want = backward(logits.contiguous(), loss_of);
    expect_bitwise_equal(loss_of(logits), want.loss);
    expect_bitwise_equal(fused_cross_entropy(logits, target.to(torch::kByte)), want.loss);
    const at::Tensor base = logits.detach().clone().requires_grad_();
    loss_of(base.t().contiguous().t()).backward();
    expect_bitwise_equal(base.grad(), want.gradient * 2);
  }
}

TEST_F(FusedCrossEntropyTest, WithoutRowsThatCountTheMeanIsNanAndTheGradientZero) {
  for (const auto& [reduction, code] : kReductions) {
    for (const std::int64_t rows : {0, 4}) {
      const at::Tensor target = torch::full({rows}, kIgnored, torch::kLong);
      const auto got =
          backward(torch::randn({rows, 5}), [&, reduction = reduction](const at::Tensor& x) {
            return fused_cross_entropy(x, target,
                                       Options().reduction(reduction).ignore_index(kIgnored));
          });
      const at::Tensor want =
          at::cross_entropy_loss(torch::randn({rows, 5}), target, {}, code, kIgnored);
      expect_bitwise_equal(got.loss, want);
      expect_bitwise_equal(got.gradient, torch::zeros({rows, 5}));
    }
  }
}

TEST_F(FusedCrossEntropyTest, IgnoredTargetsNeedNotBeClasses) {
  const at::Tensor logits = torch::randn({3, 5});
  const at::Tensor target = torch::tensor({1, -100, 4}, torch::kLong);
  const at::Tensor loss = fused_cross_entropy(logits, target, Options().reduction(torch::kNone));
  EXPECT_EQ(loss[1].item<float>(), 0);
  expect_close(loss, at::cross_entropy_loss(logits, target, {}, at::Reduction::None), 1e-6);
}

// LibTorch's is NaN there.
TEST_F(FusedCrossEntropyTest, IgnoredRowsHaveGradientZeroWhateverIsInThem) {
  const at::Tensor values = torch::randn({3, 5});
  values[1].fill_(std::nan(""));
  const at::Tensor target = torch::tensor({1, -100, 4}, torch::kLong);
  const auto got =
      backward(values, [&](const at::Tensor& x) { return fused_cross_entropy(x, target); });
  const auto theirs =
      backward(values, [&](const at::Tensor& x) { return at::cross_entropy_loss(x, target); });
  expect_close(got.loss, theirs.loss, 1e-6);
  expect_bitwise_equal(got.gradient[1], torch::zeros({5}));
  EXPECT_TRUE(theirs.gradient[1].isnan().all().item<bool>());
}

TEST_F(FusedCrossEntropyTest, GradientsOfScaledLossesKeepTheirRange) {
  const at::Tensor target = torch::randint(100, {64}, torch::kLong);
  const at::Tensor logits = torch::randn({64, 100}).to(torch::kHalf).requires_grad_();
  (fused_cross_entropy(logits, target) * 65536).backward();
  const at::Tensor exact = logits.detach().to(torch::kDouble).requires_grad_();
  (at::cross_entropy_loss(exact, target) * 65536).backward();
  EXPECT_TRUE(test::near(logits.grad(), exact.grad(), test::pointwise_tolerance(torch::kHalf)));
}

TEST_F(FusedCrossEntropyTest, PassesGradcheckInFp64) {
  const at::Tensor logits = torch::randn({4, 6}, torch::kDouble).requires_grad_();
  const at::Tensor target = torch::tensor(std::vector<std::int64_t>{0, 5, kIgnored, 2});
  const auto loss_of = [&](const at::Tensor& x) {
    return fused_cross_entropy(x, target, Options().ignore_index(kIgnored).label_smoothing(0.1));
  };
  loss_of(logits).backward();
  constexpr double kStep = 1e-6;
  for (std::int64_t i = 0; i < logits.numel(); ++i) {
    const auto at = [&](double step) {
      at::Tensor moved = logits.detach().clone();
      moved.view(-1)[i] += step;
      return loss_of(moved).item<double>();
    };
    const double slope = (at(kStep) - at(-kStep)) / (2 * kStep);
    EXPECT_LE(std::abs(logits.grad().view(-1)[i].item<double>() - slope), 1e-8);
  }
}

TEST_F(FusedCrossEntropyTest, CanBeDifferentiatedTwice) {
  const at::Tensor target = torch::tensor(std::vector<std::int64_t>{0, 5, kIgnored, 2});
  const auto second = [&](const at::Tensor& values, const auto& loss_of) {
    const at::Tensor x = values.detach().clone().requires_grad_();
    const at::Tensor gradient =
        torch::autograd::grad({loss_of(x)}, {x}, {}, true, /*create_graph=*/true)[0];
    gradient.square().sum().backward();
    return x.grad();
  };
  const at::Tensor logits = torch::randn({4, 6});
  for (const bool in_place : {false, true}) {
    const auto options =
        Options().ignore_index(kIgnored).label_smoothing(0.1).inplace_backward(in_place);
    expect_close(
        second(logits,
               [&](const at::Tensor& x) { return fused_cross_entropy(x, target, options); }),
        second(logits,
               [&](const at::Tensor& x) {
                 return at::cross_entropy_loss(x, target, {}, at::Reduction::Mean, kIgnored, 0.1);
               }),
        1e-6);
  }
}

TEST_F(FusedCrossEntropyTest, InPlaceTheGradientTakesTheLogitsMemory) {
  for (const auto dtype : kDtypes) {
    const at::Tensor target = torch::randint(70, {50}, torch::kLong);
    const at::Tensor input = torch::randn({50, 70}).to(dtype);
    const auto run = [&](bool in_place) {
      const at::Tensor leaf = input.clone().requires_grad_();
      const at::Tensor logits = leaf * 2;
      const at::Tensor loss =
          fused_cross_entropy(logits, target, Options().inplace_backward(in_place));
      const at::Tensor before = logits.detach().clone();
      const void* gradient_at = nullptr;
      logits.register_hook([&](const at::Tensor& gradient) {
        EXPECT_FALSE(gradient.requires_grad());
        gradient_at = gradient.const_data_ptr();
      });
      loss.backward();
      if (dtype != torch::kDouble) {
        EXPECT_EQ(gradient_at == logits.const_data_ptr(), in_place);
        EXPECT_EQ(logits.detach().equal(before), !in_place);
      }
      return leaf.grad();
    };
    expect_bitwise_equal(run(true), run(false));
  }
}

TEST_F(FusedCrossEntropyTest, InPlaceLeavesOfTheGraphAreNotOverwritten) {
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  const at::Tensor leaf = torch::randn({5, 7}).requires_grad_();
  const at::Tensor before = leaf.detach().clone();
  fused_cross_entropy(leaf, target, Options().inplace_backward(true)).backward();
  expect_bitwise_equal(leaf.detach(), before);
  EXPECT_NE(leaf.grad().const_data_ptr(), leaf.const_data_ptr());
  for (const at::Tensor& view : {leaf.slice(0, 0, 5), leaf.view({5, 7}), leaf.unsqueeze(0)[0]}) {
    fused_cross_entropy(view, target, Options().inplace_backward(true)).backward();
    expect_bitwise_equal(leaf.detach(), before);
  }
}

TEST_F(FusedCrossEntropyTest, TakesGradientsThatAreNegatedViews) {
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  const at::Tensor values = torch::randn({5, 7});
  const at::Tensor grad = torch::rand({5});
  for (const auto& [reduction, unused] : kReductions) {
    const auto gradient_of = [&, reduction = reduction](const at::Tensor& of_loss) {
      const at::Tensor logits = values.clone().requires_grad_();
      const at::Tensor loss = fused_cross_entropy(logits, target, Options().reduction(reduction));
      loss.backward(loss.dim() == 0 ? of_loss[0] : of_loss);
      return logits.grad();
    };
    expect_bitwise_equal(gradient_of(at::_neg_view(grad)), gradient_of(grad.neg()));
  }
}

TEST_F(FusedCrossEntropyTest, InPlaceASecondBackwardPassIsAnErrorAndNoWrongGradient) {
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  const at::Tensor leaf = torch::randn({5, 7}).requires_grad_();
  const auto loss_of = [&](bool in_place) {
    return fused_cross_entropy(leaf * 2, target, Options().inplace_backward(in_place));
  };
  const at::Tensor once = loss_of(true);
  once.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(once.backward(), c10::Error);
  const at::Tensor twice = loss_of(false);
  leaf.mutable_grad().reset();
  twice.backward({}, /*retain_graph=*/true);
  const at::Tensor first = leaf.grad().clone();
  twice.backward();
  expect_bitwise_equal(leaf.grad(), first * 2);
}

TEST_F(FusedCrossEntropyTest, WithoutGradientsNothingIsRecorded) {
  const at::Tensor logits = torch::randn({5, 7}).requires_grad_();
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(fused_cross_entropy(logits, target).requires_grad());
  const c10::InferenceMode inference;
  EXPECT_TRUE(fused_cross_entropy(torch::randn({5, 7}), target).isfinite().item<bool>());
}

TEST_F(FusedCrossEntropyTest, AutocastMakesNoCopiesInFp32) {
  const at::Tensor logits = torch::randn({5, 7}).to(torch::kBFloat16).requires_grad_();
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor loss = fused_cross_entropy(logits, target);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_EQ(loss.grad_fn()->next_edge(0).function->name(), "torch::autograd::AccumulateGrad");
  expect_bitwise_equal(loss, fused_cross_entropy(logits, target));
}

TEST_F(FusedCrossEntropyTest, ThreadsHaveNoPartInTheResult) {
  const int before = at::get_num_threads();
  const at::Tensor logits = torch::randn({3000, 100});
  const at::Tensor target = torch::randint(100, {3000}, torch::kLong);
  const auto run = [&](int threads) {
    at::set_num_threads(threads);
    return backward(logits, [&](const at::Tensor& x) { return fused_cross_entropy(x, target); });
  };
  const LossAndGradient one = run(1);
  const LossAndGradient three = run(3);
  at::set_num_threads(before);
  expect_bitwise_equal(three.loss, one.loss);
  expect_bitwise_equal(three.gradient, one.gradient);
}

// LibTorch's result, in the dtype of Semitone's.
TEST_F(FusedCrossEntropyTest, WeightsProbabilitiesAndMoreDimensionsAreLibTorchs) {
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  for (const auto dtype : kDtypes) {
    const double tolerance = test::pointwise_tolerance(dtype);
    const at::Tensor logits = torch::randn({5, 7}).to(dtype);
    const at::Tensor exact = logits.to(torch::kDouble);
    const auto expect_same = [&](const at::Tensor& got, const at::Tensor& want) {
      EXPECT_EQ(got.scalar_type(), wide(dtype));
      EXPECT_TRUE(test::near(got, want, tolerance));
    };
    const at::Tensor weight = torch::rand({7});
    expect_same(fused_cross_entropy(logits, target, Options().weight(weight)),
                at::cross_entropy_loss(exact, target, weight.to(torch::kDouble)));
    const at::Tensor shares = torch::rand({5, 7}).softmax(1).to(dtype);
    expect_same(fused_cross_entropy(logits, shares),
                at::cross_entropy_loss(exact, shares.to(torch::kDouble)));
    const at::Tensor image = torch::randn({2, 7, 3, 4}).to(dtype);
    const at::Tensor pixels = torch::randint(7, {2, 3, 4}, torch::kLong);
    expect_same(fused_cross_entropy(image, pixels),
                at::cross_entropy_loss(image.to(torch::kDouble), pixels));
    expect_same(fused_cross_entropy(logits[0], target[0]),
                at::cross_entropy_loss(exact[0], target[0]));
  }
}

TEST_F(FusedCrossEntropyTest, ModuleHasLibTorchsOptions) {
  const at::Tensor logits = torch::randn({5, 7});
  const at::Tensor target = torch::randint(7, {5}, torch::kLong);
  const at::Tensor weight = torch::rand({7});
  FusedCrossEntropy plain;
  expect_close(plain(logits, target), at::cross_entropy_loss(logits, target), 1e-6);
  FusedCrossEntropy weighted(Options().weight(weight).label_smoothing(0.2).reduction(torch::kSum));
  expect_close(weighted(logits, target),
               at::cross_entropy_loss(logits, target, weight, at::Reduction::Sum, -100, 0.2), 1e-6);
  expect_bitwise_equal(weighted->named_buffers()["weight"], weight);
  std::stringstream text;
  text << *plain;
  EXPECT_EQ(text.str(), "semitone::nn::FusedCrossEntropy(ignore_index=-100, label_smoothing=0)");
}

TEST_F(FusedCrossEntropyTest, EachModuleHasItsOwnWeight) {
  const at::Tensor weight = torch::rand({7});
  const FusedCrossEntropy first(Options().weight(weight));
  const auto second = std::dynamic_pointer_cast<FusedCrossEntropyImpl>(first->clone());
  second->to(torch::kHalf);
  EXPECT_EQ(second->weight.scalar_type(), torch::kHalf);
  EXPECT_EQ(first->weight.scalar_type(), torch::kFloat);
  first.ptr()->to(torch::kDouble);
  EXPECT_EQ(first->weight.scalar_type(), torch::kDouble);
  EXPECT_EQ(weight.scalar_type(), torch::kFloat);
}

TEST_F(FusedCrossEntropyTest, TargetsThatAreNoClassAreErrors) {
  const at::Tensor logits = torch::randn({5, 7});
  const at::Tensor target = torch::zeros({5}, torch::kLong);
  for (const std::int64_t bad : {-1, 7, -101}) {
    at::Tensor wrong = target.clone();
    wrong[3] = bad;
    expect_error([&] { fused_cross_entropy(logits, wrong); },
                 {"nn.fused_cross_entropy", "[0, 7)", "-100", c10::str(bad, " in row 3")});
  }
  expect_error([&] { fused_cross_entropy(torch::randn({5, 0}), target); }, {"[0, 0)"});
}

TEST_F(FusedCrossEntropyTest, BadArgumentsAreErrors) {
  const at::Tensor logits = torch::randn({5, 7});
  const at::Tensor target = torch::zeros({5}, torch::kLong);
  expect_error([&] { fused_cross_entropy(logits, target.slice(0, 1)); }, {"[5, 7]", "[4]"});
  expect_error([&] { fused_cross_entropy(logits, torch::zeros({5, 7}, torch::kLong)); },
               {"[5, 7]"});
  expect_error([&] { fused_cross_entropy(logits, target.to(torch::kInt)); },
               {"int64 targets", "int32", "to(torch::kLong)"});
  expect_error([&] { fused_cross_entropy(logits, torch::zeros({5})); }, {"int64", "float32"});
  expect_error([&] { fused_cross_entropy({}, target); }, {"logits", "undefined"});
  expect_error([&] { fused_cross_entropy(logits, {}); }, {"targets", "undefined"});
  for (const double smoothing : {-0.1, 1.1, std::nan("")}) {
    expect_error([&] { fused_cross_entropy(logits, target, Options().label_smoothing(smoothing)); },
                 {"label_smoothing in [0, 1]"});
    expect_error([&] { FusedCrossEntropy{Options().label_smoothing(smoothing)}; },
                 {"label_smoothing in [0, 1]"});
  }
}

}  // namespace
}  // namespace semitone::nn::fused_cross_entropy_test
