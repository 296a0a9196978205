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
  // The devices on which it runs. On a GPU with kernels a policy also has to say so.
  enum class On { cpu, cpu_and_gpu, every_device } on = On::cpu;

  // @param on_gpu  CastPolicy::fast_kernels_on_gpu
  bool runs_on(c10::DeviceType device, bool on_gpu) const {
    return device == c10::DeviceType::CPU || on == On::every_device ||
           (on == On::cpu_and_gpu && on_gpu);
  }
};

// All kernels.
std::span<const FastKernel> fast_kernels();

// The kernel of an operator, or null.
const FastKernel* find_fast_kernel(std::string_view op);

}  // namespace semitone::amp
