#pragma once

#include "semitone/amp/loss_scaler.h"
#include "semitone/amp/parameter_names.h"
#include "src/kernels/multi_tensor.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace semitone::amp {

// Calls visit(group, index, parameter) for every parameter of an optimizer. The parameter may be
// replaced.
template <typename Visit>
void for_each_parameter(torch::optim::Optimizer& optimizer, Visit&& visit) {
  auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    auto& parameters = groups[group].params();
    for (std::size_t index = 0; index < parameters.size(); ++index)
      visit(group, index, parameters[index]);
  }
}

// Collects what is to be unscaled, each parameter once however often it is named, and does it in
// one pass a device.
class Gradients {
 public:
  explicit Gradients(float inverse_scale) : inverse_scale_(inverse_scale) {}

  // parameter.grad = parameter.grad / scale + addend, in place. addend may be undefined.
  void unscale(at::Tensor& parameter, const at::Tensor& addend = {});

  // to.grad = from.grad / scale + to.grad in to's dtype, and from.grad is dropped.
  void move(at::Tensor& from, at::Tensor& to);

  // found_inf: one flag a device, made where there is none, set to 1 where a result is inf or NaN.
  void run(std::vector<at::Tensor>& found_inf);

 private:
  void add(const at::Tensor& grad, const at::Tensor& out, const at::Tensor& addend);

  float inverse_scale_;
  std::unordered_set<const c10::TensorImpl*> seen_;
  std::map<c10::DeviceIndex, std::vector<kernels::Unscale>> by_device_;
  // Sparse gradients have other rows in every backward pass: added as tensors, afterwards.
  struct Sum {
    at::Tensor parameter;
    at::Tensor addend;
  };
  std::vector<Sum> sums_;
  const at::NoGradGuard no_grad_;
};

// The device of the optimizer's first parameter; the CPU if it has none.
c10::Device device_of(torch::optim::Optimizer& optimizer);

// The flag of a device among one flag a device; made, as 0, where there is none.
at::Tensor& found_inf_on(std::vector<at::Tensor>& flags, c10::Device device);

// Whether any flag is set: one read for each device.
bool any_found_inf(const std::vector<at::Tensor>& flags);

// Which gradients of the optimizer are not finite. One read for each parameter: for messages only.
Overflow find_overflow(torch::optim::Optimizer& optimizer, const ParameterNames& names);

}  // namespace semitone::amp
