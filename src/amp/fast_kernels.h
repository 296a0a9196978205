#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <string_view>
#include <vector>

// Kernels of our own in place of LibTorch's, for operators of models that know nothing of them.
namespace semitone::amp {

struct FastKernel {
  std::string_view op;  // the display name of one overload
  // The operator's result; nothing where the kernel does not do these arguments, which is then
  // LibTorch's to do. With every Autocast key excluded.
  std::optional<at::Tensor> (*run)(std::span<const c10::IValue> arguments);
  // It takes 16-bit arguments and returns fp32 itself: no casts where a policy wants fp32.
  bool widens = false;
};

// All of them.
std::span<const FastKernel> fast_kernels();

// By operator. Null: none.
const FastKernel* find_fast_kernel(std::string_view op);

}  // namespace semitone::amp
