#include "src/kernels/non_finite.h"

#include "src/core/parallel_for.h"
#include "src/kernels/flat.h"
#include "src/kernels/non_finite_kernel.h"

#include <c10/util/complex.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace semitone::kernels {
namespace {

// The bits of inf and NaN: (bits & mask) == value. IEEE formats have all bits of the exponent set.
struct Pattern {
  std::size_t bytes;
  std::uint64_t mask;
  std::uint64_t value;
};

std::optional<Pattern> pattern_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Pattern{8, 0x7ff0000000000000, 0x7ff0000000000000};
    case at::kFloat:
      return Pattern{4, 0x7f800000, 0x7f800000};
    case at::kHalf:
      return Pattern{2, 0x7c00, 0x7c00};
    case at::kBFloat16:
      return Pattern{2, 0x7f80, 0x7f80};
    case at::kFloat8_e5m2:
      return Pattern{1, 0x7c, 0x7c};
    case at::kFloat8_e4m3fn:  // no inf, and one NaN of each sign
      return Pattern{1, 0x7f, 0x7f};
    case at::kFloat8_e5m2fnuz:  // a NaN in place of -0
    case at::kFloat8_e4m3fnuz:
      return Pattern{1, 0xff, 0x80};
    case at::kFloat8_e8m0fnu:
      return Pattern{1, 0xff, 0xff};
    default:
      return std::nullopt;
  }
}

bool any_on_cpu(const at::Tensor& tensor, const Pattern& pattern, std::int64_t size) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  std::atomic<bool> found{false};
  parallel_for(0, (size + kChunk - 1) / kChunk, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t chunk = begin; chunk < end && !found; ++chunk) {
      const std::int64_t first = chunk * kChunk;
      const auto count = static_cast<std::size_t>(std::min(kChunk, size - first));
      if (any_matches(data + static_cast<std::size_t>(first) * pattern.bytes, count, pattern.bytes,
                      pattern.mask, pattern.value))
        found = true;
    }
  });
  return found;
}

}  // namespace

bool has_non_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return false;
  const auto pattern = pattern_of(c10::toRealValueType(tensor.scalar_type()));
  if (!tensor.is_cpu() || !pattern.has_value()) return ref::has_non_finite(tensor);
  const std::int64_t size = tensor.numel() * (tensor.is_complex() ? 2 : 1);
  // The order does not matter, nor do the signs of numbers that are still to be negated.
  return any_on_cpu(tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous(), *pattern,
                    size);
}

namespace ref {

bool has_non_finite(const at::Tensor& tensor) {
  const bool is_small = tensor.is_floating_point() && tensor.element_size() == 1;
  const at::Tensor wide = is_small ? tensor.to(at::kFloat) : tensor;
  return !wide.isfinite().all().item<bool>();
}

}  // namespace ref
}  // namespace semitone::kernels
