#include "semitone/optim/clip_grad.h"

#include "semitone/core/error.h"
#include "src/kernels/multi_tensor.h"
#include "src/kernels/multi_tensor_norm.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <unordered_set>

namespace semitone::optim {
namespace {

// The values of all gradients, each once.
std::vector<at::Tensor> values_of_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> values;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) continue;
    if (grad.is_sparse() && !grad.is_coalesced()) grad = grad.coalesce();
    if (grad.is_conj()) grad = grad.resolve_conj();
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

double norm_of(std::vector<at::Tensor> values, double norm_type) {
  for (at::Tensor& value : values) value = numbers_to_norm(value, norm_type);
  return kernels::total_norm(kernels::multi_tensor_norms(values, norm_type), norm_type);
}

}  // namespace

double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  require_order("optim.grad_norm", norm_type);
  const at::NoGradGuard no_grad;
  return norm_of(values_of_grads(parameters), norm_type);
}

double clip_factor(double norm, double max_norm) {
  require_max_norm("optim.clip_factor", max_norm);
  const double factor = max_norm / (norm + 1e-6);
  return factor >= 1 ? 1 : factor;  // a NaN stays one
}

void scale_grads_(const std::vector<at::Tensor>& parameters, double factor) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<kernels::Unscale>> by_device;
  for (at::Tensor value : values_of_grads(parameters)) {
    if (value.is_complex()) value = at::view_as_real(value);
    if (value.scalar_type() == at::kDouble) {
      value.mul_(factor);
    } else {
      by_device[value.device().str()].push_back({value, value, {}});
    }
  }
  for (const auto& [device, items] : by_device) {
    at::Tensor ignored = at::zeros({}, items.front().grad.options().dtype(at::kFloat));
    kernels::multi_tensor_unscale(items, static_cast<float>(factor), ignored);
  }
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
