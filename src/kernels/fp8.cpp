#include "src/kernels/fp8.h"

#include "src/core/parallel_for.h"
#include "src/kernels/flat.h"
#include "src/kernels/pointwise.h"

#include <c10/util/FunctionRef.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace semitone::kernels {
namespace {

// The largest result of visit(begin, end) over parts of `size` elements.
float largest_of_parts(std::int64_t size,
                       c10::function_ref<float(std::int64_t, std::int64_t)> visit) {
  std::mutex mutex;
  float largest = 0;
  parallel_for(0, size, kGrain, [&](std::int64_t begin, std::int64_t end) {
    const float part = visit(begin, end);
    const std::lock_guard lock(mutex);
    largest = std::max(largest, part);
  });
  return largest;
}

}  // namespace

Fp8Values to_fp8(const at::Tensor& tensor, at::ScalarType format, float scale) {
  if (!has_pointwise_kernel(tensor)) return ref::to_fp8(tensor, format, scale);
  const at::Tensor values = at::empty_like(tensor, tensor.options().dtype(at::kFloat));
  const auto* const in = static_cast<const char*>(tensor.const_data_ptr());
  auto* const out = values.mutable_data_ptr<float>();
  const Format from = *format_of(tensor.scalar_type());
  const Fp8 to = format == at::kFloat8_e4m3fn ? Fp8::e4m3 : Fp8::e5m2;
  const float amax = largest_of_parts(tensor.numel(), [&](std::int64_t begin, std::int64_t end) {
    return round_to_fp8(in + begin * tensor.element_size(), from, out + begin,
                        static_cast<std::size_t>(end - begin), scale, to);
  });
  return {values, amax};
}

float finite_amax(const at::Tensor& tensor) {
  if (!has_pointwise_kernel(tensor)) return ref::finite_amax(tensor);
  const auto* const in = static_cast<const char*>(tensor.const_data_ptr());
  const Format from = *format_of(tensor.scalar_type());
  return largest_of_parts(tensor.numel(), [&](std::int64_t begin, std::int64_t end) {
    return max_finite_magnitude(in + begin * tensor.element_size(), from,
                                static_cast<std::size_t>(end - begin));
  });
}

}  // namespace semitone::kernels
