#include "src/kernels/layer_norm.h"

#include <ATen/OpMathType.h>
#include <torch/types.h>

namespace semitone::kernels::ref {
namespace {

// (rows, columns), in the dtype that it is computed in.
at::Tensor wide_rows(const at::Tensor& tensor, at::ScalarType dtype, const LayerNorm& norm) {
  const std::int64_t rows = norm.columns == 0 ? 0 : tensor.numel() / norm.columns;
  return tensor.to(at::toOpMathType(dtype)).reshape({rows, norm.columns});
}

at::Tensor wide_values(const at::Tensor& values, const at::Tensor& like) {
  return values.to(like.scalar_type()).reshape({-1});
}

}  // namespace

LayerNormResult layer_norm(const at::Tensor& input, const LayerNorm& norm) {
  at::Tensor rows = wide_rows(input, input.scalar_type(), norm);
  at::Tensor mean;
  if (norm.centred) {
    mean = rows.mean(1, /*keepdim=*/true);
    rows = rows.sub(mean);
  }
  const at::Tensor rstd = rows.square().mean(1, /*keepdim=*/true).add(norm.eps).rsqrt();
  at::Tensor output = rows.mul(rstd);
  if (norm.weight.defined()) output = output.mul(wide_values(norm.weight, output));
  if (norm.bias.defined()) output = output.add(wide_values(norm.bias, output));
  return {output.reshape(input.sizes()).to(input.scalar_type()).contiguous(),
          mean.defined() ? mean.flatten() : mean, rstd.flatten()};
}

LayerNormGradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                       const at::Tensor& mean, const at::Tensor& rstd,
                                       const LayerNorm& norm, const LayerNormWanted& wanted) {
  const at::Tensor grad_output = wide_rows(grad, input.scalar_type(), norm);
  at::Tensor rows = wide_rows(input, input.scalar_type(), norm);
  if (norm.centred) rows = rows.sub(mean.unsqueeze(1));
  const at::Tensor normal = rows.mul(rstd.unsqueeze(1));
  LayerNormGradients result;
  if (wanted.input) {
    const at::Tensor g = norm.weight.defined()
                             ? grad_output.mul(wide_values(norm.weight, grad_output))
                             : grad_output;
    at::Tensor inner = g.sub(normal.mul(g.mul(normal).mean(1, /*keepdim=*/true)));
    if (norm.centred) inner = inner.sub(g.mean(1, /*keepdim=*/true));
    result.input = inner.mul(rstd.unsqueeze(1)).reshape(input.sizes()).to(input.scalar_type());
  }
  if (wanted.weight) {
    result.weight =
        grad_output.mul(normal).sum(0).reshape(norm.weight.sizes()).to(norm.weight.scalar_type());
  }
  if (wanted.bias)
    result.bias = grad_output.sum(0).reshape(norm.bias.sizes()).to(norm.bias.scalar_type());
  return result;
}

}  // namespace semitone::kernels::ref
