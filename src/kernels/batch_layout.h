#pragma once

#include "src/kernels/batch_norm_kernel.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace semitone::kernels {

// An input as the kernels see it; nothing if only the reference supports it.
struct Batch {
  BatchLayout layout;
  std::int64_t pieces;
  std::int64_t grain;  // pieces that are worth a thread

  static std::optional<Batch> of(const at::Tensor& input) {
    const auto format = format_of(input.scalar_type());
    if (!format.has_value() || !has_kernels(input) || input.numel() == 0 || input.is_neg())
      return {};
    const std::int64_t channels = input.size(1);
    const std::int64_t plane = input.numel() / input.size(0) / channels;
    const bool planes = input.is_contiguous() && plane > 1;
    if (!planes && !input.is_contiguous() && !is_channels_last(input)) return {};
    const std::int64_t length = planes ? plane : channels;
    // CUDA kernels count within a plane in 32 bits.
    if (planes && !input.is_cpu() && plane > kLongestPlane) return {};
    return Batch{
        {*format, !planes, static_cast<std::size_t>(channels), static_cast<std::size_t>(length)},
        input.numel() / length,
        std::max<std::int64_t>(1, kGrain / length)};
  }
  static constexpr std::int64_t kLongestPlane = std::int64_t{1} << 30;

  std::size_t count() const { return static_cast<std::size_t>(pieces); }

 private:
  // Of any number of dimensions: also (N, C, L) that is a transposed (N, L, C), for which LibTorch
  // has no memory format.
  static bool is_channels_last(const at::Tensor& input) {
    const auto follows = [&](std::int64_t dim, std::int64_t stride) {
      return input.size(dim) == 1 || input.stride(dim) == stride;
    };
    std::int64_t stride = input.size(1);
    for (std::int64_t dim = input.dim() - 1; dim > 1; --dim) {
      if (!follows(dim, stride)) return false;
      stride *= input.size(dim);
    }
    return follows(1, 1) && follows(0, stride);
  }
};

inline bool match(const at::Tensor& tensor, const at::Tensor& input) {
  return tensor.scalar_type() == input.scalar_type() && tensor.device() == input.device() &&
         tensor.sizes() == input.sizes();
}

}  // namespace semitone::kernels
