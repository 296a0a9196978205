#include "src/kernels/dropout.h"

#include "src/kernels/dropout_kernel.h"

#include <ATen/OpMathType.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace semitone::kernels::ref {
namespace {

// 0 or the scale for each element, laid out like the result.
at::Tensor factors_like(const at::Tensor& input, const Dropout& dropout, at::ScalarType dtype) {
  at::Tensor factors = at::empty_like(input, input.options().dtype(at::kDouble).device(at::kCPU));
  auto* const data = factors.mutable_data_ptr<double>();
  const auto size = static_cast<std::size_t>(input.numel());
  for (std::size_t begin = 0; begin < size; begin += kDropoutGroup) {
    const auto numbers = dropout_numbers(dropout.stream(), begin / kDropoutGroup);
    const std::size_t count = std::min(kDropoutGroup, size - begin);
    for (std::size_t i = 0; i < count; ++i)
      data[begin + i] = numbers[i] < dropout.threshold() ? 0 : dropout.scale();
  }
  return factors.to(input.device(), dtype);
}

}  // namespace

at::Tensor dropout(const at::Tensor& input, const Dropout& dropout, at::ScalarType dtype,
                   const at::Tensor& residual) {
  at::ScalarType wide = at::toOpMathType(at::promote_types(input.scalar_type(), dtype));
  if (residual.defined()) wide = at::promote_types(wide, residual.scalar_type());
  at::Tensor result = input.to(wide).mul(factors_like(input, dropout, wide));
  if (residual.defined()) result.add_(residual);
  return at::empty_like(input, input.options().dtype(dtype)).copy_(result);
}

}  // namespace semitone::kernels::ref
