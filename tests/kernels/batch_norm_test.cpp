// The parts of batch normalisation against their reference implementations.

#include "src/kernels/batch_norm.h"

#include "semitone/core/dtype.h"
#include "src/kernels/pointwise.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::batch_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

// Every layout that the kernels support, one that only the reference supports (the last), and sizes
// around those of a vector and of a block.
std::vector<at::Tensor> inputs(c10::ScalarType dtype) {
  const auto random = [&](at::IntArrayRef shape) {
    return (torch::randn(shape) * 2 + 3).to(dtype);
  };
  std::vector<at::Tensor> all;
  for (const std::int64_t size : {1, 2, 7, 15, 16, 17, 33}) {
    all.push_back(random({3, size}));
    all.push_back(random({3, size, size}));
    all.push_back(random({2, 5, size, 3}));
    all.push_back(random({2, size, 3, 5}).contiguous(at::MemoryFormat::ChannelsLast));
  }
  all.push_back(random({2, 3, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast3d));
  all.push_back(random({3, 13, 17}).transpose(1, 2));  // the same of one dimension
  all.push_back(random({1, 5, 16}).transpose(1, 2));
  all.push_back(random({2, 3, 130, 131}));
  // A GPU's last part of a channel has no element.
  all.push_back(random({3, 16, 22, 23}));
  all.push_back(random({2, 3, 130, 131}).contiguous(at::MemoryFormat::ChannelsLast));
  // Many rows of few channels, also of one more and one fewer than a vector or a joined row has.
  all.push_back(random({1300, 1}));
  all.push_back(random({650, 2}));
  for (const std::int64_t channels : {17, 63, 64})
    all.push_back(random({3, channels, 13, 13}).contiguous(at::MemoryFormat::ChannelsLast));
  all.push_back(random({5, 2000, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast));
  all.push_back(random({0, 4, 3, 3}));
  all.push_back(random({4, 3, 2, 8}).transpose(1, 2));
  return all;
}

std::string name_of(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " strides ",
                  tensor.strides());
}

at::Tensor per_channel(const at::Tensor& input) {
  return torch::randn({input.size(1)}, torch::kDouble);
}

// A sum is rounded at most so often between one of its terms and the result: by 256 additions in a
// row, and by the few that bring the lanes together or made the term. All may round the same way,
// as those of 16-bit values minus a mean do, which all lose the same bits; so the sum is off by up
// to so many half units of the terms' sizes.
constexpr int kRoundings = 256 + 8;

at::Tensor sum_of_sizes(const at::Tensor& terms) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t dim = 2; dim < terms.dim(); ++dim) dims.push_back(dim);
  return terms.abs().sum(dims);
}

void expect_within(const at::Tensor& got, const at::Tensor& want, const at::Tensor& tolerance) {
  EXPECT_TRUE((got - want).abs().le(tolerance).all().item<bool>())
      << "got " << got << "\nwant " << want << "\nwithin " << tolerance;
}

// Bit for bit, but for NaNs, which are all alike.
void expect_same(const at::Tensor& got, const at::Tensor& want) {
  expect_close(got, want, 0);
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16,
                                       torch::kDouble};

// On every instruction set that this processor has.
class BatchNormKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(BatchNormKernels, MomentsAreThoseOfTheValuesInFp64) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& input : inputs(dtype)) {
      SCOPED_TRACE(name_of(input));
      const Moments got = moments(input);
      const Moments want = ref::moments(input.to(torch::kDouble));
      const auto terms = std::max<std::int64_t>(1, input.numel() / input.size(1));
      const double tolerance =
          test::reduction_tolerance(dtype == torch::kDouble ? dtype : torch::kFloat, terms);
      expect_close(got.mean, want.mean, tolerance);
      expect_close(got.m2, want.m2, tolerance);
    }
  }
}

