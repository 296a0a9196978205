#include "src/report/recorded_model.h"

#include "semitone/core/error.h"
#include "src/report/tensor_values.h"

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <unordered_set>

namespace semitone::report {
namespace {

std::string full_name(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

// "Conv2d" for "torch::nn::Conv2dImpl".
std::string type_of(const torch::nn::Module& module) {
  std::string name = module.name();
  name = name.substr(0, name.find('<'));
  const auto colon = name.rfind(':');
  if (colon != std::string::npos) name.erase(0, colon + 1);
  constexpr std::string_view kImpl = "Impl";
  if (name.size() > kImpl.size() && name.ends_with(kImpl)) name.resize(name.size() - kImpl.size());
  return name;
}

}  // namespace

bool can_sample(const at::Tensor& tensor) {
  return can_examine(tensor) && tensor.is_floating_point();
}

void RecordedModel::add(const torch::nn::Module& model, const std::string& prefix) {
  require_new_names(model, prefix);
  names_.add(model, prefix);
  add_layers(model, prefix);
  parameters_.clear();
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const Entry& entry : names_.entries()) {
    if (entry.is_parameter && can_sample(entry.tensor) &&
        seen.insert(entry.tensor.unsafeGetTensorImpl()).second)
      parameters_.push_back(&entry);
  }
}

void RecordedModel::require_new_names(const torch::nn::Module& model,
                                      const std::string& prefix) const {
  std::unordered_set<std::string_view> names;
  for (const Entry& entry : names_.entries()) names.insert(entry.name);
  for (const auto& parameter : model.named_parameters()) {
    const std::string name = full_name(prefix, parameter.key());
    if (names.contains(name))
      throw Error("report.recorder", "parameters with names of their own",
                  "'" + name + "' in two models", "give add_model() another prefix");
  }
}

void RecordedModel::add_layers(const torch::nn::Module& module, const std::string& name) {
  const auto children = module.named_children();
  layers_[name] = {type_of(module), children.is_empty()};
  for (const auto& child : children) add_layers(*child.value(), full_name(name, child.key()));
}

bool RecordedModel::is_leaf(const std::string& layer) const {
  const auto found = layers_.find(layer);
  return found != layers_.end() && found->second.is_leaf;
}

nlohmann::ordered_json RecordedModel::describe(std::int64_t world_size) const {
  auto parameters = nlohmann::ordered_json::array();
  for (const Entry* const entry : parameters_) {
    const auto layer = layers_.find(entry->layer);
    parameters.push_back({{"name", entry->name},
                          {"layer", entry->layer},
                          {"layer_type", layer == layers_.end() ? "" : layer->second.type},
                          {"shape", entry->tensor.sizes().vec()},
                          {"dtype", c10::toString(entry->tensor.scalar_type())}});
  }
  const std::string device =
      parameters_.empty() ? "cpu" : parameters_.front()->tensor.device().str();
  return {{"device", device},
          {"world_size", world_size},
          {"threads", at::get_num_threads()},
          {"parameters", std::move(parameters)}};
}

}  // namespace semitone::report
