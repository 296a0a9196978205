#include "semitone/core/device.h"

#include "src/core/native_kernels.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace semitone {
namespace {

TEST(Device, DefaultIsTheGpuWhereThereIsOne) {
  EXPECT_EQ(default_device(), torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
}

TEST(Device, Default16BitDtypes) {
  EXPECT_EQ(default_16bit_dtype(torch::kCPU), torch::kBFloat16);
  EXPECT_EQ(default_16bit_dtype(torch::kCUDA), torch::kHalf);
}

TEST(Device, FullPrecisionAndOtherDevicesAreAlwaysFast) {
  EXPECT_TRUE(trains_natively(torch::kCPU, torch::kFloat, OperatorKind::convolution));
  EXPECT_TRUE(trains_natively(torch::kCPU, torch::kDouble, OperatorKind::recurrent));
  EXPECT_TRUE(trains_natively(torch::kCUDA, torch::kHalf, OperatorKind::convolution));
  EXPECT_EQ(describe_16bit(torch::kCUDA, torch::kHalf), "native");
}

TEST(Device, DescriptionNamesBothDtypes) {
  const std::string text = describe_device(torch::kCPU);
  const std::string bf16 = "; bf16 " + describe_16bit(torch::kCPU, torch::kBFloat16);
  const std::string fp16 = "; fp16 " + describe_16bit(torch::kCPU, torch::kHalf);
  EXPECT_NE(text.find(bf16 + fp16), std::string::npos) << text;
}

}  // namespace
}  // namespace semitone
