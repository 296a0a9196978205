#include "semitone/weights/state_dict.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/model_entries.h"
#include "src/core/exact_weights.h"
#include "src/weights/cast.h"
#include "src/weights/load.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::weights {
namespace {

// Whether a tensor's values are roundings of fp32 ones.
bool is_below_fp32(const at::Tensor& tensor) {
  return tensor.is_floating_point() && tensor.element_size() < 4;
}

// What is loaded, for messages.
struct Source {
  std::string_view component;
  std::string in;  // " in 'PATH'"
};

std::string without_prefix(const std::string& name, const LoadOptions& options) {
  return name.starts_with(options.strip_prefix()) ? name.substr(options.strip_prefix().size())
                                                  : name;
}

// The names that the values have in the model.
std::unordered_map<std::string, at::Tensor> renamed(const StateDict& values,
                                                    const LoadOptions& options,
                                                    const Source& source) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& item : values) {
    const std::string name = without_prefix(item.key(), options);
    if (!by_name.emplace(name, item.value()).second) {
      throw FileError(source.component, "each name once" + source.in,
                      "'" + name + "' twice without the prefix '" + options.strip_prefix() + "'");
    }
  }
  return by_name;
}

// What Python's wrappers, one or two of them, add to names, or the name of a module around the model,
// if an unexpected name without it is a missing one.
std::optional<std::string> wrong_prefix(const UnmatchedNames& unmatched) {
  const std::unordered_set<std::string> missing(unmatched.missing.begin(), unmatched.missing.end());
  for (const std::string_view prefix :
       {"module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module."}) {
    for (const std::string& name : unmatched.unexpected) {
      if (name.starts_with(prefix) && missing.contains(name.substr(prefix.size())))
        return std::string(prefix);
    }
  }
  for (const std::string& name : unmatched.unexpected) {
    for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1))
      if (missing.contains(name.substr(dot + 1))) return name.substr(0, dot + 1);
  }
  return std::nullopt;
}

// "'a', 'b' and 7 more".
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string list;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i)
    list += (i == 0 ? "'" : ", '") + names[i] + "'";
  if (names.size() > kShown) list += " and " + std::to_string(names.size() - kShown) + " more";
  return list;
}

void require_matching(const UnmatchedNames& unmatched, const LoadOptions& options,
                      const Source& source) {
  if (unmatched.missing.empty() && unmatched.unexpected.empty()) return;
  std::string remedy = "load a file of the same model, or what matches with strict(false)";
  if (const auto prefix = wrong_prefix(unmatched)) {
    const std::string all = options.strip_prefix() + *prefix;
    remedy = "names begin with '" + all + "': load them with strip_prefix(\"" + all + "\")";
  }
  std::string got;
  if (!unmatched.missing.empty()) got = "none for " + listed(unmatched.missing);
  if (!unmatched.unexpected.empty()) {
    got += (got.empty() ? "" : ", and ") + listed(unmatched.unexpected) +
           ", which the model does not have";
  }
  throw FileError(source.component,
                  "a value for each parameter and buffer, and no others" + source.in, got, remedy);
}

// A tensor of the model and its new value, in the tensor's dtype, or in fp32 if it has a master.
struct Copy {
  at::Tensor tensor;
  at::Tensor value;
  std::shared_ptr<ExactWeights> exact;
};

Copy copy_of(const std::string& name, const at::Tensor& tensor, const at::Tensor& value,
             bool has_master, const Source& source) {
  if (!value.defined() || value.sizes() != tensor.sizes()) {
    throw FileError(source.component,
                    c10::str("'", name, "' of shape ", tensor.sizes()) + source.in,
                    value.defined() ? c10::str(value.sizes()) : "an undefined tensor",
                    "load a file of the same model");
  }
  if (value.layout() != tensor.layout() || value.is_meta()) {
    throw FileError(
        source.component, c10::str("'", name, "' of layout ", tensor.layout()) + source.in,
        value.is_meta() ? "a tensor on the meta device, without values"
                        : c10::str("layout ", value.layout()),
        value.is_meta() || tensor.layout() != at::kStrided ? "" : "give its to_dense()");
  }
  const bool is_expanded = at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
  if (is_expanded || tensor.is_meta()) {
    throw FileError(source.component, "memory for each element of the model's '" + name + "'",
                    is_expanded ? "an expanded tensor" : "a tensor on the meta device",
                    is_expanded ? "register a copy of it: tensor.clone()"
                                : "construct the model on another device");
  }
  auto cast = checked_cast<FileError>(value, tensor.scalar_type(), source.component,
                                      "'" + name + "'" + source.in);
  if (!has_master) return {tensor, cast, nullptr};
  return {tensor, value.detach().to(tensor.device(), at::kFloat), exact_weights_of(tensor)};
}

