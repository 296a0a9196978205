#include "semitone/scaling/parameter_names.h"

namespace semitone::amp {

void ParameterNames::add(const Model& model, std::string_view prefix) {
  for (const Model::Entry& entry : model.entries()) {
    if (!entry.is_parameter) continue;
    names_.try_emplace(entry.tensor.unsafeGetTensorImpl(),
                       Name{std::string(prefix) + entry.name, names_.size()});
  }
}

void ParameterNames::add_alias(const at::Tensor& alias, const at::Tensor& parameter) {
  if (const Name* found = find(parameter)) {
    names_.insert_or_assign(alias.unsafeGetTensorImpl(), Name(*found));
  }
}

const ParameterNames::Name* ParameterNames::find(const at::Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  return found == names_.end() ? nullptr : &found->second;
}

}  // namespace semitone::amp
