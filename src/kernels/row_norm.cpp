#include "src/kernels/row_norm.h"

#include "src/kernels/flat.h"
#include "src/kernels/row_parts.h"
#include "src/kernels/rows.h"

#include <torch/types.h>

#include <optional>

namespace semitone::kernels {
namespace {

// How the kernels see an input; nothing: only the definition can.
std::optional<RowLayout> layout_of(const at::Tensor& input, const RowNorm& norm) {
  const auto format = format_of(input.scalar_type());
  if (!format.has_value() || !input.is_cpu() || input.numel() == 0) return {};
  return RowLayout{*format, static_cast<std::size_t>(norm.columns)};
}

// In fp32, one for each column.
at::Tensor values_or(const at::Tensor& values, double otherwise, std::int64_t columns) {
  if (!values.defined()) return at::full({columns}, otherwise, at::kFloat);
  return dense(values.to(at::kFloat));
}

// -0 is what changes nothing when it is added.
at::Tensor bias_of(const RowNorm& norm) {
  return values_or(norm.bias, -0.0, norm.columns);
}

at::Tensor weight_of(const RowNorm& norm) {
  return values_or(norm.weight, 1, norm.columns);
}

float* data_of(const at::Tensor& statistics) {
  return statistics.defined() ? statistics.mutable_data_ptr<float>() : nullptr;
}

}  // namespace

NormalizedRows row_norm(const at::Tensor& input, const RowNorm& norm, bool with_statistics) {
  const auto layout = layout_of(input, norm);
  if (!layout.has_value()) return ref::row_norm(input, norm);
  const std::int64_t rows = input.numel() / norm.columns;
  const at::Tensor rows_in = dense(input);
  const at::Tensor weight = weight_of(norm);
  const at::Tensor bias = bias_of(norm);
  NormalizedRows result;
  result.output = at::empty(input.sizes(), input.options());
  if (with_statistics) {
    result.rstd = at::empty({rows}, at::kFloat);
    if (norm.centred) result.mean = at::empty({rows}, at::kFloat);
  }
  const RowNormalize work{.input = rows_in.const_data_ptr(),
                          .output = result.output.mutable_data_ptr(),
                          .weight = weight.const_data_ptr<float>(),
                          .bias = bias.const_data_ptr<float>(),
                          .centred = norm.centred,
                          .eps = norm.eps,
                          .mean = data_of(result.mean),
                          .rstd = data_of(result.rstd)};
  for_all_rows(rows, norm.columns, [&](std::size_t begin, std::size_t end) {
    row_normalize(*layout, work, begin, end);
  });
  return result;
}

RowNormGradients row_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                   const at::Tensor& mean, const at::Tensor& rstd,
                                   const RowNorm& norm, const RowNormWanted& wanted) {
  const auto layout = layout_of(input, norm);
  if (!layout.has_value() || !grad.is_cpu())
    return ref::row_norm_backward(grad, input, mean, rstd, norm, wanted);
  const at::Tensor rows_in = dense(input);
  const at::Tensor rows_grad = dense(grad.to(input.scalar_type()));
  const at::Tensor weight = weight_of(norm);
  RowNormGradients result;
  if (wanted.input) result.input = at::empty(input.sizes(), input.options());
  const RowNormGradient work{.grad = rows_grad.const_data_ptr(),
                             .input = rows_in.const_data_ptr(),
                             .output = wanted.input ? result.input.mutable_data_ptr() : nullptr,
                             .weight = weight.const_data_ptr<float>(),
                             .centred = norm.centred,
                             .mean = mean.defined() ? mean.const_data_ptr<float>() : nullptr,
                             .rstd = rstd.const_data_ptr<float>()};
  const at::Tensor sums =
      RowParts(input.numel() / norm.columns, norm.columns)
          .add_up(wanted.weight || wanted.bias ? 2 : 0,
                  [&](std::size_t begin, std::size_t end, float* part) {
                    row_norm_gradient(*layout, work, begin, end, part,
                                      part == nullptr ? nullptr : part + layout->columns);
                  });
  if (wanted.weight)
    result.weight = sums[0].view(norm.weight.sizes()).to(norm.weight.scalar_type());
  if (wanted.bias) result.bias = sums[1].view(norm.bias.sizes()).to(norm.bias.scalar_type());
  return result;
}

}  // namespace semitone::kernels
