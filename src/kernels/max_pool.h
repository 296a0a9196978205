#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

// Maximum pooling of (N, C, H, W) with one byte per element for the backward pass, where LibTorch
// keeps eight.
namespace semitone::kernels {

// Each of height and width, as for at::max_pool2d, which has dilation 1 and no ceil_mode here.
struct MaxPool {
  std::array<std::int64_t, 2> kernel;
  std::array<std::int64_t, 2> stride;
  std::array<std::int64_t, 2> padding;

  std::int64_t window() const { return kernel[0] * kernel[1]; }
};

// The largest window whose elements a byte can number.
constexpr std::int64_t kMaxPoolWindow = 255;

// The output, and for each of its elements the position of the maximum in its window, uint8: row by
// row from the window's first position, including padding. Undefined if not requested.
struct MaxPooled {
  at::Tensor output;
  at::Tensor places;
};

// Whether there is a kernel: for fp32, fp16 or bf16, channels last in memory, on the CPU, or on
// CUDA in a build with CUDA kernels. All other inputs use the reference.
bool has_max_pool_kernel(const at::Tensor& input, const MaxPool& pool);

// As at::max_pool2d_with_indices: the first of equal maxima counts, the last NaN precedes any
// number, and the padding never counts. Output and positions have LibTorch's layout. A window has
// at most kMaxPoolWindow elements if positions are requested.
MaxPooled max_pool2d(const at::Tensor& input, const MaxPool& pool, bool with_places);

// The input's gradient, in its dtype and layout; the input's values do not matter. Gradients of
// overlapping windows are added in fp32 (fp64 if the input is) and rounded once. A single gradient
// is copied, so -0 stays -0. The result does not depend on the number of threads.
at::Tensor max_pool2d_backward(const at::Tensor& grad, const at::Tensor& places,
                               const at::Tensor& input, const MaxPool& pool);

namespace ref {
// The reference implementations, composed of ATen operators.
MaxPooled max_pool2d(const at::Tensor& input, const MaxPool& pool, bool with_places);
at::Tensor max_pool2d_backward(const at::Tensor& grad, const at::Tensor& places,
                               const at::Tensor& input, const MaxPool& pool);
}  // namespace ref

}  // namespace semitone::kernels
