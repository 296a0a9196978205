// Checkpoints of a training on a CUDA device, in the program that tests CUDA's kernels.

#include "tests/checkpoint/device_training.h"
#include "tests/support/levels.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>

namespace semitone::checkpoint::test {
namespace {

class CudaCheckpoints : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(torch::cuda::is_available()) << "not run: no CUDA device"; }

  static DeviceSetting on(c10::Device device, const char* optimizer) {
    const auto to = [](torch::nn::Module& model, c10::Device where) { model.to(where); };
    return {.device = device, .move = to, .level = GetParam(), .optimizer = optimizer};
  }

  const c10::Device cuda_{torch::kCUDA, 0};
};

// The masks of dropout come from the device's generator.
TEST_P(CudaCheckpoints, GoOnBitForBit) {
  for (const char* const optimizer : kOptimizers)
    expect_resumed_as_undisturbed(on(cuda_, optimizer));
}

TEST_P(CudaCheckpoints, GoOnOnTheCPUAndTheReverse) {
  for (const char* const optimizer : kOptimizers) {
    expect_resumed_on(torch::kCPU, on(cuda_, optimizer));
    expect_resumed_on(cuda_, on(torch::kCPU, optimizer));
  }
}

// tools/gpu_hour.py tells cases apart by what is behind the slash.
INSTANTIATE_TEST_SUITE_P(Levels, CudaCheckpoints, testing::ValuesIn(semitone::test::kLevels),
                         [](const auto& which) {
                           return std::string("checkpoint_") + which.param;
                         });

}  // namespace
}  // namespace semitone::checkpoint::test
