#pragma once

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/memory.h"
#include "tests/support/accelerator/timeline.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace semitone::test::accelerator {

// All devices, with their memory, streams and errors. One lock covers everything, kernels included:
// it is taken by the functions that LibTorch calls, and held by the callers of these methods.
class Machine {
 public:
  // Never destroyed: tensors may be freed while the process ends.
  static Machine& instance();

  std::recursive_mutex& mutex() { return mutex_; }
  Timeline& timeline() { return timeline_; }
  Memory& memory() { return memory_; }
  Counts& counts() { return counts_; }

  // Records an error. `fail` also throws it.
  void record_error(std::string message) { errors_.push_back(std::move(message)); }
  [[noreturn]] void fail(const std::string& message);
  std::vector<std::string> take_errors() { return std::exchange(errors_, {}); }

  // The bytes of these tensors are read or written by `work` on a stream. After an error none are.
  struct Use {
    at::Tensor tensor;
    bool is_write;
  };
  void access(const std::vector<Use>& uses, Moment moment, const std::string& work);

  // The host waits for what the clock contains. Copies that it contains are then complete.
  void host_waits(const Clock& clock);

  // A copy to pinned memory of the host, which arrives when the host has waited for it.
  void arrive_later(const at::Tensor& destination, const at::Tensor& values, Moment moment);
  // A copy from pinned memory of the host, which must not change before the copy is complete.
  void watch_source(const at::Tensor& source, const at::Tensor& values, Moment moment);

 private:
  struct Copy {
    at::Tensor host;
    at::Tensor values;
    Moment moment;
    bool is_to_host;
  };
  void complete(const Copy& copy);
  void check(const Block& block, const Access& now);

  std::recursive_mutex mutex_;
  Timeline timeline_;
  Memory memory_;
  Counts counts_;
  std::vector<std::string> errors_;
  std::list<Copy> copies_;
};

using Lock = std::lock_guard<std::recursive_mutex>;

// The stream of this thread on a device, and this thread's device.
c10::Stream current_stream(c10::DeviceIndex device);
c10::DeviceIndex current_device();

// A stream in words: "accelerator:0 stream 2".
std::string describe(c10::Stream stream);

// A tensor of the CPU over the memory of a device's tensor, with the same sizes and strides, which
// kernels compute with.
at::Tensor over_shadow(const at::Tensor& tensor);

}  // namespace semitone::test::accelerator
