#include "src/kernels/batch_norm.h"

#include "src/kernels/pointwise.h"
#include "src/kernels/ref/wide.h"

#include <ATen/OpMathType.h>
#include <torch/types.h>

#include <vector>

namespace semitone::kernels::ref {
namespace {

// (C) -> (1, C, 1, …), in the dtype that the input is computed in.
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = values.size(0);
  return values.to(at::toOpMathType(input.scalar_type())).view(shape);
}

std::vector<std::int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

at::Tensor masked(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                  const BatchRelu& relu) {
  if (!relu.shift.defined()) return grad;
  return relu_backward(grad, normalize(input, mean, relu.scale, relu.shift, {}, /*relu=*/true));
}

}  // namespace

Moments moments(const at::Tensor& input) {
  const auto fp64 = input.options().dtype(at::kDouble);
  if (input.numel() == 0) {
    return {at::zeros({input.size(1)}, fp64), at::zeros({input.size(1)}, fp64)};
  }
  const auto [variance, mean] =
      at::var_mean(wide(input), all_but_channels(input), /*correction=*/0, /*keepdim=*/false);
  const auto count = input.numel() / input.size(1);
  return {mean.to(at::kDouble), variance.to(at::kDouble).mul(count)};
}

at::Tensor normalize(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& scale,
                     const at::Tensor& shift, const at::Tensor& residual, bool relu) {
  at::Tensor result = wide(input)
                          .sub(along_channels(mean, input))
                          .mul_(along_channels(scale, input))
                          .add_(along_channels(shift, input));
  if (residual.defined()) result.add_(residual);
  if (relu) result.relu_();
  return result.to(input.scalar_type());
}

GradientSums gradient_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                           const BatchRelu& relu) {
  const auto dims = all_but_channels(input);
  const at::Tensor own = masked(grad, input, mean, relu);
  const at::Tensor centred = wide(input).sub(along_channels(mean, input));
  return {wide(own).sum(dims).to(at::kDouble), centred.mul_(own).sum(dims).to(at::kDouble)};
}

MaskedGradient masked_gradient(const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& mean, const at::Tensor& result) {
  const at::Tensor own = relu_backward(grad, result);
  return {own, gradient_sums(own, input, mean)};
}

at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& a, const at::Tensor& b,
                             const at::Tensor& c, const at::Tensor& shift) {
  return wide(input)
      .sub(along_channels(mean, input))
      .mul_(along_channels(b, input))
      .add_(along_channels(c, input))
      .add_(wide(masked(grad, input, mean, {a, shift})).mul(along_channels(a, input)))
      .to(input.scalar_type());
}

}  // namespace semitone::kernels::ref
