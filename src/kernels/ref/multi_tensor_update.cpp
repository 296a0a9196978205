#include "src/kernels/multi_tensor_update.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace semitone::kernels {

// The arithmetic of rounding.h's split_fp32 and join_fp32 on whole tensors, in int32. Shifts of
// negative int32 keep the sign; the conversion to int16 drops the upper bits.
at::Tensor join_split_master(const at::Tensor& param, const at::Tensor& low) {
  const at::NoGradGuard no_grad;
  const at::Tensor high = param.detach().contiguous().view(at::kShort).to(at::kInt);
  const at::Tensor bits = high.mul(1 << 16);
  const at::Tensor below_zero = high.bitwise_and(0x7FFF).eq(0).logical_and(low.lt(0));
  return at::where(below_zero, bits, bits.add(low.to(at::kInt))).view(at::kFloat);
}

void split_master(const at::Tensor& value, const at::Tensor& param, const at::Tensor& low) {
  const at::NoGradGuard no_grad;
  // Split recursively into halves, since temporaries take 16 bytes per element.
  constexpr std::int64_t kMost = 1 << 20;
  if (value.numel() > kMost) {
    const auto largest = std::max_element(value.sizes().begin(), value.sizes().end());
    const auto dim = largest - value.sizes().begin();
    const std::int64_t half = *largest / 2;
    const auto split_part = [&](std::int64_t begin, std::int64_t size) {
      split_master(value.narrow(dim, begin, size), param.narrow(dim, begin, size),
                   low.narrow(dim, begin, size));
    };
    split_part(0, half);
    split_part(half, *largest - half);
    return;
  }
  const at::Tensor bits = value.detach().contiguous().view(at::kInt);
  const at::Tensor quiet = bits.bitwise_or(0x400000).bitwise_and(-0x10000);
  const at::Tensor number = at::where(value.isnan(), quiet, bits);
  low.copy_(number.to(at::kShort));
  param.copy_(number.add(0x8000).__rshift__(16).to(at::kShort).view(at::kBFloat16));
}

namespace ref {
namespace {

at::ScalarType compute_dtype(const Update& item) {
  return item.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor scaled_grad(const Update& item, double grad_scale) {
  return item.grad.to(compute_dtype(item)).mul(grad_scale);
}

at::Tensor wide_param(const Update& item) {
  if (item.low.defined()) return join_split_master(item.param, item.low);
  return item.param.to(compute_dtype(item));
}

void write(const Update& item, const at::Tensor& value) {
  if (item.low.defined()) {
    split_master(value, item.param, item.low);
  } else {
    item.param.copy_(value);
  }
  if (item.copy.defined()) item.copy.copy_(value);
}

// rule_numbers.h's flush_subnormal, of fp32 or fp64.
at::Tensor flush_subnormal(const at::Tensor& value) {
  const double smallest = value.scalar_type() == at::kDouble
                              ? std::numeric_limits<double>::min()
                              : double{std::numeric_limits<float>::min()};
  return value.masked_fill(value.abs().lt(smallest), 0);
}

// Products are separate tensors: add(tensor, alpha) would fuse them with the addition on some
// processors.
at::Tensor accumulated(const at::Tensor& average, double beta, const at::Tensor& added) {
  return flush_subnormal(average.to(added.scalar_type()).mul(beta).add(added));
}

void accumulate(const at::Tensor& average, double beta, const at::Tensor& added) {
  average.copy_(accumulated(average, beta, added));
}

// The upper bits of int32 numbers, without their sign.
at::Tensor shift_right(const at::Tensor& bits, int by) {
  return bits.__rshift__(by).bitwise_and_((1 << (32 - by)) - 1);
}

// rounding.h's, in int32, where products wrap.
at::Tensor hash_bits(at::Tensor x) {
  x = x.bitwise_xor(shift_right(x, 16)).mul_(static_cast<std::int32_t>(0x85EBCA6B));
  x = x.bitwise_xor(shift_right(x, 13)).mul_(static_cast<std::int32_t>(0xC2B2AE35));
  return x.bitwise_xor(shift_right(x, 16));
}

// Random bits for each element, by its position in memory.
at::Tensor random_bits(const Update& item) {
  const at::Tensor places = at::arange(item.param.numel(), item.param.options().dtype(at::kLong));
  const at::Tensor numbers = item.param.is_non_overlapping_and_dense()
                                 ? places.as_strided(item.param.sizes(), item.param.strides())
                                 : places.view(item.param.sizes());
  return hash_bits(numbers.to(at::kInt).bitwise_xor_(static_cast<std::int32_t>(item.seed)));
}

// bf16_from_fp32_stochastic. A NaN is rounded to nearest, which makes it quiet as well.
at::Tensor round_stochastically(const at::Tensor& value, const at::Tensor& random) {
  const at::Tensor bits = value.contiguous().view(at::kInt).add(random);
  const at::Tensor upper = bits.__rshift__(16).to(at::kShort).view(at::kBFloat16);
  return at::where(value.isnan(), value.to(at::kBFloat16), upper);
}

// State 0 and, if defined, state 1.
void store_moments(const Update& item, const at::Tensor& first, const at::Tensor& second = {}) {
  if (item.state[0].scalar_type() != at::kBFloat16) {
    item.state[0].copy_(first);
    if (second.defined()) item.state[1].copy_(second);
    return;
  }
  const at::Tensor random = random_bits(item);
  item.state[0].copy_(round_stochastically(first, random.bitwise_and(0xFFFF)));
  if (second.defined()) item.state[1].copy_(round_stochastically(second, shift_right(random, 16)));
}

// The correctly rounded root: in fp32, LibTorch's own (MKL's) is off by a unit in one of 160
// numbers.
at::Tensor root(const at::Tensor& value) {
  return value.to(at::kDouble).sqrt().to(value.scalar_type());
}

}  // namespace

void adam(const Update& item, const AdamRule& rule) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, rule.grad_scale);
  at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  if (rule.decay_factor != 1) param = param.mul(rule.decay_factor);
  const auto& [m, v, largest] = item.state;
  const at::Tensor new_m = accumulated(m, rule.beta1, grad.mul(1 - rule.beta1));
  at::Tensor new_v = accumulated(v, rule.beta2, grad.mul(1 - rule.beta2).mul(grad));
  store_moments(item, new_m, new_v);
  if (largest.defined()) {
    new_v = flush_subnormal(at::maximum(largest.to(new_v.scalar_type()), new_v));
    largest.copy_(new_v);
  }
  const at::Tensor denominator = root(new_v).div(rule.bias_correction2_sqrt).add(rule.eps);
  write(item, param.add(new_m.mul(-rule.step_size).div(denominator)));
}

