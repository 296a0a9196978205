#include "tests/support/accelerator/on_host.h"

#include "tests/support/accelerator/machine.h"

#include <ATen/core/List.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

namespace semitone::test::accelerator {
namespace {

at::Tensor with_storage(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                         c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
  return tensor;
}

bool is_theirs(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

}  // namespace

void for_each_tensor(const c10::IValue& value,
                     c10::function_ref<void(const at::Tensor&)> function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, function);
  }
}

const c10::Storage& OnHost::over_shadow(const c10::Storage& storage) {
  for (const Memory& memory : memory_) {
    if (memory.theirs.is_alias_of(storage)) return memory.ours;
  }
  void* const shadow = Machine::instance().memory().shadow(storage.data());
  // A kernel that resizes it gets memory of the CPU, which is copied to the device afterwards.
  const c10::Storage ours(c10::Storage::use_byte_size_t{}, storage.nbytes(),
                          c10::DataPtr(shadow, c10::kCPU), c10::GetCPUAllocator(), true);
  return memory_.emplace_back(Memory{storage, ours, shadow}).ours;
}

at::Tensor OnHost::replace(const at::Tensor& tensor) {
  if (!is_theirs(tensor)) return tensor;
  for (const Argument& argument : arguments_) {
    if (argument.theirs.is_same(tensor)) return argument.ours;
  }
  const at::Tensor ours =
      with_storage(over_shadow(tensor.storage()), tensor, c10::DispatchKey::CPU);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    ours.unsafeGetTensorImpl()->set_wrapped_number(true);
  arguments_.push_back({tensor, ours});
  return ours;
}

c10::IValue OnHost::replace(const c10::IValue& value) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor.has_value() ? std::optional(replace(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  return value;
}

void OnHost::write_back() {
  for (const Memory& memory : memory_) {
    const std::size_t bytes = memory.ours.nbytes();
    if (memory.ours.data() == memory.shadow && bytes == memory.theirs.nbytes()) continue;
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(memory.theirs, bytes);
    if (bytes > 0 && memory.ours.data() != memory.shadow)
      std::memcpy(Machine::instance().memory().shadow(memory.theirs.data()), memory.ours.data(),
                  bytes);
  }
  for (const Argument& argument : arguments_) {
    if (argument.theirs.sizes() == argument.ours.sizes() &&
        argument.theirs.strides() == argument.ours.strides())
      continue;
    argument.theirs.unsafeGetTensorImpl()->set_sizes_and_strides(
        argument.ours.sizes(), argument.ours.strides(), argument.ours.storage_offset());
  }
}

at::Tensor OnHost::result(const at::Tensor& tensor, c10::Device device,
                          c10::function_ref<void(const at::Tensor&)> made) {
  if (!tensor.defined() || tensor.device().type() == kType) return tensor;
  for (const Argument& argument : arguments_) {
    if (argument.ours.is_same(tensor)) return argument.theirs;
  }
  for (const Memory& memory : memory_) {
    if (memory.ours.is_alias_of(tensor.storage()))
      return with_storage(memory.theirs, tensor, c10::DispatchKey::PrivateUse1);
  }
  const at::Tensor copy =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  made(copy);
  accelerator::over_shadow(copy).copy_(tensor);
  return copy;
}

c10::IValue OnHost::replace_result(const c10::IValue& value, c10::Device device,
                                   c10::function_ref<void(const at::Tensor&)> made) {
  if (value.isTensor()) return result(value.toTensor(), device, made);
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector())
    list.push_back(result(tensor, device, made));
  return list;
}

at::Tensor over_shadow(const at::Tensor& tensor) {
  void* const shadow = Machine::instance().memory().shadow(tensor.storage().data());
  const c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(),
                             c10::DataPtr(shadow, c10::kCPU), nullptr, false);
  return with_storage(storage, tensor, c10::DispatchKey::CPU);
}

}  // namespace semitone::test::accelerator
