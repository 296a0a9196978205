#include "src/amp/gradients.h"

#include <torch/types.h>

#include <string>

namespace semitone::amp {

c10::Device device_of(torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) return group.params().front().device();
  }
  return c10::Device(c10::kCPU);
}

at::Tensor& found_inf_on(std::vector<at::Tensor>& flags, c10::Device device) {
  for (at::Tensor& flag : flags) {
    if (flag.device() == device) return flag;
  }
  return flags.emplace_back(torch::zeros({}, at::TensorOptions(device).dtype(at::kFloat)));
}

bool any_found_inf(const std::vector<at::Tensor>& flags) {
  bool any = false;
  for (const at::Tensor& flag : flags) any = flag.item<float>() != 0 || any;
  return any;
}

Overflow find_overflow(torch::optim::Optimizer& optimizer, const ParameterNames& names) {
  Overflow overflow;
  for_each_parameter(
      optimizer, [&](std::size_t group, std::size_t index, const at::Tensor& parameter) {
        const at::Tensor& grad = parameter.grad();
        if (!grad.defined()) return;
        const at::Tensor values = grad.is_sparse() ? grad._values() : grad;
        if (values.isfinite().all().item<bool>()) return;
        ++overflow.parameters;
        overflow.parameter = names.of(
            parameter, "group " + std::to_string(group) + ", parameter " + std::to_string(index));
      });
  return overflow;
}

}  // namespace semitone::amp
