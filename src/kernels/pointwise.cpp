#include "src/kernels/pointwise.h"

#include "src/core/parallel_for.h"
#include "src/kernels/flat.h"

#include <torch/types.h>

#include <cstdint>

namespace semitone::kernels {
namespace {

// Calls work(bytes before the range, elements in it) for ranges of a tensor's memory.
template <typename Work>
void for_ranges(const at::Tensor& tensor, const Work& work) {
  parallel_for(0, tensor.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    work(begin * tensor.element_size(), static_cast<std::size_t>(end - begin));
  });
}

const char* bytes_of_data(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

void relu_into(const at::Tensor& input, char* output) {
  const char* const in = bytes_of_data(input);
  const Format format = *format_of(input.scalar_type());
  for_ranges(input,
             [&](std::int64_t at, std::size_t size) { relu(in + at, output + at, format, size); });
}

void add_into(const at::Tensor& a, const at::Tensor& b, char* output) {
  const at::Tensor addend = laid_out_like(b, a, a.scalar_type());
  const char* const left = bytes_of_data(a);
  const char* const right = bytes_of_data(addend);
  const Format format = *format_of(a.scalar_type());
  for_ranges(a, [&](std::int64_t at, std::size_t size) {
    add(left + at, right + at, output + at, format, size);
  });
}

}  // namespace

bool has_pointwise_kernel(const at::Tensor& input) {
  return input.is_cpu() && input.layout() == at::kStrided &&
         format_of(input.scalar_type()).has_value() && input.is_non_overlapping_and_dense() &&
         !input.is_neg();
}

at::Tensor relu(const at::Tensor& input) {
  if (!has_pointwise_kernel(input)) return ref::relu(input);
  at::Tensor output = at::empty_like(input);
  relu_into(input, static_cast<char*>(output.mutable_data_ptr()));
  return output;
}

void relu_(const at::Tensor& input) {
  if (has_pointwise_kernel(input)) {
    relu_into(input, written_data(input));
  } else {
    input.copy_(ref::relu(input));
  }
}

at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result) {
  if (!has_pointwise_kernel(result) || !grad.is_cpu()) return ref::relu_backward(grad, result);
  const at::Tensor grad_output = laid_out_like(grad, result, result.scalar_type());
  at::Tensor output = at::empty_like(result);
  const char* const from = bytes_of_data(grad_output);
  const char* const outputs = bytes_of_data(result);
  auto* const to = static_cast<char*>(output.mutable_data_ptr());
  const Format format = *format_of(result.scalar_type());
  for_ranges(result, [&](std::int64_t at, std::size_t size) {
    relu_gradient(from + at, outputs + at, to + at, format, size);
  });
  return output;
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b) {
  if (!has_pointwise_kernel(a)) return ref::add(a, b);
  at::Tensor output = at::empty_like(a);
  add_into(a, b, static_cast<char*>(output.mutable_data_ptr()));
  return output;
}

void add_(const at::Tensor& a, const at::Tensor& b) {
  if (has_pointwise_kernel(a)) {
    add_into(a, b, written_data(a));
  } else {
    a.copy_(ref::add(a, b));
  }
}

}  // namespace semitone::kernels
