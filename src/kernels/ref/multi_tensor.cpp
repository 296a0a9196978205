#include "src/kernels/multi_tensor.h"

#include <torch/types.h>

namespace semitone::kernels::ref {

void multi_tensor_unscale(std::span<const Unscale> items, const InverseScale& inv_scale,
                          at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  for (const Unscale& item : items) {
    const auto compute_dtype = item.grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor result = item.grad.to(compute_dtype);
    result = inv_scale.on_device.defined() ? result.mul(inv_scale.on_device.reshape({}))
                                           : result.mul(inv_scale.number);
    at::Tensor fine = result.isfinite();
    at::Tensor addend_is_bad = at::zeros_like(fine);  // to be inf or NaN
    if (item.addend.defined()) {  // before out, which may be the addend, is written
      addend_is_bad = item.addend.isfinite().logical_not_();
      result.add_(item.addend.to(compute_dtype));
    }
    item.out.copy_(result);
    fine.logical_and_(item.out.isfinite().logical_or_(addend_is_bad));
    found_inf.copy_(found_inf.logical_or(fine.all().logical_not()));
  }
}

}  // namespace semitone::kernels::ref
