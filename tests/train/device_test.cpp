#include "src/train/device.h"

#include "semitone/core/device.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>

namespace semitone::train {
namespace {

TEST(DeviceNames, AreFour) {
  for (const char* const name : {"auto", "cpu", "cuda", "cuda:0", "cuda:12"})
    EXPECT_TRUE(is_device_name(name)) << name;
  for (const char* const name :
       {"", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:1x", "cuda:x", "cuda: 1", "cuda:999", "cuda0"})
    EXPECT_FALSE(is_device_name(name)) << name;
}

TEST(DeviceNames, NameOneGpuWithItsNumber) {
  EXPECT_TRUE(names_one_gpu("cuda:3"));
  for (const char* const name : {"auto", "cpu", "cuda"}) EXPECT_FALSE(names_one_gpu(name)) << name;
}

TEST(FindDevice, FindsTheCpuAndTheDefault) {
  EXPECT_EQ(find_device("cpu"), torch::kCPU);
  EXPECT_EQ(find_device("auto").type(), default_device());
}

TEST(FindDevice, SaysWhyThereIsNoGpu) {
  if (torch::cuda::is_available()) {
    EXPECT_EQ(find_device("cuda"), torch::kCUDA);
    EXPECT_EQ(find_device("cuda:0"), torch::Device(torch::kCUDA, 0));
    test::expect_error([] { find_device("cuda:127"); },
                       {"expected a GPU for --device cuda:127, got", "numbered from 0"});
    return;
  }
  const char* const why =
      at::globalContext().hasCUDART() ? "got no CUDA device" : "got a LibTorch without CUDA";
  test::expect_error([] { find_device("cuda"); },
                     {"expected a GPU for --device cuda,", why, "--device cpu"});
  test::expect_error([] { find_device("cuda:1"); }, {"expected a GPU for --device cuda:1,", why});
}

}  // namespace
}  // namespace semitone::train
