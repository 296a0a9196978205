#include "semitone/scaling/detail/parameter_names.h"

#include "src/autocast/model_entries.h"

namespace semitone::amp::detail {

void ParameterNames::add(const Model& model, std::string_view prefix) {
  for (const ModelEntry& entry : entries_of(model)) {
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

}  // namespace semitone::amp::detail
