// Cross entropy and its gradient against their references and against LibTorch.

#include "src/kernels/cross_entropy.h"

#include "semitone/core/dtype.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::cross_entropy_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

constexpr std::int64_t kIgnored = -100;
constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16,
                                       torch::kDouble};

// Sizes around those of a vector and of the blocks of sums, and rows in every layout.
std::vector<at::Tensor> inputs(c10::ScalarType dtype) {
  const auto random = [&](at::IntArrayRef shape) { return (torch::randn(shape) * 3).to(dtype); };
  std::vector<at::Tensor> all;
  for (const std::int64_t classes : {1, 2, 7, 15, 16, 17, 33, 1000, 4096, 4097, 9000})
    all.push_back(random({4, classes}));
  all.push_back(random({0, 10}));
  all.push_back(random({1, 10}));
  all.push_back(random({300, 130}));
  all.push_back(random({30, 40}).slice(1, 3, 30));
  all.push_back(random({30, 40}).t());
  all.push_back(random({1, 40}).expand({6, 40}));
  // Larger and larger, so that each block has a new maximum; smaller and smaller.
  all.push_back(torch::linspace(-30, 30, 9000).to(dtype).repeat({2, 1}));
  all.push_back(torch::linspace(30, -30, 9000).to(dtype).repeat({2, 1}));
  // The first blocks have no logit above -inf, the next ones only such as are far below 0.
  if (dtype != torch::kHalf) {
    const auto filled = [&](double value) { return torch::full({2, 4096}, value).to(dtype); };
    all.push_back(
        torch::cat({filled(-std::numeric_limits<double>::infinity()), filled(-1e9), filled(0)}, 1));
  }
  return all;
}

ClassTargets targets_for(const at::Tensor& logits, double label_smoothing) {
  at::Tensor classes = torch::randint(logits.size(1), {logits.size(0)}, torch::kLong);
  if (logits.size(0) > 3) classes[2] = kIgnored;
  return {classes, kIgnored, label_smoothing};
}

std::string name_of(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " strides ",
                  tensor.strides());
}

c10::ScalarType wide(c10::ScalarType dtype) {
  return dtype == torch::kDouble ? dtype : torch::kFloat;
}

// A sum has this many terms in fp32, the others in fp64.
constexpr std::int64_t kTerms = 256;

// Checks |got - want| <= tolerance for each element, with infinities and NaNs in the same places.
void expect_within(const at::Tensor& got, const at::Tensor& want, const at::Tensor& tolerance) {
  const at::Tensor exact = got.to(torch::kDouble);
  ASSERT_EQ(exact.sizes(), want.sizes());
  const at::Tensor close = (exact - want).abs() <= tolerance;
  const at::Tensor same = (exact == want).logical_or(exact.isnan().logical_and(want.isnan()));
  const at::Tensor bad = at::where(want.isfinite(), close, same).logical_not();
  if (!bad.any().item<bool>()) return;
  ADD_FAILURE() << bad.sum().item<std::int64_t>() << " of " << bad.numel()
                << " differ, the first at " << bad.nonzero()[0] << ": got "
                << exact.masked_select(bad)[0].item<double>() << ", want "
                << want.masked_select(bad)[0].item<double>();
}

// A loss is the difference of a logarithm, as exact as its sum, and of logits.
void expect_losses(const at::Tensor& got, const at::Tensor& want, c10::ScalarType dtype) {
  EXPECT_EQ(got.scalar_type(), wide(dtype));
  expect_within(got, want,
                test::reduction_tolerance(wide(dtype), kTerms) * want.abs().clamp_min(1));
}

// A gradient is a difference, probability - share of the target, as exact as these; then it is
// rounded to the dtype, where it may be subnormal.
void expect_gradients(const at::Tensor& got, const at::Tensor& want, const at::Tensor& logits,
                      const ClassTargets& targets, const at::Tensor& grad) {
  const auto dtype = logits.scalar_type();
  EXPECT_EQ(got.scalar_type(), dtype);
  const at::Tensor softmax = logits.to(torch::kDouble).softmax(1);
  const at::Tensor index = at::where(targets.classes.eq(kIgnored), 0, targets.classes);
  const at::Tensor terms = softmax.scatter_add(1, index.unsqueeze(1), torch::ones_like(softmax))
                               .add(targets.label_smoothing / static_cast<double>(logits.size(1)))
                               .nan_to_num(0);
  const at::Tensor grads = grad.to(torch::kDouble).abs();
  const double smallest = dtype == torch::kHalf ? 0x1p-24 : 0x1p-126;
  expect_within(got, want,
                test::reduction_tolerance(wide(dtype), kTerms) * terms *
                        (grads.dim() == 0 ? grads : grads.unsqueeze(1)) +
                    test::rounding_tolerance(dtype) * want.abs() + smallest);
}

class CrossEntropyKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(CrossEntropyKernels, LossesAreThoseOfTheValuesInFp64) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& logits : inputs(dtype)) {
      SCOPED_TRACE(name_of(logits));
      for (const double smoothing : {0.0, 0.1, 1.0}) {
        SCOPED_TRACE(smoothing);
        const ClassTargets targets = targets_for(logits, smoothing);
        const RowLosses got = cross_entropy(logits, targets);
        const RowLosses want = ref::cross_entropy(logits.to(torch::kDouble), targets);
        expect_losses(got.loss, want.loss, dtype);
        const at::Tensor counted = targets.classes.ne(kIgnored);
        EXPECT_TRUE(test::near(got.max.index({counted}), want.max.index({counted}), 0));
        EXPECT_TRUE(test::near(got.inv_sum.index({counted}), want.inv_sum.index({counted}),
                               test::reduction_tolerance(wide(dtype), kTerms)));
      }
    }
  }
}

TEST_P(CrossEntropyKernels, GradientsAreThoseOfTheValuesInFp64) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& logits : inputs(dtype)) {
      SCOPED_TRACE(name_of(logits));
      for (const double smoothing : {0.0, 0.1, 1.0}) {
        SCOPED_TRACE(smoothing);
        const ClassTargets targets = targets_for(logits, smoothing);
        const RowLosses losses = cross_entropy(logits, targets);
        const at::Tensor exact = logits.to(torch::kDouble);
        const RowLosses exact_losses = ref::cross_entropy(exact, targets);
        for (const at::Tensor& grad :
             {torch::randn({logits.size(0)}, wide(dtype)), torch::tensor(-0.7, wide(dtype))}) {
          const at::Tensor got = cross_entropy_gradient(logits, targets, losses, grad, false);
          const at::Tensor want =
              ref::cross_entropy_gradient(exact, targets, exact_losses, grad.to(torch::kDouble));
          expect_gradients(got, want, logits, targets, grad);
        }
      }
    }
  }
}

TEST_P(CrossEntropyKernels, InPlaceTheGradientsAreTheSame) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& logits : inputs(dtype)) {
      SCOPED_TRACE(name_of(logits));
      const ClassTargets targets = targets_for(logits, 0.1);
      const RowLosses losses = cross_entropy(logits, targets);
      const at::Tensor grad = torch::randn({logits.size(0)}, wide(dtype));
      const at::Tensor want = cross_entropy_gradient(logits, targets, losses, grad, false);
      expect_bitwise_equal(cross_entropy_gradient(logits, targets, losses, grad, true), want);
    }
  }
}

TEST_P(CrossEntropyKernels, InPlaceTheLogitsMemoryIsUsedAndTheirVersionCounts) {
  const at::Tensor wider = torch::randn({4, 50});
  const at::Tensor before = wider.clone();
  const at::Tensor logits = wider.slice(1, 10, 40);
  const ClassTargets targets = targets_for(logits, 0);
  const RowLosses losses = cross_entropy(logits, targets);
  const auto version = wider._version();
  const at::Tensor got = cross_entropy_gradient(logits, targets, losses, torch::tensor(1.0F), true);
  EXPECT_EQ(got.const_data_ptr(), logits.const_data_ptr());
  EXPECT_GT(wider._version(), version);
  // The memory between the rows is unchanged.
  expect_bitwise_equal(wider.slice(1, 0, 10), before.slice(1, 0, 10));
  expect_bitwise_equal(wider.slice(1, 40, 50), before.slice(1, 40, 50));
}

// With values for which no sum of exponentials is finite unless a maximum is subtracted, and
// infinities and NaNs in every place: in the first block of a row, in a later one, in the rest of a
// vector.
TEST_P(CrossEntropyKernels, ExtremeLogitsGiveWhatLibTorchGives) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const std::int64_t classes : {3, 20, 9001}) {
      const at::Tensor base = torch::randn({classes});
      std::vector<at::Tensor> rows{base,
                                   base * 1e4,
                                   base + 1e4,
                                   base - 1e4,
                                   torch::full({classes}, -1e30),
                                   torch::full({classes}, -dtype_limits(dtype).max),
                                   torch::full({classes}, -kInf),
                                   torch::full({classes}, kInf)};
      for (const double value :
           {1e4, -1e4, 1e9, -1e9, 1e10, -1e10, 1e30, -1e30, kInf, -kInf, std::nan("")}) {
        for (const std::int64_t at : {std::int64_t{0}, classes / 2, classes - 1}) {
          rows.push_back(base.clone());
          rows.back()[at] = value;
        }
      }
      // All but one are -inf, and the first block altogether.
      rows.push_back(torch::full({classes}, -kInf));
      rows.back()[classes - 1] = 1;
      const at::Tensor logits = at::stack(rows).to(dtype);
      for (const std::int64_t target : {std::int64_t{0}, classes - 1}) {
        for (const double smoothing : {0.0, 0.1}) {
          SCOPED_TRACE(c10::str(dtype_name(dtype), " ", classes, " classes, target ", target,
                                " smoothing ", smoothing));
          const ClassTargets targets{torch::full({logits.size(0)}, target, torch::kLong), kIgnored,
                                     smoothing};
          const at::Tensor exact = logits.to(torch::kDouble).requires_grad_();
          const at::Tensor want = at::cross_entropy_loss(exact, targets.classes, {},
                                                         at::Reduction::None, kIgnored, smoothing);
          const RowLosses got = cross_entropy(logits, targets);
          expect_losses(got.loss, want.detach(), dtype);
          const at::Tensor one = torch::tensor(1.0F);
          want.sum().backward();
          expect_gradients(cross_entropy_gradient(logits, targets, got, one, false), exact.grad(),
                           logits, targets, one);
        }
      }
    }
  }
}