// Whether a name is that of a tensor of a TorchScript module, or of one in a list or dict of it, that
// is neither parameter nor buffer. Its file has these too.
bool is_plain_attribute(const torch::jit::Module& module, const std::string& name) {
  const auto dot = name.find('.');
  const std::string first = name.substr(0, dot);
  if (!module.hasattr(first)) return false;
  const c10::IValue value = module.attr(first);
  if (value.isModule())
    return dot != std::string::npos && is_plain_attribute(value.toModule(), name.substr(dot + 1));
  return value.isTensor() || value.isList() || value.isGenericDict() || value.isTuple();
}

// The fp32 masters of the tensors that have one; undefined for others.
std::vector<at::Tensor> masters_of(const std::vector<amp::ModelEntry>& entries) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(entries.size());
  for (const amp::ModelEntry& entry : entries) tensors.push_back(entry.tensor);
  return exact_values_of(tensors);
}

void perform(const Copy& copy) {
  const c10::InferenceMode mode(copy.tensor.is_inference());
  const at::NoGradGuard no_gradient;
  if (copy.exact != nullptr) {
    copy.exact->set(copy.tensor, copy.value);
  } else {
    copy.tensor.copy_(copy.value);
  }
}

// Names that Python's load_state_dict and safetensors' load_model do not miss either: counters of
// BatchNorm, which files before PyTorch 0.4.1 lack, and second names of tied tensors.
bool may_be_missing(const amp::ModelEntry& entry,
                    const std::unordered_map<std::string, at::Tensor>& given,
                    const std::unordered_set<const c10::TensorImpl*>& copied) {
  constexpr std::string_view kCounter = "num_batches_tracked";
  if (entry.name.ends_with(kCounter)) {
    const std::string layer = entry.name.substr(0, entry.name.size() - kCounter.size());
    if (given.contains(layer + "running_mean")) return true;
  }
  return copied.contains(entry.tensor.unsafeGetTensorImpl());
}

}  // namespace

StateDict state_dict(const amp::Model& model) {
  const auto entries = amp::entries_of(model);
  const auto masters = masters_of(entries);
  StateDict values;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].tensor.defined()) continue;
    at::Tensor value = entries[i].tensor.detach();
    if (is_below_fp32(value))
      value = masters[i].defined() ? masters[i].detach() : value.to(at::kFloat);
    values.insert(entries[i].name, std::move(value));
  }
  return values;
}

UnmatchedNames load_state_dict(const amp::Model& model, const StateDict& values,
                               const LoadOptions& options) {
  return load_values(model, values, options, "weights.load_state_dict", "");
}

UnmatchedNames load_values(const amp::Model& model, const StateDict& values,
                           const LoadOptions& options, std::string_view component,
                           const std::string& in) {
  const Source source{component, in};
  const auto by_name = renamed(values, options, source);
  const auto entries = amp::entries_of(model);
  const auto masters = masters_of(entries);
  std::vector<Copy> copies;
  std::unordered_set<std::string> known;
  std::unordered_set<const c10::TensorImpl*> copied;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const amp::ModelEntry& entry = entries[i];
    known.insert(entry.name);
    const auto value = by_name.find(entry.name);
    if (!entry.tensor.defined() || value == by_name.end()) continue;
    copies.push_back(
        copy_of(entry.name, entry.tensor, value->second, masters[i].defined(), source));
    copied.insert(entry.tensor.unsafeGetTensorImpl());
  }
  UnmatchedNames unmatched;
  for (const amp::ModelEntry& entry : entries) {
    if (entry.tensor.defined() && !by_name.contains(entry.name) &&
        !may_be_missing(entry, by_name, copied))
      unmatched.missing.push_back(entry.name);
  }
  for (const auto& item : values) {
    const std::string name = without_prefix(item.key(), options);
    if (known.contains(name)) continue;
    if (model.script() == nullptr || !is_plain_attribute(*model.script(), name))
      unmatched.unexpected.push_back(name);
  }
  if (options.strict()) require_matching(unmatched, options, source);
  for (const Copy& copy : copies) perform(copy);
  return unmatched;
}

}  // namespace semitone::weights
