#include "src/kernels/multi_tensor_lamb.h"
#include "src/kernels/ref/update.h"

#include <torch/types.h>

namespace semitone::kernels::ref {
namespace {

at::Tensor lamb_update(const Update& item, const LambRule& rule, const at::Tensor& param) {
  const auto& [m, v, none] = item.state;
  const at::Tensor denominator = root(v.mul(rule.inv_bias_correction2)).add(rule.eps);
  const at::Tensor update = m.mul(rule.inv_bias_correction1).div(denominator);
  return rule.decoupled_weight_decay != 0 ? param.mul(rule.decoupled_weight_decay).add(update)
                                          : update;
}

at::Tensor fp64_norm(const at::Tensor& tensor) {
  return tensor.to(at::kDouble).square().sum().sqrt();
}

}  // namespace

at::Tensor lamb_moments(const Update& item, const LambRule& rule, const ComputedNumbers& computed) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, {rule.grad_scale, computed.grad_scale});
  const at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  const auto& [m, v, none] = item.state;
  accumulate(m, rule.beta1, grad.mul(rule.beta3));
  accumulate(v, rule.beta2, grad.mul(rule.one_minus_beta2).mul(grad));
  return at::stack({fp64_norm(param), fp64_norm(lamb_update(item, rule, param))});
}

void update(const Update& item, const LambRule& rule) {
  update(item, rule, {});
}

void update(const Update& item, const LambRule& rule, const ComputedNumbers& computed) {
  const at::NoGradGuard no_grad;
  const at::Tensor param = wide_param(item);
  const Number factor{-rule.step_size,
                      computed.step_size.defined() ? computed.step_size.neg() : at::Tensor()};
  write(item, times(lamb_update(item, rule, param), factor).add(param));
}

}  // namespace semitone::kernels::ref
