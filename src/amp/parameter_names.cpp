#include "semitone/amp/parameter_names.h"

#include <utility>

namespace semitone::amp {

void ParameterNames::add(const Model& model, std::string_view prefix) {
  for (const Model::Entry& entry : model.entries()) {
    if (entry.is_parameter) add(entry.tensor, std::string(prefix) + entry.name);
  }
}

void ParameterNames::add(const at::Tensor& parameter, std::string name) {
  names_.emplace(parameter.unsafeGetTensorImpl(), std::move(name));
}

std::string ParameterNames::of(const at::Tensor& parameter, std::string_view otherwise) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  return found == names_.end() ? std::string(otherwise) : found->second;
}

}  // namespace semitone::amp
