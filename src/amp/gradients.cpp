#include "src/amp/gradients.h"

#include <torch/types.h>

#include <string>
#include <utility>

namespace semitone::amp {

namespace {

// A gradient as the unscale pass takes it. The values of a sparse one with repeated indices are
// added up first: their sum may overflow fp16 where no single one does.
at::Tensor values_of(at::Tensor& grad) {
  if (!grad.is_sparse()) return grad;
  if (!grad.is_coalesced()) grad = grad.coalesce();
  return grad._values();
}

}  // namespace

void Gradients::add(const at::Tensor& grad, const at::Tensor& out, const at::Tensor& addend) {
  by_device_[grad.device().index()].push_back({grad, out, addend});
}

void Gradients::unscale(at::Tensor& parameter, const at::Tensor& addend) {
  if (!seen_.insert(parameter.unsafeGetTensorImpl()).second) return;
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined()) {
    grad = addend;
    return;
  }
  const at::Tensor values = values_of(grad);
  if (addend.defined() && (grad.is_sparse() || addend.is_sparse())) {
    add(values, values, {});
    sums_.push_back({parameter, addend});
  } else {
    add(values, values, addend);
  }
}

void Gradients::move(at::Tensor& from, at::Tensor& to) {
  seen_.insert(to.unsafeGetTensorImpl());
  at::Tensor grad = std::move(from.mutable_grad());
  from.mutable_grad().reset();
  if (!grad.defined()) return;
  at::Tensor& sum = to.mutable_grad();
  const at::Tensor addend = sum;
  const at::Tensor values = values_of(grad);
  if (grad.is_sparse() || (addend.defined() && addend.is_sparse())) {
    const at::Tensor wide = at::empty_like(values, values.options().dtype(to.scalar_type()));
    add(values, wide, {});
    sum = grad.is_sparse() ? at::_sparse_coo_tensor_unsafe(grad._indices(), wide, grad.sizes())
                           : wide;
    if (addend.defined()) sums_.push_back({to, addend});
  } else {
    if (!sum.defined()) sum = at::empty_like(grad, grad.options().dtype(to.scalar_type()));
    add(grad, sum, addend);
  }
}

void Gradients::run(std::vector<at::Tensor>& found_inf) {
  for (const auto& [device, items] : by_device_) {
    kernels::multi_tensor_unscale(items, inverse_scale_,
                                  found_inf_on(found_inf, items.front().grad.device()));
  }
  for (auto& [parameter, addend] : sums_) {
    at::Tensor& grad = parameter.mutable_grad();
    grad = grad.is_sparse() ? addend.add(grad)
                            : grad.add(addend);  // LibTorch wants the dense one first
  }
}

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
