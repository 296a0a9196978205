#include "src/kernels/gelu.h"

#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"
#include "src/kernels/parallel_rows.h"

#include <torch/types.h>

#include <cstdint>
#include <optional>

namespace semitone::kernels {
namespace {

std::optional<Format> kernel_format_of(const at::Tensor& input, const at::Tensor& bias) {
  return has_kernels(input) && input.numel() > 0 && same_device(bias, input)
             ? format_of(input.scalar_type())
             : std::nullopt;
}

// Without a bias the order of the elements does not matter: it stays, as in LibTorch's operator.
at::Tensor without_gaps(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_neg()
             ? tensor
             : at::empty_like(tensor).copy_(tensor);
}

}  // namespace

at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form) {
  const auto format = kernel_format_of(input, bias);
  if (!format.has_value()) return ref::gelu(input, bias, form);
  const at::Tensor elements = bias.defined() ? dense(input) : without_gaps(input);
  const at::Tensor shift = bias.defined() ? dense(bias.to(at::kFloat)) : at::Tensor();
  at::Tensor output = at::empty_like(elements);
  const Gelu work{.form = form,
                  .input = elements.const_data_ptr(),
                  .bias = bias.defined() ? shift.const_data_ptr<float>() : nullptr,
                  .output = output.mutable_data_ptr()};
  const std::int64_t columns = bias.defined() ? bias.numel() : 1;
  const std::int64_t rows = input.numel() / columns;
  const RowLayout layout{*format, static_cast<std::size_t>(columns)};
  if (runs_on_cuda(input)) {
    gelu_cuda(layout, work, static_cast<std::size_t>(rows), CurrentCuda(input).stream());
    return output;
  }
  for_all_rows(rows, columns,
               [&](std::size_t begin, std::size_t end) { gelu(layout, work, begin, end); });
  return output;
}

GeluGradients gelu_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& bias,
                            GeluForm form, bool bias_wanted) {
  const auto format = kernel_format_of(input, bias);
  if (!format.has_value() || !same_device(grad, input))
    return ref::gelu_backward(grad, input, bias, form, bias_wanted);
  const at::Tensor elements = bias.defined() ? dense(input) : without_gaps(input);
  const at::Tensor grad_output = laid_out_like(grad, elements, input.scalar_type());
  const at::Tensor shift = bias.defined() ? dense(bias.to(at::kFloat)) : at::Tensor();
  GeluGradients result;
  result.input = at::empty_like(elements);
  const GeluGradient work{.form = form,
                          .grad = grad_output.const_data_ptr(),
                          .input = elements.const_data_ptr(),
                          .bias = bias.defined() ? shift.const_data_ptr<float>() : nullptr,
                          .output = result.input.mutable_data_ptr()};
  const std::int64_t columns = bias.defined() ? bias.numel() : 1;
  const std::int64_t rows = input.numel() / columns;
  const RowLayout layout{*format, static_cast<std::size_t>(columns)};
  if (runs_on_cuda(input)) {
    const CurrentCuda cuda(input);
    const at::Tensor sums =
        RowParts(rows, columns, /*on_cuda=*/true)
            .add_up_on_cuda(bias_wanted ? 1 : 0, input, cuda.stream(),
                            [&](std::size_t rows_of_part, float* parts) {
                              gelu_gradient_cuda(layout, work, static_cast<std::size_t>(rows),
                                                 rows_of_part, parts, cuda.stream());
                            });
    if (bias_wanted) result.bias = sums[0].to(bias.scalar_type());
    return result;
  }
  if (!bias_wanted) {
    for_all_rows(rows, columns, [&](std::size_t begin, std::size_t end) {
      gelu_gradient(layout, work, begin, end, nullptr);
    });
    return result;
  }
  const at::Tensor sums =
      RowParts(rows, columns).add_up(1, [&](std::size_t begin, std::size_t end, float* part) {
        gelu_gradient(layout, work, begin, end, part);
      });
  result.bias = sums[0].to(bias.scalar_type());
  return result;
}

}  // namespace semitone::kernels
