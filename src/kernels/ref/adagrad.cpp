#include "src/kernels/ref/update.h"

#include <torch/types.h>

namespace semitone::kernels::ref {

void update(const Update& item, const AdagradRule& rule) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, rule.grad_scale);
  const at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  const at::Tensor& h = item.state[0];
  h.copy_(flush_subnormal(h.add(grad.mul(grad))));
  at::Tensor update = grad.div(root(h).add(rule.eps));
  if (rule.decoupled_weight_decay != 0) update = param.mul(rule.decoupled_weight_decay).add(update);
  write(item, update.mul(-rule.lr).add(param));
}

}  // namespace semitone::kernels::ref
