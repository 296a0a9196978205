#include "semitone/amp/parameter_names.h"

#include <utility>

namespace semitone::amp {

void ParameterNames::add(const torch::nn::Module& module, std::string_view prefix) {
  for (const auto& item : module.named_parameters())
    add(item.value(), std::string(prefix) + item.key());
}

void ParameterNames::add(const at::Tensor& parameter, std::string name) {
  names_.emplace(parameter.unsafeGetTensorImpl(), std::move(name));
}

std::string ParameterNames::of(const at::Tensor& parameter, std::string_view otherwise) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  return found == names_.end() ? std::string(otherwise) : found->second;
}

}  // namespace semitone::amp
