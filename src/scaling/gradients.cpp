#include "src/scaling/gradients.h"

#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"

#include <torch/optim/lbfgs.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <utility>

namespace semitone::amp {

namespace {

// Returns a gradient that can be read and written as numbers in memory. Repeated indices of a
// sparse gradient are coalesced: their sum may overflow fp16 even if no single value does. A
// pending conjugation of a complex gradient is resolved.
at::Tensor resolved(const at::Tensor& grad) {
  if (!grad.defined()) return grad;
  if (grad.layout() != at::kStrided && !grad.is_sparse()) {
    throw Error("amp.unscale", "dense gradients, or sparse ones in COO layout",
                c10::str(grad.layout(), " for a parameter of shape ", grad.sizes()));
  }
  const at::Tensor dense = grad.is_sparse() ? grad.coalesce() : grad;
  return dense.is_complex() && !dense.is_sparse() ? dense.resolve_conj().resolve_neg() : dense;
}

at::Tensor values_of(const at::Tensor& grad) {
  return grad.is_sparse() ? grad._values() : grad;
}

// The numbers of a complex tensor are its real and imaginary parts.
at::Tensor numbers_of(const at::Tensor& values) {
  return values.defined() && values.is_complex() ? at::view_as_real(values) : values;
}

at::Tensor with_values(const at::Tensor& grad, const at::Tensor& values) {
  if (!grad.is_sparse()) return values;
  return at::_sparse_coo_tensor_unsafe(grad._indices(), values, grad.sizes())._coalesced_(true);
}

// Whether the gradient can be differentiated itself.
bool has_graph(const at::Tensor& grad) {
  return grad.requires_grad() && grad.layout() == at::kStrided;
}

bool is_sparse(const at::Tensor& grad) {
  return grad.defined() && grad.is_sparse();
}

// LibTorch cannot add sparse fp16 tensors on the CPU; concatenated, they represent the same sum.
at::Tensor sum(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_sparse() || !b.is_sparse()) return a.is_sparse() ? b.add(a) : a.add(b);
  return at::_sparse_coo_tensor_unsafe(at::cat({a._indices(), b._indices()}, 1),
                                       at::cat({a._values(), b._values()}), a.sizes())
      .coalesce();
}

// grad / scale + addend, recorded by autograd: second derivatives are those of the unscaled gradient.
at::Tensor recorded(const at::Tensor& grad, const kernels::InverseScale& inverse,
                    const at::Tensor& addend) {
  const DisableCasts as_outside;
  const at::AutoGradMode with_grad(true);
  const at::Tensor product = inverse.on_device.defined()
                                 ? grad.mul(inverse.on_device.to(grad.scalar_type()))
                                 : grad.mul(double{inverse.number});
  return addend.defined() ? product.add(addend) : product;
}

}  // namespace

void Gradients::add(const at::Tensor& grad, const at::Tensor& out, const at::Tensor& addend) {
  by_device_[grad.device().index()].push_back(
      {numbers_of(grad), numbers_of(out), numbers_of(addend)});
}

at::Tensor Gradients::own(const at::Tensor& values) {
  return values.numel() == 0 || changed_.insert(values.const_data_ptr()).second ? values
                                                                                : values.clone();
}