void sgd(const Update& item, const SgdRule& rule) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, rule.grad_scale);
  const at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  if (rule.trust_ratio != 1) grad = grad.mul(rule.trust_ratio);
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

void novograd(const Update& item, const NovoGradRule& rule) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, rule.grad_scale);
  const at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  const at::Tensor& m = item.state[0];
  accumulate(m, rule.beta1, grad.mul(rule.beta3));
  at::Tensor update = m.mul(rule.correction);
  if (rule.decoupled_weight_decay != 0) update = param.mul(rule.decoupled_weight_decay).add(update);
  write(item, update.mul(-rule.lr).add(param));
}

void adagrad(const Update& item, const AdagradRule& rule) {
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

namespace {

at::Tensor lamb_update(const Update& item, const LambRule& rule, const at::Tensor& param) {
  const auto& [m, v, none] = item.state;
  const at::Tensor denominator = root(v.mul(rule.inv_bias_correction2)).add(rule.eps);
  const at::Tensor update = m.mul(rule.inv_bias_correction1).div(denominator);
  return rule.decoupled_weight_decay != 0 ? param.mul(rule.decoupled_weight_decay).add(update)
                                          : update;
}

at::Tensor norm_of(const at::Tensor& tensor) {
  return tensor.to(at::kDouble).square().sum().sqrt();
}

}  // namespace

at::Tensor lamb_moments(const Update& item, const LambRule& rule) {
  const at::NoGradGuard no_grad;
  at::Tensor grad = scaled_grad(item, rule.grad_scale);
  const at::Tensor param = wide_param(item);
  if (rule.weight_decay != 0) grad = param.mul(rule.weight_decay).add(grad);
  const auto& [m, v, none] = item.state;
  accumulate(m, rule.beta1, grad.mul(rule.beta3));
  accumulate(v, rule.beta2, grad.mul(1 - rule.beta2).mul(grad));
  return at::stack({norm_of(param), norm_of(lamb_update(item, rule, param))});
}

void lamb_apply(const Update& item, const LambRule& rule) {
  const at::NoGradGuard no_grad;
  const at::Tensor param = wide_param(item);
  write(item, lamb_update(item, rule, param).mul(-rule.step_size).add(param));
}

}  // namespace ref
}  // namespace semitone::kernels
