#include "semitone/core/device.h"

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
  EXPECT_TRUE(has_fast_dtype(torch::kCPU, torch::kFloat));
  EXPECT_TRUE(has_fast_dtype(torch::kCPU, torch::kDouble));
  EXPECT_TRUE(has_fast_dtype(torch::kCUDA, torch::kHalf));
}

TEST(Device, DescriptionNamesBothDtypes) {
  const std::string text = describe_device(torch::kCPU);
  EXPECT_NE(text.find("bf16 "), std::string::npos) << text;
  EXPECT_NE(text.find("fp16 "), std::string::npos) << text;
  EXPECT_EQ(text.find("fp16 fast") != std::string::npos, has_fast_dtype(torch::kCPU, torch::kHalf))
      << text;
}

}  // namespace
}  // namespace semitone
