#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace semitone::test::accelerator {

// Calls a function for every defined tensor of a value: a tensor, a list, a list of optional ones.
void for_each_tensor(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> function);

// The arguments of one call as the CPU's kernel gets them, and its results as the caller does.
class OnHost {
 public:
  // A value with tensors of the CPU over the shadow of the device's memory, and the CPU instead of
  // the device.
  c10::IValue replace(const c10::IValue& value);

  // After the kernel: sizes and memory of the arguments that it resized.
  void write_back();

  // A result as the device's tensor: an argument itself, a view of one, or a copy in new memory of
  // the current device, for which `made` is called.
  c10::IValue replace_result(const c10::IValue& value, c10::Device device,
                             c10::function_ref<void(const at::Tensor&)> made);

 private:
  struct Memory {
    c10::Storage theirs;  // of the device
    c10::Storage ours;    // over its shadow
    const void* shadow;
  };
  struct Argument {
    at::Tensor theirs;
    at::Tensor ours;
  };

  at::Tensor replace(const at::Tensor& tensor);
  at::Tensor result(const at::Tensor& tensor, c10::Device device,
                    c10::function_ref<void(const at::Tensor&)> made);
  const c10::Storage& over_shadow(const c10::Storage& storage);

  std::vector<Memory> memory_;
  std::vector<Argument> arguments_;
};

}  // namespace semitone::test::accelerator
