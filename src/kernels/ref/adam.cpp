#include "src/kernels/ref/update.h"

#include <torch/types.h>

namespace semitone::kernels::ref {

void update(const Update& item, const AdamRule& rule) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, rule.grad_scale);
  at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  if (rule.decay_factor != 1) param = param.mul(rule.decay_factor);
  const auto& [m, v, largest] = item.state;
  const at::Tensor new_m = accumulated(m, rule.beta1, grad.mul(rule.one_minus_beta1));
  at::Tensor new_v = accumulated(v, rule.beta2, grad.mul(rule.one_minus_beta2).mul(grad));
  store_moments(item, new_m, new_v);
  if (largest.defined()) {
    new_v = flush_subnormal(at::maximum(largest.to(new_v.scalar_type()), new_v));
    largest.copy_(new_v);
  }
  const at::Tensor denominator = root(new_v).div(rule.bias_correction2_sqrt).add(rule.eps);
  write(item, param.add(new_m.mul(-rule.step_size).div(denominator)));
}

}  // namespace semitone::kernels::ref
