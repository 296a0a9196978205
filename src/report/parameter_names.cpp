#include "src/report/parameter_names.h"

#include "src/core/replica_parameters.h"

namespace semitone::report {
namespace {

const void* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

void ParameterNames::add(const torch::nn::Module& model, const std::string& prefix) {
  const std::string start = prefix.empty() ? "" : prefix + ".";
  for (const auto& parameter : model.named_parameters())
    add(start, parameter.key(), parameter.value(), /*is_parameter=*/true);
  for (const auto& buffer : model.named_buffers())
    add(start, buffer.key(), buffer.value(), /*is_parameter=*/false);
  refresh();
}

void ParameterNames::add(const std::string& prefix, const std::string& name,
                         const at::Tensor& tensor, bool is_parameter) {
  if (!tensor.defined()) return;
  const std::string full = prefix + name;
  const auto dot = full.rfind('.');
  entries_.push_back(
      {full, dot == std::string::npos ? std::string() : full.substr(0, dot), is_parameter, tensor});
}

void ParameterNames::refresh() {
  by_storage_.clear();
  by_tensor_.clear();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    by_tensor_.emplace(entries_[i].tensor.unsafeGetTensorImpl(), i);
    if (const void* storage = memory_of(entries_[i].tensor)) by_storage_[storage].push_back(i);
  }
}

const ParameterNames::Entry* ParameterNames::find(const at::Tensor& tensor) const {
  if (entries_.empty()) return nullptr;
  const auto same = by_tensor_.find(original_of(tensor));
  if (same != by_tensor_.end()) return &entries_[same->second];
  const void* const storage = memory_of(tensor);
  const auto found = by_storage_.find(storage);
  if (storage == nullptr || found == by_storage_.end()) return nullptr;
  for (const std::size_t i : found->second) {
    const at::Tensor& owner = entries_[i].tensor;
    // A parameter that got new memory has left this storage.
    if (memory_of(owner) != storage) continue;
    const std::int64_t offset = tensor.storage_offset() - owner.storage_offset();
    if (found->second.size() == 1 || (offset >= 0 && offset < owner.numel())) return &entries_[i];
  }
  return nullptr;
}

}  // namespace semitone::report
