#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

// A pretend accelerator for tests on a CPU, in LibTorch's place for other devices (PrivateUse1).
//
// - The host must not touch its memory: data_ptr() of its tensors points to pages without access.
//   A read or a write there ends the process with a message and a backtrace.
// - Kernels run at once, in the order of the calls. A vector clock for each stream finds every
//   access that the program did not order after a conflicting one on another stream (timeline.h).
// - A non-blocking copy to pinned memory delivers bytes 0xFF, and the true values only when the
//   host waits for it. The source of one from pinned memory must not change before that.
// - Tensors of two devices, or a tensor of the CPU with dimensions, in one operator are errors.
namespace semitone::test::accelerator {

inline constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kDevices = 2;

inline c10::Device device(c10::DeviceIndex index = 0) {
  return {kType, index};
}

// How often the host waited for a device since the process began.
struct Counts {
  std::int64_t reads = 0;    // item(), blocking copies to the host, equal(), nonzero()
  std::int64_t waits = 0;    // for a stream, an event or a device
  std::int64_t uploads = 0;  // blocking copies to a device
  std::int64_t unpinned_async_copies = 0;  // they block in CUDA, though the caller asked otherwise
};
Counts counts();

// The reads of the host.
std::int64_t host_reads();

// The errors since the last call. Most were also thrown where they happened.
std::vector<std::string> take_errors();

// Waits for all devices.
void synchronize();

// Moves a model to a device. torch::nn::Module::to cannot, since LibTorch's set_data refuses tensors
// of this device type for parameters of the CPU.
void move(torch::nn::Module& model, c10::Device to);

// Fails if the devices found an error that the test did not take.
class AcceleratorTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
};

}  // namespace semitone::test::accelerator
