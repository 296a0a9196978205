// relu and addition against their references and against LibTorch's.

#include "src/kernels/pointwise.h"

#include "semitone/core/dtype.h"
#include "src/core/native_kernels.h"
#include "tests/support/tensors.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::pointwise_test {
namespace {

using test::expect_bitwise_equal;

constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16};
constexpr std::int64_t kSizes[] = {1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 65, 100, 40000};

// Every number of a 16-bit dtype, NaNs too, in some order.
at::Tensor all_numbers(c10::ScalarType dtype) {
  return torch::arange(-32768, 32768, torch::kShort)
      .index({torch::randperm(65536)})
      .contiguous()
      .view(dtype);
}

at::Tensor special_fp32() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  return torch::tensor({0.0F, -0.0F, 1.0F, -1.0F, 1e-45F, -1e-45F, 3.4e38F, -3.4e38F, kInfinity,
                        -kInfinity, kNan, -kNan});
}

// On every instruction set that this processor has.
class PointwiseKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

void expect_relu_as_defined(const at::Tensor& input, const at::Tensor& grad) {
  SCOPED_TRACE(c10::str(dtype_name(input.scalar_type()), " ", input.sizes()));
  const at::Tensor got = kernels::relu(input);
  expect_bitwise_equal(got, input.masked_fill(input.lt(0), 0));
  if (kIsX86) expect_bitwise_equal(got, ref::relu(input));
  EXPECT_EQ(got.strides(), input.strides());
  at::Tensor in_place = input.clone();
  kernels::relu_(in_place);
  expect_bitwise_equal(in_place, got);
  const at::Tensor gradient = kernels::relu_backward(grad, got);
  expect_bitwise_equal(gradient, at::threshold_backward(grad, at::relu(input), 0));
  EXPECT_EQ(gradient.strides(), input.strides());
}

TEST_P(PointwiseKernels, ReluIsLibTorchsForEverySize) {
  for (const auto dtype : kDtypes) {
    for (const std::int64_t size : kSizes) {
      const at::Tensor input = torch::randn({size}, dtype);
      ASSERT_TRUE(has_pointwise_kernel(input));
      expect_relu_as_defined(input, torch::randn({size}, dtype));
    }
  }
}

TEST_P(PointwiseKernels, ReluIsLibTorchsForEveryNumber) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16})
    expect_relu_as_defined(all_numbers(dtype), all_numbers(dtype));
  expect_relu_as_defined(special_fp32(), special_fp32().flip(0));
}

TEST_P(PointwiseKernels, AdditionIsLibTorchsForEverySize) {
  for (const auto dtype : kDtypes) {
    for (const std::int64_t size : kSizes) {
      const at::Tensor a = torch::randn({size}, dtype);
      const at::Tensor b = torch::randn({size}, dtype);
      expect_bitwise_equal(kernels::add(a, b), at::add(a, b));
      at::Tensor in_place = a.clone();
      kernels::add_(in_place, b);
      expect_bitwise_equal(in_place, at::add(a, b));
      kernels::add_(in_place, in_place);
      expect_bitwise_equal(in_place, at::add(a, b).mul(2));
    }
  }
}

TEST_P(PointwiseKernels, AdditionIsLibTorchsForEveryNumber) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    for (int pairing = 0; pairing < 8; ++pairing) {
      const at::Tensor a = all_numbers(dtype);
      const at::Tensor b = all_numbers(dtype);
      expect_bitwise_equal(kernels::add(a, b), at::add(a, b));
    }
  }
  const at::Tensor special = special_fp32();
  const at::Tensor a = special.unsqueeze(1).expand({12, 12}).contiguous();
  expect_bitwise_equal(kernels::add(a, a.t()), at::add(a, a.t()));
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, PointwiseKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(Pointwise, LayoutsAreKept) {
  const at::Tensor contiguous = torch::randn({3, 5, 7, 4}, torch::kBFloat16);
  const at::Tensor image = contiguous.contiguous(at::MemoryFormat::ChannelsLast);
  for (const at::Tensor& a : {contiguous, image, contiguous.transpose(0, 2)}) {
    const at::Tensor b = torch::randn({a.size(0), 5, a.size(2), 4}, torch::kBFloat16);
    expect_bitwise_equal(kernels::add(a, b), at::add(a, b));
    EXPECT_EQ(kernels::add(a, b).strides(), a.strides());
    EXPECT_EQ(kernels::relu(a).strides(), a.strides());
    expect_bitwise_equal(kernels::relu_backward(b, kernels::relu(a)),
                         at::threshold_backward(b, at::relu(a), 0));
  }
}

TEST(Pointwise, OtherTensorsTakeTheDefinition) {
  const at::Tensor gaps = torch::randn({6, 10}, torch::kBFloat16).slice(1, 0, 10, 3);
  const at::Tensor negative = torch::_neg_view(torch::randn({40}));
  const at::Tensor wide = torch::randn({40}, torch::kDouble);
  for (const at::Tensor& input : {gaps, negative, wide, torch::zeros({3}, torch::kLong)}) {
    EXPECT_FALSE(has_pointwise_kernel(input));
    EXPECT_TRUE(kernels::relu(input).equal(at::relu(input)));
    EXPECT_TRUE(kernels::add(input, input).equal(at::add(input, input)));
    const at::Tensor in_place = input.clone();
    kernels::relu_(in_place);
    kernels::add_(in_place, input);
    EXPECT_TRUE(in_place.equal(at::relu(input) + input));
  }
}

TEST(Pointwise, WhatIsWrittenInPlaceIsCounted) {
  const at::Tensor tensor = torch::randn({40});
  const auto before = tensor._version();
  kernels::relu_(tensor);
  EXPECT_GT(tensor._version(), before);
}

}  // namespace
}  // namespace semitone::kernels::pointwise_test
