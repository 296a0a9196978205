#include "src/kernels/layer_norm.h"

#include "src/kernels/flat.h"
#include "src/kernels/layer_norm_kernel.h"
#include "src/kernels/on_cuda.h"
#include "src/kernels/parallel_rows.h"

#include <torch/types.h>

#include <optional>

namespace semitone::kernels {
namespace {

// An input as the kernels see it; nothing if only the reference supports it.
std::optional<RowLayout> layout_of(const at::Tensor& input, const LayerNorm& norm) {
  const auto format = format_of(input.scalar_type());
  if (!format.has_value() || !has_kernels(input) || input.numel() == 0 ||
      !same_device(norm.weight, input) || !same_device(norm.bias, input))
    return {};
  return RowLayout{*format, static_cast<std::size_t>(norm.columns)};
}

at::TensorOptions fp32_on_device_of(const at::Tensor& input) {
  return at::TensorOptions(input.device()).dtype(at::kFloat);
}

// A vector in fp32 with one number for each column. CUDA kernels accept missing ones: filling them
// would be a separate launch in each call.
at::Tensor values_or(const at::Tensor& values, double otherwise, const LayerNorm& norm,
                     const at::Tensor& input) {
  if (values.defined()) return dense(values.to(at::kFloat));
  if (runs_on_cuda(input)) return {};
  return at::full({norm.columns}, otherwise, fp32_on_device_of(input));
}

// -0 is what changes nothing when it is added.
at::Tensor bias_of(const LayerNorm& norm, const at::Tensor& input) {
  return values_or(norm.bias, -0.0, norm, input);
}

at::Tensor weight_of(const LayerNorm& norm, const at::Tensor& input) {
  return values_or(norm.weight, 1, norm, input);
}

float* data_of(const at::Tensor& statistics) {
  return statistics.defined() ? statistics.mutable_data_ptr<float>() : nullptr;
}

const float* values_in(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr<float>() : nullptr;
}

}  // namespace

LayerNormResult layer_norm(const at::Tensor& input, const LayerNorm& norm, bool with_statistics) {
  const auto layout = layout_of(input, norm);
  if (!layout.has_value()) return ref::layer_norm(input, norm);
  const std::int64_t rows = input.numel() / norm.columns;
  const at::Tensor rows_in = dense(input);
  const at::Tensor weight = weight_of(norm, input);
  const at::Tensor bias = bias_of(norm, input);
  LayerNormResult result;
  result.output = at::empty(input.sizes(), input.options());
  if (with_statistics) {
    result.rstd = at::empty({rows}, fp32_on_device_of(input));
    if (norm.centred) result.mean = at::empty({rows}, fp32_on_device_of(input));
  }
  const LayerNormalize work{.input = rows_in.const_data_ptr(),
                            .output = result.output.mutable_data_ptr(),
                            .weight = values_in(weight),
                            .bias = values_in(bias),
                            .centred = norm.centred,
                            .eps = norm.eps,
                            .mean = data_of(result.mean),
                            .rstd = data_of(result.rstd)};
  if (runs_on_cuda(input)) {
    layer_normalize_cuda(*layout, work, static_cast<std::size_t>(rows),
                         CurrentCuda(input).stream());
    return result;
  }
  for_all_rows(rows, norm.columns, [&](std::size_t begin, std::size_t end) {
    layer_normalize(*layout, work, begin, end);
  });
  return result;
}

LayerNormGradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                       const at::Tensor& mean, const at::Tensor& rstd,
                                       const LayerNorm& norm, const LayerNormWanted& wanted) {
  const auto layout = layout_of(input, norm);
  if (!layout.has_value() || !same_device(grad, input))
    return ref::layer_norm_backward(grad, input, mean, rstd, norm, wanted);
  const at::Tensor rows_in = dense(input);
  const at::Tensor rows_grad = dense(grad.to(input.scalar_type()));
  const at::Tensor weight = weight_of(norm, input);
  LayerNormGradients result;
  if (wanted.input) result.input = at::empty(input.sizes(), input.options());
  const LayerNormGradient work{.grad = rows_grad.const_data_ptr(),
                               .input = rows_in.const_data_ptr(),
                               .output = wanted.input ? result.input.mutable_data_ptr() : nullptr,
                               .weight = values_in(weight),
                               .centred = norm.centred,
                               .mean = mean.defined() ? mean.const_data_ptr<float>() : nullptr,
                               .rstd = rstd.const_data_ptr<float>()};
  const std::int64_t rows = input.numel() / norm.columns;
  const std::int64_t values = wanted.weight || wanted.bias ? 2 : 0;
  if (values == 0 && !runs_on_cuda(input)) {
    for_all_rows(rows, norm.columns, [&](std::size_t begin, std::size_t end) {
      layer_norm_gradient(*layout, work, begin, end, nullptr, nullptr);
    });
    return result;
  }
  const RowParts parts(rows, norm.columns, runs_on_cuda(input));
  at::Tensor sums;
  if (runs_on_cuda(input)) {
    const CurrentCuda cuda(input);
    sums = parts.add_up_on_cuda(
        values, input, cuda.stream(), [&](std::size_t rows_of_part, float* of_parts) {
          layer_norm_gradient_cuda(*layout, work, static_cast<std::size_t>(rows), rows_of_part,
                                   of_parts, cuda.stream());
        });
  } else {
    sums = parts.add_up(values, [&](std::size_t begin, std::size_t end, float* part) {
      layer_norm_gradient(*layout, work, begin, end, part, part + layout->columns);
    });
  }
  if (wanted.weight)
    result.weight = sums[0].view(norm.weight.sizes()).to(norm.weight.scalar_type());
  if (wanted.bias) result.bias = sums[1].view(norm.bias.sizes()).to(norm.bias.scalar_type());
  return result;
}

}  // namespace semitone::kernels
