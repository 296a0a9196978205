#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <string_view>
#include <vector>

// Semitone's kernels in place of LibTorch's, for operators of unmodified models.
namespace semitone::amp {

struct FastKernel {
  std::string_view op;  // the display name of one overload
  // Returns the operator's result, or nothing if the kernel does not support the arguments; then
  // LibTorch's kernel runs. Called with every Autocast key excluded.
  std::optional<at::Tensor> (*run)(std::span<const c10::IValue> arguments);
  // Whether it takes 16-bit arguments and returns fp32 itself, so that a policy's fp32 needs no
  // casts.
  bool widens = false;
  // Whether it runs on every device. The others are for the CPU.
  bool on_every_device = false;

  bool runs_on(c10::DeviceType device) const {
    return on_every_device || device == c10::DeviceType::CPU;
  }
};

// All kernels.
std::span<const FastKernel> fast_kernels();

// The kernel of an operator, or null.
const FastKernel* find_fast_kernel(std::string_view op);

}  // namespace semitone::amp
