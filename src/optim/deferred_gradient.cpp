#include "src/optim/deferred_gradient.h"

#include <ATen/ops/full.h>

#include <cmath>
#include <limits>
#include <utility>

namespace semitone::optim {

bool DeferredGradient::is_placeholder(const at::Tensor& grad) {
  return grad.numel() > 1 && grad.is_cpu() && grad.scalar_type() == at::kFloat &&
         grad.storage().nbytes() == sizeof(float) && std::isnan(*grad.const_data_ptr<float>());
}

void DeferredGradient::defer(const at::Tensor& master, const at::Tensor& grad) {
  grad_ = grad;
  placeholder_ = at::full({}, std::numeric_limits<float>::quiet_NaN(), master.options())
                     .expand(master.sizes())
                     .variable_data();
  master.mutable_grad() = placeholder_;
}

bool DeferredGradient::counts(const at::Tensor& master) const {
  return grad_.defined() && master.grad().is_same(placeholder_) &&
         std::isnan(*placeholder_.const_data_ptr<float>());
}

at::Tensor DeferredGradient::take(const at::Tensor& master) {
  const bool still = counts(master);
  at::Tensor grad = std::exchange(grad_, {});
  const at::Tensor placeholder = std::exchange(placeholder_, {});
  if (still) {
    master.mutable_grad().reset();
    return grad;
  }
  if (placeholder.defined() && master.grad().is_same(placeholder))  // zeroed, or filled
    master.mutable_grad() = placeholder.contiguous();
  return {};
}

void DeferredGradient::drop() {
  grad_.reset();
  placeholder_.reset();
}

}  // namespace semitone::optim
