// Conversions against LibTorch's.

#include "src/kernels/convert.h"

#include "semitone/core/dtype.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::convert_test {
namespace {

using test::expect_bitwise_equal;

constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16};

// LibTorch's NaNs have other bits from one instruction set to the next.
void expect_as_defined(const at::Tensor& tensor, c10::ScalarType dtype) {
  SCOPED_TRACE(
      c10::str(dtype_name(tensor.scalar_type()), " to ", dtype_name(dtype), ", ", tensor.sizes()));
  const at::Tensor got = kernels::convert(tensor, dtype);
  const at::Tensor want = ref::convert(tensor, dtype);
  EXPECT_EQ(got.strides(), want.strides());
  EXPECT_FALSE(got.is_alias_of(tensor));
  expect_bitwise_equal(got.isnan(), want.isnan());
  expect_bitwise_equal(got.masked_fill(got.isnan(), 0), want.masked_fill(want.isnan(), 0));
}

// On every instruction set that this processor has.
class Conversions : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

// To 16 bits and back in one pass: the same numbers, in the same layout.
TEST_P(Conversions, RoundAsTwoOfThem) {
  const at::Tensor bits = torch::arange(-32768, 32768, torch::kInt).mul(65536);
  std::vector<at::Tensor> tensors{
      torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
      torch::randn({4, 5}).t(), torch::randn({4, 5}).slice(1, 0, 5, 2)};
  for (const std::int64_t size : {0, 1, 17, 4095, 4096, 4097, 70000})
    tensors.push_back(torch::randn({size}) * 1000);
  for (const int next : {0, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF})
    tensors.push_back(bits.add(next).view(torch::kFloat));
  for (const at::Tensor& tensor : tensors) {
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      SCOPED_TRACE(c10::str(dtype_name(dtype), ", ", tensor.sizes()));
      const at::Tensor got = round_to(tensor, dtype);
      const at::Tensor want = ref::round_to(tensor, dtype);
      EXPECT_EQ(got.strides(), want.strides());
      EXPECT_FALSE(got.is_alias_of(tensor));
      expect_bitwise_equal(got.isnan(), want.isnan());
      expect_bitwise_equal(got.masked_fill(got.isnan(), 0), want.masked_fill(want.isnan(), 0));
    }
  }
}

TEST_P(Conversions, AreLibTorchsForEverySize) {
  for (const auto from : kDtypes)
    for (const auto to : kDtypes)
      for (const std::int64_t size : {0, 1, 7, 8, 15, 16, 17, 31, 33, 100, 40000})
        expect_as_defined(torch::randn({size}, from), to);
}

TEST_P(Conversions, AreLibTorchsForEveryNumber) {
  const at::Tensor all = torch::arange(-32768, 32768, torch::kShort);
  for (const auto from : {torch::kHalf, torch::kBFloat16})
    for (const auto to : kDtypes) expect_as_defined(all.view(from), to);
  // Around every number of 16 bits, and halfway between two.
  const at::Tensor bits = torch::arange(-32768, 32768, torch::kInt).mul(65536);
  for (const int next : {0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF})
    for (const auto to : kDtypes) expect_as_defined(bits.add(next).view(torch::kFloat), to);
}

TEST_P(Conversions, KeepTheLayout) {
  for (const auto from : kDtypes) {
    const at::Tensor images = torch::randn({2, 3, 4, 5}).to(from);
    expect_as_defined(images.contiguous(at::MemoryFormat::ChannelsLast), torch::kBFloat16);
    expect_as_defined(images.permute({3, 1, 0, 2}), torch::kHalf);
    expect_as_defined(images.slice(3, 0, 5, 2), torch::kFloat);  // gaps
    expect_as_defined(images.select(0, 0).expand({7, 3, 4, 5}), torch::kFloat);
    expect_as_defined(images.to(torch::kDouble), torch::kBFloat16);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, Conversions,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(ConversionOfLargeTensors, IsTheSameForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  const at::Tensor tensor = torch::randn({300, 1001});
  at::set_num_threads(1);
  const at::Tensor one = kernels::convert(tensor, torch::kBFloat16);
  at::set_num_threads(3);
  const at::Tensor three = kernels::convert(tensor, torch::kBFloat16);
  at::set_num_threads(before);
  expect_bitwise_equal(one, three);
}

TEST(ConversionOfLargeTensors, IsWorthAKernelFromSoManyElementsOn) {
  const at::Tensor large = torch::zeros({64 * 1024});
  EXPECT_TRUE(is_worth_converting(large, torch::kBFloat16));
  EXPECT_FALSE(is_worth_converting(large.slice(0, 1), torch::kBFloat16));
  EXPECT_FALSE(is_worth_converting(large, torch::kDouble));
  EXPECT_FALSE(is_worth_converting(large.to(torch::kLong), torch::kBFloat16));
}

}  // namespace
}  // namespace semitone::kernels::convert_test
