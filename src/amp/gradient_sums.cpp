#include "semitone/amp/detail/gradient_sums.h"

#include "semitone/core/dtype.h"
#include "src/core/log.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <exception>
#include <limits>
#include <utility>

namespace semitone::amp::detail {

GradientSums::~GradientSums() {
  try {
    put_back();
  } catch (const std::exception& error) {
    log()->error(error.what());
  }
}

void GradientSums::take() {
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer_->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& grad = parameter.grad();
      if (!grad.defined() || !is_16bit(grad.scalar_type()) || grad.layout() != at::kStrided)
        continue;
      const auto [place, is_new] =
          places_.try_emplace(parameter.unsafeGetTensorImpl(), sums_.size());
      if (is_new) {
        sums_.push_back({parameter, grad.to(at::kFloat)});
      } else {
        sums_[place->second].value.add_(grad);
      }
      grad.zero_();
    }
  }
}

at::Tensor GradientSums::put_back() {
  const at::NoGradGuard no_grad;
  const auto sums = std::exchange(sums_, {});
  places_.clear();
  at::Tensor finite;
  for (const Sum& sum : sums) {
    at::Tensor& grad = sum.parameter.mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(sum.parameter);
    grad.copy_(sum.value.add_(grad));
    const at::Tensor all = at::isfinite(grad).all();
    finite = finite.defined() ? finite.logical_and(all.to(finite.device())) : all;
  }
  if (!finite.defined()) return {};
  return at::where(finite, 1.0, std::numeric_limits<double>::quiet_NaN());
}

}  // namespace semitone::amp::detail
