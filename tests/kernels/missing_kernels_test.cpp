// CUDA devices without Semitone's kernels.

#include "src/kernels/missing_kernels.h"

#include "src/kernels/on_cuda.h"
#include "tests/support/captured_log.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone::kernels::missing_kernels_test {
namespace {

using test::CapturedLog;
using testing::AllOf;
using testing::HasSubstr;

// A tensor on a device that no machine has, without memory.
at::Tensor tensor_on_cuda(c10::DeviceIndex device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       c10::DataPtr(nullptr, c10::Device(c10::kCUDA, device)),
                       /*allocator=*/nullptr, /*resizable=*/false);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKey::CUDA,
                                                  caffe2::TypeMeta::Make<float>());
}

TEST(MissingKernels, AreSaidOnceForEachDevice) {
  const CapturedLog log;
  warn_of_missing_kernels(40, "a reason");
  EXPECT_THAT(log.text(), AllOf(HasSubstr("warning"), HasSubstr("CUDA device 40"),
                                HasSubstr("a reason"), HasSubstr("several times slower")));
  const std::string once = log.text();
  warn_of_missing_kernels(40, "a reason");
  EXPECT_EQ(log.text(), once);
  warn_of_missing_kernels(41, "another reason");
  EXPECT_THAT(log.text().substr(once.size()),
              AllOf(HasSubstr("CUDA device 41"), HasSubstr("another reason")));
}

// For every reason: no nvcc, an old driver, no such device.
TEST(MissingKernels, AreSaidWhereATensorIsOnSuchADevice) {
  const CapturedLog log;
  EXPECT_FALSE(runs_on_cuda(torch::ones({2})));
  EXPECT_EQ(log.text(), "");
  ASSERT_FALSE(why_no_cuda_kernels(62).empty());
  EXPECT_FALSE(runs_on_cuda(tensor_on_cuda(62)));
  EXPECT_THAT(log.text(),
              AllOf(HasSubstr("CUDA device 62"), HasSubstr(std::string(why_no_cuda_kernels(62)))));
  const std::string once = log.text();
  EXPECT_FALSE(has_kernels(tensor_on_cuda(62)));
  EXPECT_EQ(log.text(), once);
}

}  // namespace
}  // namespace semitone::kernels::missing_kernels_test
