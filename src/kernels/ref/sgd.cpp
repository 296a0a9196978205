#include "src/kernels/ref/update.h"

#include <torch/types.h>

namespace semitone::kernels::ref {

void update(const Update& item, const SgdRule& rule) {
  update(item, rule, {});
}

void update(const Update& item, const SgdRule& rule, const ComputedNumbers& computed) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, {rule.grad_scale, computed.grad_scale});
  const at::Tensor param = wide_param(item);
  if (computed.weight_decay.defined()) {
    const at::Tensor decayed = times(param, {0, computed.weight_decay}).add(grad);
    grad = at::where(computed.weight_decay.ne(0), decayed, grad);
  } else if (rule.weight_decay != 0) {
    grad = param.mul(rule.weight_decay).add(grad);
  }
  if (rule.trust_ratio != 1 || computed.trust_ratio.defined())
    grad = times(grad, {rule.trust_ratio, computed.trust_ratio});
  if (const at::Tensor& buffer = item.state[0]; buffer.defined()) {
    const at::Tensor moved =
        rule.first ? flush_subnormal(grad)
                   : accumulated(buffer, rule.momentum, grad.mul(rule.one_minus_dampening));
    store_moments(item, moved);
    grad = rule.nesterov ? moved.mul(rule.momentum).add(grad) : moved;
  }
  if (rule.decoupled_weight_decay != 0) grad = param.mul(rule.decoupled_weight_decay).add(grad);
  write(item, grad.mul(-rule.lr).add(param));
}

}  // namespace semitone::kernels::ref
