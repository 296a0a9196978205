#pragma once

// Internal interface: other rooms include this header.

#include "semitone/scaling/detail/parameter_names.h"
#include "semitone/scaling/loss_scaler.h"
#include "src/kernels/multi_tensor.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <unordered_set>
#include <utility>
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

// Unscales gradients and checks for inf and NaN. Collects the work, each parameter once however
// often it is added, and does it in one pass per device.
class Gradients {
 public:
  explicit Gradients(kernels::InverseScale inverse_scale)
      : inverse_scale_(std::move(inverse_scale)) {}

  // parameter.grad = parameter.grad / scale + addend, in place. Either may be undefined. A gradient
  // with a graph (create_graph) is replaced by one whose graph has the division.
  void unscale(const at::Tensor& parameter, const at::Tensor& addend = {});

  // to.grad = from.grad / scale + to.grad, in to's dtype; drops from.grad. Error for a gradient with
  // a graph.
  void move(const at::Tensor& from, const at::Tensor& to);

  // found_inf: one flag per device, created if missing, set to 1 if a result is inf or NaN.
  // Everything on a device is checked before anything there is written. If it throws, no gradient
  // is replaced.
  void run(std::vector<at::Tensor>& found_inf);

 private:
  void add(const at::Tensor& grad, const at::Tensor& out, const at::Tensor& addend);
  // The values of a gradient to change in place: a copy if another gradient has the same memory.
  at::Tensor own(const at::Tensor& values);

  struct Result {
    at::Tensor parameter;
    at::Tensor grad;
    at::Tensor addend;  // where the sum is left to ATen: sparse gradients have other rows each time
    at::Tensor source;  // whose gradient is dropped
  };

  kernels::InverseScale inverse_scale_;
  std::unordered_set<const c10::TensorImpl*> seen_;
  std::unordered_set<const void*> changed_;  // memory that is changed in place
  std::map<c10::DeviceIndex, std::vector<kernels::Unscale>> by_device_;
  std::vector<Result> results_;
};

// Whether an optimizer evaluates the loss itself, in its step. It would see scaled gradients, and
// weights that are not written to the model yet.
bool evaluates_loss(const torch::optim::Optimizer& optimizer);

// The device of the optimizer's first parameter; the CPU if it has none.
c10::Device device_of(torch::optim::Optimizer& optimizer);

// The flag of a device in a list with one flag per device; created as 0 if missing.
at::Tensor& found_inf_on(std::vector<at::Tensor>& flags, c10::Device device);

// Whether each flag is set. One read per device with flags.
std::vector<bool> read_flags(const std::vector<at::Tensor>& flags);
bool any_found_inf(const std::vector<at::Tensor>& flags);

// The gradients of the optimizer that are not finite. One read per parameter: for messages only.
detail::Overflow find_overflow(torch::optim::Optimizer& optimizer,
                               const detail::ParameterNames& names);

}  // namespace semitone::amp
