#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <vector>

namespace semitone::kernels {

// Numbers on a device that the host reads later. The constructor starts a copy to pinned memory
// behind the work that is in the queue of the device's current stream, and does not wait for it.
class ReadLater {
 public:
  // values: a list of fp32 numbers, on the CPU, whose numbers are there at once, or on a device for
  // which there is pinned memory.
  explicit ReadLater(const at::Tensor& values);

  // Whether get() would not wait.
  bool is_there();
  // The numbers. Waits for the copy, but not for work that was started later.
  const std::vector<float>& get();
  bool any_set();  // whether one is not 0

 private:
  at::Tensor host_;
  c10::Event event_;
  bool is_there_ = false;
  std::vector<float> values_;
};

}  // namespace semitone::kernels
