#pragma once

#include "semitone/optim/fused_optimizer.h"
#include "src/kernels/multi_tensor_update.h"
#include "src/kernels/update_on_device.h"
#include "src/optim/fused_state.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace semitone::optim {

// One parameter of a step, ready for a kernel.
struct FusedOptimizer::Work {
  const torch::optim::OptimizerOptions* options;
  FusedState* state;
  kernels::Update update;       // update.state: the state's tensors, but not its numbers
  double grad_scale = 1;        // what the gradient is multiplied by
  std::size_t group = 0;        // of the optimizer's, that it stands in
  std::uint32_t place = 0;      // among all parameters
  std::array<bool, 3> fresh{};  // state that was made in this step
  std::int64_t step = 1;        // its number, for this parameter
  at::Tensor number = {};       // the state that is a number, if the optimizer has one

  template <typename Options>
  const Options& options_as() const {
    return static_cast<const Options&>(*options);  // check() has seen them
  }
};

struct FusedOptimizer::Rules {
  kernels::Rules rules;
  // For measure(): as many numbers for each parameter. Empty if nothing depends on norms.
  std::vector<double> inputs = {};
};

// A step whose rules are in the device's memory.
struct FusedOptimizer::StepOnDevice {
  kernels::UpdateOnDevice& update;
  std::span<const kernels::Update> items;
  const at::Tensor& found_inf;  // undefined: the step is taken

  // Column k of the inputs: a number for each parameter.
  at::Tensor input(std::int64_t k) const { return update.inputs().select(1, k); }
};

// The state of a parameter in the optimizer's map; created if missing.
template <typename States>
FusedState& state_in(States& states, const at::Tensor& parameter) {
  auto& entry = states[parameter.unsafeGetTensorImpl()];
  if (entry == nullptr) entry = std::make_unique<FusedState>();
  auto& state = static_cast<FusedState&>(*entry);
  state.hold_address_of(parameter);
  return state;
}

// The kernels' view of each parameter.
template <typename Work>
std::vector<kernels::Update> items_of(std::span<Work> work) {
  std::vector<kernels::Update> items;
  items.reserve(work.size());
  for (const auto& one : work) items.push_back(one.update);
  return items;
}

template <typename Work>
std::vector<at::Tensor> grads_of(std::span<Work> work) {
  std::vector<at::Tensor> grads;
  grads.reserve(work.size());
  for (const auto& one : work) grads.push_back(one.update.grad);
  return grads;
}

// rule_of(work) for each parameter.
template <typename Work, typename RuleOf>
auto rules_for(std::span<Work> work, const RuleOf& rule_of) {
  std::vector<decltype(rule_of(work.front()))> rules;
  rules.reserve(work.size());
  for (Work& one : work) rules.push_back(rule_of(one));
  return rules;
}

}  // namespace semitone::optim
