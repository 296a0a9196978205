#pragma once

#include "src/kernels/multi_tensor_update.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <span>

namespace semitone::kernels {

// multi_tensor_update, repeated without the host: its rules and found_inf are read from the
// parameters' device when the kernels run, so that it can be captured in a CUDA graph.
class CapturableUpdate {
 public:
  explicit CapturableUpdate(c10::Device device);

  // Sends the rules of the next step to the device. The first call allocates memory there. Later
  // calls need the same number of rules of the same kind.
  void send(const Rules& rules);

  // Runs the step with the rules that were sent, or nothing if found_inf, of one fp32 element, is
  // not 0 (it may be undefined). Nothing is read back. Error unless all parameters are on the
  // device and are supported by its kernels: 16 bits or fp32, without gaps.
  void run(std::span<const Update> items, const at::Tensor& found_inf) const;

 private:
  c10::Device device_;
  at::Tensor rules_;  // bytes
  // The function for rules of the kind that was sent.
  void (*run_)(std::span<const Update> items, const at::Tensor& rules,
               const at::Tensor& found_inf) = nullptr;
};

}  // namespace semitone::kernels
