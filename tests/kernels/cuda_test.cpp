// Every kernel on a CUDA device against the CPU's. It is registered if a build has CUDA and a
// machine has a device, and fails without one: a run that tested nothing does not pass.

#include "src/kernels/on_cuda.h"
#include "tests/support/cuda_cases.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cctype>
#include <string>

namespace semitone::kernels::cuda_test {
namespace {

class Cuda : public testing::TestWithParam<test::CudaCase> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(torch::cuda::is_available()) << "not run: no CUDA device";
    ASSERT_TRUE(has_cuda_kernels(0)) << "not run: the device is older than what was compiled for";
  }
};

TEST_P(Cuda, EqualsTheCpusKernels) {
  const auto got = GetParam().run(at::Device(at::kCUDA, 0));
  const auto want = GetParam().run(at::kCPU);
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(c10::str("result ", i));
    if (GetParam().relative == 0) {
      EXPECT_TRUE(test::same_bits(got[i], want[i]));
    } else {
      test::expect_close(got[i], want[i], GetParam().relative);
    }
  }
}

TEST_P(Cuda, GivesTheSameBitsTwice) {
  const auto once = GetParam().run(at::Device(at::kCUDA, 0));
  const auto again = GetParam().run(at::Device(at::kCUDA, 0));
  ASSERT_EQ(once.size(), again.size());
  for (std::size_t i = 0; i < once.size(); ++i)
    EXPECT_TRUE(test::same_bits(once[i], again[i])) << "result " << i;
}

INSTANTIATE_TEST_SUITE_P(Kernels, Cuda, testing::ValuesIn(test::cuda_cases()),
                         [](const auto& which) {
                           std::string name = which.param.name;
                           for (char& c : name)
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           return name;
                         });

}  // namespace
}  // namespace semitone::kernels::cuda_test
