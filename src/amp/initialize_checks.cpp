#include "src/amp/initialize_checks.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/model_entries.h"
#include "src/scaling/gradients.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>

namespace semitone::amp {
namespace {

constexpr auto kInitialize = "amp.initialize";

void check_optimizer(torch::optim::Optimizer& optimizer, const Properties& properties) {
  const bool plain = !properties.loss_scale.is_dynamic() && properties.loss_scale.value() == 1 &&
                     !properties.master_weights;
  if (!plain && evaluates_loss(optimizer)) {
    throw Error(kInitialize, "an optimizer that does not evaluate the loss inside its step",
                "LBFGS at " + std::string(name_of(properties.opt_level)),
                "use O0, or a loss scale of 1 without master weights");
  }
}

}  // namespace

void check_model(const Model& model) {
  for (const ModelEntry& entry : entries_of(model)) {
    if (!entry.tensor.is_floating_point() || entry.tensor.scalar_type() == at::kFloat) continue;
    throw Error(
        kInitialize, "a model in float32",
        dtype_name(entry.tensor.scalar_type()) +
            (entry.is_parameter ? " parameter '" : " buffer '") + entry.name + "'",
        is_16bit(entry.tensor.scalar_type())
            ? "pass the model before casting it: initialize does that. Was it initialized already?"
            : "cast it with ->to(torch::kFloat); or, to keep its precision, name only its fp32 "
              "submodules in initialize, and run the model inside mixed.autocast()");
  }
}

void check_optimizers(const OptimizerRefs& optimizers, const Properties& properties) {
  std::unordered_set<const torch::optim::Optimizer*> seen;
  std::unordered_set<const c10::TensorImpl*> owned;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    if (!seen.insert(&optimizer).second) {
      throw Error(kInitialize, "each optimizer once", "one of them twice");
    }
    if (!properties.enabled) continue;
    check_optimizer(optimizer, properties);
    if (!properties.master_weights) continue;
    std::unordered_set<const c10::TensorImpl*> own;
    for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
      const c10::TensorImpl* const identity = parameter.unsafeGetTensorImpl();
      if (!own.insert(identity).second || owned.insert(identity).second) return;
      throw Error(kInitialize, "each parameter in one optimizer only, with master weights",
                  "one that two optimizers share", "use one optimizer with two groups, or O1");
    });
  }
}

c10::DeviceType device_of_models(const std::vector<Model>& models) {
  std::map<c10::DeviceType, std::int64_t> elements;
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model))
      elements[entry.tensor.device().type()] += entry.tensor.numel();
  }
  const auto most =
      std::max_element(elements.begin(), elements.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == elements.end() ? c10::DeviceType::CPU : most->first;
}

at::Tensor tensor_on(c10::DeviceType device, const Model& model) {
  const auto entries = entries_of(model);
  for (const ModelEntry& entry : entries) {
    if (entry.tensor.device().type() == device) return entry.tensor;
  }
  if (entries.empty()) return {};
  const ModelEntry& first = entries.front();
  throw Error(kInitialize,
              "a model on " + c10::DeviceTypeName(device, true) + ", which it is prepared for",
              "'" + first.name + "' on " + first.tensor.device().str(),
              "move the models to their device first, and set Options::device if necessary; call "
              "initialize once per device type");
}

}  // namespace semitone::amp
