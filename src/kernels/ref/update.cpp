#include "src/kernels/ref/update.h"

#include <torch/types.h>

#include <cstdint>
#include <limits>

namespace semitone::kernels::ref {
namespace {

at::ScalarType compute_dtype(const Update& item) {
  return item.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
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

}  // namespace

at::Tensor times(const at::Tensor& tensor, const Number& number) {
  return number.computed.defined() ? tensor.mul(number.computed.to(tensor.scalar_type()))
                                   : tensor.mul(number.host);
}

at::Tensor scaled_grad(const Update& item, const Number& grad_scale) {
  return times(item.grad.to(compute_dtype(item)), grad_scale);
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

void store_moments(const Update& item, const at::Tensor& first, const at::Tensor& second) {
  if (item.state[0].scalar_type() != at::kBFloat16) {
    item.state[0].copy_(first);
    if (second.defined()) item.state[1].copy_(second);
    return;
  }
  const at::Tensor random = random_bits(item);
  item.state[0].copy_(round_stochastically(first, random.bitwise_and(0xFFFF)));
  if (second.defined()) item.state[1].copy_(round_stochastically(second, shift_right(random, 16)));
}

at::Tensor root(const at::Tensor& value) {
  return value.to(at::kDouble).sqrt().to(value.scalar_type());
}

}  // namespace semitone::kernels::ref
