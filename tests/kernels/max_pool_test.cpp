// Maximum pooling against its reference.

#include "src/kernels/max_pool.h"

#include "semitone/core/dtype.h"
#include "tests/support/tensors.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::max_pool_test {
namespace {

using test::expect_bitwise_equal;

constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Strides below, at and above the window's size, with and without padding.
std::vector<MaxPool> pools() {
  return {{.kernel = {2, 2}, .stride = {2, 2}, .padding = {0, 0}},
          {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}},
          {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}},
          {.kernel = {2, 2}, .stride = {3, 3}, .padding = {1, 1}},
          {.kernel = {1, 1}, .stride = {1, 1}, .padding = {0, 0}},
          {.kernel = {4, 2}, .stride = {3, 1}, .padding = {2, 0}},
          {.kernel = {1, 5}, .stride = {2, 3}, .padding = {0, 2}}};
}

at::Tensor channels_last(const at::Tensor& values, c10::ScalarType dtype) {
  // Not contiguous(): if both layouts are the same memory, the strides must tell which one it is.
  return torch::empty(values.sizes(),
                      torch::dtype(dtype).memory_format(at::MemoryFormat::ChannelsLast))
      .copy_(values);
}

// Numbers of channels around those of a vector of any instruction set; odd and even planes, and
// one no larger than a window.
std::vector<at::Tensor> inputs(c10::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (const std::int64_t channels : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65})
    all.push_back(channels_last(torch::randn({2, channels, 9, 8}), dtype));
  all.push_back(channels_last(torch::randn({3, 6, 12, 13}), dtype));
  all.push_back(channels_last(torch::randn({1, 40, 4, 5}), dtype));
  return all;
}

std::string name_of(const at::Tensor& input, const MaxPool& pool) {
  return c10::str(dtype_name(input.scalar_type()), " ", input.sizes(), " kernel ",
                  at::IntArrayRef(pool.kernel), " stride ", at::IntArrayRef(pool.stride),
                  " padding ", at::IntArrayRef(pool.padding));
}

void expect_as_defined(const at::Tensor& input, const MaxPool& pool) {
  SCOPED_TRACE(name_of(input, pool));
  ASSERT_TRUE(has_max_pool_kernel(input, pool));
  const MaxPooled got = max_pool2d(input, pool, /*with_places=*/true);
  const MaxPooled want = ref::max_pool2d(input, pool, /*with_places=*/true);
  expect_bitwise_equal(got.output, want.output);
  expect_bitwise_equal(got.places, want.places);
  EXPECT_EQ(got.output.strides(), want.output.strides());
  EXPECT_EQ(got.places.strides(), want.output.strides());
  const MaxPooled without = max_pool2d(input, pool, /*with_places=*/false);
  expect_bitwise_equal(without.output, want.output);
  EXPECT_FALSE(without.places.defined());
}

// On every instruction set that this processor has.
class MaxPoolKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(MaxPoolKernels, MaximaAndTheirPlacesAreAsDefined) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& input : inputs(dtype)) {
      for (const MaxPool& pool : pools()) expect_as_defined(input, pool);
    }
  }
}

TEST_P(MaxPoolKernels, SoAreThoseOfTiesZerosInfinitiesAndNans) {
  const at::Tensor values =
      torch::tensor({0.0, -0.0, 1.0, -1.0, 3e-6, -kInfinity, kInfinity, kNan, -kNan});
  // A few of the values first, then all: NaNs and infinities would hide the rest.
  for (const std::int64_t count : {2, 4, 6, 7, 9}) {
    for (const auto dtype : kDtypes) {
      const at::Tensor input =
          channels_last(values.index({torch::randint(count, {3, 19, 9, 8})}), dtype);
      for (const MaxPool& pool : pools()) expect_as_defined(input, pool);
    }
  }
  for (const double value : {-kInfinity, kInfinity, kNan, -0.0}) {
    for (const auto dtype : kDtypes) {
      const at::Tensor input = channels_last(torch::full({2, 19, 9, 8}, value), dtype);
      for (const MaxPool& pool : pools()) expect_as_defined(input, pool);
    }
  }
}

TEST_P(MaxPoolKernels, All16BitNumbersAreOrdered) {
  const at::Tensor bits = torch::arange(-32768, 32768, torch::kShort);
  const at::Tensor shuffled = bits.index({torch::randperm(65536)});
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const at::Tensor input =
        torch::stack({bits, shuffled}).view(dtype).view({1, 2, 65536, 1}).permute({0, 2, 1, 3});
    expect_as_defined(channels_last(input, dtype),
                      {.kernel = {2, 1}, .stride = {1, 1}, .padding = {0, 0}});
  }
}