TEST_P(BatchNormKernels, MomentsKeepSmallVariancesOfLargeMeans) {
  const at::Tensor squares = torch::randn({4, 3, 70, 70}) + 4096;
  // On a GPU, a part of this one begins where its plane has no chunk of elements any more.
  const at::Tensor oblongs = torch::randn({6, 16, 22, 23}) + 4096;
  for (const at::Tensor& input :
       {squares, squares.contiguous(at::MemoryFormat::ChannelsLast), oblongs}) {
    SCOPED_TRACE(name_of(input));
    const Moments got = moments(input);
    const Moments want = ref::moments(input.to(torch::kDouble));
    expect_close(got.mean, want.mean, 1e-9);
    expect_close(got.m2, want.m2, 1e-5);
    expect_bitwise_equal(moments(torch::full_like(input, 4097)).m2,
                         torch::zeros({input.size(1)}, torch::kDouble));
  }
}

TEST_P(BatchNormKernels, NormalizeAsDefined) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& input : inputs(dtype)) {
      SCOPED_TRACE(name_of(input));
      const at::Tensor mean = per_channel(input);
      const at::Tensor scale = per_channel(input);
      const at::Tensor shift = per_channel(input);
      for (const at::Tensor& residual :
           {at::Tensor(), torch::randn_like(input), torch::randn(input.sizes()).to(dtype)}) {
        for (const bool relu : {false, true}) {
          const at::Tensor got = normalize(input, mean, scale, shift, residual, relu);
          expect_close(got, ref::normalize(input, mean, scale, shift, residual, relu), 0);
          if (input.is_non_overlapping_and_dense()) {
            EXPECT_EQ(got.strides(), input.strides());
          }
        }
      }
    }
  }
}

TEST_P(BatchNormKernels, GradientsAreAsDefined) {
  for (const auto dtype : kDtypes) {
    const double half_unit =
        test::rounding_tolerance(dtype == torch::kDouble ? dtype : torch::kFloat);
    for (const at::Tensor& input : inputs(dtype)) {
      SCOPED_TRACE(name_of(input));
      const at::Tensor mean = per_channel(input);
      const at::Tensor a = per_channel(input);
      const at::Tensor b = per_channel(input);
      const at::Tensor c = per_channel(input);
      const at::Tensor exact = input.to(torch::kDouble);
      std::vector<std::int64_t> along(static_cast<std::size_t>(input.dim()), 1);
      along[1] = -1;
      const at::Tensor centred = exact - mean.view(along);
      const at::Tensor one = torch::ones({1}, input.options()).expand_as(input);
      for (const at::Tensor& grad :
           {torch::randn_like(input), torch::randn(input.sizes()).to(dtype), one}) {
        const GradientSums sums = gradient_sums(grad, input, mean);
        const at::Tensor exact_grad = grad.to(torch::kDouble);
        const GradientSums want = ref::gradient_sums(exact_grad, exact, mean);
        expect_within(sums.grad, want.grad, sum_of_sizes(exact_grad) * (half_unit * kRoundings));
        // The second: of the mean, which is rounded before.
        expect_within(sums.grad_times_centred, want.grad_times_centred,
                      sum_of_sizes(exact_grad * centred) * (half_unit * kRoundings) +
                          sum_of_sizes(exact_grad) * mean.abs() * half_unit);
        const at::Tensor got = gradient_of_input(grad, input, mean, a, b, c);
        expect_close(got, ref::gradient_of_input(grad, input, mean, a, b, c), 0);
        if (input.is_non_overlapping_and_dense()) {
          EXPECT_EQ(got.strides(), input.strides());
        }
      }
    }
  }
}

