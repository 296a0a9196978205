#include "semitone/weights/state_dict.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/model_entries.h"
#include "src/core/exact_weights.h"
#include "src/weights/cast.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::weights {
namespace {

constexpr auto kLoad = "weights.load_state_dict";

// A narrow float is the rounding of an fp32 weight.
bool is_narrow(const at::Tensor& tensor) {
  return tensor.is_floating_point() && tensor.element_size() < 4;
}

std::string without_prefix(const std::string& name, const LoadOptions& options) {
  return name.starts_with(options.strip_prefix()) ? name.substr(options.strip_prefix().size())
                                                  : name;
}

// The names that the values have in the model.
std::unordered_map<std::string, at::Tensor> renamed(const StateDict& values,
                                                    const LoadOptions& options) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& item : values) {
    const std::string name = without_prefix(item.key(), options);
    if (!by_name.emplace(name, item.value()).second) {
      throw FileError(kLoad, "each name once",
                      "'" + name + "' twice without the prefix '" + options.strip_prefix() + "'");
    }
  }
  return by_name;
}

// One of the prefixes that Python's wrappers add, if an unexpected name without it is a missing one.
std::optional<std::string> wrong_prefix(const UnmatchedNames& unmatched) {
  const auto& missing = unmatched.missing;
  for (const std::string prefix : {"module.", "_orig_mod.", "model."}) {
    for (const std::string& name : unmatched.unexpected) {
      if (name.starts_with(prefix) &&
          std::find(missing.begin(), missing.end(), name.substr(prefix.size())) != missing.end())
        return prefix;
    }
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

void require_matching(const UnmatchedNames& unmatched) {
  if (unmatched.missing.empty() && unmatched.unexpected.empty()) return;
  std::string remedy = "load a file of the same model, or what matches with strict(false)";
  if (const auto prefix = wrong_prefix(unmatched))
    remedy = "names begin with '" + *prefix + "': load them with strip_prefix(\"" + *prefix + "\")";
  std::string got;
  if (!unmatched.missing.empty()) got = "none for " + listed(unmatched.missing);
  if (!unmatched.unexpected.empty()) {
    got += (got.empty() ? "" : ", and ") + listed(unmatched.unexpected) +
           ", which the model does not have";
  }
  throw FileError(kLoad, "a value for each parameter and buffer, and no others", got, remedy);
}

// A tensor of the model and its new value, in the tensor's dtype, or in fp32 if it has a master.
struct Copy {
  at::Tensor tensor;
  at::Tensor value;
  std::shared_ptr<ExactWeights> exact;
};

Copy copy_of(const std::string& name, const at::Tensor& tensor, const at::Tensor& value) {
  if (!value.defined() || value.sizes() != tensor.sizes()) {
    throw FileError(kLoad, c10::str("'", name, "' of shape ", tensor.sizes()),
                    value.defined() ? c10::str(value.sizes()) : "an undefined tensor",
                    "load a file of the same model");
  }
  auto cast = cast_without_overflow<FileError>(value, tensor.scalar_type(), kLoad, name);
  auto exact = is_narrow(tensor) ? exact_weights_of(tensor) : nullptr;
  if (exact == nullptr || !exact->value_of(tensor).defined()) return {tensor, cast, nullptr};
  return {tensor, value.detach().to(tensor.device(), at::kFloat), exact};
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
                    const std::vector<Copy>& copies) {
  constexpr std::string_view kCounter = "num_batches_tracked";
  if (entry.name.ends_with(kCounter)) {
    const std::string layer = entry.name.substr(0, entry.name.size() - kCounter.size());
    if (given.count(layer + "running_mean") != 0) return true;
  }
  return std::any_of(copies.begin(), copies.end(),
                     [&](const Copy& copy) { return copy.tensor.is_same(entry.tensor); });
}

}  // namespace

StateDict state_dict(const amp::Model& model) {
  StateDict values;
  for (const amp::ModelEntry& entry : amp::entries_of(model)) {
    if (!entry.tensor.defined()) continue;
    at::Tensor value = entry.tensor.detach();
    if (is_narrow(value)) {
      const auto exact = exact_weights_of(entry.tensor);
      const at::Tensor master = exact == nullptr ? at::Tensor() : exact->value_of(entry.tensor);
      value = master.defined() ? master.detach() : value.to(at::kFloat);
    }
    values.insert(entry.name, std::move(value));
  }
  return values;
}

UnmatchedNames load_state_dict(const amp::Model& model, const StateDict& values,
                               const LoadOptions& options) {
  const auto by_name = renamed(values, options);
  const auto entries = amp::entries_of(model);
  std::vector<Copy> copies;
  std::unordered_set<std::string> known;
  for (const amp::ModelEntry& entry : entries) {
    known.insert(entry.name);
    const auto value = by_name.find(entry.name);
    if (entry.tensor.defined() && value != by_name.end())
      copies.push_back(copy_of(entry.name, entry.tensor, value->second));
  }
  UnmatchedNames unmatched;
  for (const amp::ModelEntry& entry : entries) {
    if (entry.tensor.defined() && by_name.count(entry.name) == 0 &&
        !may_be_missing(entry, by_name, copies))
      unmatched.missing.push_back(entry.name);
  }
  for (const auto& item : values) {
    const std::string name = without_prefix(item.key(), options);
    if (known.count(name) == 0) unmatched.unexpected.push_back(name);
  }
  if (options.strict()) require_matching(unmatched);
  for (const Copy& copy : copies) perform(copy);
  return unmatched;
}

}  // namespace semitone::weights
