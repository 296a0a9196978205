#include "src/kernels/convert.h"

#include "src/core/parallel_for.h"
#include "src/kernels/flat.h"
#include "src/kernels/pointwise.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace semitone::kernels {
namespace {

bool has_convert_kernel(const at::Tensor& tensor, at::ScalarType dtype) {
  return has_pointwise_kernel(tensor) && format_of(dtype).has_value();
}

}  // namespace

bool is_worth_converting(const at::Tensor& tensor, at::ScalarType dtype) {
  constexpr std::int64_t kElements = 64 * 1024;  // below, 4 us for a function of our own count
  return tensor.numel() >= kElements && has_convert_kernel(tensor, dtype);
}

at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!has_convert_kernel(tensor, dtype)) return ref::convert(tensor, dtype);
  at::Tensor result = at::empty_like(tensor, tensor.options().dtype(dtype));
  const auto* const in = static_cast<const char*>(tensor.const_data_ptr());
  auto* const out = static_cast<char*>(result.mutable_data_ptr());
  const Format from = *format_of(tensor.scalar_type());
  const Format to = *format_of(dtype);
  parallel_for(0, tensor.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    convert(in + begin * tensor.element_size(), from, out + begin * result.element_size(), to,
            static_cast<std::size_t>(end - begin));
  });
  return result;
}

at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!has_convert_kernel(tensor, dtype)) return ref::round_to(tensor, dtype);
  // Through 16-bit values that stay in the first-level cache.
  constexpr std::int64_t kBufferSize = 4096;
  at::Tensor result = at::empty_like(tensor);
  const auto* const in = tensor.const_data_ptr<float>();
  auto* const out = result.mutable_data_ptr<float>();
  const Format through = *format_of(dtype);
  parallel_for(0, tensor.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::array<std::uint16_t, kBufferSize> buffer;
    for (std::int64_t i = begin; i < end; i += kBufferSize) {
      const auto size = static_cast<std::size_t>(std::min(kBufferSize, end - i));
      convert(in + i, Format::fp32, buffer.data(), through, size);
      convert(buffer.data(), through, out + i, Format::fp32, size);
    }
  });
  return result;
}

}  // namespace semitone::kernels