// A gradient counts where relu's result is positive or NaN: the kernels find that out again, from
// the input or from the result, and must come to what relu_backward says of the rounded result.
TEST_P(BatchNormKernels, GradientsOfReluAreThoseOfItsResult) {
  for (const auto dtype : kDtypes) {
    for (at::Tensor input : inputs(dtype)) {
      SCOPED_TRACE(name_of(input));
      const at::Tensor mean = per_channel(input);
      // Results around the numbers that are rounded to 0, some of them subnormal.
      const double size = dtype == torch::kHalf       ? 0x1p-24
                          : dtype == torch::kBFloat16 ? 0x1p-133
                                                      : 1;
      const at::Tensor scale = per_channel(input) * size;
      const at::Tensor shift = per_channel(input) * size;
      const at::Tensor b = per_channel(input);
      const at::Tensor c = per_channel(input);
      if (input.numel() > 0) input.as_strided({input.numel()}, {1})[input.numel() / 2] = kNan;
      for (const at::Tensor& grad :
           {torch::randn_like(input), torch::randn(input.sizes()).to(dtype)}) {
        const at::Tensor result = normalize(input, mean, scale, shift, {}, /*relu=*/true);
        const at::Tensor masked = ref::relu_backward(grad, result);
        const GradientSums want = gradient_sums(masked, input, mean);
        const GradientSums got = gradient_sums(grad, input, mean, {scale, shift});
        expect_same(got.grad, want.grad);
        expect_same(got.grad_times_centred, want.grad_times_centred);
        expect_same(gradient_of_input(grad, input, mean, scale, b, c, shift),
                    gradient_of_input(masked, input, mean, scale, b, c));
        expect_same(ref::gradient_of_input(grad, input, mean, scale, b, c, shift),
                    ref::gradient_of_input(masked, input, mean, scale, b, c));

        const at::Tensor residual = torch::randn_like(input) * size;
        const at::Tensor sum = normalize(input, mean, scale, shift, residual, /*relu=*/true);
        const at::Tensor of_sum = ref::relu_backward(grad, sum);
        const MaskedGradient own = masked_gradient(grad, input, mean, sum);
        const GradientSums own_want = gradient_sums(of_sum, input, mean);
        expect_same(own.grad, of_sum);
        expect_same(own.sums.grad, own_want.grad);
        expect_same(own.sums.grad_times_centred, own_want.grad_times_centred);
        if (input.is_non_overlapping_and_dense() && dtype != torch::kDouble) {
          EXPECT_EQ(own.grad.strides(), input.strides());
        }
      }
    }
  }
}

TEST_P(BatchNormKernels, NonFiniteValuesStayInTheirChannel) {
  for (const bool channels_last : {false, true}) {
    for (const double bad :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      at::Tensor input = torch::randn({2, 3, 5, 5});
      if (channels_last) input = input.contiguous(at::MemoryFormat::ChannelsLast);
      input.index_put_({1, 1, 4, 4}, bad);
      const Moments got = moments(input);
      const at::Tensor finite = torch::tensor({true, false, true});
      EXPECT_TRUE(got.m2.isfinite().equal(finite)) << got.m2;
      EXPECT_TRUE(got.mean.isfinite().equal(finite)) << got.mean;
      const at::Tensor ones = torch::ones({3}, torch::kDouble);
      const at::Tensor output = normalize(input, ones, ones, ones, {}, /*relu=*/true);
      EXPECT_EQ(output.isfinite().logical_not().sum().item<std::int64_t>(), 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, BatchNormKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(BatchNormKernelsThreads, HaveNoPartInTheResults) {
  const int before = at::get_num_threads();
  for (const bool channels_last : {false, true}) {
    torch::manual_seed(2);
    at::Tensor input = torch::randn({7, 33, 40, 41});
    if (channels_last) input = input.contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor grad = torch::randn_like(input);
    at::set_num_threads(1);
    const Moments one = moments(input);
    const GradientSums one_sums = gradient_sums(grad, input, one.mean);
    for (const int threads : {2, 3, 5, 64}) {
      at::set_num_threads(threads);
      const Moments more = moments(input);
      const GradientSums sums = gradient_sums(grad, input, one.mean);
      expect_bitwise_equal(more.mean, one.mean);
      expect_bitwise_equal(more.m2, one.m2);
      expect_bitwise_equal(sums.grad, one_sums.grad);
      expect_bitwise_equal(sums.grad_times_centred, one_sums.grad_times_centred);
    }
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace semitone::kernels::batch_norm_test