// A loss near 0 is the logarithm of a sum of 1 and a little.
TEST_P(CrossEntropyKernels, LossesOfLikelyTargetsAreNotNegative) {
  const at::Tensor target = torch::arange(64);
  for (const auto dtype : kDtypes) {
    for (const double offset : {0.0, -300.0, 1000.3}) {
      const at::Tensor likely = torch::linspace(5, 40, 64).unsqueeze(1);
      const at::Tensor logits =
          (torch::randn({64, 300}) + offset).scatter_add(1, target.unsqueeze(1), likely).to(dtype);
      const RowLosses got = cross_entropy(logits, {target, kIgnored, 0});
      const at::Tensor want = at::cross_entropy_loss(logits.to(torch::kDouble), target, {},
                                                     at::Reduction::None, kIgnored, 0);
      expect_losses(got.loss, want, dtype);
      EXPECT_TRUE(got.loss.ge(0).all().item<bool>());
      EXPECT_TRUE(got.inv_sum.le(1).all().item<bool>());
    }
  }
}

TEST_P(CrossEntropyKernels, ClassesMaskedWithTheLowestNumberHaveNoPart) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const double lowest = -dtype_limits(dtype).max;
    for (const double value : {lowest, std::max(-1e10, lowest), std::max(-1e30, lowest)}) {
      SCOPED_TRACE(c10::str(dtype_name(dtype), " ", value));
      const at::Tensor logits = torch::randn({5, 700}).to(dtype);
      logits.slice(1, 0, 3).fill_(value);
      logits.slice(1, 20, 600).fill_(value);
      const ClassTargets targets{torch::full({5}, 10, torch::kLong), kIgnored, 0};
      const at::Tensor want = at::cross_entropy_loss(logits.to(torch::kDouble), targets.classes, {},
                                                     at::Reduction::None, kIgnored, 0);
      expect_losses(cross_entropy(logits, targets).loss, want, dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, CrossEntropyKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(CrossEntropyDefinition, IsLibTorchs) {
  torch::manual_seed(3);
  for (const double smoothing : {0.0, 0.1, 1.0}) {
    const at::Tensor logits = torch::randn({6, 11}, torch::kDouble).requires_grad_();
    const ClassTargets targets = targets_for(logits, smoothing);
    const at::Tensor want = at::cross_entropy_loss(logits, targets.classes, {}, at::Reduction::None,
                                                   kIgnored, smoothing);
    const at::Tensor grad = torch::randn({6}, torch::kDouble);
    want.backward(grad);
    const at::NoGradGuard no_grad;
    const RowLosses losses = ref::cross_entropy(logits, targets);
    const double tolerance = test::pointwise_tolerance(torch::kDouble);
    expect_close(losses.loss, want, tolerance);
    expect_close(ref::cross_entropy_gradient(logits, targets, losses, grad), logits.grad(),
                 tolerance);
  }
}

TEST(CrossEntropyKernelsRows, ThatAreIgnoredHaveNoPart) {
  at::Tensor logits = torch::randn({3, 20});
  logits[1].fill_(std::nan(""));
  const ClassTargets targets{torch::tensor({4, 7, 19}, torch::kLong), 7, 0.1};
  const RowLosses losses = cross_entropy(logits, targets);
  EXPECT_EQ(losses.loss[1].item<float>(), 0);
  EXPECT_TRUE(losses.loss.isfinite().all().item<bool>());
  const at::Tensor gradient =
      cross_entropy_gradient(logits, targets, losses, torch::tensor(1.0F), false);
  expect_bitwise_equal(gradient[1], torch::zeros({20}));
  EXPECT_TRUE(gradient[0].ne(0).all().item<bool>());
}

TEST(CrossEntropyKernelsThreads, HaveNoPartInTheResults) {
  const int before = at::get_num_threads();
  torch::manual_seed(2);
  const at::Tensor logits = torch::randn({333, 1001});
  const ClassTargets targets = targets_for(logits, 0.1);
  const auto run = [&](int threads) {
    at::set_num_threads(threads);
    const RowLosses losses = cross_entropy(logits, targets);
    return std::vector<at::Tensor>{
        losses.loss, cross_entropy_gradient(logits, targets, losses, torch::tensor(1.0F), false)};
  };
  const auto one = run(1);
  const auto three = run(3);
  at::set_num_threads(before);
  expect_bitwise_equal(three[0], one[0]);
  expect_bitwise_equal(three[1], one[1]);
}

}  // namespace
}  // namespace semitone::kernels::cross_entropy_test
