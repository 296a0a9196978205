// fp8 values against LibTorch's casts.

#include "src/kernels/fp8.h"

#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::fp8_test {
namespace {

using test::expect_bitwise_equal;

constexpr c10::ScalarType kFormats[] = {torch::kFloat8_e4m3fn, torch::kFloat8_e5m2};
constexpr float kInf = std::numeric_limits<float>::infinity();

void expect_as_defined(const at::Tensor& tensor, c10::ScalarType format, float scale) {
  SCOPED_TRACE(c10::str(dtype_name(tensor.scalar_type()), " to ", dtype_name(format), " by ", scale,
                        ", ", tensor.sizes()));
  const Fp8Values got = to_fp8(tensor, format, scale);
  const Fp8Values want = ref::to_fp8(tensor, format, scale);
  EXPECT_EQ(got.values.scalar_type(), torch::kFloat);
  EXPECT_EQ(got.values.strides(), want.values.strides());
  EXPECT_FALSE(got.values.is_alias_of(tensor));
  expect_bitwise_equal(got.values.isnan(), want.values.isnan());
  expect_bitwise_equal(got.values.masked_fill(got.values.isnan(), 0),
                       want.values.masked_fill(want.values.isnan(), 0));
  EXPECT_EQ(got.amax, want.amax);
  EXPECT_EQ(finite_amax(tensor), want.amax);
}

// On every instruction set that this processor has.
class Fp8Kernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(Fp8Kernels, AreAsDefinedForEvery16BitNumber) {
  const at::Tensor all = torch::arange(-32768, 32768, torch::kShort);
  for (const auto format : kFormats)
    for (const auto dtype : {torch::kHalf, torch::kBFloat16})
      for (const float scale : {1.0F, 0.37F, 1000.0F, 0x1p100F, 0x1p-100F})
        expect_as_defined(all.view(dtype), format, scale);
}

// Around each tie of both formats, and around their limits.
TEST_P(Fp8Kernels, AreAsDefinedBetween16BitNumbers) {
  const at::Tensor bits = torch::arange(-32768, 32768, torch::kInt).mul(65536);
  for (const int next : {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF})
    for (const auto format : kFormats)
      expect_as_defined(bits.add(next).view(torch::kFloat), format, 1.0F);
}

TEST_P(Fp8Kernels, AreAsDefinedForEverySizeAndLayout) {
  std::vector<at::Tensor> tensors{
      torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
      torch::randn({4, 5}).t(), torch::randn({4, 5}).slice(1, 0, 5, 2),
      torch::randn({3}).expand({4, 3}), torch::randn({5}, torch::kDouble)};
  for (const std::int64_t size : {0, 1, 7, 8, 15, 16, 17, 31, 33, 100, 70000})
    tensors.push_back(torch::randn({size}) * 100);
  for (const at::Tensor& tensor : tensors)
    for (const auto format : kFormats) expect_as_defined(tensor, format, 3.5F);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, Fp8Kernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const testing::TestParamInfo<std::int64_t>& tested) {
                           return std::string(hwy::TargetName(tested.param));
                         });

// All 256 numbers of a format, which no rounding changes, and of which the numbers between are
// rounded to the nearer one, or to the even one.
TEST(Fp8Values, AreTheNearestNumbersOfTheFormat) {
  for (const auto format : kFormats) {
    SCOPED_TRACE(dtype_name(format));
    const at::Tensor all = torch::arange(0, 128, torch::kByte).view(format).to(torch::kFloat);
    const at::Tensor numbers = all.masked_select(all.isfinite());
    expect_bitwise_equal(to_fp8(numbers, format, 1).values, numbers);
    const at::Tensor low = numbers.slice(0, 0, -1);
    const at::Tensor high = numbers.slice(0, 1);
    const at::Tensor even = torch::arange(low.numel()).remainder(2).eq(0);
    const auto between = [&](double part) { return low + (high - low) * part; };
    expect_bitwise_equal(to_fp8(between(0.49), format, 1).values, low);
    expect_bitwise_equal(to_fp8(between(0.51), format, 1).values, high);
    expect_bitwise_equal(to_fp8(between(0.5), format, 1).values, torch::where(even, low, high));
    expect_bitwise_equal(to_fp8(between(0.5).neg(), format, 1).values,
                         torch::where(even, low, high).neg());
  }
}

TEST(Fp8Values, StopAtTheLargestNumberUnlessTheyAreInfinite) {
  const at::Tensor values =
      torch::tensor({1e9F, -1e9F, 3e38F, kInf, -kInf, std::nanf(""), 0.0F, -0.0F});
  const auto e4m3 = to_fp8(values, torch::kFloat8_e4m3fn, 10).values;
  expect_bitwise_equal(e4m3.slice(0, 0, 3), torch::tensor({448.0F, -448.0F, 448.0F}));
  EXPECT_TRUE(e4m3.slice(0, 3, 6).isnan().all().item<bool>());
  const auto e5m2 = to_fp8(values, torch::kFloat8_e5m2, 10);
  expect_bitwise_equal(e5m2.values.slice(0, 0, 5),
                       torch::tensor({57344.0F, -57344.0F, 57344.0F, kInf, -kInf}));
  EXPECT_TRUE(std::isnan(e5m2.values[5].item<float>()));
  EXPECT_EQ(e5m2.amax, 3e38F);
  EXPECT_TRUE(std::signbit(e5m2.values[7].item<float>()));
}

TEST(Fp8Values, HaveAnAmaxOfZeroWithoutFiniteNumbers) {
  for (const at::Tensor& tensor : {torch::zeros({4}), torch::full({40}, kInf), torch::empty({0}),
                                   torch::full({4}, std::nanf(""))}) {
    EXPECT_EQ(finite_amax(tensor), 0);
    EXPECT_EQ(to_fp8(tensor, torch::kFloat8_e5m2, 1).amax, 0);
  }
}

}  // namespace
}  // namespace semitone::kernels::fp8_test
