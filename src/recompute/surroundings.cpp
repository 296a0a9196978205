#include "src/recompute/surroundings.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>

namespace semitone::nn {
namespace {

using States = std::vector<std::pair<at::Generator, at::Tensor>>;

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

AutocastRegions::AutocastRegions() : state_(amp::AutocastState::current().with_own_cache()) {
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(device) && !state_.has_region(device))
      libtorchs_.emplace_back(device, at::autocast::get_autocast_dtype(device));
  }
}

AutocastRegions::Scope::Scope(const AutocastRegions& regions)
    : had_cache_(at::autocast::is_autocast_cache_enabled()), regions_(regions.state_.enter()) {
  // LibTorch has one cache for the whole process.
  at::autocast::set_autocast_cache_enabled(false);
  for (const auto& [device, dtype] : regions.libtorchs_) {
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, dtype);
    switched_on_.push_back(device);
  }
}

AutocastRegions::Scope::~Scope() {
  for (const c10::DeviceType device : switched_on_)
    at::autocast::set_autocast_enabled(device, false);
  at::autocast::set_autocast_cache_enabled(had_cache_);
}

RandomStates RandomStates::of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices{c10::kCPU};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && std::ranges::find(devices, tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  }
  RandomStates states;
  for (const c10::Device device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    at::Tensor state = state_of(generator);
    states.states_.emplace_back(std::move(generator), std::move(state));
  }
  return states;
}

RandomStates::Scope::Scope(const RandomStates& states) : before_(states.states_) {
  for (auto& [generator, state] : before_) {
    const at::Tensor wanted = state;
    state = state_of(generator);
    set_state(generator, wanted);
  }
}

RandomStates::Scope::~Scope() {
  for (auto& [generator, state] : before_) set_state(generator, state);
}

UnchangedTensors::UnchangedTensors(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) values_.emplace_back(tensor.variable_data(), tensor.detach().clone());
  }
}

UnchangedTensors::~UnchangedTensors() {
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, values] : values_) tensor.copy_(values);
}

}  // namespace semitone::nn
