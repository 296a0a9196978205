#include "src/report/frame.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

namespace semitone::report {

std::string Frame::name_of(const WatchedArgument& argument) const {
  if (op == nullptr) return "gradient " + std::to_string(argument.position);
  std::string name = argument.position < op->arguments.size() ? op->arguments[argument.position]
                                                              : std::string("argument");
  if (argument.index >= 0) name += "[" + std::to_string(argument.index) + "]";
  return name;
}

Frame* Frame::formula() const {
  for (Frame* outer = caller; outer != nullptr; outer = outer->caller)
    if (outer->node != nullptr) return outer->is_custom_node ? nullptr : outer;
  return nullptr;
}

bool Frame::has_returned_suspect() const {
  return std::any_of(suspects.begin(), suspects.end(), [](const Suspect& suspect) {
    const at::Tensor result = suspect.lock();
    return result.defined() && kinds_of(result) != 0;
  });
}

Suspect::Suspect(const at::Tensor& tensor)
    : storage_(tensor.storage().getWeakStorageImpl()),
      options_(tensor.options()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      offset_(tensor.storage_offset()) {}

at::Tensor Suspect::lock() const {
  auto storage = storage_.lock();
  if (storage == nullptr) return {};
  at::Tensor tensor = at::empty({0}, options_.pinned_memory(false).requires_grad(std::nullopt));
  tensor.set_(c10::Storage(std::move(storage)), offset_, sizes_, strides_);
  return tensor;
}

ThreadTrace& ThreadTrace::of_this_thread() {
  static thread_local ThreadTrace trace;
  return trace;
}

void ThreadTrace::enter(const CheckState& state) {
  if (epoch_ == state.epoch()) return;
  epoch_ = state.epoch();
  last_layer = nullptr;
  last_node = nullptr;
  examined_.clear();
  next_ = 0;
}

void ThreadTrace::add_examined(const at::Tensor& tensor) {
  constexpr std::size_t kMost = 32;
  if (examined_.size() < kMost) {
    examined_.push_back(tensor.storage().getWeakStorageImpl());
    return;
  }
  examined_[next_] = tensor.storage().getWeakStorageImpl();
  next_ = (next_ + 1) % kMost;
}

bool ThreadTrace::was_examined(const at::Tensor& tensor) const {
  // A weak reference keeps the address of a storage in use, so equal addresses are one storage.
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  return std::any_of(examined_.begin(), examined_.end(), [&](const WeakStorage& examined) {
    return examined._unsafe_get_target() == storage;
  });
}

}  // namespace semitone::report
