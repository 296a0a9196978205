#include "src/kernels/dropout.h"

#include "src/core/parallel_for.h"
#include "src/kernels/dropout_kernel.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace semitone::kernels {
namespace {

constexpr std::uint32_t kOne = 1 << 16;  // p = 1 as a threshold
constexpr std::int64_t kGroupGrain = kGrain / static_cast<std::int64_t>(kDropoutGroup);

std::uint32_t threshold_for(double p) {
  if (p == 1) return kOne;
  return std::min(kOne - 1, static_cast<std::uint32_t>(std::lround(p * kOne)));
}

}  // namespace

Dropout::Dropout(double p, PhiloxStream stream) : stream_(stream), threshold_(threshold_for(p)) {}

double Dropout::scale() const {
  return threshold_ == kOne ? 0 : static_cast<double>(kOne) / (kOne - threshold_);
}

at::Tensor dropout(const at::Tensor& input, const Dropout& dropout, at::ScalarType dtype,
                   const at::Tensor& residual) {
  const auto input_format = format_of(input.scalar_type());
  const auto output_format = format_of(dtype);
  const bool of_one_format =
      input.scalar_type() == dtype || input_format == Format::fp32 || output_format == Format::fp32;
  if (!has_kernels(input) || !same_device(residual, input) || !input_format.has_value() ||
      !output_format.has_value() || !of_one_format || dropout.threshold() == kOne ||
      input.numel() == 0) {
    return ref::dropout(input, dropout, dtype, residual);
  }
  at::Tensor output = at::empty_like(input, input.options().dtype(dtype));
  const at::Tensor from = laid_out_like(input, output, input.scalar_type());
  const at::Tensor added = residual.defined() ? laid_out_like(residual, output, dtype) : residual;
  const auto size = static_cast<std::size_t>(input.numel());
  const DropoutWork work{.input = from.const_data_ptr(),
                         .input_format = *input_format,
                         .residual = added.defined() ? added.const_data_ptr() : nullptr,
                         .output = output.mutable_data_ptr(),
                         .output_format = *output_format,
                         .size = size,
                         .stream = dropout.stream(),
                         .threshold = dropout.threshold(),
                         .scale = static_cast<float>(dropout.scale())};
  if (runs_on_cuda(input)) {
    dropout_cuda(work, CurrentCuda(input).stream());
    return output;
  }
  const auto groups = static_cast<std::int64_t>((size + kDropoutGroup - 1) / kDropoutGroup);
  parallel_for(0, groups, kGroupGrain, [&](std::int64_t begin, std::int64_t end) {
    dropout_groups(work, static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
  });
  return output;
}

}  // namespace semitone::kernels