void Gradients::unscale(const at::Tensor& parameter, const at::Tensor& addend) {
  if (!seen_.insert(parameter.unsafeGetTensorImpl()).second) return;
  if (!parameter.grad().defined()) {
    if (addend.defined()) results_.push_back({parameter, addend, {}, {}});
    return;
  }
  if (has_graph(parameter.grad())) {
    const at::Tensor scaled = resolved(parameter.grad().detach());
    add(scaled, at::empty_like(scaled), resolved(addend));  // only checks the result
    results_.push_back({parameter, recorded(parameter.grad(), inverse_scale_, addend), {}, {}});
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor grad = resolved(parameter.grad());
  const at::Tensor before = values_of(grad);
  const at::Tensor values = own(before);
  const bool sum_later = is_sparse(grad) || is_sparse(addend);
  add(values, values, sum_later ? at::Tensor() : resolved(addend));
  results_.push_back({parameter,
                      values.is_same(before) ? grad : with_values(grad, values),
                      sum_later ? addend : at::Tensor(),
                      {}});
}

void Gradients::move(const at::Tensor& from, const at::Tensor& to) {
  seen_.insert(to.unsafeGetTensorImpl());
  if (!from.grad().defined()) return;
  if (has_graph(from.grad())) {
    throw Error("amp.unscale", "gradients without a graph, for parameters with master weights",
                "one of backward(…, create_graph = true): its graph would end at the master",
                "take torch::autograd::grad(…, create_graph = true), and scale the sum of losses");
  }
  const at::NoGradGuard no_grad;
  const at::Tensor grad = resolved(from.grad());
  const at::Tensor values = values_of(grad);
  const at::Tensor& addend = to.grad();
  const bool sum_later = is_sparse(grad) || is_sparse(addend);
  const at::Tensor out = addend.defined() && !sum_later
                             ? addend
                             : at::empty_like(values, values.options().dtype(to.scalar_type()));
  add(values, out, sum_later ? at::Tensor() : addend);
  results_.push_back({to, with_values(grad, out), sum_later ? addend : at::Tensor(), from});
}

void Gradients::run(std::vector<at::Tensor>& found_inf) {
  const at::NoGradGuard no_grad;
  for (const auto& [device, items] : by_device_) {
    kernels::multi_tensor_unscale(items, inverse_scale_,
                                  found_inf_on(found_inf, items.front().grad.device()));
  }
  for (Result& result : results_) {
    if (!result.addend.defined()) continue;
    result.grad = sum(result.grad, result.addend);
    if (result.grad.scalar_type() != at::kHalf) continue;
    // The sum of two finite fp16 numbers can overflow.
    const at::Tensor values = values_of(result.grad);
    kernels::multi_tensor_unscale(std::vector<kernels::Unscale>{{values, values, {}}}, 1.0F,
                                  found_inf_on(found_inf, values.device()));
  }
  for (const Result& result : results_) {
    result.parameter.mutable_grad() = result.grad;
    if (result.source.defined()) result.source.mutable_grad().reset();
  }
}

bool evaluates_loss(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
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

std::vector<bool> read_flags(const std::vector<at::Tensor>& flags) {
  std::vector<bool> set(flags.size());
  std::vector<bool> is_read(flags.size());
  for (std::size_t first = 0; first < flags.size(); ++first) {
    if (is_read[first]) continue;
    std::vector<std::size_t> places;
    std::vector<at::Tensor> on_device;
    for (std::size_t i = first; i < flags.size(); ++i) {
      if (flags[i].device() != flags[first].device()) continue;
      places.push_back(i);
      on_device.push_back(flags[i]);
    }
    const at::Tensor read = at::stack(on_device).cpu();
    for (std::size_t i = 0; i < places.size(); ++i) {
      set[places[i]] = read.const_data_ptr<float>()[i] != 0;
      is_read[places[i]] = true;
    }
  }
  return set;
}

bool any_found_inf(const std::vector<at::Tensor>& flags) {
  const std::vector<bool> set = read_flags(flags);
  return std::find(set.begin(), set.end(), true) != set.end();
}

detail::Overflow find_overflow(torch::optim::Optimizer& optimizer,
                               const detail::ParameterNames& names) {
  detail::Overflow overflow;
  const detail::ParameterNames::Name* nearest = nullptr;
  for_each_parameter(
      optimizer, [&](std::size_t group, std::size_t index, const at::Tensor& parameter) {
        const at::Tensor& grad = parameter.grad();
        if (!grad.defined() || values_of(grad).isfinite().all().item<bool>()) return;
        ++overflow.parameters;
        const detail::ParameterNames::Name* name = names.find(parameter);
        if (name != nullptr) {
          if (nearest != nullptr && nearest->position > name->position) return;
          nearest = name;
          overflow.parameter = name->name;
        } else if (nearest == nullptr) {
          overflow.parameter =
              "group " + std::to_string(group) + ", parameter " + std::to_string(index);
        }
      });
  return overflow;
}

}  // namespace semitone::amp
