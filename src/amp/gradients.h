#pragma once

#include "semitone/amp/loss_scaler.h"
#include "semitone/amp/parameter_names.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

namespace semitone::amp {

// Calls visit(group, index, parameter) for every parameter of an optimizer.
template <typename Visit>
void for_each_parameter(torch::optim::Optimizer& optimizer, Visit&& visit) {
  auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    auto& parameters = groups[group].params();
    for (std::size_t index = 0; index < parameters.size(); ++index)
      visit(group, index, parameters[index]);
  }
}

// The device of the optimizer's first parameter; the CPU if it has none.
c10::Device device_of(torch::optim::Optimizer& optimizer);

// The flag of a device among one flag a device; made, as 0, where there is none.
at::Tensor& found_inf_on(std::vector<at::Tensor>& flags, c10::Device device);

// Whether any flag is set: one read for each device.
bool any_found_inf(const std::vector<at::Tensor>& flags);

// Which gradients of the optimizer are not finite. One read for each parameter: for messages only.
Overflow find_overflow(torch::optim::Optimizer& optimizer, const ParameterNames& names);

}  // namespace semitone::amp
