#include "src/kernels/ref/update.h"

#include <torch/types.h>

namespace semitone::kernels::ref {

void update(const Update& item, const NovoGradRule& rule) {
  update(item, rule, {});
}

void update(const Update& item, const NovoGradRule& rule, const ComputedNumbers& computed) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, {rule.grad_scale, computed.grad_scale});
  const at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  const at::Tensor& m = item.state[0];
  accumulate(m, rule.beta1, grad.mul(rule.beta3));
  at::Tensor update = times(m, {rule.correction, computed.correction});
  if (rule.decoupled_weight_decay != 0) update = param.mul(rule.decoupled_weight_decay).add(update);
  write(item, update.mul(-rule.lr).add(param));
}

}  // namespace semitone::kernels::ref
