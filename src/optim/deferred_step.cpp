#include "src/optim/deferred_step.h"

#include "src/core/state_mode.h"
#include "src/kernels/pinned.h"
#include "src/optim/work.h"

#include <torch/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Steps on a device without the host: with norms that stay there, or decided there.

namespace semitone::optim {

bool DeferredStep::is_supported(const FusedOptimizer& optimizer) {
  std::optional<c10::Device> device;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined()) continue;
      if (device.value_or(parameter.device()) != parameter.device()) return false;
      device = parameter.device();
    }
  }
  return device.has_value() && !device->is_cpu() && kernels::has_pinned_memory(*device);
}

void DeferredStep::step(FusedOptimizer& optimizer, const FusedStep& how,
                        const at::Tensor& found_inf, std::shared_ptr<kernels::ReadLater> result) {
  const StateMode mode;
  optimizer.settle();
  std::vector<FusedOptimizer::Work> work = optimizer.gather(how);
  auto deferred = std::make_shared<FusedOptimizer::Deferred>();
  for (const FusedOptimizer::Work& one : work) {
    const FusedState* const state = optimizer.find(one.update.param);
    deferred->before.emplace_back(one.update.param.unsafeGetTensorImpl(),
                                  state == nullptr ? FusedState() : *state);
  }
  optimizer.count(work);
  if (!work.empty()) optimizer.update_on_device(work, found_inf);
  deferred->found_inf = std::move(result);
  optimizer.deferred_ = std::move(deferred);
}

std::vector<FusedOptimizer::Work> FusedOptimizer::update_on_devices(std::span<Work> work) const {
  std::vector<Work> here;
  std::map<std::string, std::vector<Work>> by_device;
  for (Work& one : work) {
    const c10::Device device = one.update.param.device();
    (device.is_cpu() ? here : by_device[device.str()]).push_back(std::move(one));
  }
  for (auto& [name, there] : by_device) update_on_device(there, {});
  return here;
}

// For parameters on one device, at least one.
void FusedOptimizer::update_on_device(std::span<Work> work, const at::Tensor& found_inf) const {
  kernels::UpdateOnDevice update(work.front().update.param.device());
  const Rules rules = rules_of(work);
  update.send(rules.rules, rules.inputs);
  const auto items = items_of(work);
  StepOnDevice step{update, items, found_inf};
  measure(work, step);
  update.run(items, found_inf);
}

void FusedOptimizer::settle() const {
  const auto deferred = std::exchange(deferred_, nullptr);
  if (deferred == nullptr || !deferred->found_inf->any_set()) return;
  for (const auto& [parameter, before] : deferred->before) {
    const auto entry = state_.find(const_cast<c10::TensorImpl*>(parameter));
    if (entry != state_.end()) static_cast<FusedState&>(*entry->second) = before;
  }
}

}  // namespace semitone::optim