TEST_P(MaxPoolKernels, LargestWindowsHaveAPlaceForEachElement) {
  // Windows that overlap, and windows that do not.
  const std::vector<MaxPool> largest{{.kernel = {15, 17}, .stride = {4, 5}, .padding = {7, 8}},
                                     {.kernel = {15, 17}, .stride = {15, 17}, .padding = {0, 0}}};
  for (const auto dtype : kDtypes) {
    // Growing, so that the last place of a window is the largest.
    const at::Tensor input = channels_last(
        torch::linspace(-9, 9, 20 * 21).view({1, 1, 20, 21}).expand({1, 9, 20, 21}), dtype);
    for (const MaxPool& pool : largest) {
      expect_as_defined(input, pool);
      const at::Tensor places = max_pool2d(input, pool, true).places;
      EXPECT_GT(places.max().item<std::int64_t>(), 127);
      const at::Tensor grad = torch::randn(places.sizes()).to(dtype);
      expect_bitwise_equal(max_pool2d_backward(grad, places, input, pool),
                           ref::max_pool2d_backward(grad, places, input, pool));
    }
  }
  const MaxPool larger{.kernel = {16, 16}, .stride = {1, 1}, .padding = {0, 0}};
  EXPECT_FALSE(
      has_max_pool_kernel(channels_last(torch::zeros({1, 8, 20, 20}), torch::kFloat), larger));
}

TEST_P(MaxPoolKernels, GradientsAreAsDefined) {
  for (const auto dtype : kDtypes) {
    for (const at::Tensor& input : inputs(dtype)) {
      for (const MaxPool& pool : pools()) {
        SCOPED_TRACE(name_of(input, pool));
        const at::Tensor places = max_pool2d(input, pool, /*with_places=*/true).places;
        const at::Tensor planes = torch::randn(places.sizes()).to(dtype);
        const at::Tensor one = torch::ones({1}, planes.options()).expand_as(planes);
        for (const at::Tensor& grad : {planes, channels_last(planes, dtype), one}) {
          const at::Tensor got = max_pool2d_backward(grad, places, input, pool);
          const at::Tensor want = ref::max_pool2d_backward(grad, places, input, pool);
          EXPECT_EQ(got.strides(), input.strides());
          expect_bitwise_equal(got, want);
        }
      }
    }
  }
}

TEST_P(MaxPoolKernels, NonFiniteGradientsStayInTheirElement) {
  for (const auto dtype : kDtypes) {
    const at::Tensor input = channels_last(torch::randn({1, 19, 9, 8}), dtype);
    for (const MaxPool& pool : pools()) {
      const at::Tensor places = max_pool2d(input, pool, /*with_places=*/true).places;
      for (const double bad : {kInfinity, kNan}) {
        at::Tensor grad = torch::ones(places.sizes(), dtype);
        grad.index_put_({0, 5, 1, 1}, bad);
        const at::Tensor got = max_pool2d_backward(grad, places, input, pool);
        EXPECT_EQ(got.isfinite().logical_not().sum().item<std::int64_t>(), 1);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, MaxPoolKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(MaxPool, InputsWithoutAKernelTakeTheDefinitionsPath) {
  const MaxPool pool{.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
  const at::Tensor values = torch::randn({2, 8, 9, 7});
  for (const at::Tensor& input :
       {values, channels_last(values, torch::kDouble), values.transpose(2, 3),
        at::_neg_view(channels_last(values, torch::kFloat))}) {
    EXPECT_FALSE(has_max_pool_kernel(input, pool));
    const MaxPooled got = max_pool2d(input, pool, /*with_places=*/true);
    const MaxPooled want = ref::max_pool2d(input, pool, /*with_places=*/true);
    expect_bitwise_equal(got.output, want.output);
    expect_bitwise_equal(got.places, want.places);
    const at::Tensor grad = torch::randn_like(got.output);
    expect_bitwise_equal(max_pool2d_backward(grad, got.places, input, pool),
                         ref::max_pool2d_backward(grad, got.places, input, pool));
  }
}

TEST(MaxPool, ThreadsHaveNoPartInTheResults) {
  const int before = at::get_num_threads();
  torch::manual_seed(2);
  const at::Tensor input = channels_last(torch::randn({5, 33, 40, 41}), torch::kBFloat16);
  for (const MaxPool& pool : pools()) {
    SCOPED_TRACE(name_of(input, pool));
    at::set_num_threads(1);
    const MaxPooled one = max_pool2d(input, pool, /*with_places=*/true);
    const at::Tensor grad = torch::randn_like(one.output);
    const at::Tensor one_grad = max_pool2d_backward(grad, one.places, input, pool);
    at::set_num_threads(3);
    const MaxPooled three = max_pool2d(input, pool, /*with_places=*/true);
    expect_bitwise_equal(three.output, one.output);
    expect_bitwise_equal(three.places, one.places);
    expect_bitwise_equal(max_pool2d_backward(grad, one.places, input, pool), one_grad);
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace semitone::kernels::max_pool_test
