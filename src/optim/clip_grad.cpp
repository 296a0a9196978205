#include "semitone/optim/clip_grad.h"

#include "semitone/core/error.h"
#include "src/kernels/multi_tensor.h"
#include "src/kernels/multi_tensor_norm.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

namespace semitone::optim {
namespace {

enum class Access { read, write };

// The values of all gradients, each once. Gradients of two parameters that are written get memory
// of their own: autograd may give both parameters the same gradient.
std::vector<at::Tensor> values_of_grads(const std::vector<at::Tensor>& parameters, Access access) {
  std::vector<at::Tensor> values;
  std::unordered_set<const c10::TensorImpl*> seen;
  std::unordered_set<const void*> written;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) continue;
    if (grad.is_sparse() && !grad.is_coalesced()) grad = grad.coalesce();
    if (grad.is_conj()) grad = grad.resolve_conj();
    if (access == Access::write && grad.layout() == at::kStrided && grad.numel() > 0 &&
        !written.insert(grad.const_data_ptr()).second)
      grad = grad.clone();
    values.push_back(grad.is_sparse() ? grad._values() : grad.detach());
  }
  return values;
}

// The 2-norm of complex numbers is that of their real and imaginary parts; other norms use
// magnitudes.
at::Tensor numbers_to_norm(const at::Tensor& values, double norm_type) {
  if (!values.is_complex()) return values;
  return norm_type == 2 ? at::view_as_real(values) : values.abs();
}

void require_order(std::string_view component, double norm_type) {
  if (!(norm_type > 0)) throw Error(component, "a norm_type above 0", std::to_string(norm_type));
}

void require_max_norm(std::string_view component, double max_norm) {
  if (!(max_norm >= 0))
    throw Error(component, "a max_norm of at least 0", std::to_string(max_norm));
}

void require_number(std::string_view component, const at::Tensor& tensor, const char* what) {
  if (tensor.defined() && tensor.numel() == 1 && tensor.is_floating_point()) return;
  throw Error(component, c10::str(what, " of one floating-point element"),
              tensor.defined() ? c10::str(tensor.sizes(), " of ", tensor.scalar_type())
                               : "an undefined tensor");
}

kernels::InverseScale as_scale(double factor) {
  return static_cast<float>(factor);
}

kernels::InverseScale as_scale(const at::Tensor& factor) {
  return kernels::InverseScale(factor.to(at::kFloat));
}

// Multiplies the values by factor_on(device): a double, or a scalar on the device.
template <typename FactorOn>
void scale_values(const std::vector<at::Tensor>& values, const FactorOn& factor_on) {
  std::map<std::string, std::vector<at::Tensor>> by_device;
  for (const at::Tensor& value : values) by_device[value.device().str()].push_back(value);
  for (const auto& [name, there] : by_device) {
    const c10::Device device = there.front().device();
    std::vector<kernels::Unscale> items;
    for (at::Tensor value : there) {
      if (value.is_complex()) value = at::view_as_real(value);
      if (value.scalar_type() == at::kDouble) {
        value.mul_(factor_on(device));
      } else {
        items.push_back({value, value, {}});
      }
    }
    if (items.empty()) continue;
    at::Tensor ignored = at::zeros({}, items.front().grad.options().dtype(at::kFloat));
    kernels::multi_tensor_unscale(items, as_scale(factor_on(device)), ignored);
  }
}

double norm_of(std::vector<at::Tensor> values, double norm_type) {
  for (at::Tensor& value : values) value = numbers_to_norm(value, norm_type);
  return kernels::total_norm(kernels::multi_tensor_norms(values, norm_type), norm_type);
}

}  // namespace

double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  require_order("optim.grad_norm", norm_type);
  const at::NoGradGuard no_grad;
  return norm_of(values_of_grads(parameters, Access::read), norm_type);
}

double clip_factor(double norm, double max_norm) {
  require_max_norm("optim.clip_factor", max_norm);
  const double factor = max_norm / (norm + 1e-6);
  return factor >= 1 ? 1 : factor;  // a NaN stays one
}

void scale_grads_(const std::vector<at::Tensor>& parameters, double factor) {
  const at::NoGradGuard no_grad;
  scale_values(values_of_grads(parameters, Access::write),
               [factor](c10::Device) { return factor; });
}

void scale_grads_(const std::vector<at::Tensor>& parameters, const at::Tensor& factor) {
  require_number("optim.scale_grads_", factor, "a factor");
  const at::NoGradGuard no_grad;
  const at::Tensor number = factor.detach().reshape({}).to(at::kDouble);
  scale_values(values_of_grads(parameters, Access::write),
               [&](c10::Device device) { return number.to(device); });
}

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, double norm_type) {
  require_order("optim.get_total_norm", norm_type);
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<at::Tensor>> by_device;
  std::optional<c10::Device> first;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (!first.has_value()) first = tensor.device();
    by_device[tensor.device().str()].push_back(
        numbers_to_norm(tensor.detach().resolve_conj(), norm_type));
  }
  std::vector<at::Tensor> norms;
  for (const auto& [device, there] : by_device) {
    const at::Tensor of_tensors = kernels::multi_tensor_norms_on_device(there, norm_type);
    norms.push_back(kernels::total_norm_on_device(of_tensors, norm_type).to(*first));
  }
  if (norms.empty()) return at::zeros({}, at::kDouble);
  return norms.size() == 1 ? norms.front()
                           : kernels::total_norm_on_device(at::stack(norms), norm_type);
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm) {
  constexpr auto kComponent = "optim.clip_grads_with_norm_";
  require_max_norm(kComponent, max_norm);
  require_number(kComponent, total_norm, "a total_norm");
  const at::NoGradGuard no_grad;
  const at::Tensor norm = total_norm.detach().reshape({}).to(at::kDouble);
  scale_grads_(parameters, at::full_like(norm, max_norm).div(norm.add(1e-6)).clamp_max(1));
}

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  constexpr auto kComponent = "optim.clip_grad_norm_";
  require_order(kComponent, norm_type);
  require_max_norm(kComponent, max_norm);
  const double norm = grad_norm(parameters, norm_type);
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw Error(kComponent, "finite gradients", "a norm of " + std::to_string(norm),
                "skip the step, or clip with error_if_nonfinite false");
  }
  const double factor = clip_factor(norm, max_norm);
  if (factor != 1) scale_grads_(parameters, factor);
  return norm;
}

}  // namespace semitone::optim
